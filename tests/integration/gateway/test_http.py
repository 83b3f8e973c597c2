"""HTTP itself: methods, bodies of all sizes and framings, old clients, small writes at once."""

import asyncio
import gzip
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from forebay.worker.v1 import worker_pb2 as pb

from tests.support.client import chat_body, completion_body

CHAT = "/v1/chat/completions"
LETTER = 70
"""A token of one letter, so that each one is a chunk."""


def assert_shape(answer: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object, whole."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


async def raw(port: int, *pieces: bytes, until: bytes = b"") -> bytes:
    """Sends the pieces one by one; everything that comes back until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(10):
            return await (reader.readuntil(until) if until else reader.read())
    finally:
        writer.close()


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    head = [f"POST {CHAT} HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"hi"',
        b"1",
        b'{"model": "x", "messages": [',
        b'{"content":"\xff\xfe"}',
    ],
)
async def test_bodies_that_are_no_request(rig: Any, body: bytes) -> None:
    async with rig() as r:
        answer = await r.client.post(CHAT, content=body)
        assert answer.status_code == 400
        assert assert_shape(answer)["type"] == "invalid_request_error"
        assert (await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=1))).is_success


async def test_paths_and_methods(rig: Any) -> None:
    async with rig() as r:
        for method, path, status, allow in [
            ("GET", "/v1/nope", 404, None),
            ("POST", "/nope", 404, None),
            ("GET", CHAT, 405, "OPTIONS, POST"),
            ("PUT", CHAT, 405, "OPTIONS, POST"),
            ("DELETE", "/v1/models", 405, "GET, HEAD, OPTIONS"),
            ("POST", "/v1/models/tiny", 405, "GET, HEAD, OPTIONS"),
        ]:
            answer = await r.client.request(method, path)
            assert answer.status_code == status, path
            assert assert_shape(answer)["type"] == "invalid_request_error"
            if allow:
                assert answer.headers["allow"].replace("HEAD, GET", "GET, HEAD") == allow


async def test_head_and_options(rig: Any) -> None:
    async with rig() as r:
        for path in ("/health", "/v1/models", "/live", "/ready"):
            answer = await r.client.head(path)
            assert answer.status_code == 200 and answer.content == b""
            assert int(answer.headers["content-length"]) > 0
        answer = await r.client.options(CHAT)
        assert answer.status_code == 204 and answer.headers["allow"] == "OPTIONS, POST"
        assert "access-control-allow-origin" not in answer.headers


async def test_cors(rig: Any) -> None:
    async with rig(cors_origins="https://a.example,https://b.example") as r:
        preflight = {
            "origin": "https://b.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, x-mine",
        }
        answer = await r.client.options(CHAT, headers=preflight)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://b.example"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization, x-mine"
        plain = await r.client.get("/v1/models", headers={"origin": "https://b.example"})
        assert plain.headers["access-control-allow-origin"] == "https://b.example"
        assert plain.headers["vary"] == "Origin"
        other = await r.client.options(CHAT, headers={**preflight, "origin": "https://c.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_unknown_model(rig: Any) -> None:
    async with rig() as r:
        for streaming in (False, True):
            answer = await r.client.post(CHAT, json=chat_body("no/such", "hi", stream=streaming))
            assert answer.status_code == 404
            error = assert_shape(answer)
            assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_request_ids(rig: Any) -> None:
    async with rig() as r:
        answer = await r.client.get("/v1/models", headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        for bad in ("x" * 129, "a b", "a\u00e9"):
            raw_header = [(b"x-request-id", bad.encode("latin-1"))]
            answer = await r.client.get("/v1/models", headers=raw_header)
            assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize("size", [1 << 10, 6 << 10, 32 << 10, 128 << 10, 1 << 20, 31 << 20])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_bodies_up_to_the_cap(rig: Any, size: int, chunked: bool) -> None:
    """Bodies of any size are read; these end as a 400 for their unknown content, or are served."""
    async with rig() as r:
        body = json.dumps({**chat_body("tiny", "hi", max_tokens=1), "pad": "x" * size}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 50_000):
                yield body[start : start + 50_000]

        content = pieces() if chunked else body
        answer = await r.client.post(CHAT, content=content)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_bodies_over_the_cap(rig: Any, chunked: bool) -> None:
    async with rig(max_body_bytes=100_000) as r:
        body = b" " * 5_000_000

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 50_000):
                yield body[start : start + 50_000]

        answer = await r.client.post(CHAT, content=pieces() if chunked else body)
        assert answer.status_code == 413
        assert_shape(answer)
        assert (await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=1))).is_success
        assert await r.metric("requests_in_flight") == 0.0


async def test_too_long_is_said_before_it_is_sent(rig: Any) -> None:
    async with rig() as r:
        answer = await raw(r.port, post(b"", "Content-Length: 99999999999"), until=b"}}")
        assert b" 413 " in answer and b"connection: close" in answer
        expecting = post(b"", "Content-Length: 99999999999", "Expect: 100-continue")
        answer = await raw(r.port, expecting, until=b"}}")
        assert answer.startswith(b"HTTP/1.1 413 ")


async def test_slow_body(rig: Any) -> None:
    async with rig(body_timeout_s=0.2) as r:
        answer = await raw(r.port, post(b"{", "Content-Length: 10"), until=b"}}")
        assert b" 408 " in answer


async def test_seven_byte_pieces(rig: Any) -> None:
    async with rig() as r:
        body = json.dumps(chat_body("tiny", "hi", max_tokens=2)).encode()
        parts = [body[i : i + 7] for i in range(0, len(body), 7)]
        chunks = [f"{len(p):x}\r\n".encode() + p + b"\r\n" for p in parts]
        answer = await raw(
            r.port,
            post(b"", "Transfer-Encoding: chunked", "Connection: close"),
            *chunks,
            b"0\r\n\r\n",
        )
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_old_client(rig: Any) -> None:
    """HTTP/1.0 knows no chunks: the stream ends with the connection."""
    async with rig() as r:
        body = json.dumps(chat_body("tiny", "hi", max_tokens=3, stream=True)).encode()
        length = f"Content-Length: {len(body)}"
        answer = await raw(r.port, post(body, length, version="1.0"))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert rest.startswith(b"data: {") and rest.endswith(b"data: [DONE]\n\n")
        body = json.dumps(chat_body("tiny", "hi", max_tokens=3)).encode()
        answer = await raw(r.port, post(body, f"Content-Length: {len(body)}", version="1.0"))
        json.loads(answer.partition(b"\r\n\r\n")[2])


async def test_expect_continue(rig: Any) -> None:
    async with rig() as r:
        body = json.dumps(chat_body("tiny", "hi", max_tokens=1)).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        headers = [f"Content-Length: {len(body)}", "Expect: 100-continue", "Connection: close"]
        writer.write(post(b"", *headers))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_two_requests_at_once_on_a_connection(rig: Any) -> None:
    async with rig() as r:
        body = json.dumps(chat_body("tiny", "hi", max_tokens=1)).encode()
        length = f"Content-Length: {len(body)}"
        both = post(body, length) + post(body, length, "Connection: close")
        assert (await raw(r.port, both)).count(b"HTTP/1.1 200 ") == 2


async def test_unreadable_http(rig: Any) -> None:
    async with rig() as r:
        for bad in (b"NONSENSE\r\n\r\n", post(b"{}", "Content-Length: -5")):
            answer = await raw(r.port, bad)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) >= {"message", "type"}


async def test_media(rig: Any) -> None:
    async with rig() as r:
        body = json.dumps(chat_body("tiny", "hi", max_tokens=1)).encode()
        for headers, content in (
            ({"content-type": "text/plain"}, body),
            ({"content-type": "application/x-www-form-urlencoded"}, body),
            ({"content-type": "application/json", "content-encoding": "gzip"}, gzip.compress(body)),
        ):
            answer = await r.client.post(CHAT, content=content, headers=headers)
            assert answer.status_code == 415
            assert_shape(answer)
        for kind in ("application/json; charset=utf-8", "application/json", None):
            headers = {"content-type": kind} if kind else {}
            assert (await r.client.post(CHAT, content=body, headers=headers)).is_success


async def test_small_writes_leave_at_once(rig: Any) -> None:
    """Without TCP_NODELAY a chunk may wait some 40 ms for the ACK of the one before."""
    async with rig(interval_s=None) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        body = json.dumps(chat_body("tiny", "hi", max_tokens=100, stream=True)).encode()
        writer.write(post(body, f"Content-Length: {len(body)}"))
        await r.worker.until(lambda: len(r.worker.running) == 1)
        request_id = r.worker.requests[0].request_id
        times = []
        for _ in range(30):
            start = time.perf_counter()
            r.worker.say(request_id, pb.RequestDelta(token_ids=[LETTER]))
            await reader.readuntil(b"}\n\n")
            times.append(time.perf_counter() - start)
        writer.close()
        assert statistics.median(times) < 0.02, times


async def test_nodelay_is_set(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from services.gateway.http.server import Protocol

    seen: list[int] = []
    original = Protocol.connection_made

    def spy(self: Protocol, transport: Any) -> None:
        original(self, transport)
        sock = transport.get_extra_info("socket")
        seen.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Protocol, "connection_made", spy)
    async with rig():
        pass
    assert seen and all(seen)


async def test_keep_alive_comments(rig: Any) -> None:
    """Comments come only when silent and only when configured."""
    async with (
        rig(interval_s=None, sse_keep_alive_s=0.1) as r,
        r.client.stream(
            "POST", CHAT, json=chat_body("tiny", "hi", max_tokens=2, stream=True)
        ) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        comments = [await anext(lines) for _ in range(4)]
        assert comments == [": keep-alive", ""] * 2
        r.worker.step(2)
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]" and not [x for x in rest if x.startswith(":")]
    async with rig() as r:
        answer = await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=2, stream=True))
        assert not [line for line in answer.text.splitlines() if line.startswith(":")]


async def test_chunk_shapes(rig: Any) -> None:
    """Every chunk has finish_reason, each choice ends once; usage only when asked for."""
    async with rig() as r:
        for options, wants in (
            ({"include_usage": True}, True),
            ({"include_usage": False}, False),
            ({}, False),
            (None, False),
        ):
            body = chat_body("tiny", "hi", max_tokens=5, n=2, stream=True, stream_options=options)
            answer = await r.client.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            events = [x[6:] for x in answer.text.split("\n\n") if x.startswith("data: ")]
            assert events.pop() == "[DONE]"
            chunks = [json.loads(e) for e in events]
            assert len({(c["id"], c["model"], c["created"], c["object"]) for c in chunks}) == 1
            if wants:
                last = chunks.pop()
                assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
                assert all(c["usage"] is None for c in chunks)
            else:
                assert all(c.get("usage") is None for c in chunks)
            for index in (0, 1):
                choices = [x for c in chunks for x in c["choices"] if x["index"] == index]
                assert choices[0]["delta"] == {"role": "assistant", "content": ""}
                assert [x["finish_reason"] for x in choices if x["finish_reason"]] == ["length"]
                assert choices[-1]["finish_reason"] == "length"


async def test_slow_reader_stops_nobody(rig: Any) -> None:
    """A client that does not read its stream holds up no other one."""
    async with rig() as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        body = json.dumps(
            completion_body("tiny", [5, 6], max_tokens=4000, n=8, stream=True, logprobs=5)
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await r.worker.until(lambda: len(r.worker.running) == 8)
        answer = await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=20))
        assert answer.status_code == 200
        writer.close()
        del reader


async def test_trace_context_travels(rig: Any) -> None:
    async with rig() as r:
        trace = "4bf92f3577b34da6a3ce929d0e0e4736"
        headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "tracestate": "a=b"}
        await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=1), headers=headers)
        assert r.worker.requests[0].traceparent.split("-")[1] == trace
        assert r.worker.requests[0].tracestate == "a=b"
        await r.client.post(CHAT, json=chat_body("tiny", "hi", max_tokens=1))
        assert r.worker.requests[1].traceparent == ""
