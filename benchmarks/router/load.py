"""Known chains of blocks, dealt to workers; a core that holds them; timing."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.common.events.codec import encode
from services.common.events.model import Batch, BlocksStored, Snapshot, Tier
from services.common.ids import BlockKey
from services.router.core.nodes import NodeInfo
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo

MODEL = "m"
BATCH = 128
"""Blocks of a prefill step of 2,048 tokens, at 16 tokens each: in one event."""
_INCARNATION = 7
NAMESPACE = bytes(32)
"""Of daemons' blocks."""


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def chain_keys(chains: int, length: int, seed: int) -> list[list[BlockKey]]:
    """Chains of random keys."""
    rng = random.Random(seed)
    return [[BlockKey(rng.getrandbits(63)) for _ in range(length)] for _ in range(chains)]


def new_core(
    workers: int, block_size: int, capacity: int = 1 << 20, per_node: int = 0
) -> RouterCore:
    """A core that knows so many empty workers; `per_node`: above each daemon."""
    core = RouterCore(CoreConfig(), random.Random(1))
    for number in range(workers):
        node = f"n{number // per_node}" if per_node else ""
        if node and number % per_node == 0:
            core.nodes.record(NodeInfo(node, 1, "127.0.0.1:2", transfer="nixl"), 0.0)
            core.nodes.reset(Snapshot(node, 1, 0), 0.0)
        info = WorkerInfo(
            f"w{number}",
            _INCARNATION,
            "127.0.0.1:1",
            MODEL,
            block_size,
            capacity,
            1 << 24,
            kvbm=node,
            namespace=NAMESPACE,
        )
        core.record(info, 0.0)
        core.reset(Snapshot(info.id, _INCARNATION, 0), 0.0)
    core.synced()
    return core


def stored(chains: Iterable[list[BlockKey]], workers: int, batch: int = BATCH) -> Iterator[Batch]:
    """The events with which workers, one chain after the other, tell that they have them."""
    sequences = [0] * workers
    for number, chain in enumerate(chains):
        worker = number % workers
        for start in range(0, len(chain), batch):
            sequences[worker] += 1
            event = BlocksStored(Tier.G1, tuple(chain[start : start + batch]))
            yield Batch(f"w{worker}", _INCARNATION, sequences[worker], 0, (event,))


def envelopes(chains: Iterable[list[BlockKey]], workers: int, batch: int = BATCH) -> list[bytes]:
    """The same, as they come over the wire."""
    return [encode(one) for one in stored(chains, workers, batch)]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of a call."""

    best_us: float
    p50_us: float
    p99_us: float


def timed(
    call: Callable[[int], object], repeats: int, after: Callable[[], object] = bool
) -> Timing:
    """Times `call(number)`; `after` each, and collections of garbage, are left out."""
    gc.collect()
    gc.disable()
    times = []
    for number in range(repeats):
        started = time.perf_counter()
        call(number)
        times.append((time.perf_counter() - started) * 1e6)
        after()
    gc.enable()
    times.sort()
    return Timing(times[0], times[len(times) // 2], times[len(times) * 99 // 100])
