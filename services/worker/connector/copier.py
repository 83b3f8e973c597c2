"""Copies blocks between an engine's cache (G1) and the arena's slots (G2), and verifies them.

In a slot a shard lies layer by layer. Checksums are always taken from G1's side: on a save over the
source, on a load over the destination, after the copy. Not a cache: which block goes where is told
from outside. Blocks being copied must not be written by anybody else meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from services.common.arena import Arena
from services.worker.connector.cachelayout import CacheLayout, describe
from services.worker.connector.cpucopy import cpu_lanes
from services.worker.connector.lanes import Lanes
from services.worker.connector.model import LoadItem


class Copier:
    """One rank's copies between its cache and one arena. One thread at a time."""

    def __init__(
        self,
        caches: Sequence[torch.Tensor],
        arena: Arena,
        rank: int,
        verify: bool = True,
        *,
        lanes: Callable[[CacheLayout, Sequence[torch.Tensor], Arena, int], Lanes] | None = None,
    ) -> None:
        """caches: one tensor a layer, as for `describe`. `verify` False: loads are believed.

        Raises ValueError: a layout not understood, or an arena that is for another one.
        """
        self.layout = describe(caches)
        if arena.geometry.shard_bytes != self.layout.shard_bytes:
            raise ValueError(
                f"the arena's shards have {arena.geometry.shard_bytes} bytes, the engine's blocks "
                f"{self.layout.shard_bytes} ({self.layout.words})"
            )
        if not 0 <= rank < arena.geometry.ranks:
            raise ValueError(f"rank {rank} of an arena for {arena.geometry.ranks}")
        self._arena = arena
        self._rank = rank
        self._verify = verify
        if lanes is None:
            lanes = _gpu_lanes if caches[0].is_cuda else cpu_lanes
        self._lanes = lanes(self.layout, caches, arena, rank)

    @staticmethod
    def describe(caches: Sequence[torch.Tensor], num_blocks: int | None = None) -> CacheLayout:
        """`cachelayout.describe`."""
        return describe(caches, num_blocks)

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's part of a block."""
        return self.layout.shard_bytes

    def fence(self) -> Any:
        """Marks the work given to the engine's device so far; for `after`. On the engine's thread.

        None where work is done when its call returns (CPU).
        """
        return self._lanes.fence()

    def save(self, blocks: Sequence[int], slots: Sequence[int], after: Any = None) -> list[int]:
        """Copies G1 blocks into slots; returns each block's checksum, over its bytes in G1.

        Reads nothing before `after` is done; None: before all work of the device is. Raises
        IndexError for a block or slot that isn't there; then nothing was copied.
        """
        self._check(blocks)
        for slot in slots:
            self._arena.payload_address(slot)
        self._lanes.wait(self._lanes.save, after)
        return list(self._lanes.save.move(blocks, slots, True))

    def load(self, items: Sequence[LoadItem], after: Any = None) -> list[bool]:
        """Copies slots into G1 blocks; for each, whether G1 now holds just what was asked for.

        That is: after the copy the slot is still sealed with the key in the generation asked for,
        and the bytes in G1 have the checksum. Where it says False, or raises after it began, the
        block holds zeros: bad bytes must not stay in a cache, whoever gets the block next. Kernels
        multiply also what lies beyond a sequence's end, by 0, and a NaN there is a NaN for all.
        Writes nothing before `after` is done, as in `save`. Raises IndexError for a block that
        isn't there; a slot that isn't is False.
        """
        self._check([item.block for item in items])
        good = [0 <= item.slot.index < self._arena.slots for item in items]
        there = [item for item, ok in zip(items, good, strict=True) if ok]
        self._lanes.wait(self._lanes.load, after)
        blocks = [item.block for item in there]
        slots = [item.slot.index for item in there]
        verdicts: list[bool] = []
        try:
            found = self._lanes.load.move(blocks, slots, self._verify)
            for item, total in zip(there, found, strict=True):
                verdicts.append(self._is(item, total))
        finally:
            verdicts += [False] * (len(there) - len(verdicts))
            if bad := [block for block, ok in zip(blocks, verdicts, strict=True) if not ok]:
                self._lanes.clear(bad)
        told = iter(verdicts)
        return [ok and next(told) for ok in good]

    def _is(self, item: LoadItem, found: int) -> bool:
        if not self._verify:
            return True
        return (
            self._arena.holds(item.slot.index, item.slot.generation, item.key)
            and self._rank < len(item.checksums)
            and item.checksums[self._rank] == found
        )

    def _check(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not 0 <= block < self.layout.num_blocks:
                raise IndexError(f"block {block} of {self.layout.num_blocks}")

    def close(self) -> None:
        """Lets go of cache and arena (and of the arena's registration with the GPU)."""
        self._lanes.close()


def _gpu_lanes(
    layout: CacheLayout, caches: Sequence[torch.Tensor], arena: Arena, rank: int
) -> Lanes:
    # Imported where there is a GPU alone: nothing of it is of use elsewhere.
    from services.worker.connector.gpucopy import cuda, gpu_lanes

    return gpu_lanes(layout, caches, arena, rank, cuda(caches[0].device))
