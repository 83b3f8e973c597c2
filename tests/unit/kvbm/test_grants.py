"""Engines that write: grants, commits of one or several ranks, and their deaths."""

import gc
import sys
from collections.abc import Callable

import pytest

from services.common.arena import NO_KEY, SlotState
from services.common.events.model import Tier
from services.kvbm.core.model import DAEMON, BlockMeta, CommitResult, Owner, Selection, SlotRef
from tests.support.catalogs import (
    ENGINE,
    PAYLOAD,
    Shell,
    catalog,
    chain,
    checksum,
    key,
    keys,
    save,
)

OTHER = Owner(8)


def test_a_block_appears_with_its_commit_and_not_before() -> None:
    """C5: what is being stored can't be found; only a commit publishes it."""
    cat, shell, (meta,) = catalog(), Shell(), chain("a", 1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    shell.apply(cat.take_changes())
    header = shell.header(Tier.G2, ref.index)
    assert (header.state, header.owner, header.generation) == (SlotState.FILLING, ENGINE, 1)
    assert cat.tiers_of(meta.key) == () and not shell.told[Tier.G2]
    assert cat.commit(ENGINE, ref, 0, meta, 99, 5) is CommitResult.STORED
    shell.apply(cat.take_changes())
    header = shell.header(Tier.G2, ref.index)
    assert (header.state, header.key, header.checksums) == (SlotState.SEALED, meta.key, (99,))
    assert (header.generation, header.payload_bytes, header.owner) == (1, PAYLOAD, 0)
    assert cat.tiers_of(meta.key) == (Tier.G2,) and shell.told[Tier.G2] == {meta.key}
    cat.check_invariants()


def test_a_store_that_fails_is_never_found() -> None:
    """C5: given back, refused and fenced slots leave nothing behind."""
    cat, shell, (meta,) = catalog(1), Shell(), chain("a", 1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    assert cat.give_back(ENGINE, ref, 2) is CommitResult.RETURNED
    assert cat.give_back(ENGINE, ref, 2) is CommitResult.RETURNED
    assert cat.commit(ENGINE, ref, 0, meta, 1, 3) is CommitResult.FENCED
    shell.apply(cat.take_changes())
    assert shell.header(Tier.G2, 0).state is SlotState.FREE
    assert shell.header(Tier.G2, 0).generation == 1
    (again,) = cat.grant(OTHER, 1, 4)
    assert again == SlotRef(0, 2)
    assert cat.give_back(ENGINE, again, 5) is CommitResult.FENCED
    assert cat.commit(ENGINE, again, 0, meta, 1, 5) is CommitResult.FENCED
    assert cat.commit(ENGINE, ref, 0, meta, 1, 5) is CommitResult.FENCED
    assert cat.commit(OTHER, again, 1, meta, 1, 5) is CommitResult.FENCED, "no such rank"
    assert cat.tiers_of(meta.key) == ()
    cat.check_invariants()


@pytest.mark.parametrize(
    "meta", [BlockMeta(NO_KEY), BlockMeta(b"short"), BlockMeta(key(1), b"short", 1)]
)
def test_what_is_no_block_is_refused(meta: BlockMeta) -> None:
    cat = catalog(1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    assert cat.commit(ENGINE, ref, 0, meta, 1, 3) is CommitResult.REFUSED
    assert cat.counts().tiers[Tier.G2].free == 1


def test_unknown_slots_are_fenced() -> None:
    cat, (meta,) = catalog(2), chain("a", 1)
    for ref in (SlotRef(7, 1), SlotRef(-1, 1), SlotRef(0, 1)):
        assert cat.commit(ENGINE, ref, 0, meta, 1, 1) is CommitResult.FENCED
        assert cat.give_back(ENGINE, ref, 1) is CommitResult.FENCED
    with pytest.raises(ValueError, match="daemon"):
        cat.grant(DAEMON, 1, 1)
    with pytest.raises(ValueError, match="daemon"):
        cat.release_owner(DAEMON, 1)


def test_the_first_to_seal_wins() -> None:
    cat, (meta,) = catalog(4), chain("a", 1)
    (mine,), (theirs,) = cat.grant(ENGINE, 1, 1), cat.grant(OTHER, 1, 1)
    assert cat.commit(OTHER, theirs, 0, meta, 5, 2) is CommitResult.STORED
    assert cat.commit(ENGINE, mine, 0, meta, 6, 2) is CommitResult.DUPLICATE
    assert cat.commit(ENGINE, mine, 0, meta, 6, 2) is CommitResult.DUPLICATE, "asked again"
    assert cat.slot(Tier.G2, meta.key) == theirs
    assert cat.counts().tiers[Tier.G2].free == 3
    cat.check_invariants()


def test_a_repeated_commit_answers_as_the_first() -> None:
    cat, (meta, other) = catalog(4), chain("a", 2)
    (ref,) = save(cat, [meta])
    again = cat.commit(ENGINE, ref, 0, meta, checksum(meta), 20)
    assert again is CommitResult.STORED
    assert cat.commit(ENGINE, ref, 0, meta, 1, 20) is CommitResult.FENCED, "other bytes"
    assert cat.commit(ENGINE, ref, 0, other, checksum(meta), 20) is CommitResult.FENCED
    lease = cat.lease([meta.key], 0, 100, 21)
    cat.clear(Selection(), 22)
    again = cat.commit(ENGINE, ref, 0, meta, checksum(meta), 23)
    assert again is CommitResult.STORED, "it was stored, and is forgotten since"
    cat.release(lease.id, 24)
    assert cat.commit(ENGINE, ref, 0, meta, checksum(meta), 25) is CommitResult.FENCED
    assert cat.tiers_of(meta.key) == ()


def test_a_full_tier_grants_what_it_has() -> None:
    """K5: with all slots in use there is less to fill, and no error."""
    cat, metas = catalog(4), chain("a", 3)
    save(cat, metas)
    lease = cat.lease(keys(metas), 0, 100, 11)
    assert len(cat.grant(OTHER, 8, 12)) == 1
    assert cat.grant(OTHER, 8, 12) == []
    assert cat.begin_fetch(BlockMeta(key("far")), 12) is None
    cat.release(lease.id, 13)
    assert len(cat.grant(OTHER, 8, 14)) == 3
    cat.check_invariants()


def test_an_owner_holds_no_more_than_its_limit() -> None:
    cat = catalog(8, grant_limit=3)
    refs = cat.grant(ENGINE, 8, 1)
    assert len(refs) == cat.granted(ENGINE) == 3
    assert cat.grant(ENGINE, 1, 1) == []
    assert len(cat.grant(OTHER, 2, 1)) == 2
    cat.give_back(ENGINE, refs[0], 2)
    assert len(cat.grant(ENGINE, 2, 3)) == 1
    assert cat.counts().granted == 5


def test_engines_that_wait_leave_a_small_tier_to_its_blocks() -> None:
    """Slots that stand empty for many engines must not push everything out of a small memory."""
    cat, metas = catalog(64, grant_limit=16, grant_share=0.125), chain("a", 48)
    save(cat, metas)
    held = [len(cat.grant(Owner(owner), 16, 20)) for owner in range(20, 26)]
    assert held == [8, 4, 2, 2, 1, 1]
    # Who has what it may have gets more only for what it has filled.
    assert cat.grant(Owner(20), 1, 21) == []
    assert cat.counts().tiers[Tier.G2].blocks >= 44
    cat.check_invariants()


def test_death_of_an_owner_frees_all_it_held() -> None:
    """L5: slots come back and leases end; what it had committed stays."""
    cat, shell, metas = catalog(8), Shell(), chain("a", 2)
    save(cat, metas)
    refs = cat.grant(ENGINE, 3, 11)
    lease = cat.lease(keys(metas), 0, 1000, 12, owner=ENGINE)
    theirs = cat.lease(keys(metas), 0, 1000, 12, owner=OTHER)
    assert cat.release_owner(ENGINE, 13) == 3
    assert cat.release_owner(ENGINE, 13) == 0
    shell.apply(cat.take_changes())
    assert all(shell.header(Tier.G2, ref.index).state is SlotState.FREE for ref in refs)
    assert not cat.has_lease(lease.id) and cat.has_lease(theirs.id)
    assert cat.run(keys(metas)) == [(Tier.G2,)] * 2
    assert cat.granted(ENGINE) == 0
    assert cat.commit(ENGINE, refs[0], 0, metas[0], 1, 14) is not CommitResult.STORED
    cat.check_invariants()


def _calls(work: Callable[[], object]) -> int:
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    # A collection in between would call those who watch collections.
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.parametrize("work", ["owner", "lease", "give_back"])
def test_cleaning_up_after_one_owner_costs_what_it_held(work: str) -> None:
    """H8: not what all others hold."""
    costs = []
    for others in (10, 4000):
        cat = catalog(others + 8, grant_limit=others)
        assert len(cat.grant(OTHER, others // 2, 1)) == others // 2
        metas = chain("b", others // 2)
        save(cat, metas)
        for meta in metas:
            cat.lease([meta.key], 0, 1000, 11, owner=OTHER)
        refs = cat.grant(ENGINE, 4, 12)
        lease = cat.lease(keys(metas[:4]), 0, 1000, 12, owner=ENGINE)
        if work == "owner":
            costs.append(_calls(lambda c=cat: c.release_owner(ENGINE, 13)))  # type: ignore[misc]
        elif work == "lease":
            costs.append(_calls(lambda c=cat, i=lease.id: c.release(i, 13)))  # type: ignore[misc]
        else:
            costs.append(
                _calls(lambda c=cat, r=refs[0]: c.give_back(ENGINE, r, 13))  # type: ignore[misc]
            )
    assert costs[0] == costs[1]


# Several ranks.


def test_a_block_appears_when_all_ranks_have_committed() -> None:
    cat, shell, (meta,) = catalog(ranks=3), Shell(), chain("a", 1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    assert cat.commit(ENGINE, ref, 1, meta, 11, 2) is CommitResult.PENDING
    assert cat.commit(ENGINE, ref, 1, meta, 11, 2) is CommitResult.PENDING, "asked again"
    assert cat.commit(OTHER, ref, 2, meta, 12, 2) is CommitResult.PENDING, "a rank's own process"
    assert cat.tiers_of(meta.key) == ()
    cat.check_invariants()
    assert cat.commit(ENGINE, ref, 0, meta, 10, 3) is CommitResult.STORED
    assert cat.commit(OTHER, ref, 2, meta, 12, 3) is CommitResult.STORED
    shell.apply(cat.take_changes())
    assert shell.header(Tier.G2, ref.index).checksums == (10, 11, 12)
    cat.check_invariants()


def test_ranks_that_contradict_each_other_store_nothing() -> None:
    cat, (meta, other) = catalog(1, ranks=3), chain("a", 2)
    (ref,) = cat.grant(ENGINE, 1, 1)
    assert cat.commit(ENGINE, ref, 0, meta, 1, 2) is CommitResult.PENDING
    assert cat.commit(ENGINE, ref, 1, other, 1, 2) is CommitResult.FENCED
    # The third rank may be writing yet: the slot is nobody else's before it has said so.
    assert cat.grant(OTHER, 1, 2) == []
    assert cat.commit(ENGINE, ref, 2, meta, 1, 2) is CommitResult.FENCED
    assert cat.run([meta.key, other.key]) == []
    assert cat.grant(OTHER, 1, 3) == [SlotRef(0, 2)]
    cat.check_invariants()


def test_a_rank_that_contradicts_itself_stores_nothing() -> None:
    cat, (meta,) = catalog(1, ranks=2), chain("a", 1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    assert cat.commit(ENGINE, ref, 0, meta, 1, 2) is CommitResult.PENDING
    assert cat.commit(ENGINE, ref, 0, meta, 2, 2) is CommitResult.FENCED
    assert cat.commit(ENGINE, ref, 1, meta, 1, 2) is CommitResult.FENCED
    assert cat.counts().tiers[Tier.G2].free == 1
    cat.check_invariants()


def test_shards_of_a_dead_owner_are_forgotten() -> None:
    cat, (meta,) = catalog(1, ranks=2), chain("a", 1)
    (ref,) = cat.grant(ENGINE, 1, 1)
    cat.commit(ENGINE, ref, 0, meta, 1, 2)
    assert cat.release_owner(ENGINE, 3) == 1
    (ref,) = cat.grant(OTHER, 1, 4)
    assert cat.commit(OTHER, ref, 1, meta, 1, 5) is CommitResult.PENDING
    assert cat.give_back(OTHER, ref, 6) is CommitResult.RETURNED
    cat.check_invariants()


# Quotas.


def test_a_tenant_over_its_quota_loses_its_own_oldest() -> None:
    cat = catalog(8, limits={(1, Tier.G2): 3 * PAYLOAD})
    others, first, second = chain("o", 2, 2), chain("a", 2, 1), chain("b", 1, 1)
    save(cat, others, 1)
    save(cat, first, 2)
    save(cat, second, 3)
    cat.touch(keys(first), 4)
    save(cat, chain("c", 1, 1), 5)
    assert cat.run(keys(second)) == [], "used longest ago"
    save(cat, chain("d", 1, 1), 6)
    assert cat.run(keys(first)) == [(Tier.G2,)], "a chain loses its end first"
    assert cat.run(keys(others)) == [(Tier.G2,)] * 2
    assert cat.charges() == {(1, Tier.G2): 3 * PAYLOAD, (2, Tier.G2): 2 * PAYLOAD}
    cat.check_invariants()


def test_a_tenant_whose_blocks_are_all_in_use_is_refused() -> None:
    cat = catalog(8, limits={(None, Tier.G2): 2 * PAYLOAD, (9, Tier.G2): 0})
    metas = chain("a", 2, 1)
    save(cat, metas)
    lease = cat.lease(keys(metas), 1, 100, 11)
    (ref,) = cat.grant(ENGINE, 1, 12)
    (more,) = chain("b", 1, 1)
    assert cat.commit(ENGINE, ref, 0, more, 1, 12) is CommitResult.REFUSED
    cat.clear(Selection(tenant=1), 13)
    (ref,) = cat.grant(ENGINE, 1, 13)
    assert cat.commit(ENGINE, ref, 0, more, 1, 13) is CommitResult.REFUSED, "bytes still read count"
    cat.release(lease.id, 14)
    (ref,) = cat.grant(ENGINE, 1, 14)
    assert cat.commit(ENGINE, ref, 0, more, 1, 14) is CommitResult.STORED
    (ref,) = cat.grant(ENGINE, 1, 15)
    assert cat.commit(ENGINE, ref, 0, chain("c", 1, 9)[0], 1, 15) is CommitResult.REFUSED
    cat.check_invariants()
