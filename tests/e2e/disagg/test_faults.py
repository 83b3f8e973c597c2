"""Prefill and decode apart under faults: no error to anybody, the right text, nothing held."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import LOGS
from tests.e2e.conftest import settle
from tests.e2e.disagg.conftest import FLAGS
from tests.support.client import (
    StreamResult,
    WorkerClient,
    chat_body,
    http_client,
    metric,
    stream,
)
from tests.support.cluster import MODEL, Cluster
from tests.support.etcd import Etcd
from tests.support.pairs import Pairs
from tests.support.polling import until
from tests.support.words import prose

CHAT = "/v1/chat/completions"
P, D0, D1 = "worker-0", "worker-1", "worker-2"
REQUESTS = 8
TOKENS = 60
WORDS = 500


@pytest.fixture(scope="module")
def apart(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, tiny_model_path: Path
) -> Iterator[Cluster]:
    """One worker that prefills, two that decode; the router always takes them apart."""
    cluster = Cluster(tmp_path_factory.mktemp("apart"), etcd, tiny_model_path)
    try:
        cluster.start_worker(P, **FLAGS, role="prefill")
        for name in (D0, D1):
            cluster.start_worker(name, **FLAGS, role="decode")
        cluster.start_router("router-0", disagg="always")
        cluster.start_gateway("gateway-0")
        cluster.keep("router-0", "gateway-0", P, D0, D1)
        for process in cluster.processes.values():
            process.wait_ready(180)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def cluster(apart: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    apart.heal()
    await settle(apart)
    starts = {name: process.log_size() for name, process in apart.processes.items()}
    request.node.stash[LOGS] = lambda: [
        (f"log of {n}", text)
        for n, p in apart.processes.items()
        if (text := p.log_tail(starts.get(n, 0)))
    ]
    yield apart
    apart.heal()
    await settle(apart)
    await Pairs(apart).at_rest(P, D0, D1)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(cluster.url()) as client:
        yield client


def body(number: int, round: int, **extra: Any) -> dict[str, Any]:
    """Each round has prompts of its own, so that nothing of them is cached."""
    return chat_body(
        MODEL,
        prose(50_000 + 100 * round + number, WORDS),
        max_tokens=TOKENS,
        stream_options={"include_usage": True},
        **extra,
    )


def check(results: list[StreamResult], expected: list[str]) -> None:
    for number, (result, text) in enumerate(zip(results, expected, strict=True)):
        assert result.error is None and result.done, (number, result.chunks[-2:])
        assert result.finish_reasons() == ["length"]
        assert result.text() == text, number


async def expected_of(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> list[str]:
    """The texts by one worker that does all of each, before it holds anything."""
    headers = {"x-forebay-worker": D1}
    results = [await stream(client, CHAT, b, headers=headers) for b in bodies]
    assert all(r.error is None for r in results)
    return [r.text() for r in results]


async def forget(cluster: Cluster) -> None:
    await Pairs(cluster).at_rest(P, D0, D1)
    await Pairs(cluster).forget(P, D0, D1)


async def taken(cluster: Cluster) -> int:
    pairs = Pairs(cluster)
    return sum([await pairs.transfers(name, "taken") for name in (D0, D1)])


def start(
    client: httpx.AsyncClient, bodies: list[dict[str, Any]]
) -> list[asyncio.Task[StreamResult]]:
    return [asyncio.create_task(stream(client, CHAT, b)) for b in bodies]


async def test_texts_are_those_of_one_worker(cluster: Cluster, client: httpx.AsyncClient) -> None:
    bodies = [body(n, 0) for n in range(REQUESTS)]
    expected = await expected_of(client, bodies)
    await forget(cluster)
    before = await taken(cluster)
    results = await asyncio.gather(*start(client, bodies))
    check(results, expected)
    assert {r.worker for r in results} <= {D0, D1}
    assert await taken(cluster) == before + REQUESTS
    for result in results:
        assert result.usage is not None
        # Nobody had anything of it: what travelled was computed.
        assert result.usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_kill_the_prefill_worker(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    """Before, during and after prefills and transfers, as it comes."""
    bodies = [body(n, 1 + repetition) for n in range(REQUESTS)]
    expected = await expected_of(client, bodies)
    await forget(cluster)
    before = await taken(cluster)
    tasks = start(client, bodies)
    await until(
        lambda: taken(cluster), lambda n: n > before, within_s=30, what="a transfer", every_s=0.005
    )
    cluster[P].kill()
    check(await asyncio.gather(*tasks), expected)
    # Dead, and perhaps not yet known to be.
    check(await asyncio.gather(*start(client, bodies)), expected)


async def test_kill_a_decode_worker(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    bodies = [body(n, 101 + repetition) for n in range(REQUESTS)]
    expected = await expected_of(client, bodies)
    await forget(cluster)
    before = await taken(cluster)
    tasks = start(client, bodies)
    await until(
        lambda: taken(cluster), lambda n: n > before, within_s=30, what="a transfer", every_s=0.005
    )
    cluster[D0].kill()
    check(await asyncio.gather(*tasks), expected)
    # What the dead one was to take is let go of, at the latest when its lease is over.
    await Pairs(cluster).at_rest(P, D1)


@pytest.mark.parametrize("victim", [P, D0])
async def test_a_worker_stops_and_goes_on(
    cluster: Cluster, client: httpx.AsyncClient, victim: str, repetition: int
) -> None:
    """Past every deadline: the read's, the lease's, the gateway's for silence."""
    bodies = [body(n, 201 + 10 * repetition + (victim == P)) for n in range(REQUESTS)]
    expected = await expected_of(client, bodies)
    await forget(cluster)
    before = await taken(cluster)
    tasks = start(client, bodies)
    await until(
        lambda: taken(cluster), lambda n: n > before, within_s=30, what="a transfer", every_s=0.005
    )
    cluster[victim].freeze()
    try:
        check(await asyncio.gather(*tasks), expected)
    finally:
        cluster[victim].thaw()
    await Pairs(cluster).at_rest(P, D0, D1)
    again = [body(n, 291 + 10 * repetition + (victim == P)) for n in range(REQUESTS)]
    expected = await expected_of(client, again)
    await forget(cluster)
    check(await asyncio.gather(*start(client, again)), expected)


async def test_clients_that_leave(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    """While prefills wait, run, have ended, and while KV moves: both legs end, all is let go of."""
    tasks = start(client, [body(n, 401 + repetition) for n in range(REQUESTS)])
    before = await taken(cluster)
    async with WorkerClient(cluster.ready(P).address) as prefill:
        await until(prefill.requests, within_s=10, what="a prefill", every_s=0.005)
        for task in tasks[: REQUESTS // 2]:
            task.cancel()
        await until(lambda: taken(cluster), lambda n: n > before, within_s=30, what="a transfer")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An engine's running step ends first; nobody waits for its end.
        await until(prefill.requests, lambda n: n == 0, within_s=2, what="an idle prefill worker")
    await Pairs(cluster).at_rest(P, D0, D1, within_s=5)
    gateway = cluster.ready("gateway-0").metrics_address
    assert await metric(gateway, "forebay_gateway_sequences") == 0


async def test_roles_change_under_load(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """Twenty times: nobody notices."""
    from forebay.common.v1 import common_pb2
    from forebay.worker.v1 import worker_pb2

    roles = [common_pb2.ROLE_PREFILL, common_pb2.ROLE_BOTH, common_pb2.ROLE_DECODE]
    done = asyncio.Event()
    served = 0

    async def load(lane: int) -> None:
        nonlocal served
        number = 0
        while not done.is_set():
            one = body(lane, 500 + number, stream=True) | {"max_tokens": 8}
            result = await stream(client, CHAT, one)
            assert result.error is None and result.done
            assert result.finish_reasons() == ["length"]
            served += 1
            number += 1

    async with asyncio.TaskGroup() as tasks:
        for lane in range(4):
            tasks.create_task(load(lane))
        async with WorkerClient(cluster.ready(D1).address) as worker:
            for flip in range(20):
                seen = served
                await worker.stub.SetRole(
                    worker_pb2.SetRoleRequest(role=roles[flip % 3]), timeout=5
                )

                async def more(seen: int = seen) -> bool:
                    return served >= seen + 2

                await until(more, within_s=60, what="requests served between two flips")
            await worker.stub.SetRole(
                worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE), timeout=5
            )
        done.set()
