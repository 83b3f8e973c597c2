"""Who holds which blocks below G1. Knows no time.

For each namespace a flat dict maps a block's key to one number: three bits (G2, G3, G4) for each
daemon that holds it, equal numbers shared. So a prompt is looked up there once, whatever the number
of daemons (walk.py), and nothing is ever copied to a worker. What was found to be alike for a whole
stretch of a prompt is remembered until one of its blocks changes: a look-up of each block is mostly
a miss of the CPU's caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from itertools import filterfalse
from operator import xor

from services.common.events.model import Tier, TierRate
from services.router.core.index import Digest

LOWER_TIERS = (Tier.G2, Tier.G3, Tier.G4)
TIER_BITS = {Tier.G2: 1, Tier.G3: 2, Tier.G4: 4}
G4_BIT = TIER_BITS[Tier.G4]
ALL_TIERS = 7
"""Set of all lower tiers, as bits."""
LOCAL_TIERS = 3
"""Those of a daemon's own machine: G2 and G3."""
_WIDTH = 3
"""Bits of one daemon."""
_MANY = 1024
"""Blocks at a time that are worth a detour through sets, which are faster for new ones."""
_MOST_INTERNED = 1 << 16
_MOST_REMEMBERED = 1 << 18
"""Blocks of stretches: some 30 MB. Beyond that the oldest are forgotten."""


def tier_set(tiers: Iterable[Tier]) -> int:
    """Lower tiers as bits."""
    return sum(TIER_BITS[t] for t in set(tiers))


@dataclass(slots=True)
class Overlap:
    """Usable leading blocks of a prompt: G1, then those beyond, each in the best tier it is in."""

    g1: int = 0
    g2: int = 0
    g3: int = 0
    g4: int = 0
    peer: int = 0
    """From the memory of other nodes."""

    @property
    def lower(self) -> int:
        """Usable blocks beyond G1."""
        return self.g2 + self.g3 + self.g4 + self.peer

    @property
    def total(self) -> int:
        """Usable blocks in all tiers."""
        return self.g1 + self.g2 + self.g3 + self.g4 + self.peer


@dataclass(slots=True)
class Stretch:
    """Consecutive blocks of a chain that all lie in the same tiers of the same daemons."""

    keys: list[int]
    mask: int


class TierSpace:
    """Blocks of one namespace in the tiers of all daemons."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        """Key to the tiers of all daemons."""
        self.stretches: dict[int, Stretch] = {}
        """What is remembered, by the first key. Of one chain: keys stand for all before them."""
        self._stretch_of: dict[int, int] = {}
        """The first key of the stretch that a block is part of."""
        self._interned: dict[int, int] = {}
        self._free: list[int] = []
        self.beyond = 0
        """Bits in use: a shift by so many finds nothing."""

    @property
    def unused(self) -> bool:
        """Whether no daemon has a place here."""
        return len(self._free) * _WIDTH == self.beyond

    def take(self) -> int:
        """A place for a daemon: by how many bits its tiers are shifted."""
        if self._free:
            return self._free.pop()
        self.beyond += _WIDTH
        return self.beyond - _WIDTH

    def give_back(self, shift: int) -> None:
        """A place is free: no mask has a bit of it."""
        self._free.append(shift)

    def remember(self, keys: list[int], mask: int) -> None:
        """All these, which follow each other in a chain, have this mask, which is not 0."""
        while len(self._stretch_of) >= _MOST_REMEMBERED:
            self.changed(next(iter(self.stretches)))
        mine = dict.fromkeys(keys, keys[0])
        if len(mine) == len(keys) and self._stretch_of.keys().isdisjoint(mine):
            self.stretches[keys[0]] = Stretch(keys, mask)
            self._stretch_of.update(mine)

    def changed(self, key: int) -> None:
        """A block's mask is another, or it is gone."""
        first = self._stretch_of.get(key)
        if first is not None:
            for each in self.stretches.pop(first).keys:
                del self._stretch_of[each]

    def check_invariants(self) -> None:
        """Raises AssertionError when what is remembered is not so."""
        parts = {key: first for first, stretch in self.stretches.items() for key in stretch.keys}
        assert parts == self._stretch_of
        for first, stretch in self.stretches.items():
            assert first == stretch.keys[0]
            assert {self.masks[key] for key in stretch.keys} == {stretch.mask}

    def intern(self, mask: int) -> int:
        """The one object for this number."""
        if len(self._interned) > _MOST_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)


class Holding:
    """One daemon's blocks of one namespace: its keys here, their tiers in the space's masks."""

    __slots__ = ("_counts", "_xors", "keys", "rates", "shift", "space")

    def __init__(self, space: TierSpace) -> None:
        self.space = space
        self.shift = space.take()
        self.keys: set[int] = set()
        self.rates: Mapping[Tier, TierRate] = {}
        """What the daemon has measured; never changed, but replaced."""
        self._counts = dict.fromkeys(LOWER_TIERS, 0)
        self._xors = dict.fromkeys(LOWER_TIERS, 0)

    @property
    def g2_flag(self) -> int:
        """Its bit for G2."""
        return 1 << self.shift

    @property
    def g4_flag(self) -> int:
        """Its bit for G4."""
        return G4_BIT << self.shift

    def store(self, tier: Tier, keys: Iterable[int], room: int) -> int:
        """Blocks came to a tier. Those that would need more than `room` new entries are refused.

        Returns how many were.
        """
        flag, mine = TIER_BITS[tier] << self.shift, ALL_TIERS << self.shift
        masks, intern, changed = self.space.masks, self.space.intern, self.space.changed
        keys = keys if isinstance(keys, Sequence | Set) else list(keys)
        if _MANY <= len(keys) <= room:
            # In their order, which is mostly that of chains: near each other in memory as well.
            new = dict.fromkeys(filterfalse(masks.__contains__, keys), intern(flag))
            masks.update(new)
            self.keys.update(new)
            room -= len(new)
            self._counts[tier] += len(new)
            self._xors[tier] = reduce(xor, new, self._xors[tier])
        count, digest, refused = self._counts[tier], self._xors[tier], 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask & flag:
                continue
            if not mask & mine:
                if room <= 0:
                    refused += 1
                    continue
                room -= 1
                self.keys.add(key)
            masks[key] = intern(mask | flag)
            if mask:
                changed(key)
            count += 1
            digest ^= key
        self._counts[tier], self._xors[tier] = count, digest
        return refused

    def remove(self, tier: Tier, keys: Iterable[int]) -> None:
        """Blocks left a tier; those not known there are skipped."""
        flag, mine = TIER_BITS[tier] << self.shift, ALL_TIERS << self.shift
        masks, intern, changed = self.space.masks, self.space.intern, self.space.changed
        count, digest = self._counts[tier], self._xors[tier]
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & flag:
                continue
            mask ^= flag
            changed(key)
            if mask:
                masks[key] = intern(mask)
            else:
                del masks[key]
            if not mask & mine:
                self.keys.remove(key)
            count -= 1
            digest ^= key
        self._counts[tier], self._xors[tier] = count, digest

    def clear(self, tier: Tier) -> None:
        """A tier is empty now."""
        self.remove(tier, self.keys_in(tier))

    def keys_in(self, tier: Tier) -> set[int]:
        """All blocks in a tier."""
        flag, masks = TIER_BITS[tier] << self.shift, self.space.masks
        return {key for key in self.keys if masks[key] & flag}

    def forget(self, limit: int) -> int:
        """Drops up to `limit` entries in all tiers; how many. For one that nobody asks any more."""
        masks, keep = self.space.masks, ~(ALL_TIERS << self.shift)
        batch = [self.keys.pop() for _ in range(min(limit, len(self.keys)))]
        for key in batch:
            mask = masks[key] & keep
            self.space.changed(key)
            if mask:
                masks[key] = self.space.intern(mask)
            else:
                del masks[key]
        return len(batch)

    def digest(self, tier: Tier) -> Digest:
        """Count and xor of the keys in a tier."""
        return Digest(self._counts[tier], self._xors[tier])

    def check_invariants(self) -> None:
        """Raises AssertionError when keys, masks and counts disagree."""
        mine = ALL_TIERS << self.shift
        assert self.keys == {key for key, mask in self.space.masks.items() if mask & mine}
        for tier in LOWER_TIERS:
            keys = self.keys_in(tier)
            assert self.digest(tier) == Digest(len(keys), reduce(xor, keys, 0)), tier


@dataclass(slots=True)
class Reach:
    """A daemon's tiers, as its workers can use them."""

    space: TierSpace
    shift: int
    """Where its bits begin."""
    remote: int
    """Bits of all daemons' G4 that is its own as well."""
    rates: Mapping[Tier, TierRate]
    peers: int = 0
    """Bits of the host memory of all daemons that it can fetch from."""
