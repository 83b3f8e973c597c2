"""Without a router: the least loaded worker, fairly, and never one that is excluded if another is
there.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest

from services.common.cards import Holder, Role
from services.common.errors import NotFound, Overloaded, Unavailable
from services.gateway.placement import RoutedPlacer
from services.gateway.ports import Ask, Candidate, PlacedBy, Placement, Wishes

ASK = Ask(model="m", block_size=32, keys=(), tokens=5)


class Router:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def place(self, ask: Ask) -> Placement:
        raise self.error

    def release(self, placement: Placement, *, unreachable: bool = False) -> None: ...


def worker(name: str, in_flight: int = 0, connected: bool = True) -> Candidate:
    return Candidate(Holder(name, 1), f"{name}:1", connected, in_flight)


def placer(*workers: Candidate, error: Exception | None = None) -> tuple[RoutedPlacer, list[str]]:
    reasons: list[str] = []
    router = Router(error or Unavailable("away", reason="NO_ROUTER"))
    return RoutedPlacer(router, lambda m: workers, reasons.append, random.Random(1)), reasons


async def test_least_loaded() -> None:
    made, reasons = placer(worker("a", 3), worker("b", 1), worker("c", 2))
    placement = await made.place(ASK)
    assert placement.worker.id == "b" and placement.placed_by is PlacedBy.FALLBACK
    assert placement.attempt_id.startswith("att-") and reasons == ["NO_ROUTER"]


async def test_ties_are_spread() -> None:
    made, _ = placer(worker("a"), worker("b"))
    counts = Counter([(await made.place(ASK)).worker.id for _ in range(200)])
    assert min(counts["a"], counts["b"]) > 60


async def test_connected_ones_first() -> None:
    made, _ = placer(worker("a", 0, connected=False), worker("b", 9))
    assert (await made.place(ASK)).worker.id == "b"


async def test_prefill_workers_last() -> None:
    """Whole requests go to them when nobody else is there."""
    prefill = replace(worker("p"), role=Role.PREFILL)
    made, _ = placer(prefill, replace(worker("d", 9), role=Role.DECODE))
    placement = await made.place(ASK)
    assert placement.worker.id == "d" and placement.prefill is None
    made, _ = placer(prefill, worker("b", 9, connected=False))
    assert (await made.place(ASK)).worker.id == "b"
    made, _ = placer(prefill)
    assert (await made.place(ASK)).worker.id == "p"


async def test_excluded() -> None:
    made, _ = placer(worker("a"), worker("b", 5))
    ask = Ask(model="m", block_size=32, keys=(), tokens=5, excluded=frozenset({"a"}))
    assert (await made.place(ask)).worker.id == "b"
    # The only one failed this request, but its session lives: a blip is no reason to give up.
    made, _ = placer(worker("a"))
    assert (await made.place(ask)).worker.id == "a"
    made, reasons = placer(worker("a", connected=False))
    with pytest.raises(Unavailable) as failure:
        await made.place(ask)
    assert failure.value.reason == "NO_WORKER" and reasons == []


@pytest.mark.parametrize(
    ("tenant", "wishes", "found"),
    [
        ("", Wishes(), {"a", "b"}),
        ("other", Wishes(), {"a", "b"}),
        ("acme", Wishes(), {"own"}),
        ("", Wishes(worker="b"), {"b"}),
        ("", Wishes(labels={"zone": "x"}), {"b"}),
        ("", Wishes(excluded=frozenset({"a"})), {"b"}),
        ("", Wishes(session="s"), {"a", "b"}),
        ("acme", Wishes(worker="a"), set()),
        ("", Wishes(worker="own"), set()),
        ("", Wishes(labels={"zone": "y"}), set()),
        ("", Wishes(worker="a", rank=0), set()),
    ],
)
async def test_constraints_hold(tenant: str, wishes: Wishes, found: set[str]) -> None:
    workers = [
        worker("a"),
        replace(worker("b"), labels={"zone": "x"}),
        replace(worker("own"), labels={"tenants": "acme+bee"}),
    ]
    made, _ = placer(*workers)
    ask = replace(ASK, tenant=tenant, wishes=wishes)
    if found:
        assert {(await made.place(ask)).worker.id for _ in range(50)} == found
        return
    with pytest.raises(Unavailable) as failure:
        await made.place(ask)
    assert failure.value.reason == "NO_WORKER"


async def test_what_stands_and_what_does_not() -> None:
    made, _ = placer(worker("a"), error=Overloaded("full"))
    with pytest.raises(Overloaded):
        await made.place(ASK)
    made, reasons = placer(worker("a"), error=NotFound("never heard", reason="MODEL_NOT_FOUND"))
    assert (await made.place(ASK)).worker.id == "a" and reasons == ["MODEL_NOT_FOUND"]
