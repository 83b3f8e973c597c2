"""Blocks for tests of the local disk: an arena with known bytes, and their way to disk and back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.common.arena import Arena, CorruptHeader, Geometry, SlotHeader, SlotState
from services.kvbm.tiers.disk import LocalDisk, open_disk_tier
from services.kvbm.tiers.port import Transfer
from services.kvbm.tiers.space import LocalSpace

GEOMETRY = Geometry(block_size=32, shard_bytes=10_000, ranks=2, layout="test")
NAMESPACE = hashlib.sha256(b"test namespace").digest()
MIB = 1 << 20
ARENA_SLOTS = 64


def key_of(number: int) -> bytes:
    """The key of a block by its number."""
    return hashlib.sha256(b"block %d" % number).digest()


def content_of(number: int, geometry: Geometry = GEOMETRY) -> bytes:
    """A block's bytes, by its number."""
    return random.Random(number).randbytes(geometry.payload_bytes)


class Blocks:
    """An arena in a test's folder. Slot i of it is used for whatever is moved i-th."""

    def __init__(
        self, folder: Path, namespace: bytes = NAMESPACE, slots: int = ARENA_SLOTS
    ) -> None:
        path = folder / f"{namespace.hex()[:8]}.arena"
        self.arena = Arena.create(path, namespace, GEOMETRY, slots)

    def filled(
        self, numbers: Iterable[int], slots: Iterable[int], first: int = 0
    ) -> list[Transfer]:
        """Puts blocks into the arena, from slot `first` on, to be stored into these slots."""
        transfers = []
        for at, (number, slot) in enumerate(zip(numbers, slots, strict=True), first):
            self.arena.payload(at)[:] = content_of(number)
            header = SlotHeader(
                SlotState.SEALED,
                generation=1,
                key=key_of(number),
                created_ms=number,
                payload_bytes=GEOMETRY.payload_bytes,
                checksums=self.arena.checksums(at),
            )
            transfers.append(Transfer(at, header, slot))
        return transfers

    def cleared(self, transfers: Iterable[Transfer]) -> None:
        """Overwrites these in the arena, so that only a load can bring them back."""
        for transfer in transfers:
            self.arena.payload(transfer.arena_slot)[:] = bytes(GEOMETRY.payload_bytes)

    def holds(self, transfer: Transfer) -> bool:
        """Whether the arena has just the block's bytes."""
        number = transfer.header.created_ms
        return bytes(self.arena.payload(transfer.arena_slot)) == content_of(number)


@asynccontextmanager
async def disk_tier(folder: Path, cap: int = 64 * MIB, **more: Any) -> AsyncIterator[LocalDisk]:
    """A tier in `folder`."""
    floor = more.pop("floor", 0)
    async with open_disk_tier(folder, cap, floor, **more) as disk:
        yield disk


def sealed(space: LocalSpace) -> dict[int, SlotHeader]:
    """Slots that held a block when the space was opened."""
    return {
        slot: header
        for slot, header in enumerate(space.headers())
        if not isinstance(header, CorruptHeader) and header.state is SlotState.SEALED
    }
