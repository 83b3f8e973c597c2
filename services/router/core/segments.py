"""Runs of blocks that came together, and who holds all or the first so many of them.

A prefill brings dozens of blocks of one chain at once, and engines evict a chain from its end. So
the index keeps such a run as one object, shared by all its blocks: who has a whole run is in one
interned set, who has a part of it is noted apart. A key stands for the whole chain before it, so a
prompt is compared with a run by the run's two ends, once the run is known to be one chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from services.router.core.holders import HolderSet

SHORTEST = 8
"""Blocks from which on a run is worth an object."""
LONGEST = 128
"""Most blocks of a run."""


Part = int | set[int]
"""What a holder has of a run: the first so many blocks, or just these."""


class Segment:
    """A run of blocks. Mutable, compared by identity; all fields belong to the index."""

    __slots__ = ("full", "keys", "partial", "proven")

    def __init__(self, keys: list[int], full: HolderSet, proven: bool = False) -> None:
        self.keys = keys
        self.full = full
        """Holders of all of them."""
        self.partial: dict[int, Part] | None = None
        """What others hold, never nothing and never all."""
        self.proven = 0 if proven else len(keys)
        """From this block on they are known to be one chain: somebody's prompt said so."""

    def holders(self, key: int) -> frozenset[int]:
        """All who have one block."""
        if not self.partial:
            return self.full.members
        at = self.keys.index(key)
        some = {s for s, p in self.partial.items() if (at < p if isinstance(p, int) else key in p)}
        return self.full.members | some

    def held_by(self, slot: int) -> Sequence[int]:
        """The blocks that one holder has, in order."""
        if slot in self.full.members:
            return self.keys
        part: Part = self.partial.get(slot, 0) if self.partial else 0
        if isinstance(part, int):
            return self.keys[:part]
        return [key for key in self.keys if key in part]

    def match(self, start: int, keys: list[int], at: int, end: int) -> int:
        """How many of keys[at:end] are the run's blocks from `start` on; the first one is.

        Notes that the rest of the run is one chain when all of it agrees.
        """
        mine = self.keys
        size = min(len(mine) - start, end - at)
        if start >= self.proven:
            if keys[at + size - 1] == mine[start + size - 1]:
                return size
            low, high = 1, size - 1
            while low < high:
                middle = (low + high + 1) // 2
                if keys[at + middle - 1] == mine[start + middle - 1]:
                    low = middle
                else:
                    high = middle - 1
            return low
        if keys[at : at + size] != mine[start : start + size]:
            return next(i for i in range(1, size) if keys[at + i] != mine[start + i])
        if start + size == len(mine):
            self.proven = start
        return size

    def run_of(self, part: Part, start: int, count: int) -> int:
        """How many of `count` blocks from `start` on a holder of that part has, without a hole."""
        if isinstance(part, int):
            return max(0, min(part - start, count))
        return sum(1 for _ in takewhile(part.__contains__, self.keys[start : start + count]))
