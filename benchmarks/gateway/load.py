"""The two ways to the same tokens: HTTP through the gateway, or a session with the worker itself.

Both clients do as little as they can, since they share the machine with what is measured.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common.rpc.channel import open_channel

OUTPUT_TOKENS = 16
PROMPT_TOKENS = 80


@dataclass
class Timings:
    """Seconds of each request to its first token and to its end."""

    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0


One = Callable[[int], Awaitable[tuple[float, float]]]
"""Sends request number i; seconds to first token, seconds in all."""


async def closed_loop(one: One, concurrency: int, seconds: float) -> Timings:
    """`concurrency` clients, each with one request after the other, for `seconds`."""
    timings = Timings()
    started = time.perf_counter()
    counter = 0

    async def client() -> None:
        nonlocal counter
        while time.perf_counter() - started < seconds:
            counter += 1
            ttft, total = await one(counter)
            timings.ttft_s.append(ttft)
            timings.total_s.append(total)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    timings.elapsed_s = time.perf_counter() - started
    return timings


class Gateway:
    """Streams chat completions over kept-alive raw HTTP/1.1 connections."""

    def __init__(self, address: str, model: str, words: int) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._model = model
        self._words = words
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def request(self, i: int) -> tuple[float, float]:
        """One streamed answer, to its [DONE]."""
        started = time.perf_counter()
        connection = self._idle.pop() if self._idle else await self._open()
        reader, writer = connection
        writer.write(self._message(i))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode() + (await reader.read(2000)).decode())
        seen, first = b"", 0.0
        # The end of the chunked body; what comes before it is looked at only for the first text.
        while not seen.endswith(b"\r\n0\r\n\r\n"):
            seen += await reader.read(65536)
            if not first and b'"content":"' in seen.replace(b'"content":""', b""):
                first = time.perf_counter()
        if b"data: [DONE]" not in seen:
            raise RuntimeError("the stream broke off")
        self._idle.append(connection)
        ended = time.perf_counter()
        return first - started, ended - started

    async def close(self) -> None:
        """Closes the connections."""
        for _, writer in self._idle:
            writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    def _message(self, i: int) -> bytes:
        text = f"{i} " + "word " * self._words
        body = (
            f'{{"model":"{self._model}","stream":true,"max_tokens":{OUTPUT_TOKENS},"temperature":0,'
            f'"messages":[{{"role":"user","content":"{text}"}}]}}'
        ).encode()
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        ) + body


class Direct:
    """Sends token ids over one session with the worker, as a gateway does."""

    def __init__(self, address: str, model: str) -> None:
        self._channel = open_channel(address)
        self._model = model
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._writes: asyncio.Queue[pb.SessionRequest] = asyncio.Queue(4096)
        self._writer: asyncio.Task[None] | None = None
        self._waiting: dict[str, tuple[asyncio.Future[float], asyncio.Future[float]]] = {}
        self._random = random.Random(1)

    async def open(self) -> None:
        """Opens the session."""
        self._call = worker_pb2_grpc.WorkerServiceStub(self._channel).Session()
        await self._call.write(pb.SessionRequest(open=pb.SessionOpen(gateway_id="bench")))
        self._reader = asyncio.create_task(self._read())
        self._writer = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Ends the session."""
        for task in (self._reader, self._writer):
            if task:
                task.cancel()
        self._call.cancel()
        await self._channel.close()

    async def request(self, i: int) -> tuple[float, float]:
        """One request, to its last token."""
        started = time.perf_counter()
        loop = asyncio.get_running_loop()
        name = f"direct-{i}"
        first, last = loop.create_future(), loop.create_future()
        self._waiting[name] = (first, last)
        prompt = [self._random.randrange(300, 2000) for _ in range(PROMPT_TOKENS)]
        generate = pb.GenerateRequest(
            request_id=name,
            attempt_id=name,
            model=self._model,
            prompt_token_ids=prompt,
            sampling=pb.SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0),
        )
        await self._writes.put(pb.SessionRequest(generate=generate))
        return await first - started, await last - started

    async def _write(self) -> None:
        while True:
            await self._call.write(await self._writes.get())

    async def _read(self) -> None:
        async for frame in self._call:
            now = time.perf_counter()
            for delta in frame.deltas:
                first, last = self._waiting[delta.request_id]
                if not first.done():
                    first.set_result(now)
                if delta.finish_reason:
                    del self._waiting[delta.request_id]
                    last.set_result(now)
