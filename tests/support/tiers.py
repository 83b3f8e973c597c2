"""Real workers on one real kvbm: processes, prompts, and what their answers tell."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from forebay.kvbm.v1 import kvbm_pb2 as kpb
from forebay.kvbm.v1 import kvbm_pb2_grpc
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common.arena import Arena, SlotHeader, SlotState
from services.common.blocks import block_hashes
from services.common.rpc.channel import open_channel
from tests.models import VOCAB_SIZE
from tests.support.etcd import free_port
from tests.support.forks import fork
from tests.support.kvbm import daemon_process
from tests.support.polling import until
from tests.support.processes import Process

BLOCK = 32
BLOCK_BYTES = 131_072
"""Of the tiny model in float32."""
START_S = 240


def prompt(tokens: int, seed: object = 0) -> list[int]:
    """Random token ids: equal seeds give equal beginnings."""
    rng = random.Random(repr(seed))
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(tokens)]


@dataclass
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    finish: int = 0


class Worker:
    """A worker process, and calls to it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.stub: Any = None
        self.metrics_address = ""
        self._names = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Worker]:
        """Started and ready; killed at the end."""
        self.process.start()
        try:
            ready = await self.process.until_ready(START_S)
            self.metrics_address = ready.metrics_address
            async with open_channel(ready.address) as channel:
                self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
                yield self
        finally:
            self.process.close()

    def call(self, tokens: Sequence[int], max_tokens: int = 8, **more: Any) -> Any:
        self._names += 1
        name = f"r{self._names}"
        return self.stub.Generate(
            pb.GenerateRequest(
                request_id=name,
                attempt_id=f"{self.process.name}-{name}",
                model="tiny",
                prompt_token_ids=tokens,
                sampling=pb.SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
                **more,
            ),
            timeout=120,
        )

    async def ask(self, tokens: Sequence[int], max_tokens: int = 8, **more: Any) -> Answer:
        """A whole answer; fails on anything but a full one."""
        answer = Answer()
        async for message in self.call(tokens, max_tokens, **more):
            delta = message.delta
            answer.tokens += delta.token_ids
            if delta.HasField("cached_tokens"):
                answer.cached = delta.cached_tokens
            answer.finish = delta.finish_reason or answer.finish
        assert answer.finish == pb.FINISH_REASON_LENGTH, answer
        return answer

    async def abort(self, tokens: Sequence[int], after_s: float, **more: Any) -> None:
        """Asks, and hangs up soon."""
        call = self.call(tokens, 200, **more)
        with contextlib.suppress(TimeoutError, asyncio.CancelledError, grpc.aio.AioRpcError):
            async with asyncio.timeout(after_s):
                async for _ in call:
                    after_s = after_s
        call.cancel()

    async def reset(self) -> None:
        """Empties G1; the tiers stay."""

        async def done() -> str:
            try:
                await self.stub.ResetCache(pb.ResetCacheRequest(), timeout=30)
            except grpc.aio.AioRpcError as exc:
                return exc.details() or "refused"
            return ""

        await until(done, lambda why: not why, within_s=20, what="reset")

    async def card(self) -> Any:
        """Its model card."""
        answer = await self.stub.GetModelCard(pb.GetModelCardRequest(), timeout=5)
        return answer.card

    async def metrics(self) -> dict[str, float]:
        def read() -> str:
            with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=5) as a:
                return str(a.read().decode())

        rows = (line.rsplit(" ", 1) for line in (await asyncio.to_thread(read)).splitlines())
        return {row[0]: float(row[1]) for row in rows if row[0].startswith("forebay")}

    async def blocks(self, event: str) -> float:
        """The connector's count of an event."""
        return (await self.metrics())[f'forebay_worker_kvbm_blocks_total{{event="{event}"}}']


class Node:
    """One daemon and its workers, in a folder."""

    def __init__(self, folder: Path, model: Path, *daemon_flags: str) -> None:
        self.folder = folder
        self.model = model
        self.port = free_port()
        flags = ("--port", str(self.port), "--gate", "always", "--scrub-mb-s", "0")
        self.daemon = daemon_process(folder, *flags, "--cpu-cache-gb", "0.06", *daemon_flags)
        self.stub: Any = None
        self._arenas: dict[int, Arena] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        self.daemon.start()
        try:
            await self.daemon.until_ready(60)
            async with open_channel(f"127.0.0.1:{self.port}") as channel:
                self.stub = kvbm_pb2_grpc.KvbmServiceStub(channel)  # type: ignore[no-untyped-call]
                yield self
        finally:
            self.daemon.close()

    def worker(self, name: str, *flags: str, blocks: int = 96, model: Path | None = None) -> Worker:
        argv = [sys.executable, "-m", "services.worker", "--model", str(model or self.model)]
        argv += ["--served-model-name", "tiny", "--dtype", "float32", "--id", name]
        argv += ["--port", "0", "--events-port", "0", "--metrics-port", "0"]
        argv += ["--etcd-endpoints", "127.0.0.1:1", "--max-model-len", "1024"]
        argv += ["--kv-cache-gb", str(BLOCK_BYTES * blocks / 2**30)]
        # On a busy machine an answer may take a while; what that costs is tested elsewhere.
        argv += ["--kvbm", f"127.0.0.1:{self.port}", "--kvbm-timeout-s", "3", *flags]
        process = Process(name, argv, self.folder, starter=fork)
        process.argv += ["--ready-file", str(process.ready_file)]
        return Worker(process)

    async def stats(self) -> kpb.StatsResponse:
        answer: kpb.StatsResponse = await self.stub.Stats(
            kpb.StatsRequest(), timeout=5, wait_for_ready=True
        )
        return answer

    async def at_rest(self) -> None:
        """Waits until nobody holds a lease, and what was saved is stored."""

        async def leases() -> int:
            return sum(n.leases for n in (await self.stats()).namespaces)

        await until(leases, lambda n: n == 0, within_s=15, what="rest")

    async def stored(self, keys: Sequence[bytes], within_s: float = 15) -> None:
        """Waits until G2 has all of these."""

        async def missing() -> int:
            return len(set(keys) - set(self.slots()))

        await until(missing, lambda n: n == 0, within_s=within_s, what="blocks in G2")

    def arenas(self) -> list[Arena]:
        """All arenas, as another process maps them."""
        paths = [p for p in (self.folder / "arenas").rglob("*") if p.is_file()]
        for path in paths:
            state = path.stat()
            if state.st_size > BLOCK_BYTES and state.st_ino not in self._arenas:
                self._arenas[state.st_ino] = Arena.open(path)
        there = {p.stat().st_ino for p in paths}
        return [arena for inode, arena in self._arenas.items() if inode in there]

    def slots(self) -> dict[bytes, tuple[Arena, int]]:
        """Where the sealed blocks of all arenas are, by key."""
        return {
            header.key: (arena, slot)
            for arena in self.arenas()
            for slot, header in enumerate(arena.headers())
            if isinstance(header, SlotHeader)
            and header.state is SlotState.SEALED
            and not header.expires_ms
        }

    def damage(self, key: bytes, rng: random.Random) -> None:
        """Flips a bit of a block's bytes in G2."""
        arena, slot = self.slots()[key]
        payload = arena.payload(slot)
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)


def keys(tokens: Sequence[int], **more: Any) -> list[bytes]:
    """Hashes of a prompt's full blocks."""
    return block_hashes(tokens, BLOCK, **more)
