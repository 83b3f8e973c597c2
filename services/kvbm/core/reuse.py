"""Reuse: how likely blocks of one kind are asked for again at some age, learned while running.

A sample of all keys, those that were evicted included, is watched from one use to the next. For
each kind of block and each bin of age that gives the chance of being used again within that bin,
and from it the Gittins index: the most hits for a slot's time that keeping a block from now on can
bring, whatever the moment at which it is given up. Evicting the lowest index is the best that can
be done by kind and age alone (Gittins 1979; for caches, "hit density", Beckmann et al., NSDI 2018).

Ages are counted in uses of blocks, and in units of the tier's capacity.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable

_STEPS = range(-10, 9)
"""Bins end at capacity x 2 ** (step / 2): from 1/32 of a capacity to 16 of them."""
_CHANCE = 0.05
"""Chance of a hit in any one bin before there is evidence (in the first, which is wider than those
after it, more). It knows no kind, and the index falls with age: least recently used goes first."""
_PRIOR = 100.0
"""Blocks of evidence that count as much as what holds without. High, since the blocks of a prompt
come and go together: a hundred of them are but a few prompts."""
_TRUSTED_AFTER = 4
"""Capacities of uses before evidence counts at all: sooner, the old are too few to judge them."""
_DECAY = 0.98
"""What is left of evidence after a quarter of a capacity of uses: it lasts 12 capacities."""


class Reuse:
    """Chances by kind and age. Pure; `now` is the count of uses so far."""

    def __init__(self, capacity: int, kinds: int) -> None:
        self.bounds: list[float] = [capacity * 2.0 ** (step / 2) for step in _STEPS]
        """Where each bin of age ends; one more, for all that is older, follows them."""
        self.bins = len(self.bounds)
        self._widths = [b - a for a, b in zip([0.0, *self.bounds], self.bounds, strict=False)]
        self._period = max(256, capacity // 4)
        self._next = self._period
        first = 1.5 * _CHANCE * self._widths[0] / self._widths[1]
        self._unproven = [first] + [_CHANCE] * (self.bins - 1)
        self._trusted = _TRUSTED_AFTER * capacity
        # Of each kind and bin: blocks that reached it, and those that were used again in it.
        self._reached = [[0.0] * self.bins for _ in range(kinds)]
        self._hits = [[0.0] * self.bins for _ in range(kinds)]
        self._watched: list[list[OrderedDict[Hashable, int]]] = [
            [OrderedDict() for _ in range(self.bins)] for _ in range(kinds)
        ]
        self._where: dict[Hashable, tuple[int, int]] = {}
        self.index: list[list[float]] = []
        """Gittins index by kind and bin; 0 in the last."""
        self.chance: list[list[float]] = []
        """Chance of being used again at all, by kind and bin."""
        self._learn(0)

    def used(self, key: Hashable, kind: int, now: int) -> None:
        """A block was used and is of that kind from now on."""
        self._end(key, hit=True)
        self._where[key] = (kind, 0)
        self._watched[kind][0][key] = now
        self._reached[kind][0] += 1

    def forget(self, key: Hashable) -> None:
        """A block is watched no more, and nobody knows what would have become of it."""
        self._end(key, hit=False)

    def _end(self, key: Hashable, *, hit: bool) -> None:
        if (where := self._where.pop(key, None)) is not None:
            kind, bin = where
            del self._watched[kind][bin][key]
            self._hits[kind][bin] += hit

    def advance(self, now: int) -> bool:
        """Lets those watched grow older; True when that has changed the index."""
        for kind, bins in enumerate(self._watched):
            for bin in reversed(range(self.bins)):
                queue = bins[bin]
                if not queue:
                    continue
                due = now - self.bounds[bin]
                while queue and (since := next(iter(queue.values()))) <= due:
                    key, _ = queue.popitem(last=False)
                    if bin + 1 < self.bins:
                        bins[bin + 1][key] = since
                        self._where[key] = (kind, bin + 1)
                        self._reached[kind][bin + 1] += 1
                    else:
                        del self._where[key]
        if now < self._next:
            return False
        self._next = now + self._period
        self._learn(now)
        for rows in (self._reached, self._hits):
            for row in rows:
                row[:] = [value * _DECAY for value in row]
        return True

    def _learn(self, now: int) -> None:
        prior = _PRIOR if now >= self._trusted else float("1e12")
        hits = [sum(column) for column in zip(*self._hits, strict=True)]
        reached = [sum(column) for column in zip(*self._reached, strict=True)]
        # Each kind is shrunk towards all kinds together, these towards what holds without evidence.
        pooled = [
            (h + prior * p) / (r + prior)
            for h, r, p in zip(hits, reached, self._unproven, strict=True)
        ]
        self.index, self.chance = [], []
        for kind_hits, kind_reached in zip(self._hits, self._reached, strict=True):
            chances = [
                (h + prior * p) / (r + prior)
                for h, r, p in zip(kind_hits, kind_reached, pooled, strict=True)
            ]
            self.index.append([self._gittins(chances, bin) for bin in range(self.bins)] + [0.0])
            never, ever = 1.0, [0.0]
            for chance in reversed(chances):
                never *= 1 - chance
                ever.append(1 - never)
            self.chance.append(ever[::-1])

    def _gittins(self, chances: list[float], bin: int) -> float:
        """The best ratio of hits to time over all ends, for a block that has reached a bin."""
        alive, hits, time, best = 1.0, 0.0, 0.0, 0.0
        for chance, width in zip(chances[bin:], self._widths[bin:], strict=True):
            hits += alive * chance
            time += alive * width * (1 - chance / 2)
            alive *= 1 - chance
            best = max(best, hits / time)
        return best

    def bin_of(self, age: float) -> int:
        """The bin of an age."""
        return bisect_right(self.bounds, age)

    def value(self, kind: int, bin: int, age: float) -> float:
        """The index at an age within a bin (or a little beyond), by the straight line between."""
        row = self.index[kind]
        if bin >= self.bins:
            return 0.0
        part = min(1.0, 1 - (self.bounds[bin] - age) / self._widths[bin])
        return row[bin] + part * (row[bin + 1] - row[bin])

    def check_invariants(self) -> None:
        """Raises AssertionError when the books disagree."""
        watched = {
            key: (kind, bin)
            for kind, bins in enumerate(self._watched)
            for bin, queue in enumerate(bins)
            for key in queue
        }
        assert watched == self._where
        assert all(0 <= c <= 1 for row in self.chance for c in row)
        assert all(i >= 0 for row in self.index for i in row)
