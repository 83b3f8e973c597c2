"""How many placements a router makes a second: its core alone, and over RouteStream."""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Any

from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc

from services.common.events.model import Snapshot, Tier, TierBlocks
from services.common.ids import AttemptId, BlockKey
from services.common.rpc.channel import open_channel
from services.router.core.answers import Placement, Query
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo

MODEL = "bench"
BLOCK_SIZE = 32
WORKERS = 8
BLOCKS = 10_000
"""Blocks that each worker holds."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Placements a second for prompts of that many tokens."""

    prompt_tokens: int
    per_second: float


def _keys(rng: random.Random, count: int) -> list[BlockKey]:
    return [BlockKey(rng.getrandbits(64)) for _ in range(count)]


def core_rate(prompt_tokens: int, seconds: float) -> Rate:
    """A core with 8 workers of 10,000 blocks each; half of each prompt is known to some worker."""
    rng = random.Random(1)
    core = RouterCore(CoreConfig(), random.Random(2))
    length = prompt_tokens // BLOCK_SIZE
    known: list[list[BlockKey]] = []
    for i in range(WORKERS):
        info = WorkerInfo(f"w{i}", i + 1, "127.0.0.1:1", MODEL, BLOCK_SIZE, BLOCKS, 1 << 20)
        core.record(info, 0.0)
        keys = _keys(rng, BLOCKS)
        known += [keys[j : j + max(1, length // 2)] for j in range(0, 2000, max(1, length // 2))]
        blocks = (TierBlocks(Tier.G1, keys),)
        core.reset(Snapshot(info.id, info.incarnation, 1, blocks), 0.0)
    core.synced()
    queries = []
    for _ in range(500):
        prefix = rng.choice(known)
        keys = [*prefix, *_keys(rng, length - len(prefix))]
        queries.append(Query(MODEL, prompt_tokens, keys, BLOCK_SIZE))
    count, started = 0, time.perf_counter()
    while (now := time.perf_counter()) - started < seconds:
        for query in queries[:50]:
            count += 1
            placed = core.place(query, AttemptId(f"a{count}"), 0.5)
            assert isinstance(placed, Placement)
            core.release(placed.attempt_id)
    return Rate(prompt_tokens, count / (now - started))


async def stream_rate(
    address: str, model: str, prompt_tokens: int, seconds: float, in_flight: int = 64
) -> Rate:
    """A running router, asked by one gateway with `in_flight` questions at a time."""
    rng = random.Random(3)
    length = prompt_tokens // BLOCK_SIZE
    questions = [
        pb.RouteRequest(
            model=model,
            block_size_tokens=BLOCK_SIZE,
            block_hashes=_keys(rng, length),
            prompt_tokens=prompt_tokens,
        )
        for _ in range(200)
    ]
    async with open_channel(address) as channel:
        call: Any = router_pb2_grpc.RouterServiceStub(channel).RouteStream()
        window = asyncio.Semaphore(in_flight)
        answered, stop = 0, False
        releases: list[str] = []

        async def ask() -> None:
            number = 0
            while not stop:
                await window.acquire()
                number += 1
                question = questions[number % len(questions)]
                await call.write(pb.RouteStreamRequest(correlation_id=number, route=question))
                while releases:
                    release = pb.ReleasePlacement(attempt_id=releases.pop())
                    await call.write(pb.RouteStreamRequest(release=release))
            await call.done_writing()

        asking = asyncio.create_task(ask())
        started = time.perf_counter()
        async for answer in call:
            if not answer.HasField("placement"):
                raise RuntimeError(f"no placement: {answer.failure.message}")
            answered += 1
            releases.append(answer.placement.attempt_id)
            window.release()
            if not stop and time.perf_counter() - started >= seconds:
                elapsed, counted, stop = time.perf_counter() - started, answered, True
        await asking
    return Rate(prompt_tokens, counted / elapsed)
