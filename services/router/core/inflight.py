"""Prefixes of requests that are booked or running: what will be at a worker before its turn comes.

An engine serves its queue in order and caches full blocks as it schedules them, so a prompt finds
there what the requests ahead of it bring, stored yet or not. The same figures tell how many
requests crowd on one copy of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SAMPLES = 16
"""Blocks of a prompt at which the crowd is counted."""


@dataclass(frozen=True, slots=True)
class Mates:
    """Requests in flight at one worker that share a prefix with a prompt."""

    depth: int
    """Leading blocks of the prompt that some request there has or brings."""
    crowd: float
    """Requests there that share an average block of the prompt: half of the prompt counts half."""


class InflightPrefixes:
    """Counts, for each block key, the requests in flight at each slot whose prompt has it.

    A key stands for its whole chain, so a slot that counts at one block of a prompt counts at all
    earlier ones; questions rely on that and search by halves.
    """

    def __init__(self) -> None:
        self._at: dict[int, dict[int, int]] = {}

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """A request with these prompt blocks is at `slot`."""
        at = self._at
        for key in keys:
            counts = at.get(key)
            if counts is None:
                at[key] = {slot: 1}
            else:
                counts[slot] = counts.get(slot, 0) + 1

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """Takes back one `add` with the same arguments."""
        at = self._at
        for key in keys:
            counts = at[key]
            left = counts[slot] - 1
            if left:
                counts[slot] = left
            elif len(counts) > 1:
                del counts[slot]
            else:
                del at[key]

    def mates(self, keys: Sequence[int], limit: int) -> dict[int, Mates]:
        """For each slot with requests that share a prefix with `keys`: how deep, how many.

        `depth` counts at most the first `limit` keys.
        """
        first = self._at.get(keys[0]) if keys else None
        if first is None:
            return {}
        count = len(keys)
        steps = (
            range(count) if count <= _SAMPLES else [i * count // _SAMPLES for i in range(_SAMPLES)]
        )
        sums: dict[int, int] = {}
        for i in steps:
            counts = self._at.get(keys[i])
            if counts is None:
                break
            for slot, n in counts.items():
                sums[slot] = sums.get(slot, 0) + n
        return {
            slot: Mates(self._depth(slot, keys, limit), total / len(steps))
            for slot, total in sums.items()
        }

    def _depth(self, slot: int, keys: Sequence[int], limit: int) -> int:
        low, high = 0, min(limit, len(keys))
        while low < high:
            middle = (low + high) // 2
            if slot in self._at.get(keys[middle], ()):
                low = middle + 1
            else:
                high = middle
        return low

    def counts(self) -> dict[tuple[int, int], int]:
        """All counts by (key, slot); for invariants and tests."""
        return {(key, slot): n for key, at in self._at.items() for slot, n in at.items()}
