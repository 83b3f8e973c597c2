"""Clients and neighbours that do what nobody should."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.router.v1 import router_pb2
from forebay.worker.v1 import worker_pb2 as pb
from grpc.aio import _call

from services.gateway.adapters.tokenizer import Tokenizer
from tests.fakes.router import FakeRouter
from tests.fakes.token_worker import TokenWorker
from tests.support.client import chat_body
from tests.support.polling import until

CHAT = "/v1/chat/completions"


def post(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def test_router_whose_decision_fails(rig: Any) -> None:
    code = grpc.StatusCode.INTERNAL.value[0]
    failure = router_pb2.RouteFailure(code=code, reason="INTERNAL", message="a bug")
    async with rig(router=FakeRouter("r0", lambda request: failure)) as r:
        answer = await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=2))
        assert answer.status_code == 200
        assert await r.metric("router_fallback_total", reason="INTERNAL") == 1


@pytest.mark.parametrize("error", [asyncio.InvalidStateError("RPC finished"), RuntimeError("odd")])
async def test_writing_to_a_router_that_has_just_ended(
    rig: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with rig() as r:
        real = _call.StreamStreamCall.write
        failures = [error]

        async def write(self: Any, message: Any) -> None:
            if failures and isinstance(message, router_pb2.RouteStreamRequest):
                raise failures.pop()
            await real(self, message)

        monkeypatch.setattr(_call.StreamStreamCall, "write", write)
        answer = await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=2))
        assert answer.status_code == 200 and not failures
        assert not r.task.done(), "one broken stream ended the gateway"


@pytest.mark.parametrize("begun", [b"", b"\r\n"])
async def test_connection_without_a_request_is_closed(rig: Any, begun: bytes) -> None:
    async with rig(http_keep_alive_s=1.0) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(begun)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_head_that_never_ends_is_refused(rig: Any) -> None:
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: ")
        answer = asyncio.create_task(reader.readuntil(b"\r\n"))
        sent = 0
        while not answer.done() and sent < 20 << 20:
            writer.write(b"a" * 16384)
            sent += 16384
            await asyncio.wait({answer}, timeout=0.01)
        assert await answer == b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
        assert sent < 2 << 20
        writer.close()


async def test_gone_with_another_request_behind(rig: Any) -> None:
    async with rig(interval_s=None) as r:
        _, writer = await asyncio.open_connection("127.0.0.1", r.port)
        writer.write(2 * post({**chat_body("tiny", "hi", max_tokens=400), "stream": True}))
        await r.worker.until(lambda: len(r.worker.requests) == 1)
        writer.transport.abort()
        await r.worker.until(lambda: len(r.worker.aborted) == 1, 3)


async def test_client_that_never_reads_is_let_go(rig: Any) -> None:
    loop = asyncio.get_running_loop()
    async with rig(request_timeout_s=5.0) as r:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", r.port))
        body = chat_body("tiny", "hi", max_tokens=3900, n=8, logprobs=True, top_logprobs=20)
        await loop.sock_sendall(sock, post({**body, "stream": True}))

        async def let_go() -> bool:
            return (await r.metric("client_connections")) == 1

        await r.worker.until(lambda: len(r.worker.requests) == 8)
        await until(let_go, within_s=15, what="end of a connection that nobody reads")
        assert await r.metric("requests_in_flight") == 0
        sock.close()


async def test_time_between_tokens(rig: Any) -> None:
    async with rig(interval_s=0.02) as r:
        body = chat_body("tiny", "hi", max_tokens=10)
        await r.client.post(CHAT, json=body)
        # A whole answer shows its first and its last token; what lies between is no gap.
        assert await r.metric("inter_token_seconds_count", model="tiny") == 0
        await r.client.post(CHAT, json={**body, "stream": True, "n": 2})
        assert await r.metric("inter_token_seconds_count", model="tiny") == 18
        assert await r.metric("inter_token_seconds_sum", model="tiny") >= 18 * 0.015


async def test_line_separators_end_no_line(rig: Any, tiny_model_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d"
    ids = Tokenizer.load(tiny_model_path).encode(text, add_special_tokens=False)
    async with rig(interval_s=None) as r:
        lines: list[str] = []

        async def read() -> None:
            body = {**chat_body("tiny", "hi", max_tokens=50), "stream": True}
            async with r.client.stream("POST", CHAT, json=body) as response:
                # httpx splits as str.splitlines does.
                lines.extend([line async for line in response.aiter_lines()])

        task = asyncio.create_task(read())
        await r.worker.until(lambda: len(r.worker.requests) == 1)
        end = pb.RequestDelta(token_ids=ids, finish_reason=pb.FINISH_REASON_LENGTH)
        r.worker.say(r.worker.requests[0].request_id, end)
        await task
        assert all(not line or line.startswith("data: ") for line in lines)
        chunks = [json.loads(line[6:]) for line in lines if line and line != "data: [DONE]"]
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text


async def test_record_that_comes_back_at_once(rig: Any, tiny_model_path: Path) -> None:
    """etcd lost a worker's lease while we, too, could not reach it; then both are back."""
    async with rig(workers=2) as r:
        lost = r.worker
        await lost.kill()

        async def noticed() -> bool:
            rows = (await r.client.get("/health")).json()["instances"]
            return not next(row for row in rows if row["id"] == "w0")["connected"]

        await until(noticed, within_s=5, what="loss of the worker")
        r.discovery.drop(lost.instance)
        r.discovery.put(lost.instance)
        again = TokenWorker("w0", tiny_model_path, port=lost.port)
        again.incarnation = lost.incarnation
        async with again:

            async def back() -> bool:
                rows = (await r.client.get("/health")).json()["instances"]
                return any(row["id"] == "w0" and row["connected"] for row in rows)

            await until(back, within_s=8, what="the worker's return")


async def test_aborted_before_it_was_sent(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as r:
        real, gate = _call.StreamStreamCall.write, asyncio.Event()

        async def write(self: Any, message: Any) -> None:
            if isinstance(message, pb.SessionRequest):
                await gate.wait()
            await real(self, message)

        monkeypatch.setattr(_call.StreamStreamCall, "write", write)
        body = chat_body("tiny", "hi", max_tokens=2, n=3)
        task = asyncio.create_task(r.client.post(CHAT, json=body))

        async def queued() -> bool:
            return await r.metric("sequences_in_flight") == 3

        await until(queued, within_s=5, what="queued sequences")
        task.cancel()
        await asyncio.wait({task})

        async def forgotten() -> bool:
            return await r.metric("sequences_in_flight") == 0

        await until(forgotten, within_s=5, what="end of the sequences")
        gate.set()
        answer = await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=2))
        assert answer.status_code == 200
        # The first was being written already.
        assert len(r.worker.requests) == 2
