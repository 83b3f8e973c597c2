"""Placements over RouteStream, as a gateway asks for them: latency, and CPU of the router."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc

from benchmarks.router.load import MODEL, chain_keys
from services.common.rpc.channel import open_channel

CHAINS, LENGTH, SEED = 125, 8_000, 5


@dataclass(frozen=True, slots=True)
class Answered:
    """How a run went."""

    blocks: int
    in_flight: int
    p50_ms: float
    p99_ms: float
    per_second: float
    router_cpu_us: float


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _run(port: int, pid: int, blocks: int, in_flight: int, seconds: float) -> Answered:
    questions = [
        pb.RouteRequest(
            model=MODEL,
            block_size_tokens=16,
            block_hashes=chain[:blocks],
            prompt_tokens=blocks * 16,
        )
        for chain in chain_keys(CHAINS, LENGTH, SEED)
    ]
    times: list[float] = []
    async with open_channel(f"127.0.0.1:{port}") as channel:
        call: Any = router_pb2_grpc.RouterServiceStub(channel).RouteStream()
        began: dict[int, float] = {}
        window = asyncio.Semaphore(in_flight)
        releases: list[str] = []
        until = time.perf_counter() + seconds

        async def ask() -> None:
            number = 0
            while time.perf_counter() < until:
                await window.acquire()
                number += 1
                question = questions[number % len(questions)]
                began[number] = time.perf_counter()
                await call.write(pb.RouteStreamRequest(correlation_id=number, route=question))
                while releases:
                    release = pb.ReleasePlacement(attempt_id=releases.pop())
                    await call.write(pb.RouteStreamRequest(release=release))
            await call.done_writing()

        before, started = _cpu_s(pid), time.perf_counter()
        asking = asyncio.create_task(ask())
        async for answer in call:
            if not answer.HasField("placement"):
                raise RuntimeError(f"no placement: {answer.failure.message}")
            times.append(time.perf_counter() - began.pop(answer.correlation_id))
            releases.append(answer.placement.attempt_id)
            window.release()
        await asking
        elapsed, cpu = time.perf_counter() - started, _cpu_s(pid) - before
    times.sort()
    return Answered(
        blocks,
        in_flight,
        times[len(times) // 2] * 1e3,
        times[len(times) * 99 // 100] * 1e3,
        len(times) / elapsed,
        cpu / len(times) * 1e6,
    )


async def measure(workers: int, seconds: float) -> list[Answered]:
    """One after the other: short and long prompts, alone and many at a time."""
    process = await asyncio.to_thread(_start, workers)
    assert process.stdout is not None
    try:
        port = int(await asyncio.to_thread(process.stdout.readline))
        return [
            await _run(port, process.pid, blocks, in_flight, seconds)
            for blocks in (62, 1000, 8000)
            for in_flight in (1, 64)
        ]
    finally:
        # The end of its stdin ends it.
        await asyncio.to_thread(process.communicate)


def _start(workers: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.router.serve"),
            *(str(n) for n in (workers, CHAINS, LENGTH, SEED)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
