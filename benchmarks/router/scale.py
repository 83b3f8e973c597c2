"""A router over many simulated workers, on real processes: `python -m benchmarks.router.scale`.

Simulated workers, full from their start, serve a real router through etcd, gRPC and event streams:
1,000 of them with 5,000 blocks each are an index of five million entries. Measured are the time
until a new router (also one that takes the place of one killed under load) serves and knows
everything, its memory, what the idle streams cost it, and placements a second over RouteStream.
Then the core alone, in a process for each size: the curve of a decision's cost and of memory
against the number of workers. Blocks are held by two workers each; prompts are documents of 64
blocks that are known whole, with a new end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import uvloop
from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc

from services.common.events.model import Snapshot, Tier, TierBlocks
from services.common.ids import AttemptId, BlockKey
from services.common.rpc.channel import open_channel
from services.router.core.answers import Placement, Query
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo
from services.worker.engines.sim.core.filling import DOCUMENT_BLOCKS, document, documents
from tests.models import default_cache_dir, tiny_model
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.processes import Process

MODEL = "simulated"
BLOCK_SIZE = 16
NEW_BLOCKS = 8
CURVE = (1, 8, 64, 256, 1000)
EACH_PROCESS = 500
"""Simulated workers of a process."""
PATIENCE_S = 300.0
LEASE_S = 300.0
"""Of all records: nothing is to expire here, and a thousand renewals are not what is measured."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a router came to know everything; seconds since its process was started."""

    serving_s: float
    gap_s: float
    """Longest time without an answer for those who never ceased to ask; 0: nobody did."""
    complete_s: float
    cpu_s: float
    rss_mb: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Placements over one stream."""

    in_flight: int
    per_second: float
    p50_ms: float
    p99_ms: float
    router_cpu_us: float


@dataclass(frozen=True, slots=True)
class Point:
    """The core alone with so many workers."""

    workers: int
    entries: int
    fill_s: float
    bytes_an_entry: float
    decision_us: float
    """Decide, book, take back; median of batches."""


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompt(rng: random.Random, known: int) -> list[BlockKey]:
    """One of `known` documents and a new end."""
    return [*document(rng.randrange(known)), *(BlockKey(rng.getrandbits(64)) for _ in range(8))]


def held_documents(workers: int, blocks: int) -> int:
    """Documents that all workers together hold whole."""
    return (workers - 1) * (blocks // DOCUMENT_BLOCKS) // 2 + max(1, blocks // DOCUMENT_BLOCKS)


class Asking:
    """Somebody who asks without end, whether or not a router is there."""

    def __init__(self, address: str, known: int) -> None:
        self.address = address
        """Where the router is, or was when it lived."""
        self.answers: list[float] = []
        """When each answer came."""
        self._known = known

    async def run(self) -> None:
        """Goes on until cancelled."""
        rng = random.Random(5)
        while True:
            async with open_channel(self.address) as channel:
                await self._ask(router_pb2_grpc.RouterServiceStub(channel), rng)
            await asyncio.sleep(0.02)

    async def _ask(self, stub: Any, rng: random.Random) -> None:
        while True:
            keys = prompt(rng, self._known)
            request = pb.RouteRequest(
                model=MODEL,
                block_size_tokens=BLOCK_SIZE,
                block_hashes=keys,
                prompt_tokens=len(keys) * BLOCK_SIZE + 1,
            )
            try:
                await stub.Route(request, timeout=1)
            except grpc.RpcError:
                return
            self.answers.append(time.monotonic())
            await asyncio.sleep(0.001)


async def recover(
    router: Process, entries: int, workers: int, asking: Asking | None = None
) -> tuple[Recovery, str]:
    """Waits until a router that is just starting serves, and until it knows all."""
    began = time.monotonic()
    # It says that it is ready when it serves.
    address = (await router.until_ready(PATIENCE_S)).address
    if asking is not None:
        asking.address = address
    serving, complete = time.monotonic() - began, 0.0
    async with open_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        async with asyncio.timeout(PATIENCE_S):
            while not complete:
                try:
                    stats = await stub.GetIndexStats(pb.GetIndexStatsRequest(), timeout=30)
                except grpc.RpcError:
                    continue
                if stats.entries >= entries and stats.holders >= workers:
                    complete = time.monotonic() - began
                else:
                    await asyncio.sleep(0.05)
    answers = [] if asking is None else asking.answers
    gap = max((b - a for a, b in pairwise(answers)), default=0.0)
    found = Recovery(serving, gap, complete, cpu_s(router.pid), rss_bytes(router.pid) / 1e6)
    return found, address


async def idle_share(pid: int, seconds: float) -> float:
    """Share of a core that a process uses while nobody asks it."""
    before = cpu_s(pid)
    await asyncio.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


async def place(address: str, pid: int, known: int, in_flight: int, seconds: float) -> Rate:
    """Asks for placements as one gateway does, and takes each back."""
    rng = random.Random(7)
    questions = [
        pb.RouteRequest(
            model=MODEL,
            block_size_tokens=BLOCK_SIZE,
            block_hashes=keys,
            prompt_tokens=len(keys) * BLOCK_SIZE + 1,
        )
        for keys in (prompt(rng, known) for _ in range(500))
    ]
    times: list[float] = []
    began: dict[int, float] = {}
    releases: list[str] = []
    async with open_channel(address) as channel:
        call: Any = router_pb2_grpc.RouterServiceStub(channel).RouteStream()
        window = asyncio.Semaphore(in_flight)
        before, started = cpu_s(pid), time.perf_counter()

        async def ask() -> None:
            number = 0
            while time.perf_counter() - started < seconds:
                await window.acquire()
                number += 1
                began[number] = time.perf_counter()
                route = questions[number % len(questions)]
                await call.write(pb.RouteStreamRequest(correlation_id=number, route=route))
                while releases:
                    release = pb.ReleasePlacement(attempt_id=releases.pop())
                    await call.write(pb.RouteStreamRequest(release=release))
            await call.done_writing()

        asking = asyncio.create_task(ask())
        async for answer in call:
            if not answer.HasField("placement"):
                raise RuntimeError(f"no placement: {answer.failure.message}")
            times.append(time.perf_counter() - began.pop(answer.correlation_id))
            releases.append(answer.placement.attempt_id)
            window.release()
        await asking
    elapsed, used = time.perf_counter() - started, cpu_s(pid) - before
    times.sort()
    return Rate(
        in_flight,
        len(times) / elapsed,
        times[len(times) // 2] * 1000,
        times[len(times) * 99 // 100] * 1000,
        used / len(times) * 1e6,
    )


async def on_processes(workers: int, blocks: int, seconds: float) -> dict[str, Any]:
    """All that needs real processes."""
    model = tiny_model(default_cache_dir())
    said: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="forebay-scale-") as name, Etcd(Path(name)) as etcd:
        cluster = Cluster(Path(name), etcd, model)
        try:
            began = time.monotonic()
            for number, first in enumerate(range(0, workers, EACH_PROCESS)):
                cluster.start(
                    "services.worker",
                    f"sim-{number}",
                    model=model,
                    served_model_name=MODEL,
                    events_port=0,
                    engine="sim",
                    sim_workers=min(EACH_PROCESS, workers - first),
                    sim_fill_blocks=blocks,
                    sim_fill_first=first,
                    log_level="warning",
                    lease_ttl_s=LEASE_S,
                )
            simulators = list(cluster.processes.values())
            for process in simulators:
                await process.until_ready(PATIENCE_S)
            said["workers_ready_s"] = time.monotonic() - began
            said["workers_rss_mb"] = sum(rss_bytes(p.pid) for p in simulators) / 1e6
            say(f"{workers} simulated workers with {blocks} blocks each", said)

            router = cluster.start_router("router", log_level="warning", lease_ttl_s=LEASE_S)
            first_start, address = await recover(router, workers * blocks, workers)
            said["start"] = asdict(first_start)
            say("a router starts", said["start"])
            known = held_documents(workers, blocks)
            asking = Asking(address, known)
            task = asyncio.create_task(asking.run())
            try:
                await asyncio.sleep(seconds)
                router.kill()
                router.start()
                again, address = await recover(router, workers * blocks, workers, asking)
            finally:
                task.cancel()
                await asyncio.wait({task})
            said["restart"] = asdict(again)
            say("killed under load, and started again", said["restart"])
            said["idle_core_share"] = {
                "router": await idle_share(router.pid, 5.0),
                "simulators": sum([await idle_share(p.pid, 2.0) for p in simulators]),
            }
            say("idle, share of a core", said["idle_core_share"])
            said["placements"] = []
            for in_flight in (1, 64):
                rate = await place(address, router.pid, known, in_flight, seconds)
                said["placements"].append(asdict(rate))
                say("placements over RouteStream", asdict(rate))
            said["rss_after_mb"] = rss_bytes(router.pid) / 1e6
        finally:
            cluster.close()
    return said


def core_point(workers: int, blocks: int, seconds: float) -> Point:
    """The core alone: filled by snapshots, then asked."""
    core = RouterCore(CoreConfig(), random.Random(2))
    before, began, spent = rss_bytes(), time.perf_counter(), 0.0
    for number in range(workers):
        info = WorkerInfo(
            f"w{number}", number + 1, "127.0.0.1:1", MODEL, BLOCK_SIZE, blocks, 1 << 20
        )
        keys = [key for held in documents(number, blocks) for key in held]
        snapshot = Snapshot(info.id, info.incarnation, 1, (TierBlocks(Tier.G1, keys),))
        at = time.perf_counter()
        core.record(info, 0.0)
        core.reset(snapshot, 0.0)
        spent += time.perf_counter() - at
        del keys, snapshot
    core.synced()
    entries = core.index_stats().entries
    grown = rss_bytes() - before
    rng = random.Random(3)
    known = held_documents(workers, blocks)
    queries = [
        Query(MODEL, len(keys) * BLOCK_SIZE + 1, keys, BLOCK_SIZE)
        for keys in (prompt(rng, known) for _ in range(500))
    ]
    batches: list[float] = []
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        at = time.perf_counter()
        for query in queries[:50]:
            count += 1
            placed = core.place(query, AttemptId(f"a{count}"), 0.5)
            assert isinstance(placed, Placement)
            core.release(placed.attempt_id)
        batches.append((time.perf_counter() - at) / 50)
        queries = queries[50:] + queries[:50]
    batches.sort()
    return Point(workers, entries, spent, grown / entries, batches[len(batches) // 2] * 1e6)


def curve(workers: int, blocks: int, seconds: float) -> list[dict[str, Any]]:
    """The core alone at several sizes, each in a process of its own."""
    points = []
    for size in sorted({n for n in CURVE if n < workers} | {workers}):
        command = [sys.executable, "-m", "benchmarks.router.scale", "--core", str(size)]
        command += ["--blocks", str(blocks), "--seconds", str(seconds)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        points.append(json.loads(ran.stdout))
        say(f"core alone, {size} workers", points[-1])
    return points


def say(what: str, figures: dict[str, Any]) -> None:
    """Tells what was just found, on stderr: a long run shows where it is."""
    shown = ", ".join(
        f"{k} {v:,.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()
    )
    print(f"{what}: {shown}", file=sys.stderr, flush=True)


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    workers, blocks = result["workers"], result["blocks"]
    lines = []
    if real := result.get("processes"):
        lines += [
            f"{workers} simulated workers with {blocks} blocks each: index of "
            f"{workers * blocks / 1e6:.1f} M entries, on {os.cpu_count()} CPUs",
            "",
            "router         serving after s   no answer s   complete after s   CPU s   RSS MB",
        ]
        for name in ("start", "restart"):
            r = real[name]
            lines.append(
                f"  {name:12} {r['serving_s']:15.1f} {r['gap_s']:13.1f} "
                f"{r['complete_s']:18.1f} {r['cpu_s']:7.1f} "
                f"{r['rss_mb']:8.0f}"
            )
        idle = real["idle_core_share"]
        lines += [
            f"  idle: {idle['router']:.0%} of a core (simulators: {idle['simulators']:.0%}); "
            f"RSS at the end {real['rss_after_mb']:.0f} MB",
            "",
            "RouteStream, in flight   placements/s   p50 ms   p99 ms   router CPU us",
        ]
        lines += [
            f"  {r['in_flight']:22} {r['per_second']:14,.0f} {r['p50_ms']:8.2f} {r['p99_ms']:8.2f} "
            f"{r['router_cpu_us']:15.0f}"
            for r in real["placements"]
        ]
        known_s = real["restart"]["complete_s"] - real["restart"]["serving_s"]
        lines += [f"  complete {known_s:.1f} s after it served again (goal: 2 s, for 1 M)", ""]
    lines.append("core alone, workers     entries   fill s   bytes an entry   decision us")
    lines += [
        f"  {p['workers']:17} {p['entries']:11,} {p['fill_s']:8.2f} {p['bytes_an_entry']:16.0f} "
        f"{p['decision_us']:13.0f}"
        for p in result["core"]
    ]
    return "\n".join(lines)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=5000, help="that each worker holds")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--core", type=int, help="only the core, with so many workers")
    parser.add_argument("--no-processes", action="store_true", help="only the core's curve")
    options = parser.parse_args()
    if options.core:
        print(json.dumps(asdict(core_point(options.core, options.blocks, options.seconds))))
        return 0
    result: dict[str, Any] = {"workers": options.workers, "blocks": options.blocks}
    if not options.no_processes:
        work = on_processes(options.workers, options.blocks, options.seconds)
        result["processes"] = uvloop.run(work)
    result["core"] = curve(options.workers, options.blocks, options.seconds)
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
