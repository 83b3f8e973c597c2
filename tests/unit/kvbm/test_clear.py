"""Clears: what is selected is gone for everybody who comes later."""

from services.common.arena import SlotState
from services.common.events.model import Tier
from services.kvbm.core.model import Selection
from tests.support.catalogs import (
    ENGINE,
    PAYLOAD,
    Shell,
    catalog,
    chain,
    copy_down,
    key,
    keys,
    save,
)

G2, G3, G4 = Tier.G2, Tier.G3, Tier.G4


def test_by_tenant() -> None:
    cat, mine, theirs = catalog(8, 8), chain("a", 3, 1), chain("b", 3, 2)
    save(cat, mine + theirs)
    copy_down(cat, mine[:2])
    dry = cat.clear(Selection(tenant=1), 30, dry_run=True)
    assert dry.blocks == {G2: 3, G3: 2, G4: 0} and dry.leased == 0
    assert cat.run(keys(mine))[0] == (G2, G3)
    assert cat.clear(Selection(tenant=1), 31) == dry
    assert cat.run(keys(mine)) == [] and len(cat.run(keys(theirs))) == 3
    assert cat.clear(Selection(tenant=1), 32).blocks == {G2: 0, G3: 0, G4: 0}
    assert cat.charges() == {(2, G2): 3 * PAYLOAD}
    cat.check_invariants()


def test_by_prefix_also_across_holes() -> None:
    cat, metas, other = catalog(8), chain("a", 5), chain("b", 2)
    save(cat, metas + other)
    cat.forget(G2, metas[2].key, 11)
    cat.forget(G2, metas[3].key, 11)
    assert cat.clear(Selection(prefix=metas[1].key), 12).blocks[G2] == 2
    assert cat.run(keys(metas)) == [(G2,)] and cat.tiers_of(metas[4].key) == ()
    assert len(cat.run(keys(other))) == 2
    cat.check_invariants()
    save(cat, metas[1:], 13)
    cat.forget(G2, metas[2].key, 14)
    assert cat.clear(Selection(prefix=metas[2].key), 15).blocks[G2] == 2, "the missing one, too"
    assert cat.clear(Selection(prefix=key("?")), 16).blocks[G2] == 0
    cat.check_invariants()


def test_by_tier() -> None:
    cat, shell, metas = catalog(4, 4), Shell(), chain("a", 3)
    save(cat, metas)
    copy_down(cat, metas[:2])
    cat.set_remote(keys(metas[1:]), True)
    cleared = cat.clear(Selection(tiers=frozenset({G2})), 30)
    assert cleared.blocks == {G2: 3} and cleared.remote == ()
    assert cat.run(keys(metas)) == [(G3,), (G3, G4)]
    cleared = cat.clear(Selection(tiers=frozenset({G4})), 31)
    assert cleared.blocks == {G4: 1} and cleared.remote == (metas[1].key,)
    shell.apply(cat.take_changes())
    assert shell.told == {G2: set(), G3: set(keys(metas[:2])), G4: set()}
    cleared = cat.clear(Selection(), 32)
    assert cleared.blocks == {G2: 0, G3: 2, G4: 0}
    shell.apply(cat.take_changes())
    assert all(h.state is SlotState.FREE for h in shell.headers.values())
    assert not list(cat._stock.blocks)
    cat.check_invariants()


def test_remote_blocks_are_named_for_erasure() -> None:
    cat, metas = catalog(4), chain("a", 2, 1)
    save(cat, metas)
    cat.set_remote(keys(metas), True)
    cleared = cat.clear(Selection(tenant=1), 30)
    assert cleared.blocks == {G2: 2, G3: 0, G4: 2}
    assert set(cleared.remote) == set(keys(metas))
    assert cat.charges() == {}
    cat.check_invariants()


def test_leased_ones_are_counted_and_go_with_the_last_lease() -> None:
    cat, shell, metas = catalog(4), Shell(), chain("a", 3)
    refs = save(cat, metas)
    leases = [cat.lease(keys(metas[:2]), 0, 100, 11) for _ in range(2)]
    cleared = cat.clear(Selection(), 12)
    assert (cleared.blocks[G2], cleared.leased) == (3, 2)
    shell.apply(cat.take_changes())
    assert shell.told[G2] == set()
    for lease in leases:
        assert cat.counts().tiers[G2].leaving == 2
        assert shell.header(G2, refs[0].index).state is SlotState.SEALED
        cat.release(lease.id, 13)
        shell.apply(cat.take_changes())
    assert cat.counts().tiers[G2].free == 4
    assert shell.header(G2, refs[0].index).state is SlotState.FREE
    cat.check_invariants()


def test_a_slot_that_will_be_filled_is_not_the_clears() -> None:
    cat, (meta,) = catalog(4), chain("a", 1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    cat.clear(Selection(), 2)
    assert cat.commit(ENGINE, ref, 0, meta, 1, 3) == "stored"
    cat.check_invariants()


def test_a_large_clear_goes_in_steps() -> None:
    """H8: nobody waits for all of it."""
    cat, metas = catalog(40, 20), [m for name in "abcdef" for m in chain(name, 6, 1)]
    save(cat, metas)
    copy_down(cat, metas[:10])
    select, cleared, steps = Selection(tenant=1), 0, 0
    assert cat.clear(select, 30, dry_run=True, limit=7).blocks == {G2: 36, G3: 10, G4: 0}
    more = True
    while more:
        step = cat.clear(select, 30, limit=7)
        cleared, more, steps = cleared + sum(step.blocks.values()), step.more, steps + 1
        assert sum(step.blocks.values()) <= 8
        cat.check_invariants()
    assert cleared == 46 and 6 <= steps <= 8 and not list(cat.blocks())
