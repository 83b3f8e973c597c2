"""Real processes for a benchmark: a kvbm daemon and workers on it, and calls to them.

No etcd (unless flags name one), router or gateway: they would only add to what is measured. Caches
lie in a folder on tmpfs and one on disk, and go with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from forebay.common.v1 import common_pb2
from forebay.kvbm.v1 import kvbm_pb2 as kpb
from forebay.kvbm.v1 import kvbm_pb2_grpc
from forebay.worker.v1 import worker_pb2 as wpb
from forebay.worker.v1 import worker_pb2_grpc

import services.cli.up.launch
from services.cli.model import SMALL_MODEL, resolve
from services.common.blocks import block_hashes
from services.common.rpc.channel import open_channel
from tests.support.netns import Host

BLOCK = 32
MODEL = "bench"
TierNumber: TypeAlias = common_pb2.Tier.ValueType
G2, G3, G4 = common_pb2.TIER_G2, common_pb2.TIER_G3, common_pb2.TIER_G4
START_S = 240.0
_numbers = itertools.count(1)


def small_model() -> str:
    """Folder of the real small model, prepared if need be."""
    return resolve(SMALL_MODEL).location


def prompt(tokens: int, vocabulary: int = 49_000) -> list[int]:
    """Random token ids that no other prompt begins with."""
    return [random.randrange(100, vocabulary) for _ in range(tokens)]


async def until(
    condition: Callable[[], Awaitable[bool]], within_s: float, every_s: float = 0.05
) -> bool:
    """Waits for a condition; whether it came in time."""
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(every_s)
    return True


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a benchmark's processes keep things."""

    disk: Path
    memory: Path


@contextlib.contextmanager
def folders() -> Iterator[Folders]:
    """Temporary ones, on disk and on tmpfs."""
    shm = Path("/dev/shm")
    root = shm if os.access(shm, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="forebay-bench-", ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(
            prefix="forebay-bench-", dir=root, ignore_cleanup_errors=True
        ) as memory,
    ):
        yield Folders(Path(disk), Path(memory))


class Process:
    """A child that says where it listens, and ends with us."""

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, at: Host | None = None
    ) -> None:
        self.name = name
        self.ready_file = folder / f"{name}.ready.json"
        self.log_file = folder / f"{name}.log"
        self._command = at.argv(command) if at else list(command)
        self._env = at.env if at else {}
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._popen is not None, f"{self.name} was not started"
        return self._popen.pid

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def threads(self) -> dict[str, tuple[float, float]]:
        """Seconds that each thread of it has run, and has waited for a CPU, by thread id."""
        found = {}
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                ran, waited, _ = (task / "schedstat").read_text().split()
                found[task.name] = int(ran) / 1e9, int(waited) / 1e9
        return found

    def start(self) -> None:
        """Starts it. From the main thread: it dies with the thread that starts it."""
        self.ready_file.unlink(missing_ok=True)
        with self.log_file.open("ab") as log:
            launcher = services.cli.up.launch.__file__
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", launcher, str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._env,
                start_new_session=True,
            )

    async def ready(self, timeout_s: float = START_S) -> dict[str, Any]:
        """What it wrote into its ready file. Raises RuntimeError with its last words."""

        async def there() -> bool:
            self.check()
            return self.ready_file.exists()

        if not await until(there, timeout_s):
            raise RuntimeError(f"{self.name} is not ready:\n{self.last_words()}")
        said: dict[str, Any] = json.loads(self.ready_file.read_text())
        return said

    def check(self) -> None:
        """Raises RuntimeError when it has ended."""
        if self._popen is None or self._popen.poll() is not None:
            raise RuntimeError(f"{self.name} ended:\n{self.last_words()}")

    def last_words(self, lines: int = 15) -> str:
        """The end of its log."""
        if not self.log_file.exists():
            return ""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])

    async def stop(self, grace_s: float = 15.0) -> None:
        """Asks it to end, then ends it."""
        popen = self._popen
        if popen is None or popen.poll() is not None:
            return
        popen.send_signal(signal.SIGTERM)

        async def ended() -> bool:
            return popen.poll() is not None

        if not await until(ended, grace_s):
            popen.kill()
        await asyncio.to_thread(popen.wait)


def _flags(
    name: str, ready_file: Path, flags: dict[str, object], at: Host | None = None
) -> list[str]:
    basic: dict[str, object] = {
        "id": name,
        "host": at.control if at else "127.0.0.1",
        "port": 0,
        "events_port": 0,
        "metrics_port": 0,
        # Nobody listens there: they serve without being found.
        "etcd_endpoints": "127.0.0.1:1",
        "drain_timeout_s": 1,
        "ready_file": ready_file,
    }
    return [f"--{key.replace('_', '-')}={value}" for key, value in (basic | flags).items()]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a prompt, and when."""

    tokens: tuple[int, ...]
    cached: int
    ttft_s: float
    total_s: float


class Worker:
    """A worker process, asked over gRPC."""

    def __init__(self, process: Process, stub: Any) -> None:
        self.process = process
        self._stub = stub

    async def ask(self, tokens: Sequence[int], max_tokens: int = 4) -> Answer:
        """A greedy answer. Raises RuntimeError for one that broke off."""
        name = f"bench-{next(_numbers)}"
        request = wpb.GenerateRequest(
            request_id=name,
            attempt_id=name,
            model=MODEL,
            prompt_token_ids=tokens,
            sampling=wpb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )
        out: list[int] = []
        cached, first = 0, 0.0
        began = time.perf_counter()
        async for message in self._stub.Generate(request, timeout=120):
            delta = message.delta
            if delta.token_ids and not first:
                first = time.perf_counter() - began
            out += delta.token_ids
            if delta.HasField("cached_tokens"):
                cached = delta.cached_tokens
        if len(out) != max_tokens:
            raise RuntimeError(f"{self.process.name} gave {len(out)} tokens of {max_tokens}")
        return Answer(tuple(out), cached, first, time.perf_counter() - began)

    async def reset(self) -> None:
        """Empties G1, once no save holds a part of it."""

        async def done() -> bool:
            try:
                await self._stub.ResetCache(wpb.ResetCacheRequest(), timeout=30)
            except grpc.aio.AioRpcError as exc:
                if exc.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                return False
            return True

        if not await until(done, 30):
            raise RuntimeError(f"{self.process.name} keeps its cache in use")


@contextlib.asynccontextmanager
async def worker(
    name: str,
    place: Folders,
    model: str,
    *,
    module: str = "services.worker",
    flags: Mapping[str, object],
    at: Host | None = None,
) -> AsyncIterator[Worker]:
    """A worker that serves `model` in float32; flags as its settings are called."""
    ready_file = place.disk / f"{name}.ready.json"
    given: dict[str, object] = {"model": model, "served_model_name": MODEL, "dtype": "float32"}
    command = [sys.executable, "-m", module, *_flags(name, ready_file, {**given, **flags}, at)]
    process = Process(name, command, place.disk, at)
    process.start()
    try:
        said = await process.ready()
        async with open_channel(said["address"]) as channel:
            yield Worker(process, worker_pb2_grpc.WorkerServiceStub(channel))
    finally:
        await process.stop()


class Daemon:
    """A kvbm process, asked over gRPC on its Unix socket. Restarts keep its address and blocks."""

    def __init__(
        self, place: Folders, name: str, flags: dict[str, object], at: Host | None = None
    ) -> None:
        self.name = name
        self._at = at
        self._place = place
        self._flags = flags
        self.socket = place.memory / f"{name}.sock"
        self.tcp = ""
        self._process: Process | None = None

    @property
    def process(self) -> Process:
        """The process of its present life."""
        assert self._process is not None, "it was not started"
        return self._process

    @property
    def address(self) -> str:
        """Where workers find it."""
        return f"unix:{self.socket}"

    async def start(self, **more: object) -> None:
        """Starts it, or starts it anew; `more` flags hold from now on."""
        if self._process is not None:
            await self._process.stop()
        self._flags |= more
        place = self._place
        given: dict[str, object] = {
            "socket": self.socket,
            "cpu_cache_dir": place.memory / self.name,
            "disk_cache_dir": place.disk / f"{self.name}-g3",
            "disk_free_gb": 0,
        }
        ready_file = place.disk / f"{self.name}.ready.json"
        flags = _flags(self.name, ready_file, given | self._flags, self._at)
        command = [sys.executable, "-m", "services.kvbm", *flags]
        self._process = Process(self.name, command, place.disk, self._at)
        self._process.start()
        self.tcp = (await self._process.ready(60))["address"]

    async def stop(self) -> None:
        """Ends it and removes its caches."""
        if self._process is not None:
            await self._process.stop()
        for folder in (self._place.memory / self.name, self._place.disk / f"{self.name}-g3"):
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def stub(self) -> AsyncIterator[Any]:
        """Its methods, while the context lasts."""
        async with open_channel(self.address) as channel:
            yield kvbm_pb2_grpc.KvbmServiceStub(channel)

    async def stats(self) -> kpb.StatsResponse:
        """Its figures."""
        async with self.stub() as stub:
            answer: kpb.StatsResponse = await stub.Stats(kpb.StatsRequest(), timeout=10)
            return answer

    async def clear(self, *tiers: TierNumber) -> None:
        """Forgets all blocks in some tiers."""
        async with self.stub() as stub:
            await stub.Clear(kpb.ClearRequest(everything=True, tiers=tiers), timeout=30)

    async def blocks_in(self, tokens: Sequence[int]) -> dict[TierNumber, int]:
        """By tier, how many of a prompt's full blocks are there."""
        stats = await self.stats()
        found: dict[TierNumber, int] = {G2: 0, G3: 0, G4: 0}
        if not stats.namespaces:
            return found
        keys = block_hashes(tokens, BLOCK)
        lookup = kpb.LookupRequest(namespace=stats.namespaces[0].namespace, keys=keys)
        async with self.stub() as stub:
            answer = await stub.Explain(kpb.ExplainRequest(lookup=lookup), timeout=10)
        for block in answer.blocks:
            for tier in block.tiers:
                found[tier] += 1
        return found

    async def stored(
        self, tokens: Sequence[int], *tiers: TierNumber, within_s: float = 20.0
    ) -> bool:
        """Waits until all full blocks of a prompt are in each of some tiers; whether they came."""
        blocks = len(tokens) // BLOCK

        async def there() -> bool:
            found = await self.blocks_in(tokens)
            return all(found[tier] >= blocks for tier in tiers)

        return await until(there, within_s, 0.1)

    async def attached(self, workers: int) -> None:
        """Waits until so many workers are attached."""

        async def there() -> bool:
            return sum(len(n.workers) for n in (await self.stats()).namespaces) >= workers

        if not await until(there, 30):
            raise RuntimeError(f"nobody is attached to {self.name}")


@contextlib.asynccontextmanager
async def daemon(
    place: Folders, name: str = "kvbm", *, at: Host | None = None, **flags: object
) -> AsyncIterator[Daemon]:
    """A daemon that serves; flags as its settings are called."""
    running = Daemon(place, name, flags, at)
    try:
        await running.start()
        yield running
    finally:
        await running.stop()
