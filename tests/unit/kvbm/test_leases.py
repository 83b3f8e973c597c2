"""Engines that read: what a lease holds, and that every lease ends."""

import pytest

from services.common.arena import SlotState
from services.common.events.model import Tier
from services.kvbm.core.model import LeaseId, Selection
from tests.support.catalogs import (
    ENGINE,
    Shell,
    catalog,
    chain,
    checksum,
    copy_down,
    key,
    keys,
    save,
)


def test_a_lease_holds_the_leading_blocks_in_g2() -> None:
    cat, metas = catalog(8), chain("a", 4)
    refs = save(cat, metas[:2] + metas[3:])
    lease = cat.lease(keys(metas), 0, 100, 11)
    assert [(b.key, b.ref, b.checksums) for b in lease.ready] == [
        (m.key, r, (checksum(m),)) for m, r in zip(metas[:2], refs[:2], strict=True)
    ]
    assert cat.counts().tiers[Tier.G2].leased == 2
    save(cat, metas[2:3])
    assert [b.key for b in cat.lease_ready(lease.id)] == keys(metas)
    assert cat.counts().tiers[Tier.G2].leased == 4
    cat.check_invariants()


def test_leased_blocks_are_not_evicted() -> None:
    cat, metas = catalog(4), chain("a", 4)
    save(cat, metas)
    lease = cat.lease(keys(metas[:2]), 0, 100, 11)
    assert len(cat.grant(ENGINE, 8, 12)) == 2
    assert cat.run(keys(metas)) == [(Tier.G2,)] * 2
    assert cat.release(lease.id, 13)
    assert not cat.release(lease.id, 13)
    assert len(cat.grant(ENGINE, 8, 14)) == 2
    assert cat.run(keys(metas)) == []
    cat.check_invariants()


def test_leases_that_nobody_uses_expire() -> None:
    """L1: what a look-up has pinned and nobody retrieves comes back by itself."""
    cat, metas = catalog(2), chain("a", 2)
    save(cat, metas)
    early = cat.lease(keys(metas), 0, 100, 11)
    late = cat.lease(keys(metas), 0, 200, 11)
    assert cat.expire(99).leases == 0
    assert cat.expire(100).leases == 1
    assert not cat.has_lease(early.id) and cat.has_lease(late.id)
    with pytest.raises(KeyError):
        cat.lease_ready(early.id)
    assert cat.expire(1000).leases == 1
    assert cat.counts().leases == cat.counts().tiers[Tier.G2].leased == 0
    assert len(cat.grant(ENGINE, 2, 1001)) == 2


def test_many_leases_end_in_steps() -> None:
    """H8: one call ends a bounded number."""
    cat, metas = catalog(2), chain("a", 2)
    save(cat, metas)
    for _ in range(5000):
        cat.lease(keys(metas), 0, 100, 11)
    steps = 0
    while (expired := cat.expire(100)).more:
        assert 0 < expired.leases <= 2048
        steps += 1
    assert steps == 2 and cat.counts().leases == 0
    cat.check_invariants()


def test_a_lease_on_nothing_may_wait_for_it() -> None:
    cat, metas = catalog(4, 4), chain("a", 2)
    lease = cat.lease(keys(metas), 0, 100, 1)
    assert lease.ready == () and cat.lease_ready(lease.id) == []
    save(cat, metas)
    copy_down(cat, metas)
    assert len(cat.lease_ready(lease.id)) == 2
    with pytest.raises(KeyError):
        cat.lease_ready(LeaseId(99))


def test_leases_that_were_released_leave_nothing() -> None:
    cat = catalog()
    for now in range(5000):
        assert cat.release(cat.lease([key(1)], 0, now + 10**6, now).id, now)
    assert len(cat._leases._expiries) <= 2000
    last = cat.lease([key(1)], 0, 10**6, 5000)
    cat.check_invariants()
    assert cat.expire(10**6).leases == 1 and not cat.has_lease(last.id)


def test_lease_ids_are_not_used_twice_at_a_time() -> None:
    cat = catalog()
    ids = iter([LeaseId(1), LeaseId(1), LeaseId(2)])
    cat._leases._new_lease = lambda: next(ids)
    assert [cat.lease([key(1)], 0, 100, 1).id for _ in range(2)] == [1, 2]


def test_a_lease_is_not_ended_by_the_time_of_a_former_one() -> None:
    cat = catalog()
    cat._leases._new_lease = lambda: LeaseId(1)
    assert cat.release(cat.lease([key(1)], 0, 100, 1).id, 2)
    again = cat.lease([key(1)], 0, 200, 3)
    assert cat.expire(100).leases == 0 and cat.has_lease(again.id)
    assert cat.expire(200).leases == 1


def test_forgotten_blocks_stay_as_they_are_for_who_reads_them() -> None:
    """A clear, an expiry or a fault takes a block from later look-ups, not from a reader."""
    cat, shell, metas = catalog(4), Shell(), chain("a", 3)
    refs = save(cat, metas)
    lease = cat.lease(keys(metas), 0, 100, 11)
    cat.forget(Tier.G2, metas[1].key, 12)
    cat.forget(Tier.G2, metas[2].key, 12, quarantine=True)
    shell.apply(cat.take_changes())
    assert cat.run(keys(metas)) == [(Tier.G2,)]
    assert [b.key for b in cat.lease_ready(lease.id)] == keys(metas)
    header = shell.header(Tier.G2, refs[1].index)
    assert (header.state, header.key) == (SlotState.SEALED, metas[1].key), "readers find it"
    assert 0 < header.expires_ms < 12, "a later daemon doesn't"
    counts = cat.counts().tiers[Tier.G2]
    assert (counts.blocks, counts.leaving, counts.quarantined) == (1, 2, 0)
    assert [b.key for b in cat.lease(keys(metas), 0, 100, 13).ready] == keys(metas)[:1]
    cat.check_invariants()
    cat.release(lease.id, 14)
    shell.apply(cat.take_changes())
    counts = cat.counts().tiers[Tier.G2]
    assert (counts.leaving, counts.quarantined) == (0, 1)
    assert shell.header(Tier.G2, refs[1].index).state is SlotState.FREE
    cat.check_invariants()


def test_blocks_expire_for_new_readers_only() -> None:
    cat, shell, metas = catalog(4), Shell(), chain("a", 2, expires_ms=50)
    save(cat, metas)
    lease = cat.lease(keys(metas[:1]), 0, 100, 49)
    assert cat.run(keys(metas)) == [(Tier.G2,)] * 2
    assert cat.lease(keys(metas), 0, 100, 50).ready == ()
    assert cat.run(keys(metas)) == [] and cat.tiers_of(metas[1].key) == ()
    assert cat.expire(50).blocks == 2
    shell.apply(cat.take_changes())
    assert not shell.told[Tier.G2]
    assert len(cat.lease_ready(lease.id)) == 1
    cat.check_invariants()
    again = chain("a", 2, expires_ms=90)
    refs = save(cat, again, 51)
    assert refs[0] != lease.ready[0].ref, "a new block beside the one that is being read"
    cat.release(lease.id, 52)
    assert cat.run(keys(metas)) == [(Tier.G2,)] * 2
    cat.check_invariants()


def test_an_expired_block_makes_room_before_a_good_one() -> None:
    cat, old, good = catalog(2), chain("a", 1, expires_ms=50), chain("b", 1)
    save(cat, good, 10)
    save(cat, old, 20)
    save(cat, chain("c", 1), 60)
    assert cat.run(keys(good)) == [(Tier.G2,)]
    cat.check_invariants()


def test_an_expired_block_is_no_duplicate() -> None:
    cat = catalog(4)
    save(cat, chain("a", 1, expires_ms=50), 10)
    save(cat, chain("a", 1, expires_ms=90), 60)
    assert cat.run(keys(chain("a", 1))) == [(Tier.G2,)]
    cat.expire(61)
    assert cat.run(keys(chain("a", 1))) == [(Tier.G2,)]
    cat.check_invariants()


def test_clearing_leaves_a_reader_unharmed_and_a_new_save_is_a_new_block() -> None:
    cat, metas = catalog(4), chain("a", 1)
    (old,) = save(cat, metas)
    lease = cat.lease(keys(metas), 0, 100, 11)
    cleared = cat.clear(Selection(), 12)
    assert cleared.blocks[Tier.G2] == cleared.leased == 1
    assert cat.run(keys(metas)) == []
    (new,) = save(cat, metas, 13)
    assert new.index != old.index
    fresh = cat.lease(keys(metas), 0, 100, 14)
    assert fresh.ready[0].ref == new and cat.lease_ready(lease.id)[0].ref == old
    cat.release(lease.id, 15)
    assert cat.slot(Tier.G2, metas[0].key) == new
    cat.check_invariants()
