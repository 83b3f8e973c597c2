"""The catalog as a whole: adoption, look-ups, events, figures."""

import random
from dataclasses import replace

import pytest

from services.common.arena import SlotHeader, SlotState
from services.common.events.model import Tier
from services.kvbm.core.catalog import Catalog
from services.kvbm.core.model import (
    Adopted,
    BlockMeta,
    CommitResult,
    Owner,
    Selection,
    SlotRef,
    sealed_header,
    tenant_id,
)
from services.kvbm.core.slots import IllegalStep
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
GOOD = sealed_header(replace(chain("good", 1)[0], checksums=(1,)), 5, PAYLOAD)


def nobody(owner: int) -> bool:
    return False


# Start.


@pytest.mark.parametrize(
    ("header", "verdict"),
    [
        (GOOD, Adopted.ADOPTED),
        (None, Adopted.CORRUPT),
        (SlotHeader(SlotState.FREE, 5), Adopted.EMPTY),
        (SlotHeader(SlotState.FILLING, 5, owner=7), Adopted.INCOMPLETE),
        (SlotHeader(SlotState.FILLING, 5, owner=0), Adopted.INCOMPLETE),
        (replace(GOOD, expires_ms=1000), Adopted.EXPIRED),
        (replace(GOOD, payload_bytes=1), Adopted.CORRUPT),
        (replace(GOOD, checksums=(1, 2)), Adopted.CORRUPT),
        (replace(GOOD, key=bytes(32)), Adopted.CORRUPT),
    ],
)
def test_what_is_found_at_start(header: SlotHeader | None, verdict: Adopted) -> None:
    """R1: only what is whole is found again, and every other slot is of use again."""
    cat, shell = catalog(1), Shell()
    assert cat.adopt(G2, 0, header, 1000, nobody) is verdict
    shell.apply(cat.take_changes())
    cat.check_invariants()
    if verdict is Adopted.ADOPTED:
        assert cat.tiers_of(GOOD.key) == (G2,) and shell.told[G2] == {GOOD.key}
        assert cat.slot(G2, GOOD.key) == SlotRef(0, 5)
    else:
        assert cat.tiers_of(GOOD.key) == () and not shell.told[G2]
        if verdict is not Adopted.EMPTY:
            assert shell.header(G2, 0).state is SlotState.FREE
    (ref,) = cat.grant(ENGINE, 1, 1001)
    assert ref.generation == (1001 if header is None else 6)
    cat.check_invariants()


def test_of_two_headers_for_one_key_one_is_adopted() -> None:
    cat = catalog(2, 1)
    assert cat.adopt(G2, 0, GOOD, 10, nobody) is Adopted.ADOPTED
    assert cat.adopt(G2, 1, replace(GOOD, generation=9), 10, nobody) is Adopted.DUPLICATE
    assert cat.adopt(G3, 0, GOOD, 10, nobody) is Adopted.ADOPTED
    assert cat.tiers_of(GOOD.key) == (G2, G3)
    assert cat.grant(ENGINE, 1, 11) == [SlotRef(1, 10)]
    cat.check_invariants()


def test_what_a_live_engine_fills_is_out_of_use_until_it_ends() -> None:
    """L5: a restarted daemon hands no slot to a second writer."""
    cat = catalog(3)
    for slot, owner in enumerate((7, 8, 9)):
        header = SlotHeader(SlotState.FILLING, 5, owner=owner)
        cat.adopt(G2, slot, header, 10, lambda owner: owner in (7, 8))
    assert cat.counts().tiers[G2].quarantined == 2 and cat.granted(Owner(7)) == 1
    assert cat.grant(Owner(1), 3, 11) == [SlotRef(2, 6)]
    (meta,) = chain("a", 1)
    assert cat.commit(Owner(7), SlotRef(0, 5), 0, meta, 1, 12) is CommitResult.FENCED
    assert cat.give_back(Owner(7), SlotRef(0, 5), 12) is CommitResult.FENCED
    assert cat.release_owner(Owner(7), 13) == 1
    assert cat.grant(Owner(1), 3, 14) == [SlotRef(0, 6)]
    cat.check_invariants()


def test_slots_are_adopted_before_any_is_taken() -> None:
    """C12: no write is accepted before it is known what is there."""
    cat = catalog(2, 2)
    cat.adopt(G2, 0, GOOD, 10, nobody)
    assert cat.grant(ENGINE, 1, 11) == [SlotRef(1, 1)]
    with pytest.raises(IllegalStep):
        cat.adopt(G2, 1, GOOD, 12, nobody)
    assert cat.adopt(G3, 1, GOOD, 12, nobody) is Adopted.ADOPTED, "each tier by itself"
    cat.check_invariants()


def test_a_lowered_quota_is_met_by_eviction_not_at_start() -> None:
    cat = catalog(4, limits={(1, G2): 2 * PAYLOAD})
    for slot, meta in enumerate(chain("a", 4, 1)):
        header = sealed_header(replace(meta, checksums=(1,)), 1, PAYLOAD)
        assert cat.adopt(G2, slot, header, 10, nobody) is Adopted.ADOPTED
    assert cat.charges() == {(1, G2): 4 * PAYLOAD}
    (other,) = chain("o", 1)
    save(cat, [other], 11)
    (ref,) = cat.grant(ENGINE, 1, 12)
    assert cat.commit(ENGINE, ref, 0, chain("b", 1, 1)[0], 1, 12) is CommitResult.STORED
    assert cat.charges()[1, G2] == 2 * PAYLOAD and cat.tiers_of(other.key) == (G2,)
    cat.check_invariants()


# Readers.


def test_a_run_ends_at_the_first_block_that_is_nowhere() -> None:
    cat, metas = catalog(8, 8), chain("a", 6)
    save(cat, metas[:4] + metas[5:])
    copy_down(cat, metas[1:4])
    cat.forget(G2, metas[2].key, 30)
    assert cat.run(keys(metas)) == [(G2,), (G2, G3), (G3,), (G2, G3)]
    assert cat.run([]) == [] and cat.run(keys(metas)[4:]) == []
    assert cat.tiers_of(key("?")) == ()


def test_look_ups_decide_what_stays() -> None:
    cat, old, new = catalog(4), chain("old", 2), chain("new", 2)
    save(cat, old, 10)
    save(cat, new, 11)
    cat.touch([*keys(old), key("?")], 12)
    assert len(cat.grant(ENGINE, 2, 13)) == 2
    assert cat.run(keys(old)) == [(G2,)] * 2 and cat.run(keys(new)) == []
    views = list(cat.blocks())
    assert {v.meta.key for v in views} == set(keys(old))
    assert all(
        (v.hits, v.used_ms, v.leases, v.pins, v.tiers) == (1, 12, 0, 0, (G2,)) for v in views
    )


def test_blocks_are_listed_most_recently_used_first() -> None:
    cat, metas = catalog(4), chain("a", 3)
    for now, meta in enumerate(metas, 10):
        save(cat, [meta], now)
    cat.touch(keys(metas[:1]), 20)
    assert [v.meta.key for v in cat.blocks()] == [metas[i].key for i in (0, 2, 1)]
    assert cat.view(key("?")) is None


def test_a_bad_slot_is_forgotten_by_its_generation() -> None:
    cat, metas = catalog(1), chain("a", 2)
    (old,) = save(cat, metas[:1])
    (new,) = save(cat, metas[1:])
    cat.lost(G2, old)
    assert cat.tiers_of(metas[1].key) == (G2,), "it was another block's slot"
    cat.lost(G2, new)
    assert cat.tiers_of(metas[1].key) == ()
    cat.lost(G2, new)
    assert not cat.forget(G2, metas[1].key, 20) and not cat.forget(G2, key("?"), 20)
    cat.check_invariants()


def test_a_quarantined_slot_is_never_granted() -> None:
    cat, shell, metas = catalog(2), Shell(), chain("a", 1)
    (ref,) = save(cat, metas)
    assert cat.forget(G2, metas[0].key, 11, quarantine=True)
    shell.apply(cat.take_changes())
    assert shell.header(G2, ref.index).state is SlotState.FREE
    assert [r.index for r in cat.grant(ENGINE, 8, 12)] == [1 - ref.index]
    assert cat.counts().tiers[G2].quarantined == 1 and cat.charges() == {}
    cat.check_invariants()


def test_bad_slots_are_forgiven_and_slots_with_an_operation_on_them_are_not() -> None:
    """A disk that was away as a whole gets back what reads had failed on."""
    cat, metas = catalog(4, 3), chain("a", 3)
    save(cat, metas)
    for meta in metas:
        copy = cat.begin_copy(meta.key, G2, G3, 11)
        assert copy is not None
        cat.end_copy(copy, meta is not metas[2], 12, terminal=meta is not metas[2])
    assert cat.forget(G3, metas[0].key, 13, quarantine=True)
    assert cat.counts().tiers[G3].quarantined == 2
    assert cat.forgive(G3) == 1 and cat.forgive(G3) == 0 and cat.forgive(G2) == 0
    assert cat.counts().tiers[G3].quarantined == 1, "a write may still be going on there"
    again = cat.begin_copy(metas[0].key, G2, G3, 14)
    assert again is not None
    assert cat.end_copy(again, True, 15)
    assert cat.tiers_of(metas[0].key) == (G2, G3)
    cat.check_invariants()


# Events.


def test_a_tier_is_told_removed_when_its_own_copy_goes() -> None:
    """E4: eviction from one tier says nothing of the other's copy."""
    cat, shell, metas = catalog(2, 2), Shell(), chain("a", 2)
    save(cat, metas)
    copy_down(cat, metas)
    shell.apply(cat.take_changes())
    save(cat, chain("b", 2), 30)
    changes = cat.take_changes()
    assert {tier for tier, _ in changes.removed} == {G2}
    shell.apply(changes)
    assert shell.told[G3] == set(keys(metas)) and shell.told[G2] == set(keys(chain("b", 2)))


def test_a_second_engine_that_stores_or_drops_a_key_tells_nothing() -> None:
    """E4: two producers of one block don't announce it twice, nor remove a live one."""
    cat, (meta,) = catalog(4), chain("a", 1)
    save(cat, [meta])
    assert cat.take_changes().stored == [(G2, meta.key)]
    (ref,) = cat.grant(Owner(8), 1, 11)
    assert cat.commit(Owner(8), ref, 0, meta, 5, 11) is CommitResult.DUPLICATE
    cat.release_owner(Owner(8), 12)
    cat.release_owner(ENGINE, 12)
    changes = cat.take_changes()
    assert changes.stored == changes.removed == []
    assert cat.tiers_of(meta.key) == (G2,)


def test_news_are_told_as_their_sum() -> None:
    cat, (meta,) = catalog(4), chain("a", 1)
    save(cat, [meta])
    cat.clear(Selection(), 11)
    changes = cat.take_changes()
    assert changes.stored == changes.removed == []
    assert [w.header.state for w in changes.headers] == [SlotState.FREE]
    save(cat, [meta])
    cat.take_changes()
    cat.clear(Selection(), 12)
    save(cat, [meta], 13)
    changes = cat.take_changes()
    assert changes.stored == changes.removed == []
    assert cat.take_changes().headers == []


# All of it.


def test_figures() -> None:
    cat, metas = catalog(8, 4), chain("a", 3)
    save(cat, metas)
    copy_down(cat, metas[:1])
    cat.grant(ENGINE, 2, 30)
    cat.lease(keys(metas), 0, 99, 30)
    cat.pin(metas[0].key, "ops", 99, 30)
    cat.begin_copy(metas[1].key, G2, G3, 30)
    counts = cat.counts()
    g2, g3 = counts.tiers[G2], counts.tiers[G3]
    assert (g2.blocks, g2.free, g2.filling, g2.leased, g2.slots) == (3, 3, 2, 3, 8)
    assert (g3.blocks, g3.filling, g3.slots) == (1, 1, 4)
    assert (counts.leases, counts.pins, counts.granted, counts.copies) == (1, 1, 2, 1)
    assert set(cat.keys(G2)) == set(keys(metas)) and list(cat.keys(G3)) == keys(metas[:1])


def _history(cat: Catalog, seed: int) -> list[object]:
    """A long mixed life; everything it answered."""
    rng = random.Random(seed)
    said: list[object] = []
    blocks = [meta for name in "abcd" for meta in chain(name, 12, ord(name) % 3)]
    refs: list[SlotRef] = []
    copies = []
    for now in range(10, 800):
        chosen = rng.choice("abcd")
        prompt = keys(chain(chosen, 1 + rng.randrange(12)))
        roll = rng.random()
        if roll < 0.3:
            refs += cat.grant(ENGINE, rng.randrange(4), now)
        elif roll < 0.6 and refs:
            ref = refs.pop(rng.randrange(len(refs)))
            said.append(cat.commit(ENGINE, ref, 0, rng.choice(blocks), 1, now))
        elif roll < 0.8:
            said.append(cat.run(prompt))
            cat.touch(prompt, now)
            said.append(cat.lease(prompt, 0, now + 20, now))
        elif roll < 0.9:
            copies.append(cat.begin_copy(rng.choice(prompt), G2, G3, now))
            said.append(copies[-1])
        elif copies:
            copy = copies.pop()
            if copy is not None:
                said.append(cat.end_copy(copy, rng.random() < 0.7, now))
        said.append(cat.expire(now))
        said.append(cat.take_changes())
        if now % 20 == 0:
            cat.check_invariants()
    said.append([view.meta for view in cat.blocks()])
    return said


@pytest.mark.parametrize("seed", range(3))
def test_the_same_questions_get_the_same_answers(seed: int) -> None:
    limits = {(0, G2): 3 * PAYLOAD, (1, G3): 4 * PAYLOAD}
    first, second = (_history(catalog(20, 10, limits=limits), seed) for _ in range(2))
    assert first == second


def test_names_of_tenants() -> None:
    assert tenant_id("") == 0
    numbers = [tenant_id(name) for name in ("a", "b", "*")]
    assert len(set(numbers)) == 3 and all(0 < n < 1 << 64 for n in numbers)


def test_a_clock_that_was_set_back_does_no_harm() -> None:
    cat, metas = catalog(4), chain("a", 2)
    save(cat, metas, 1_000_000)
    lease = cat.lease(keys(metas), 0, 560, 500)
    assert len(lease.ready) == 2 and cat.expire(501).leases == 0
    cat.touch(keys(metas), 502)
    save(cat, chain("b", 2), 503)
    assert cat.expire(560).leases == 1
    cat.check_invariants()


def test_names_of_missing_blocks_are_limited() -> None:
    """L2: many ends of chains whose beginnings have gone keep a bounded number of names."""
    cat = catalog(4)
    for number in range(300):
        parent = key((number, "missing"))
        save(cat, [BlockMeta(key(number), parent, 7)])
    assert len(list(cat._stock.blocks)) == 8
    cat._stock.blocks.most_missing = 2
    save(cat, [BlockMeta(key("x"), key("y"), 7)])
    assert len(list(cat._stock.blocks)) == 6
    cat.check_invariants()


def test_an_erasure_never_follows_a_new_block() -> None:
    cat, metas = catalog(4, 1), chain("a", 2)
    save(cat, metas)
    copy_down(cat, metas)
    assert cat.tiers_of(metas[1].key) == (G2, G3), "in the slot that was another's"
    assert [w for w in cat.take_changes().headers if w.tier is G3] == []
