"""How far a prompt can be loaded from tiers below G1 (tiers.py), for any daemon. Knows no time.

A prompt is looked up once, in chunks, so that C does most of it, and no further than any daemon
goes. Daemons that hold none of it are alike: what others bring them is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from operator import or_

from services.common.events.model import Tier
from services.router.core.tiers import ALL_TIERS, G4_BIT, TIER_BITS, Reach, TierSpace

_CHUNK = 64
_ABSENT = repeat(0)
_BEST = tuple(
    next((int(tier) for tier, bit in TIER_BITS.items() if bit & bits), 0) for bits in range(8)
)
"""Number of the best tier in a set of tiers; 0: there is none."""
_NOBODY = -1
"""Stands for the place of a daemon that has none of a prompt."""


@dataclass(slots=True)
class Run:
    """A contiguous run of a prompt's blocks in a daemon's tiers."""

    g2: int = 0
    g3: int = 0
    g4: int = 0
    below: int | None = None
    """Number in the prompt of its first block that is not in G2."""
    peer: int = 0

    def add(self, tier: int, count: int, first: int) -> None:
        """So many blocks are in a tier, `first` is the number of the first one there."""
        if tier == Tier.G2:
            self.g2 += count
            return
        if self.below is None or first < self.below:
            self.below = first
        if tier == Tier.G3:
            self.g3 += count
        elif tier == Tier.G4:
            self.g4 += count
        else:
            self.peer += count

    @property
    def total(self) -> int:
        """Blocks of the run."""
        return self.g2 + self.g3 + self.g4 + self.peer


class TierWalk:
    """The first `limit` keys of one chain in one space; what was looked up is remembered."""

    def __init__(self, keys: Sequence[int], limit: int, space: TierSpace) -> None:
        self._keys = keys if isinstance(keys, list) else list(keys)
        self._limit = min(limit, len(keys))
        self._space = space
        self._chunks: dict[int, int | list[int]] = {}
        self._told: dict[int, int] = {}
        self._tiers: dict[tuple[int, int, int, int, int], bytes] = {}
        self._runs: dict[tuple[int, int, int, int, int], Run] = {}

    def run(self, reach: Reach, start: int, worth: int = ALL_TIERS, *, fetch: bool = False) -> Run:
        """The run from block number `start` on, up to the first hole.

        A block that is in no tier out of `worth` (bits) is a hole, unless (`fetch`) a peer has it.
        Treat the answer as immutable.
        """
        told = self._tell(start)
        shift = reach.shift if told >> reach.shift & ALL_TIERS else _NOBODY
        peers = reach.peers & told if fetch else 0
        who = shift, reach.remote & told, worth, start, peers
        found = self._runs.get(who)
        if found is None:
            found = self._runs[who] = self._run(who)
        return found

    def finds(self, reach: Reach) -> bool:
        """Whether a daemon finds any of the first blocks anywhere, be it of use or not."""
        told = self._tell(0)
        return bool(told >> reach.shift & ALL_TIERS or told & (reach.remote | reach.peers))

    def masks(self, start: int, end: int) -> list[int]:
        """Where each block is, from number `start` to before `end`."""
        if start >= end:
            return []
        masks: list[int] = []
        for chunk in range(start // _CHUNK, -(-end // _CHUNK)):
            found = self._chunk(chunk)
            masks += [found] * self._size(chunk) if isinstance(found, int) else found
        skip = start - start % _CHUNK
        return masks[start - skip : end - skip]

    def _tell(self, start: int) -> int:
        """All bits of the blocks from `start` on to the first that nobody has (or a few more)."""
        told = self._told.get(start)
        if told is not None:
            return told
        told = 0
        for chunk in range(start // _CHUNK, -(-self._limit // _CHUNK)):
            masks = self._chunk(chunk)
            if isinstance(masks, int):
                told |= masks
                if not masks:
                    break
                continue
            told |= reduce(or_, set(masks))
            skip = start - chunk * _CHUNK
            if 0 in (masks[skip:] if skip > 0 else masks):
                break
        self._told[start] = told
        return told

    def _run(self, who: tuple[int, int, int, int, int]) -> Run:
        shift, remote, worth, start, peers = who
        run = Run()
        while start < self._limit:
            chunk, skip = divmod(start, _CHUNK)
            masks = self._chunk(chunk)
            if isinstance(masks, int):
                tier = _tier(masks, shift, remote, worth, peers)
                if not tier:
                    break
                run.add(tier, self._size(chunk) - skip, start)
            elif self._add_some(run, masks, chunk, who, skip):
                break
            start = (chunk + 1) * _CHUNK
        return run

    def _add_some(
        self, run: Run, masks: list[int], chunk: int, who: tuple[int, int, int, int, int], skip: int
    ) -> bool:
        """Goes on with the blocks of a chunk; whether the run ends in it."""
        shift, remote, worth, _, peers = who
        known = shift, remote, worth, peers, chunk
        tiers = self._tiers.get(known)
        if tiers is None:
            best = {mask: _tier(mask, shift, remote, worth, peers) for mask in set(masks)}
            tiers = self._tiers[known] = bytes(map(best.__getitem__, masks))
        hole = tiers.find(0, skip)
        end = len(tiers) if hole < 0 else hole
        for tier in (Tier.G2, Tier.G3, Tier.G4, Tier.PEER):
            count = tiers.count(tier, skip, end)
            if count:
                run.add(tier, count, chunk * _CHUNK + tiers.find(tier, skip))
        return hole >= 0

    def _chunk(self, chunk: int) -> int | list[int]:
        """Masks of a chunk of the prompt's blocks; one, if it is that of all."""
        found = self._chunks.get(chunk)
        if found is None:
            found = self._chunks[chunk] = self._look_up(chunk)
        return found

    def _look_up(self, chunk: int) -> int | list[int]:
        begin, size = chunk * _CHUNK, self._size(chunk)
        keys = self._keys
        stretch = self._space.stretches.get(keys[begin])
        if (
            stretch is not None
            and len(stretch.keys) >= size
            and stretch.keys[size - 1] == keys[begin + size - 1]
        ):
            return stretch.mask
        mine = keys[begin : begin + size]
        masks = list(map(self._space.masks.get, mine, _ABSENT))
        first = masks[0]
        if masks.count(first) < size:
            return masks
        if first and size == _CHUNK:
            self._space.remember(mine, first)
        return first

    def _size(self, chunk: int) -> int:
        return min(_CHUNK, self._limit - chunk * _CHUNK)


def _tier(mask: int, shift: int, remote: int, worth: int, peers: int) -> int:
    """Number of the best tier of a block.

    Memory of a peer is nearer than remote storage, as daemons have it, too.
    """
    bits = mask >> shift & ALL_TIERS if shift >= 0 else 0
    if mask & remote:
        bits |= G4_BIT
    best = _BEST[bits & worth]
    if mask & peers and best in (0, Tier.G4):
        return int(Tier.PEER)
    return best
