"""Copies between a cache in host memory and the arena, in calls that let go of the GIL.

numpy and not torch: torch would start a team of threads beside the engine's for each caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from services.common.arena import Arena
from services.worker.connector.cachelayout import CacheLayout
from services.worker.connector.lanes import Lanes

Bytes = npt.NDArray[np.uint8]


class CpuCache:
    """A cache in host memory, as arrays of bytes."""

    def __init__(self, layout: CacheLayout, caches: Sequence[torch.Tensor]) -> None:
        self._piece = layout.piece_bytes
        self._stride = layout.block_stride
        storages: dict[int, Bytes] = {}
        parts: list[tuple[Bytes, int, int]] = []
        for cache in caches:
            storage = cache.untyped_storage()
            start = storage.data_ptr()
            if start not in storages:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                storages[start] = whole.numpy()
            memory, at = storages[start], cache.data_ptr() - start
            # Layers that lie one after the other in each block are one piece.
            if parts and parts[-1][0] is memory and parts[-1][1] + parts[-1][2] == at:
                parts[-1] = (memory, parts[-1][1], parts[-1][2] + layout.piece_bytes)
            else:
                parts.append((memory, at, layout.piece_bytes))
        self._parts = [(memory.data, at, length) for memory, at, length in parts]
        steps = {b[1] - a[1] for a, b in pairwise(parts)}
        lengths = {length for _, _, length in parts}
        self._whole: npt.NDArray[np.uint8] | None = None
        if all(p[0] is parts[0][0] for p in parts) and len(steps) <= 1 and len(lengths) == 1:
            memory, at, length = parts[0]
            # [block, piece, byte] over the engine's own memory.
            self._whole = np.ndarray(
                (layout.num_blocks, len(parts), length),
                np.uint8,
                memory,
                at,
                (self._stride, next(iter(steps), length), 1),
            )

    def copy_out(self, block: int, shard: Bytes) -> None:
        """G1 -> shard. In one call without the GIL if the layers are evenly spaced."""
        if self._whole is not None:
            pieces = self._whole[block]
            np.copyto(shard.reshape(pieces.shape), pieces)
            return
        to = 0
        for piece in self._pieces(block):
            np.copyto(shard[to : to + len(piece)], piece)
            to += len(piece)

    def copy_in(self, block: int, shard: Bytes) -> None:
        """Shard -> G1; as `copy_out`."""
        if self._whole is not None:
            pieces = self._whole[block]
            np.copyto(pieces, shard.reshape(pieces.shape))
            return
        at = 0
        for piece in self._pieces(block):
            np.copyto(piece, shard[at : at + len(piece)])
            at += len(piece)

    def clear(self, block: int) -> None:
        """Zeros."""
        for piece in self._pieces(block):
            piece.fill(0)

    def checksum(self, block: int) -> int:
        """XXH3-64 over the block's bytes in G1, in layer order."""
        digest = xxhash.xxh3_64()
        offset = block * self._stride
        for memory, at, length in self._parts:
            digest.update(memory[at + offset : at + offset + length])
        return digest.intdigest()

    def _pieces(self, block: int) -> Iterator[Bytes]:
        offset = block * self._stride
        for memory, at, length in self._parts:
            yield np.frombuffer(memory, np.uint8, length, at + offset)


class _CpuLane:
    """Block by block: a block's bytes are still in the processor's cache when they are hashed."""

    def __init__(
        self, copy: Callable[[int, Bytes], None], cache: CpuCache, arena: Arena, rank: int
    ) -> None:
        self._copy = copy
        self._cache = cache
        self._arena = arena
        self._rank = rank

    def move(self, blocks: Sequence[int], slots: Sequence[int], sums: bool) -> Iterator[int]:
        for block, slot in zip(blocks, slots, strict=True):
            self._copy(block, np.frombuffer(self._arena.shard(slot, self._rank), np.uint8))
            yield self._cache.checksum(block) if sums else 0


def cpu_lanes(
    layout: CacheLayout, caches: Sequence[torch.Tensor], arena: Arena, rank: int
) -> Lanes:
    """Both directions for a cache in host memory, whose work is done when a call returns."""
    cache = CpuCache(layout, caches)

    def clear(blocks: Sequence[int]) -> None:
        for block in blocks:
            cache.clear(block)

    return Lanes(
        _CpuLane(cache.copy_out, cache, arena, rank),
        _CpuLane(cache.copy_in, cache, arena, rank),
        fence=lambda: None,
        wait=lambda lane, after: None,
        clear=clear,
        close=lambda: None,
    )
