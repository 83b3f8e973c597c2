"""A gateway dies: its streams break, its work ends at the workers, other gateways serve on."""

import asyncio

import pytest

from tests.support.client import WorkerClient, chat_body, http_client, metric, stream
from tests.support.cluster import MODEL, Cluster
from tests.support.polling import until
from tests.support.words import prose

pytestmark = pytest.mark.chaos

CHAT = "/v1/chat/completions"


async def test_kill_a_gateway(
    cluster: Cluster, workers: dict[str, WorkerClient], repetition: int
) -> None:
    cluster.start_gateway("gateway-doomed")
    await cluster["gateway-doomed"].until_ready()

    async def running() -> int:
        return sum([await w.requests() for w in workers.values()])

    async with (
        http_client(cluster.url()) as other,
        http_client(cluster.url("gateway-doomed")) as doomed,
    ):
        kept = asyncio.create_task(
            stream(other, CHAT, chat_body(MODEL, "another gateway's", max_tokens=600))
        )
        bodies = [chat_body(MODEL, prose(13_000 + i, 30), max_tokens=3900) for i in range(8)]
        tasks = [asyncio.create_task(stream(doomed, CHAT, b)) for b in bodies]
        await until(running, lambda n: n == 9, within_s=10, what="running requests")
        await asyncio.sleep(0.3)
        cluster["gateway-doomed"].kill()
        broken = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(b, Exception) for b in broken), "its clients see their streams break"
        await until(running, lambda n: n <= 1, within_s=1, what="end of the orphans")
        result = await kept
        assert result.finish_reasons() == ["length"], "other gateways' requests go on"
        await until(running, lambda n: n == 0, within_s=1, what="idle engines")
    for name in workers:
        address = cluster.ready(name).metrics_address
        for gauge in ("forebay_worker_running_requests", "forebay_worker_waiting_requests"):
            assert await metric(address, gauge) == 0
