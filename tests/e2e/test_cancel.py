"""A client that leaves takes its work with it, and no counter keeps its trace (rows 46 and 48)."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.support.client import (
    WorkerClient,
    chat_body,
    http_client,
    metric,
    stream,
)
from tests.support.cluster import MODEL, SEQUENCES, Cluster
from tests.support.polling import until
from tests.support.words import prose

CHAT = "/v1/chat/completions"
WITHIN_S = 1.0
"""Promised: 0.3 s to the worker, then the running step ends."""


def long_chat(i: int, **extra: Any) -> dict[str, Any]:
    return chat_body(MODEL, prose(5000 + i, 40), max_tokens=3900, **extra)


async def running(workers: dict[str, WorkerClient]) -> int:
    return sum(await asyncio.gather(*(w.requests() for w in workers.values())))


async def gone(
    cluster: Cluster, workers: dict[str, WorkerClient], gateway: str = "gateway-0"
) -> None:
    """Nothing runs or waits any more, and every gauge says exactly 0."""
    await until(
        lambda: running(workers),
        lambda n: n == 0,
        within_s=WITHIN_S,
        what="idle engines",
        every_s=0.05,
    )

    async def gauges() -> dict[str, float]:
        address = cluster.ready(gateway).metrics_address
        names = ("requests_in_flight", "sequences_in_flight", "sse_clients")
        seen = {name: await metric(address, f"forebay_gateway_{name}") for name in names}
        for name in workers:
            address = cluster.ready(name).metrics_address
            for gauge in ("forebay_worker_running_requests", "forebay_worker_waiting_requests"):
                seen[f"{name} {gauge}"] = await metric(address, gauge)
        return seen

    await until(gauges, lambda g: set(g.values()) == {0.0}, within_s=1, what="gauges at 0")


async def leave(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Start = Callable[[httpx.AsyncClient, int], Awaitable[Any]]


def streaming(client: httpx.AsyncClient, i: int) -> Awaitable[Any]:
    return stream(client, CHAT, long_chat(i))


def plain(client: httpx.AsyncClient, i: int) -> Awaitable[Any]:
    return client.post(CHAT, json=long_chat(i))


def several(client: httpx.AsyncClient, i: int) -> Awaitable[Any]:
    return stream(client, CHAT, long_chat(i, n=3, temperature=0.8))


@pytest.mark.parametrize("start", [streaming, plain, several])
async def test_46_a_client_leaves(
    cluster: Cluster, workers: dict[str, WorkerClient], start: Start
) -> None:
    async with http_client(cluster.url()) as client:
        tasks = [asyncio.ensure_future(start(client, i)) for i in range(4)]
        await until(lambda: running(workers), lambda n: n >= 4, within_s=5, what="running")
        await asyncio.sleep(0.3)  # some tokens are on their way
        await leave(tasks)
        await gone(cluster, workers)


@pytest.mark.parametrize("start", [streaming, plain])
async def test_46_a_client_leaves_while_queued(
    cluster: Cluster, workers: dict[str, WorkerClient], start: Start
) -> None:
    async with http_client(cluster.url()) as busy, http_client(cluster.url()) as client:
        batches = 2 * SEQUENCES  # what both engines take; the rest waits
        full = [asyncio.ensure_future(streaming(busy, i)) for i in range(batches)]
        await until(
            lambda: running(workers), lambda n: n >= batches, within_s=20, what="full engines"
        )
        tasks = [asyncio.ensure_future(start(client, 100 + i)) for i in range(10)]
        await until(
            lambda: running(workers), lambda n: n >= batches + 10, within_s=10, what="a queue"
        )
        await leave(tasks)
        await until(
            lambda: running(workers), lambda n: n <= batches, within_s=WITHIN_S, what="no queue"
        )
        assert not any(t.done() for t in full), "the others go on"
        await leave(full)
        await gone(cluster, workers)


async def test_46_a_client_leaves_during_a_long_prefill(
    cluster: Cluster, workers: dict[str, WorkerClient]
) -> None:
    async with http_client(cluster.url()) as client:
        bodies = [chat_body(MODEL, prose(6000 + i, 1500), max_tokens=100) for i in range(4)]
        tasks = [asyncio.ensure_future(stream(client, CHAT, body)) for body in bodies]
        await until(lambda: running(workers), lambda n: n >= 4, within_s=5, what="running")
        await leave(tasks)
        await gone(cluster, workers)


async def test_48_two_hundred_cancelled_requests_leave_no_trace(
    cluster: Cluster, workers: dict[str, WorkerClient]
) -> None:
    rng = random.Random(3)
    async with http_client(cluster.url()) as client:

        async def one(i: int) -> None:
            await asyncio.sleep(rng.random() * 2)
            task = asyncio.ensure_future((streaming, plain)[i % 2](client, i))
            await asyncio.sleep(rng.random() * 0.5)
            await leave([task])

        await asyncio.gather(*(one(i) for i in range(200)))
        await gone(cluster, workers)
        answer = await client.post(CHAT, json=chat_body(MODEL, "and now?", max_tokens=2))
        assert answer.status_code == 200


async def test_46_a_finished_stream_leaves_no_trace(
    cluster: Cluster, workers: dict[str, WorkerClient]
) -> None:
    async with http_client(cluster.url()) as client:
        # A stop string ends the request at the gateway while the engine still runs it.
        whole = (await stream(client, CHAT, {**long_chat(1), "max_tokens": 30})).text()
        stopped = await stream(client, CHAT, {**long_chat(1), "stop": whole[8:16]})
        assert stopped.finish_reasons() == ["stop"]
        await gone(cluster, workers)
