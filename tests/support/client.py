"""How tests speak to a running cluster: OpenAI REST with SSE, metrics, and the gRPC services."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from forebay.router.v1 import router_pb2, router_pb2_grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from services.common.rpc.channel import open_channel

Json = dict[str, Any]
PROMISE_S = 0.3
"""So long after a client has left, workers hear of it at the latest."""


@dataclass
class StreamResult:
    """A finished stream: its chunks, when each came, and what they add up to."""

    status: int
    headers: httpx.Headers
    chunks: list[Json] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    done: bool = False
    body: str = ""

    @property
    def error(self) -> Json | None:
        """The error that ended it, as an event or as a body."""
        if self.status != 200:
            return dict(json.loads(self.body)["error"])
        return next((c["error"] for c in self.chunks if "error" in c), None)

    def text(self, index: int = 0) -> str:
        """All text of one choice."""
        parts = []
        for chunk in self.chunks:
            for choice in chunk.get("choices", []):
                if choice["index"] == index:
                    piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
                    parts.append(piece or "")
        return "".join(parts)

    def finish_reasons(self, index: int = 0) -> list[str]:
        """All finish reasons that are not null; there should be one."""
        return [
            choice["finish_reason"]
            for chunk in self.chunks
            for choice in chunk.get("choices", [])
            if choice["index"] == index and choice["finish_reason"] is not None
        ]

    @property
    def usage(self) -> Json | None:
        return next((c["usage"] for c in reversed(self.chunks) if c.get("usage")), None)

    @property
    def worker(self) -> str:
        """The worker that was chosen first."""
        return self.headers["x-forebay-worker"]


@asynccontextmanager
async def http_client(base_url: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client without proxies and connection limits."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, limits=limits, timeout=60, trust_env=False, **options
    ) as client:
        yield client


async def stream(
    client: httpx.AsyncClient,
    path: str,
    body: Json,
    *,
    on_chunk: Any = None,
    **options: Any,
) -> StreamResult:
    """Posts with stream true and reads the SSE to its end."""
    async with client.stream("POST", path, json={**body, "stream": True}, **options) as response:
        result = StreamResult(response.status_code, response.headers)
        if response.status_code != 200:
            result.body = (await response.aread()).decode()
            return result
        async for line in response.aiter_lines():
            if line.startswith(":"):
                result.comments.append(line)
            elif line == "data: [DONE]":
                result.done = True
            elif line.startswith("data: "):
                result.times.append(time.monotonic())
                result.chunks.append(json.loads(line.removeprefix("data: ")))
                if on_chunk is not None:
                    on_chunk(result)
    return result


async def send(port: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """A request over a bare connection, whose client may leave; returns (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    await writer.drain()
    return reader, writer


async def raw_stream(address: str, path: str, body: Json) -> tuple[bytes, bytes]:
    """Head and body of a streamed answer, over a bare connection: for very many at once."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        content = json.dumps({**body, "stream": True}).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        return head, rest
    finally:
        writer.close()


def chat_body(model: str, *contents: str, **extra: Any) -> Json:
    """A chat body; contents alternate between user and assistant. Greedy unless told otherwise."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return {"model": model, "messages": messages, "temperature": 0, **extra}


def completion_body(model: str, prompt: Any, **extra: Any) -> Json:
    """A completion body, greedy unless told otherwise."""
    return {"model": model, "prompt": prompt, "temperature": 0, **extra}


def cached_tokens(usage: Json) -> int:
    """usage.prompt_tokens_details.cached_tokens."""
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def metrics(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples of a /metrics port by (name, labels)."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        text = (await client.get(f"http://{address}/metrics")).raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def metric(address: str, name: str, **labels: str) -> float:
    """Sum of the samples called `name` that carry `labels`; 0 when there are none."""
    wanted = set(labels.items())
    return sum(
        value for (n, has), value in (await metrics(address)).items() if n == name and wanted <= has
    )


class RouterClient:
    """The router's gRPC service."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self.stub = router_pb2_grpc.RouterServiceStub(self._channel)

    async def __aenter__(self) -> "RouterClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def workers(self) -> dict[str, router_pb2.WorkerView]:
        answer = await self.stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)
        return {w.worker.id: w for w in answer.workers}

    async def index(self) -> router_pb2.GetIndexStatsResponse:
        return await self.stub.GetIndexStats(router_pb2.GetIndexStatsRequest(), timeout=5)

    async def digests(self) -> dict[str, tuple[int, int]]:
        """Per worker (number of G1 blocks, XOR of their keys) as the index has it."""
        return {d.holder.id: (d.blocks, d.xor) for d in (await self.index()).digests}


class WorkerClient:
    """A worker's gRPC service."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    async def __aenter__(self) -> "WorkerClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def snapshot(self) -> worker_pb2.SnapshotResponse:
        return await self.stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=5)

    async def requests(self) -> int:
        """Requests that the worker has, waiting or running, by every count that it keeps."""
        snap = await self.snapshot()
        engine = snap.load.running_requests + snap.load.waiting_requests
        return max(len(snap.requests), engine)

    async def digest(self) -> tuple[int, int]:
        """(number of G1 blocks, XOR of their keys): the truth."""
        keys = [k for tier in (await self.snapshot()).blocks for k in tier.block_hashes]
        xor = 0
        for key in keys:
            xor ^= key
        return len(keys), xor

    async def reset_cache(self) -> int:
        answer = await self.stub.ResetCache(worker_pb2.ResetCacheRequest(), timeout=10)
        return int(answer.blocks)


async def reset_all(addresses: list[str]) -> None:
    """Empties the caches of all workers."""

    async def one(address: str) -> None:
        async with WorkerClient(address) as worker:
            await worker.reset_cache()

    await asyncio.gather(*(one(a) for a in addresses))
