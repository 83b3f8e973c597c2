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
_ALIKE = [bytes((tier,)) * _CHUNK for tier in range(8)]
"""A chunk of which all blocks are in the same tier."""
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
        start, peers, run = who[3], who[4], Run()
        while start < self._limit:
            chunk, skip = divmod(start, _CHUNK)
            tiers = self._best(who, chunk)
            hole = tiers.find(0, skip)
            end = len(tiers) if hole < 0 else hole
            g2, g3 = tiers.count(2, skip, end), tiers.count(3, skip, end)
            lower = end - skip - g2
            if lower and run.below is None:
                found = [tiers.find(tier, skip, end) for tier in (Tier.G3, Tier.G4, Tier.PEER)]
                run.below = chunk * _CHUNK + min(at for at in found if at >= 0)
            run.g2 += g2
            run.g3 += g3
            fetched = tiers.count(Tier.PEER, skip, end) if peers else 0
            run.g4 += lower - g3 - fetched
            run.peer += fetched
            if hole >= 0:
                break
            start = (chunk + 1) * _CHUNK
        return run

    def _best(self, who: tuple[int, int, int, int, int], chunk: int) -> bytes:
        """Number of the best tier of each block of a chunk; 0: there is none."""
        shift, remote, worth, _, peers = who
        masks = self._chunk(chunk)
        if isinstance(masks, int):
            return _ALIKE[_tier(masks, shift, remote, worth, peers)][: self._size(chunk)]
        known = shift, remote, worth, peers, chunk
        tiers = self._tiers.get(known)
        if tiers is None:
            best = {mask: _tier(mask, shift, remote, worth, peers) for mask in set(masks)}
            tiers = self._tiers[known] = bytes(map(best.__getitem__, masks))
        return tiers

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
