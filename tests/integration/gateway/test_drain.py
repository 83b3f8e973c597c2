"""SIGTERM under load: readiness first, service goes on, what runs is finished, no client sees an
error.
"""

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from tests.fakes.router import choose
from tests.support.client import chat_body, stream
from tests.support.polling import until


async def test_nobody_notices(rig: Any) -> None:
    async with rig(interval_s=0.01, drain_notice_s=1.0) as r:
        base = f"http://{r.address}"
        failures: list[object] = []
        served = 0
        ready = True

        async def caller(number: int) -> None:
            """Calls as a load balancer would: only while readiness says yes."""
            nonlocal served
            async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=20) as client:
                while ready:
                    body = chat_body("tiny", f"hi {number}", max_tokens=20)
                    try:
                        if number % 2:
                            result = await stream(client, "/v1/chat/completions", body)
                            good = result.status == 200 and result.done
                        else:
                            good = (await client.post("/v1/chat/completions", json=body)).is_success
                    except httpx.HTTPError as exc:
                        failures.append(exc)
                        continue
                    served += 1
                    if not good:
                        failures.append(number)

        async def enough() -> bool:
            return served >= 20

        async def poller() -> None:
            nonlocal ready
            async with httpx.AsyncClient(base_url=base, trust_env=False) as client:
                while ready:
                    ready = (await client.get("/ready")).status_code == 200
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(poller())
            for number in range(20):
                tasks.create_task(caller(number))
            await until(enough, within_s=30)
            r.life.stop()
            await asyncio.sleep(0.3)
            # Still serving, though not ready.
            late = await r.client.post(
                "/v1/chat/completions", json=chat_body("tiny", "late", max_tokens=1)
            )
            assert late.status_code == 200 and late.headers["connection"] == "close"
        await r.task
        assert not failures and served >= 40
        assert r.discovery.registered_instances[-1].draining


async def test_what_runs_is_finished(rig: Any) -> None:
    """Without notice: no new connections, and running streams come to their end."""
    async with rig(interval_s=None) as r:
        body = chat_body("tiny", "hi", max_tokens=5)
        task = asyncio.create_task(stream(r.client, "/v1/chat/completions", body))
        await r.worker.until(lambda: len(r.worker.running) == 1)
        r.life.stop()
        async with asyncio.timeout(5):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", r.port)
                except ConnectionError:  # refused, or reset while it waited to be accepted
                    break
                writer.close()
                await asyncio.sleep(0.01)
        r.worker.step(5)
        result = await task
        assert result.done and result.finish_reasons() == ["length"]
        await r.task


@pytest.mark.timeout(90)
async def test_two_thousand_streams(rig: Any) -> None:
    """None fails, none waits for another; the limit on open files is raised at start."""
    async with rig(workers=2, interval_s=None) as r:
        pair = [w.instance for w in r.workers]
        turn = itertools.count()
        r.router.decide = lambda q: choose(q, [pair[next(turn) % 2]])

        async def one(number: int) -> bool:
            # A bare connection: 2,000 clients of a library would cost more than what is tested.
            body = chat_body("tiny", f"{number}", max_tokens=3, stream=True)
            reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
            raw = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}"
            writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + raw)
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            return b"HTTP/1.1 200 " in answer and answer.count(b'"finish_reason":"length"') == 1

        async def all_there() -> int:
            return sum(len(w.running) for w in r.workers)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i)) for i in range(2000)]
            await until(all_there, lambda n: n == 2000, within_s=60, what="streams", every_s=0.1)
            assert await r.metric("requests_in_flight") == 2000.0
            for worker in r.workers:
                worker.step(3)
        assert all(task.result() for task in tasks)
        assert await r.metric("requests_in_flight") == 0.0
