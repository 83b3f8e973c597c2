"""The client goes: every worker drops its requests within 0.3 s, wherever the request was just
then.
"""

import asyncio
from typing import Any

import pytest

from tests.fakes.router import FakeRouter
from tests.support.client import PROMISE_S, chat_body, completion_body, send
from tests.support.polling import until


async def assert_quiet(r: Any) -> None:
    """Nothing is left of any request."""
    for gauge in ("requests_in_flight", "sequences_in_flight", "sse_clients"):
        assert await r.metric(gauge) == 0.0, gauge
    assert not any(w.running for w in r.workers)


@pytest.mark.parametrize("reading", [True, False], ids=["decoding", "queued"])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
async def test_abort_in_time(rig: Any, streaming: bool, reading: bool) -> None:
    async with rig(interval_s=None) as r:
        body = chat_body("tiny", "hi", max_tokens=3000, n=2, stream=streaming)
        reader, writer = await send(r.port, body)
        await r.worker.until(lambda: len(r.worker.running) == 2)
        if reading:
            r.worker.step(3)
            if streaming:
                await reader.readuntil(b"data: ")
        writer.close()
        left = asyncio.get_running_loop().time()
        await r.worker.until(lambda: len(r.worker.aborted) == 2)
        assert all(at - left < PROMISE_S for _, at in r.worker.aborted)
        await assert_quiet(r)
        assert await r.metric("aborts_total", reason="client") == 1.0
        name = {"path": "/v1/chat/completions", "model": "tiny", "status": "499"}
        assert await r.metric("requests_total", **name) == 1.0


async def test_gone_while_routing(rig: Any) -> None:
    """The router answers too late: the placement that nobody wants any more is given back."""
    ask: list[Any] = []
    router = FakeRouter("r0", lambda request: ask.append(request))
    async with rig(router=router, router_timeout_s=30) as r:
        _, writer = await send(r.port, chat_body("tiny", "hi"))
        await router.until(lambda: len(router.requests) == 1)
        assert await r.metric("requests_in_flight") == 1.0
        writer.close()
        await until(lambda: r.metric("requests_in_flight"), lambda n: n == 0, within_s=PROMISE_S)
        assert not r.worker.requests
        await assert_quiet(r)


async def test_gone_while_sending_the_body(rig: Any) -> None:
    async with rig() as r:
        _, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        )
        await writer.drain()
        await until(lambda: r.metric("requests_in_flight"), within_s=5)
        writer.close()
        await until(lambda: r.metric("requests_in_flight"), lambda n: n == 0, within_s=5)


async def test_two_hundred_cancelled(rig: Any) -> None:
    """Gauges are exactly zero afterwards, and the next request is served."""
    async with rig(workers=2, interval_s=None) as r:
        opened = [
            await send(r.port, chat_body("tiny", f"hi {i}", max_tokens=500, stream=i % 2 == 0))
            for i in range(200)
        ]
        await r.worker.until(lambda: len(r.worker.running) == 200)
        assert await r.metric("requests_in_flight") == 200.0
        r.worker.step()
        for _, writer in opened:
            writer.close()
        await r.worker.until(lambda: len(r.worker.aborted) == 200)
        await assert_quiet(r)
        good = asyncio.create_task(
            r.client.post("/v1/completions", json=completion_body("tiny", "x", max_tokens=1))
        )
        await r.worker.until(lambda: len(r.worker.running) == 1)
        r.worker.step()
        assert (await good).status_code == 200


async def test_deadline(rig: Any) -> None:
    """A request that takes too long is told so and aborted."""
    async with rig(interval_s=None, request_timeout_s=0.3) as r:
        answer = await r.client.post("/v1/chat/completions", json=chat_body("tiny", "hi"))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        await r.worker.until(lambda: len(r.worker.aborted) == 1)
        assert 0 < r.worker.requests[0].deadline_ms <= 300
        await assert_quiet(r)
        assert await r.metric("aborts_total", reason="timeout") == 1.0


async def test_gateway_gone(rig: Any) -> None:
    """Its sessions end with it, so that workers drop its orphans."""
    async with rig(interval_s=None, drain_timeout_s=0.2) as r:
        reader, writer = await send(r.port, chat_body("tiny", "hi", max_tokens=500, stream=True))
        await r.worker.until(lambda: len(r.worker.running) == 1)
        r.worker.step()
        await reader.readuntil(b"data: ")
        r.life.stop()
        rest = await reader.read()
        assert b'"code":"shutdown"' in rest and b"[DONE]" not in rest
        await r.task
        assert not r.worker.running
        writer.close()
