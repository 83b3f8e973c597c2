"""Prefill and decode apart, as a gateway sees it: real gRPC, real event streams, real etcd."""

import asyncio
import urllib.request
from dataclasses import replace
from typing import Any

from forebay.common.v1 import common_pb2
from forebay.router.v1 import router_pb2 as pb

from services.common.cards import Role
from services.common.events.model import LoadReport
from tests.fakes.worker import FakeWorker
from tests.integration.router.conftest import Cluster, Router, until

KEYS = [0xF000_0000_0000_0000 + i for i in range(250)]
"""4,000 tokens."""
TOKENS = 4001


async def started(cluster: Cluster) -> tuple[Router, FakeWorker, FakeWorker]:
    """A router, a worker that prefills, and one that decodes eight requests."""
    p = await cluster.worker("p", role=Role.PREFILL, transfer="nixl")
    d = await cluster.worker("d", role=Role.DECODE, transfer="nixl")
    for i in range(8):
        d.admit(f"x{i}", 10, [], 500)
        d.first_token(f"x{i}", 0)
    router = await cluster.router()
    await until("states", router.states, {"p": "READY", "d": "READY"})
    await told(router, p, d)
    return router, p, d


async def told(router: Router, *workers: FakeWorker) -> None:
    """The router has heard all that these said."""

    async def sequences() -> dict[str, int]:
        seen = await router.workers()
        return {w.id: seen[w.id].sequence for w in workers}

    await until("sequences", sequences, {w.id: w.publisher.sequence for w in workers})


async def loads(router: Router) -> dict[str, tuple[int, int]]:
    """Bookings, and prompt tokens that wait."""
    seen = await router.workers()
    return {id: (w.booked_requests, w.pending_prefill_tokens) for id, w in seen.items()}


async def metrics(router: Router) -> dict[str, float]:
    url = f"http://{router.metrics_address}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("forebay_router_"): float(value) for name, value in lines}


async def test_a_request_in_two_legs(cluster: Cluster) -> None:
    router, p, d = await started(cluster)
    answer = await router.route(KEYS, TOKENS)
    assert (answer.prefill_worker.id, answer.worker.id) == ("p", "d")
    assert (answer.prefill_address, answer.address) == (p.address, d.address)
    assert await loads(router) == {"p": (1, TOKENS), "d": (1, 0)}

    first, then = answer.prefill_attempt_id, answer.attempt_id
    p.admit(first, TOKENS, KEYS, prefill_only=True)
    p.store(KEYS)
    p.first_token(first, 0)
    p.finish(first, 0)
    await told(router, p)
    assert await loads(router) == {"p": (0, 0), "d": (1, 0)}
    d.admit(then, TOKENS, KEYS, 100, transfer_tokens=TOKENS)
    d.transfer(then, "p", TOKENS, 0.25)
    d.store(KEYS)
    d.first_token(then, TOKENS - 1, TOKENS - 1)
    await told(router, d)
    assert await loads(router) == {"p": (0, 0), "d": (0, 0)}
    d.finish(then, TOKENS - 1, 100)
    await told(router, d)
    seen = await metrics(router)
    assert seen['placements_total{path="apart"}'] == 1
    assert seen['transfers_total{result="came"}'] == 1
    assert seen["transfer_tokens_total"] == TOKENS
    assert seen["transfer_bytes_total"] == TOKENS * 1000
    assert seen["actual_transfer_seconds_total"] == 0.25
    assert seen["predicted_cached_tokens_total"] == seen["actual_cached_tokens_total"] == 0
    assert (await router.route(KEYS, TOKENS)).predicted_cached_tokens == 4000


async def test_legs_are_taken_back_one_by_one_on_a_stream(cluster: Cluster) -> None:
    router, _, _ = await started(cluster)
    stream = router.stub.RouteStream()
    request = pb.RouteRequest(
        model="m", block_size_tokens=16, block_hashes=KEYS, prompt_tokens=TOKENS
    )
    await stream.write(pb.RouteStreamRequest(correlation_id=1, route=request))
    placed = (await asyncio.wait_for(stream.read(), 5)).placement
    assert placed.prefill_worker.id == "p"

    async def release(**fields: Any) -> None:
        message = pb.ReleasePlacement(**fields)
        await stream.write(pb.RouteStreamRequest(correlation_id=2, release=message))

    await release(
        attempt_id=placed.prefill_attempt_id,
        worker_unreachable=True,
        worker=placed.prefill_worker,
    )
    await until("loads", lambda: loads(router), {"p": (0, 0), "d": (1, 0)})
    await until("state", lambda: state(router, "p"), "SUSPECT")
    await release(attempt_id=placed.attempt_id)
    await until("loads", lambda: loads(router), {"p": (0, 0), "d": (0, 0)})
    await stream.done_writing()


async def state(router: Router, id: str) -> str:
    return (await router.states())[id]


async def test_explain_and_list(cluster: Cluster) -> None:
    router, p, _ = await started(cluster)
    p.report(LoadReport(held_transfers=2))
    await told(router, p)
    seen = await router.workers()
    assert (seen["p"].transfer, seen["p"].held_transfers) == ("nixl", 2)
    assert seen["p"].role == common_pb2.ROLE_PREFILL
    request = pb.RouteRequest(
        model="m", block_size_tokens=16, block_hashes=KEYS, prompt_tokens=TOKENS
    )
    card = await router.stub.Explain(pb.ExplainRequest(request=request), timeout=5)
    assert card.apart.chosen and card.apart.prefill_worker.id == "p"
    assert card.whole.worker.id == card.apart.worker.id == "d"
    assert card.whole.reason.endswith("ms more than apart")
    request.whole = True
    card = await router.stub.Explain(pb.ExplainRequest(request=request), timeout=5)
    assert card.whole.chosen and card.apart.reason == "the request asks for one worker"


async def test_a_role_is_followed_when_the_record_changes(cluster: Cluster) -> None:
    router, p, d = await started(cluster)
    p.store(KEYS)
    await told(router, p)

    async def set_role(worker: FakeWorker, role: Role) -> None:
        worker.instance = replace(worker.instance, role=role)
        await cluster.registrations[worker.id].update(worker.instance)

        async def shown() -> int:
            return int((await router.workers())[worker.id].role)

        await until("role", shown, {Role.BOTH: 1, Role.PREFILL: 2, Role.DECODE: 3}[role])

    await set_role(p, Role.BOTH)
    answer = await router.route(KEYS, TOKENS)
    assert answer.worker.id == "p" and answer.predicted_cached_tokens == 4000
    assert not answer.HasField("prefill_worker")
    p.serve(answer.attempt_id, TOKENS, KEYS)
    await set_role(d, Role.PREFILL)
    await set_role(p, Role.PREFILL)
    answer = await router.route(KEYS, TOKENS)
    assert answer.worker.id == "p", "nobody else is there"
    await set_role(d, Role.DECODE)
    answer = await router.route(KEYS, TOKENS)
    assert (answer.prefill_worker.id, answer.worker.id) == ("p", "d")
    assert answer.predicted_prefill_cached_tokens == 4000


async def test_a_link_that_fails_is_left_for_a_while(cluster: Cluster) -> None:
    router, _, d = await started(cluster)
    answer = await router.route(KEYS, TOKENS)
    assert answer.prefill_worker.id == "p"
    d.admit(answer.attempt_id, TOKENS, KEYS, 100, transfer_tokens=TOKENS)
    d.transfer(answer.attempt_id, "p", 0, 30.0)
    await told(router, d)
    assert (await loads(router))["d"] == (0, TOKENS), "it computes now"
    request = pb.RouteRequest(
        model="m", block_size_tokens=16, block_hashes=range(250), prompt_tokens=TOKENS
    )
    card = await router.stub.Explain(pb.ExplainRequest(request=request), timeout=5)
    assert card.whole.chosen and card.apart.transfer_s > 30
    assert (await metrics(router))['transfers_total{result="failed"}'] == 1
    d.first_token(answer.attempt_id, 0)
    d.finish(answer.attempt_id, 0, 5)
    await told(router, d)
    assert (await loads(router))["d"] == (0, 0)


async def test_twins_agree_about_legs(cluster: Cluster) -> None:
    router, p, d = await started(cluster)
    twin = await cluster.router(id="router-1")
    await until("states", twin.states, {"p": "READY", "d": "READY"})
    answer = await router.route(KEYS, TOKENS)
    p.admit(answer.prefill_attempt_id, TOKENS, KEYS, prefill_only=True)
    d.admit(answer.attempt_id, TOKENS, KEYS, 100, transfer_tokens=TOKENS)
    for one in (router, twin):
        await told(one, p, d)
        assert await loads(one) == {"p": (0, TOKENS), "d": (0, 0)}
