"""Prefixes of requests that are booked or running: what will be at a worker before its turn comes.

An engine serves its queue in order and caches full blocks as it schedules them, so a prompt finds
there what the requests ahead of it bring, stored yet or not. The same figures tell how many
requests crowd on one copy of a prefix. Counting every block would cost more than all the rest of a
decision, so requests are counted at some blocks only, ever further apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_DENSE = 16
"""So many first blocks are all counted at; then four for each doubling."""
_SPARSE = 128
"""From here on two for each doubling."""
_LONGEST = 1 << 24
_ALL = -1
"""Stands among slots for the sum over them."""
_NOTHING: Mapping[int, int] = {}
_RECENT = 2
"""Requests remembered for each slot and first block, to tell exactly where prompts part."""


def _anchors() -> list[int]:
    positions = list(range(_DENSE))
    octave = _DENSE
    while octave < _LONGEST:
        parts = 4 if octave < _SPARSE else 2
        positions += [octave + i * octave // parts for i in range(parts)]
        octave *= 2
    return positions


ANCHORS = _anchors()
"""Numbers of the blocks at which requests are counted."""


def anchored(keys: Sequence[int]) -> list[int]:
    """The blocks of a prompt at which it is counted."""
    return [keys[position] for position in ANCHORS[: bisect_left(ANCHORS, len(keys))]]


@dataclass(slots=True)
class Mates:
    """Requests in flight that share a prefix with a prompt, by slot."""

    depth: dict[int, int] = field(default_factory=dict)
    """Leading blocks of the prompt that some request there has or brings; at least so many."""
    crowd: dict[int, float] = field(default_factory=dict)
    """Requests there that share an average block of the prompt: half of the prompt counts half."""


class InflightPrefixes:
    """Counts the requests in flight at each slot by the blocks of their prompts.

    A key stands for its whole chain, so a slot that counts at one block of a prompt counts at all
    earlier ones, and equal sums at two blocks mean the same requests.
    """

    def __init__(self) -> None:
        # Most blocks are those of one request only: then its slot stands for the counts.
        self._at: dict[int, int | dict[int, int]] = {}
        self._recent: dict[tuple[int, int], list[Sequence[int]]] = {}

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """A request with these prompt blocks is at `slot`."""
        if not keys:
            return
        at, mine = self._at, anchored(keys)
        for number, key in enumerate(mine):
            counts = at.get(key)
            if counts is None:
                # Behind a new block there are mostly new ones only.
                new = dict.fromkeys(mine[number:], slot)
                if len(new) == len(mine) - number and at.keys().isdisjoint(new):
                    at.update(new)
                    break
                at[key] = slot
                continue
            if isinstance(counts, int):
                counts = at[key] = {_ALL: 1, counts: 1}
            counts[_ALL] += 1
            counts[slot] = counts.get(slot, 0) + 1
        recent = self._recent.setdefault((slot, keys[0]), [])
        recent.append(keys)
        if len(recent) > _RECENT:
            del recent[0]

    def remove(self, slot: int, keys: Sequence[int]) -> None:
        """Takes back one `add` with the same arguments."""
        if not keys:
            return
        at = self._at
        for key in anchored(keys):
            counts = at[key]
            if isinstance(counts, int):
                del at[key]
                continue
            counts[_ALL] -= 1
            left = counts[slot] - 1
            if left:
                counts[slot] = left
            elif counts[_ALL]:
                del counts[slot]
            else:
                del at[key]
        where = slot, keys[0]
        if slot not in _counted(at.get(keys[0])):
            self._recent.pop(where, None)
            return
        recent = self._recent.get(where, [])
        for i, other in enumerate(recent):
            if other is keys:
                del recent[i]
                break

    def mates(self, keys: Sequence[int], limit: int, known: Mapping[int, int] = _NOTHING) -> Mates:
        """For each slot with requests that share a prefix with `keys`: how deep, how many.

        `known` is what slots have anyhow: smaller depths may be told as that. `depth` counts at
        most the first `limit` keys. It is exact up to the 16th block and for the latest requests;
        else it may be too small by what lies between two anchors.
        """
        mates = Mates()
        if not keys or keys[0] not in self._at:
            return mates
        get = self._at.get
        total = len(keys)
        used = bisect_left(ANCHORS, total)
        last = None
        runs: list[tuple[int, int, int | dict[int, int]]] = []
        for i in range(used):
            counts = get(keys[ANCHORS[i]])
            if counts is None:
                used = i
                break
            requests = 1 if isinstance(counts, int) else counts[_ALL]
            if requests != last:
                last = requests
                runs.append((i, ANCHORS[i], counts))
        ended = used
        until = ANCHORS[used] if ANCHORS[used] < total else total
        depth, crowd = mates.depth, mates.crowd
        for first, begin, counts in reversed(runs):
            share = (until - begin) / total
            for slot, count in _counted(counts).items():
                if slot in crowd:
                    crowd[slot] += count * share
                elif slot != _ALL:
                    crowd[slot] = count * share
                    depth[slot] = ended
            ended, until = first, begin
        most = min(limit, total)
        head = keys[0]
        for slot, passed in depth.items():
            low = max(ANCHORS[passed - 1] + 1, known.get(slot, 0))
            high = ANCHORS[passed]
            if low >= high or low >= most:
                depth[slot] = min(low, most)
                continue
            for other in self._recent.get((slot, head), ()):
                if low < most and low < len(other) and keys[low] == other[low]:
                    low = _shared(keys, other, low + 1, min(high, most, len(other)))
            depth[slot] = low
        return mates

    def counts(self) -> dict[tuple[int, int], int]:
        """All counts by (key, slot); for invariants and tests."""
        return {
            (key, slot): n
            for key, counts in self._at.items()
            for slot, n in _counted(counts).items()
            if slot != _ALL
        }

    def check_invariants(self) -> None:
        """Raises AssertionError when sums or what is remembered can't be right."""
        for key, counts in self._at.items():
            at = _counted(counts)
            assert at[_ALL] == sum(n for slot, n in at.items() if slot != _ALL), key
            assert min(at.values()) > 0
        for (slot, key), recent in self._recent.items():
            assert slot in _counted(self._at[key])
            assert len(recent) <= _RECENT


def _counted(counts: int | dict[int, int] | None) -> Mapping[int, int]:
    """Requests by slot, and of all."""
    if counts is None:
        return _NOTHING
    return {_ALL: 1, counts: 1} if isinstance(counts, int) else counts


def _shared(keys: Sequence[int], other: Sequence[int], low: int, high: int) -> int:
    """How many keys two chains share, if that is from `low` to `high`."""
    while low < high:
        middle = (low + high) // 2
        if keys[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
