"""Admission on a real router: who waits, in which order they go, who is refused."""

import asyncio
from typing import Any

import pytest
from forebay.router.v1 import router_pb2 as pb

from services.common.errors import Overloaded
from tests.integration.router.conftest import Cluster, Router, until
from tests.integration.router.test_router import both_ready, failure

ROUTE: dict[str, Any] = {"model": "m", "block_size_tokens": 16, "prompt_tokens": 1000}
LIMITS = {
    "prefill_tokens_per_s": 10.0,
    "learn_rates": False,
    "booking_ttl_s": 60.0,
    "max_wait_s": 150.0,
    "queue_wait_s": 1000.0,
}
"""A prompt takes a hundred seconds, so that only events move anything; two fill a worker."""


async def route(router: Router, **fields: Any) -> Any:
    # A patience in words: a call's own deadline is told by another clock, and equals would swap.
    request = pb.RouteRequest(**ROUTE, **({"deadline_ms": 800_000} | fields))
    return await router.stub.Route(request, timeout=900)


async def explained(router: Router) -> Any:
    request = pb.ExplainRequest(request=pb.RouteRequest(**ROUTE))
    return await router.stub.Explain(request, timeout=5)


async def waiting(router: Router) -> int:
    answer: int = (await explained(router)).waiting_requests
    return answer


async def test_requests_wait_for_room_in_fair_turns(cluster: Cluster) -> None:
    worker = await cluster.worker("w0")
    router = await cluster.router(**LIMITS)
    await both_ready(router, "w0")
    there = [await route(router) for _ in range(2)]
    for answer in there:
        worker.admit(answer.attempt_id, 1000, [])
    order: list[str] = []

    async def ask(name: str, **fields: Any) -> Any:
        answer = await route(router, **fields)
        order.append(name)
        return answer

    calls = []
    wants: list[tuple[str, dict[str, Any]]] = [
        ("a1", {"tenant": "a"}),
        ("a2", {"tenant": "a"}),
        ("b1", {"tenant": "b"}),
        ("urgent", {"tenant": "c", "priority": 1}),
    ]
    for count, (name, fields) in enumerate(wants, 1):
        calls.append(asyncio.create_task(ask(name, **fields)))
        await until("waiting", lambda: waiting(router), count)
    card = await explained(router)
    assert card.would_wait and card.predicted_wait_s > 200 and card.max_wait_s == 150

    hasty = await failure(route(router, deadline_ms=100))
    assert isinstance(hasty, Overloaded) and hasty.reason == "OVERLOADED"
    assert hasty.retry_after_s > 0 and "busy" in hasty.message

    gone = asyncio.create_task(ask("gone", tenant="a"))
    await until("waiting", lambda: waiting(router), 5)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await until("waiting", lambda: waiting(router), 4)

    for left in (3, 2, 1, 0):
        done = there.pop(0).attempt_id
        worker.first_token(done, 0)
        worker.finish(done, 0)
        await until("waiting", lambda: waiting(router), left)
        told, pending = await asyncio.wait(calls, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        calls = list(pending)
        placed = told.pop().result()
        worker.admit(placed.attempt_id, 1000, [])
        there.append(placed)
    assert order == ["urgent", "a1", "b1", "a2"]
