"""Checksums over blocks of the engine's own cache, where both sides of a transfer can reach them.

The scheduler's half of a connector makes them at the end of a prefill, the worker's half compares
them after a read. Both find the cache here: an engine of one rank is one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.telemetry.logging import get_logger
from services.worker.connector.cachelayout import describe
from services.worker.connector.cpucopy import CpuCache
from services.worker.connector.geometry import in_layer_order

log = get_logger(__name__)


class BlockSums:
    """One engine's cache in host memory, block by block."""

    def __init__(self, caches: Mapping[str, Any], num_blocks: int) -> None:
        """Raises ValueError for a cache whose layout isn't known."""
        ordered = in_layer_order(caches)
        self._layout = describe(ordered, num_blocks)
        self._cache = CpuCache(self._layout, ordered)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        return self._layout.shard_bytes

    def of(self, blocks: Sequence[int]) -> list[int]:
        """The checksum of each block as it is now."""
        return [self._cache.checksum(block) for block in blocks]

    def clear(self, blocks: Sequence[int]) -> None:
        """Fills blocks with zeros: what did not arrive whole must not stay in a cache. Kernels
        multiply what lies beyond a sequence's end by 0, and a NaN there is a NaN for all.
        """
        for block in blocks:
            self._cache.clear(block)


_by_engine: dict[str, BlockSums] = {}


def publish(engine_id: str, caches: Mapping[str, Any], num_blocks: int) -> BlockSums | None:
    """Makes an engine's cache known in this process. None where it can't be summed, and why is
    logged: it lies in a GPU's memory, or in a way that isn't known.
    """
    if any(cache.device.type != "cpu" for cache in caches.values()):
        log.info("transfers are not summed: the cache is not in host memory")
        return None
    try:
        sums = BlockSums(caches, num_blocks)
    except ValueError as exc:
        log.warning("transfers are not summed: the cache's layout is not known", error=str(exc))
        return None
    _by_engine[engine_id] = sums
    return sums


def of_engine(engine_id: str) -> BlockSums | None:
    """The cache of an engine of this process."""
    return _by_engine.get(engine_id)


def forget(engine_id: str) -> None:
    """The engine ends."""
    _by_engine.pop(engine_id, None)
