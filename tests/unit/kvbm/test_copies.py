"""Copies between tiers: each ends once, and brings only what is still wanted."""

from dataclasses import replace

import pytest

from services.common.arena import SlotState
from services.common.events.model import Tier
from services.kvbm.core.model import BlockMeta, CommitResult, Selection, sealed_header
from tests.support.catalogs import (
    ENGINE,
    PAYLOAD,
    Shell,
    catalog,
    chain,
    checksum,
    copy_down,
    keys,
    save,
)

G2, G3, G4 = Tier.G2, Tier.G3, Tier.G4


def test_down_and_up() -> None:
    cat, shell, (meta,) = catalog(2, 2), Shell(), chain("a", 1)
    (ref,) = save(cat, [meta])
    down = cat.begin_copy(meta.key, G2, G3, 11)
    assert down is not None and down.source_slot == ref and down.target_slot is not None
    assert down.meta.checksums == (checksum(meta),)
    assert cat.tiers_of(meta.key) == (G2,), "not there before it has ended"
    assert cat.begin_copy(meta.key, G2, G3, 11) is None, "under way"
    assert cat.end_copy(down, True, 12)
    assert not cat.end_copy(down, True, 12), "ends once"
    assert cat.tiers_of(meta.key) == (G2, G3)
    assert cat.begin_copy(meta.key, G2, G3, 13) is None, "there"
    assert cat.begin_copy(meta.key, G3, G2, 13) is None, "there"
    cat.forget(G2, meta.key, 14)
    up = cat.begin_copy(meta.key, G3, G2, 15)
    assert up is not None and up.target_slot is not None
    shell.apply(cat.take_changes())
    assert shell.header(G2, up.target_slot.index).state is SlotState.FILLING
    assert cat.end_copy(up, True, 16)
    shell.apply(cat.take_changes())
    assert shell.header(G2, up.target_slot.index).checksums == (checksum(meta),)
    assert shell.told == {G2: {meta.key}, G3: {meta.key}, G4: set()}
    cat.check_invariants()


def test_a_copy_that_fails_leaves_nothing() -> None:
    """C5: a failed store is not visible in its tier, nor does it keep anything."""
    cat, shell, (meta,) = catalog(1, 1), Shell(), chain("a", 1)
    save(cat, [meta])
    copy = cat.begin_copy(meta.key, G2, G3, 11)
    assert copy is not None and cat.grant(ENGINE, 1, 11) == [], "the source is being read"
    assert not cat.end_copy(copy, False, 12)
    shell.apply(cat.take_changes())
    assert cat.tiers_of(meta.key) == (G2,) and shell.told[G3] == set()
    assert shell.header(G3, 0).state is SlotState.FREE
    assert cat.counts().tiers[G3].free == 1 and cat.counts().copies == 0
    assert len(cat.grant(ENGINE, 1, 13)) == 1
    cat.check_invariants()


def test_slots_of_an_unfinished_failure_stay_out_of_use() -> None:
    """L5: an operation that was given up ends for the catalog only when its fence has passed."""
    cat, (meta,) = catalog(1, 1), chain("a", 1)
    save(cat, [meta])
    copy = cat.begin_copy(meta.key, G2, G3, 11)
    assert copy is not None
    assert not cat.end_copy(copy, False, 12, terminal=False)
    assert not cat.end_copy(copy, True, 12), "it has ended"
    assert cat.counts().tiers[G3].quarantined == 1
    assert cat.counts().tiers[G2].leased == 1, "its source may still be read"
    assert cat.begin_copy(meta.key, G2, G3, 13) is None, "no room"
    cat.check_invariants()
    cat.fence_passed(copy, 14)
    cat.fence_passed(copy, 14)
    assert cat.counts().tiers[G3].free == 1 and cat.counts().tiers[G2].leased == 0
    again = cat.begin_copy(meta.key, G2, G3, 15)
    assert again is not None and again.target_slot is not None and copy.target_slot is not None
    assert again.target_slot.generation > copy.target_slot.generation
    cat.check_invariants()


def test_making_room_does_not_take_what_moves() -> None:
    cat, metas = catalog(4, 2), chain("a", 4)
    save(cat, metas)
    copy_down(cat, metas[:2])
    up = [cat.begin_copy(m.key, G2, G3, 30) for m in metas[2:]]
    assert None not in up, "both of G3 were evicted"
    assert cat.begin_copy(metas[0].key, G2, G3, 30) is None
    assert len(cat.grant(ENGINE, 8, 31)) == 2
    assert cat.run(keys(metas)[2:]) == [(G2,)] * 2
    for copy in up:
        assert copy is not None and cat.end_copy(copy, True, 32)
    cat.check_invariants()


@pytest.mark.parametrize("how", ["clear", "forget", "lost", "expire", "resaved"])
def test_what_is_forgotten_under_way_does_not_come_back(how: str) -> None:
    cat, (meta,) = catalog(4, 4), chain("a", 1, expires_ms=100)
    save(cat, [meta])
    copy_down(cat, [meta])
    cat.forget(G2, meta.key, 21)
    copy = cat.begin_copy(meta.key, G3, G2, 22)
    assert copy is not None and copy.source_slot is not None
    now = 23
    if how in ("clear", "resaved"):
        cat.clear(Selection(tiers=frozenset({G3})), now)
    elif how == "forget":
        cat.forget(G3, meta.key, now)
    elif how == "lost":
        cat.lost(G3, copy.source_slot)
    else:
        now = 100
    if how == "resaved":
        (new,) = save(cat, chain("a", 1), now)
    assert not cat.end_copy(copy, True, now)
    assert cat.tiers_of(meta.key) == ((G2,) if how == "resaved" else ())
    if how == "resaved":
        assert cat.slot(G2, meta.key) == new
    cat.expire(now)
    assert cat.counts().tiers[G3].free == 4
    cat.check_invariants()


def test_clearing_the_target_catches_what_is_under_way_to_it() -> None:
    cat, (meta,) = catalog(4, 4), chain("a", 1)
    save(cat, [meta])
    copy = cat.begin_copy(meta.key, G2, G3, 11)
    assert copy is not None
    cat.clear(Selection(tiers=frozenset({G3})), 12)
    assert not cat.end_copy(copy, True, 13)
    assert cat.tiers_of(meta.key) == (G2,)
    copy = cat.begin_copy(meta.key, G2, G3, 14)
    assert copy is not None
    cat.clear(Selection(tenant=5), 15)
    cat.clear(Selection(prefix=b"x" * 32), 15)
    assert cat.end_copy(copy, True, 16), "others' clears don't matter"
    cat.check_invariants()


def test_an_engine_may_be_faster_than_a_promotion() -> None:
    cat, (meta,) = catalog(4, 4), chain("a", 1)
    save(cat, [meta])
    copy_down(cat, [meta])
    cat.forget(G2, meta.key, 21)
    copy = cat.begin_copy(meta.key, G3, G2, 22)
    assert copy is not None
    (ref,) = cat.grant(ENGINE, 1, 22)
    assert cat.commit(ENGINE, ref, 0, meta, 77, 23) is CommitResult.STORED
    assert not cat.end_copy(copy, True, 24)
    assert cat.slot(G2, meta.key) == ref
    cat.check_invariants()


def test_copies_of_a_block_keep_their_own_checksums() -> None:
    """A block computed twice may differ in its bytes; each tier's copy is what it is."""
    cat, (meta,) = catalog(4, 4), chain("a", 1)
    save(cat, [meta])
    copy_down(cat, [meta])
    cat.forget(G2, meta.key, 21)
    (ref,) = cat.grant(ENGINE, 1, 22)
    assert cat.commit(ENGINE, ref, 0, meta, 77, 23) is CommitResult.STORED
    there = cat.meta(meta.key, G3)
    assert there is not None and there.checksums == (checksum(meta),)
    best = cat.meta(meta.key)
    assert best is not None and best.checksums == (77,)
    assert cat.lease([meta.key], 0, 99, 24).ready[0].checksums == (77,)
    assert cat.meta(meta.key, G4) is None and cat.meta(b"?" * 32) is None


# G4.


def header(meta: BlockMeta, **other: object) -> object:
    whole = replace(meta, checksums=(5,))
    return replace(sealed_header(whole, 9, PAYLOAD), **other)  # type: ignore[arg-type]


def test_to_remote_and_back() -> None:
    cat, shell, (meta,) = catalog(2), Shell(), chain("a", 1)
    save(cat, [meta])
    copy = cat.begin_copy(meta.key, G2, G4, 11)
    assert copy is not None and copy.target_slot is None
    assert cat.end_copy(copy, True, 12)
    assert cat.tiers_of(meta.key) == (G2, G4)
    assert cat.counts().tiers[G4].blocks == 1 and list(cat.keys(G4)) == [meta.key]
    assert cat.begin_copy(meta.key, G4, G2, 13) is None
    cat.forget(G2, meta.key, 14)
    assert cat.tiers_of(meta.key) == (), "what no slot holds is forgotten"
    fetch = cat.begin_fetch(BlockMeta(meta.key), 15)
    assert fetch is not None and cat.begin_fetch(BlockMeta(meta.key), 15) is None
    assert cat.end_copy(fetch, True, 16, header=header(meta))  # type: ignore[arg-type]
    assert cat.tiers_of(meta.key) == (G2, G4)
    assert cat.lease([meta.key], 0, 99, 17).ready[0].checksums == (5,)
    shell.apply(cat.take_changes())
    assert shell.told == {G2: {meta.key}, G3: set(), G4: {meta.key}}
    cat.check_invariants()


@pytest.mark.parametrize(
    "other",
    [
        {"key": b"x" * 32},
        {"payload_bytes": 1},
        {"checksums": ()},
        {"expires_ms": 5},
        {"state": SlotState.FILLING},
    ],
)
def test_a_fetch_of_something_else_is_no_block(other: dict[str, object]) -> None:
    cat, (meta,) = catalog(2), chain("a", 1)
    fetch = cat.begin_fetch(meta, 15)
    assert fetch is not None
    assert not cat.end_copy(fetch, True, 16, header=header(meta, **other))  # type: ignore[arg-type]
    assert cat.counts().tiers[G2].free == 2 and cat.tiers_of(meta.key) == ()
    cat.check_invariants()


def test_a_fetch_without_a_header_is_no_block() -> None:
    cat, (meta,) = catalog(2), chain("a", 1)
    fetch = cat.begin_fetch(meta, 15)
    assert fetch is not None and not cat.end_copy(fetch, True, 16)


def test_a_fetch_is_charged_to_whom_the_block_belongs() -> None:
    cat = catalog(4, limits={(1, G2): PAYLOAD, (2, G2): 0})
    (mine,), (theirs,) = chain("a", 1, 1), chain("b", 1, 2)
    for meta in (mine, theirs):
        fetch = cat.begin_fetch(BlockMeta(meta.key), 15)
        assert fetch is not None and cat.charges()[0, G2] == PAYLOAD
        done = cat.end_copy(fetch, True, 16, header=header(meta))  # type: ignore[arg-type]
        assert done is (meta is mine)
        cat.check_invariants()
    assert cat.charges() == {(1, G2): PAYLOAD, (1, G4): PAYLOAD}


def test_remote_copies_are_told_and_charged_while_their_block_is_here() -> None:
    """E4: each tier's copy comes and goes by itself; told once, whoever finds out again."""
    cat, shell, metas = catalog(4, 4), Shell(), chain("a", 2, 1)
    save(cat, metas)
    copy_down(cat, metas)
    for _ in range(2):
        cat.set_remote([*keys(metas), b"?" * 32], True)
    assert cat.tiers_of(b"?" * 32) == ()
    shell.apply(cat.take_changes())
    assert shell.told[G4] == set(keys(metas))
    assert cat.charges()[1, G4] == 2 * PAYLOAD
    cat.forget(G2, metas[0].key, 30)
    shell.apply(cat.take_changes())
    assert metas[0].key in shell.told[G4] and metas[0].key in shell.told[G3]
    cat.forget(G3, metas[0].key, 31)
    cat.forget(G4, metas[1].key, 31)
    cat.set_remote([metas[1].key], False)
    shell.apply(cat.take_changes())
    assert shell.told == {G2: {metas[1].key}, G3: {metas[1].key}, G4: set()}
    assert (1, G4) not in cat.charges()
    cat.check_invariants()


def test_a_clear_voids_a_fetch_under_way() -> None:
    cat, (meta,) = catalog(4), chain("a", 1)
    fetch = cat.begin_fetch(meta, 1)
    assert fetch is not None
    assert cat.clear(Selection(prefix=meta.key), 2).blocks == {G2: 0, G3: 0, G4: 0}
    assert not cat.end_copy(fetch, True, 3, header=header(meta))  # type: ignore[arg-type]
    cat.check_invariants()


def test_an_object_of_a_block_cleared_meanwhile_is_to_be_erased() -> None:
    cat, (meta,) = catalog(4), chain("a", 1)
    save(cat, [meta])
    copy = cat.begin_copy(meta.key, G2, G4, 11)
    assert copy is not None
    cat.clear(Selection(), 12)
    assert not cat.end_copy(copy, True, 13)
    cat.check_invariants()


def test_quotas_hold_for_what_is_under_way() -> None:
    cat = catalog(4, 4, limits={(1, G3): 2 * PAYLOAD, (1, G4): PAYLOAD})
    metas = chain("a", 4, 1)
    save(cat, metas)
    copies = [cat.begin_copy(m.key, G2, G3, 20) for m in metas]
    assert [c is not None for c in copies] == [True, True, False, False]
    assert copies[0] is not None and copies[1] is not None
    assert cat.end_copy(copies[0], True, 21) and not cat.end_copy(copies[1], False, 21)
    assert cat.charges()[1, G3] == PAYLOAD
    copy_down(cat, metas[1:3], 22)
    assert [G3 in tiers for tiers in cat.run(keys(metas))] == [True, False, True, False]
    remote = [cat.begin_copy(m.key, G2, G4, 23) for m in metas[:2]]
    assert remote[0] is not None and remote[1] is None
    cat.check_invariants()
