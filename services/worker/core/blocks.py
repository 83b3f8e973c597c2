"""Mirror of the engine's G1 blocks by key, with reference counts.

An engine may hold several copies of one block; others are told of the first and of the loss of the
last. Fed with the engine's own changes in order; says what to publish.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

from services.common.events.model import (
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Tier,
    TierBlocks,
)
from services.common.ids import BlockKey


@dataclass(frozen=True, slots=True)
class CopiesAdded:
    """The engine holds one more copy of each of these blocks."""

    keys: Sequence[BlockKey]
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class CopiesDropped:
    """The engine lost one copy of each of these blocks."""

    keys: Sequence[BlockKey]
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class AllDropped:
    """The engine lost all blocks."""

    dp_rank: int = 0


BlockChange = CopiesAdded | CopiesDropped | AllDropped
BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


class BlockMirror:
    """Which blocks the engine holds, for each data-parallel rank."""

    def __init__(self) -> None:
        self._copies: dict[int, Counter[BlockKey]] = {}
        self._xors: dict[int, int] = {}
        self.unknown_drops = 0
        """Drops of blocks that were never added: a lost or misread event."""

    def apply(self, changes: Iterable[BlockChange]) -> list[BlockEvent]:
        """Takes changes in order; returns what others must learn, neighbours of one kind merged."""
        events: list[BlockEvent] = []
        keys: list[BlockKey] = []
        kind: type[BlocksStored] | type[BlocksRemoved] = BlocksStored
        rank = 0

        def flush() -> None:
            nonlocal keys
            if keys:
                events.append(kind(Tier.G1, tuple(keys), rank))
                self._xors[rank] = reduce(xor, keys, self._xors.get(rank, 0))
                keys = []

        for change in changes:
            held = self._copies.setdefault(change.dp_rank, Counter())
            if isinstance(change, AllDropped):
                flush()
                held.clear()
                self._xors[change.dp_rank] = 0
                events.append(BlocksCleared(Tier.G1, change.dp_rank))
                continue
            wanted = BlocksStored if isinstance(change, CopiesAdded) else BlocksRemoved
            if wanted is not kind or change.dp_rank != rank:
                flush()
                kind, rank = wanted, change.dp_rank
            for key in change.keys:
                if isinstance(change, CopiesAdded):
                    held[key] += 1
                    if held[key] == 1:
                        keys.append(key)
                elif (count := held.get(key, 0)) > 1:
                    held[key] = count - 1
                elif count == 1:
                    del held[key]
                    keys.append(key)
                else:
                    self.unknown_drops += 1
        flush()
        return events

    def run(self, keys: Iterable[BlockKey], dp_rank: int = 0) -> int:
        """How many of `keys` are held, from the first on without a hole."""
        held = self._copies.get(dp_rank)
        if not held:
            return 0
        return sum(1 for _ in itertools.takewhile(held.__contains__, keys))

    def blocks(self) -> tuple[TierBlocks, ...]:
        """All blocks held, for a snapshot."""
        return tuple(
            TierBlocks(Tier.G1, tuple(held), rank) for rank, held in self._copies.items() if held
        )

    def digests(self) -> list[BlocksDigest]:
        """All blocks held, condensed; one for each rank that was ever heard of."""
        return [
            BlocksDigest(Tier.G1, len(held), self._xors.get(rank, 0), rank)
            for rank, held in self._copies.items()
        ]

    def __len__(self) -> int:
        return sum(len(held) for held in self._copies.values())

    def check_invariants(self) -> None:
        """Raises AssertionError when the mirror contradicts itself."""
        for rank, held in self._copies.items():
            assert all(count > 0 for count in held.values()), "a block with no copies is kept"
            assert reduce(xor, held, 0) == self._xors.get(rank, 0)
