"""SIGTERM under load costs no client anything (row 72)."""

import asyncio
import time

import httpx
import pytest

from tests.support.client import chat_body, http_client, stream
from tests.support.cluster import MODEL, Cluster
from tests.support.polling import until
from tests.support.words import prose

pytestmark = pytest.mark.chaos

CHAT = "/v1/chat/completions"


async def test_72_drain_a_worker_under_load(
    cluster: Cluster, client: httpx.AsyncClient, every_third_repetition: int
) -> None:
    stop = asyncio.Event()
    workers: list[tuple[float, str]] = []

    async def one(number: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            text = prose(14_000 + 100 * number + i, 30)
            result = await stream(client, CHAT, chat_body(MODEL, text, max_tokens=30))
            assert result.status == 200 and result.error is None, result
            assert result.done and result.finish_reasons() == ["length"]
            workers.append((time.monotonic(), result.worker))

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(one(number))
        await asyncio.sleep(1)
        cluster["worker-0"].terminate()
        assert await cluster["worker-0"].until_ended(30) == 0
        ended = time.monotonic()
        await asyncio.sleep(1)
        stop.set()
    assert {w for _, w in workers} == {"worker-0", "worker-1"}
    assert all(w == "worker-1" for t, w in workers if t > ended)


async def test_72_drain_a_gateway_under_load(cluster: Cluster, repetition: int) -> None:
    cluster.start_gateway("gateway-leaving", drain_notice_s=4)
    await cluster["gateway-leaving"].until_ready()
    leaving, staying = cluster.url("gateway-leaving"), cluster.url("gateway-0")
    target = leaving
    stop = asyncio.Event()
    served: list[str] = []

    async def one(number: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            mine = target
            # A connection of its own for each request, as a balancer's clients have.
            async with http_client(mine) as client:
                text = prose(15_000 + 100 * number + i, 20)
                result = await stream(client, CHAT, chat_body(MODEL, text, max_tokens=60))
            assert result.status == 200 and result.error is None, result
            assert result.done and result.finish_reasons() == ["length"]
            served.append(mine)

    async def ready(client: httpx.AsyncClient) -> int:
        return (await client.get("/ready")).status_code

    async with http_client(leaving) as poller:
        assert await ready(poller) == 200
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(one(number))
            await asyncio.sleep(1)
            cluster["gateway-leaving"].terminate()
            await until(lambda: ready(poller), lambda s: s == 503, within_s=0.5, what="503")
            still = await poller.post(CHAT, json=chat_body(MODEL, "last call", max_tokens=2))
            assert still.status_code == 200, "it still serves while readiness says no"
            assert (await poller.get("/live")).status_code == 200
            target = staying
            assert await cluster["gateway-leaving"].until_ended(30) == 0
            stop.set()
    assert leaving in served and staying in served
