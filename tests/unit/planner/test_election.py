"""Who is active: by a claim's time, and asked anew before each act."""

from __future__ import annotations

from services.planner.adapters.election import JOB, Election
from tests.fakes.claims import FakeClaims


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def two() -> tuple[Clock, FakeClaims, Election, Election]:
    clock = Clock()
    claims = FakeClaims(clock)
    return clock, claims, Election(claims, "a", 10.0, clock), Election(claims, "b", 10.0, clock)


async def test_one_of_two_is_active() -> None:
    _, _, a, b = two()
    assert not a.active
    assert await a.confirmed() and not await b.confirmed()
    assert (a.active, b.active) == (True, False)
    assert a.left_s == 6.0


async def test_who_does_not_renew_believes_no_longer_than_the_claim_lasts() -> None:
    clock, _, a, b = two()
    await a.confirmed()
    clock.now += 5.9
    assert a.active and not await b.confirmed()
    clock.now += 0.2
    assert not a.active
    assert await b.confirmed()
    assert not await a.confirmed()


async def test_renewing_keeps_it() -> None:
    clock, _, a, b = two()
    for _ in range(10):
        assert await a.confirmed() and not await b.confirmed()
        clock.now += 1.5


async def test_a_claim_that_was_taken_is_seen_before_acting() -> None:
    _, claims, a, _ = two()
    await a.confirmed()
    claims.steal(JOB, "somebody", 100.0)
    assert a.active  # by its own time
    assert not await a.confirmed()
    assert not a.active


async def test_without_etcd_nobody_acts_and_belief_ends() -> None:
    clock, claims, a, _ = two()
    await a.confirmed()
    claims.away = True
    assert not await a.confirmed()
    assert a.active
    clock.now += 6.0
    assert not a.active


async def test_who_resigns_makes_room_at_once() -> None:
    _, _, a, b = two()
    await a.confirmed()
    await b.resign()  # has nothing to give up
    assert not await b.confirmed()
    await a.resign()
    assert not a.active
    assert await b.confirmed()


async def test_resigning_without_etcd_is_no_error() -> None:
    _, claims, a, _ = two()
    await a.confirmed()
    claims.away = True
    await a.resign()
    assert not a.active
