"""What kvbm daemons hold below G1, and how far a prompt can be loaded from there. Knows no time.

A daemon's tiers are one holding for each namespace, shared by all its workers: a dict from block
key to the set of tiers as bits. It is joined to workers when a prompt is walked, never copied to
them. A walk runs in C a chunk of blocks at a time: it is done for each daemon and decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from operator import xor as xor_

from services.common.events.model import Tier, TierRate
from services.router.core.index import Digest

LOWER_TIERS = (Tier.G2, Tier.G3, Tier.G4)
_BITS = {Tier.G2: 1, Tier.G3: 2, Tier.G4: 4}
_G4_BIT = _BITS[Tier.G4]
ALL_TIERS = 7
"""Set of all lower tiers, as bits."""
_CHUNK = 16
_WIDEST_CHUNK = 1024
_ABSENT = repeat(0)


def tier_set(tiers: Iterable[Tier]) -> int:
    """Lower tiers as bits."""
    return sum(_BITS[t] for t in set(tiers))


def _best_table(worth: int) -> bytes:
    """Translates sets of tiers into the best tier's number, 0 where no tier is worth it."""
    table = bytearray(256)
    for bits in range(8):
        table[bits] = next((t for t in LOWER_TIERS if _BITS[t] & bits & worth), 0)
    return bytes(table)


_BEST = tuple(_best_table(worth) for worth in range(8))
_ONLY_G4 = bytes(bits & _G4_BIT for bits in range(256))


@dataclass(frozen=True, slots=True)
class Overlap:
    """Usable leading blocks of a prompt: G1, then those beyond, each in the best tier it is in."""

    g1: int = 0
    g2: int = 0
    g3: int = 0
    g4: int = 0

    @property
    def lower(self) -> int:
        """Usable blocks below G1."""
        return self.g2 + self.g3 + self.g4

    @property
    def total(self) -> int:
        """Usable blocks in all tiers."""
        return self.g1 + self.g2 + self.g3 + self.g4


class Holding:
    """One daemon's blocks of one namespace. A block in several tiers is one entry."""

    __slots__ = ("_counts", "_xors", "blocks", "rates")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Key to tiers, as bits."""
        self.rates: dict[Tier, TierRate] = {}
        """What the daemon has measured."""
        self._counts = dict.fromkeys(LOWER_TIERS, 0)
        self._xors = dict.fromkeys(LOWER_TIERS, 0)

    def __len__(self) -> int:
        return len(self.blocks)

    def store(self, tier: Tier, keys: Sequence[int], room: int) -> int:
        """Blocks came to a tier. Those that would need more than `room` entries are refused.

        Returns how many were.
        """
        bit, blocks = _BITS[tier], self.blocks
        if not blocks and len(keys) <= room:
            # A snapshot's first tier may have a million blocks: in C.
            self.blocks = blocks = dict.fromkeys(keys, bit)
            self._counts[tier], self._xors[tier] = len(blocks), reduce(xor_, blocks, 0)
            return 0
        count, xor, refused = self._counts[tier], self._xors[tier], 0
        for key in keys:
            bits = blocks.get(key, 0)
            if bits & bit:
                continue
            if not bits:
                if room <= 0:
                    refused += 1
                    continue
                room -= 1
            blocks[key] = bits | bit
            count += 1
            xor ^= key
        self._counts[tier], self._xors[tier] = count, xor
        return refused

    def remove(self, tier: Tier, keys: Iterable[int]) -> None:
        """Blocks left a tier; those not known there are skipped."""
        bit, blocks = _BITS[tier], self.blocks
        count, xor = self._counts[tier], self._xors[tier]
        for key in keys:
            bits = blocks.get(key, 0)
            if not bits & bit:
                continue
            if bits == bit:
                del blocks[key]
            else:
                blocks[key] = bits ^ bit
            count -= 1
            xor ^= key
        self._counts[tier], self._xors[tier] = count, xor

    def clear(self, tier: Tier) -> dict[int, int]:
        """A tier is empty now. Returns entries for the caller to free at leisure."""
        bit, old = _BITS[tier], self.blocks
        others = sum(count for t, count in self._counts.items() if t is not tier)
        self.blocks = {k: left for k, b in old.items() if (left := b & ~bit)} if others else {}
        self._counts[tier] = self._xors[tier] = 0
        return old

    def digest(self, tier: Tier) -> Digest:
        """Count and xor of the keys in a tier."""
        return Digest(self._counts[tier], self._xors[tier])

    def check_invariants(self) -> None:
        """Raises AssertionError when counts differ from what they count."""
        for tier in LOWER_TIERS:
            keys = [k for k, bits in self.blocks.items() if bits & _BITS[tier]]
            xor = 0
            for key in keys:
                xor ^= key
            assert self.digest(tier) == Digest(len(keys), xor), tier
        assert all(0 < bits <= ALL_TIERS for bits in self.blocks.values())


@dataclass(frozen=True, slots=True)
class Reach:
    """A daemon's tiers, as a worker can use them."""

    holding: Holding
    remote: Sequence[Holding] = ()
    """Holdings of all daemons that share its remote storage: their G4 is its own."""


class TierWalk:
    """The first `limit` keys of one chain, looked up in holdings; remembers what it has seen."""

    def __init__(self, keys: Sequence[int], limit: int) -> None:
        self._keys = keys
        self._limit = min(limit, len(keys))
        self._runs: dict[tuple[int, int, int], list[tuple[int, bytes]]] = {}
        self._remote: dict[int, bytearray] = {}

    def run(self, reach: Reach, start: int, worth: int = ALL_TIERS) -> bytes:
        """Best tier of each block from number `start` on, as numbers, up to the first hole.

        A block that is in no tier out of `worth` (bits) is a hole.
        """
        runs = self._runs.setdefault((id(reach.holding), id(reach.remote), worth), [])
        for begin, tiers in runs:
            if begin <= start <= begin + len(tiers):
                return tiers[start - begin :]
        found = self._walk(reach, start, worth)
        runs.append((start, found))
        return found

    def _walk(self, reach: Reach, start: int, worth: int) -> bytes:
        get, table = reach.holding.blocks.get, _BEST[worth]
        shared = bool(worth & _G4_BIT) and len(reach.remote) > 1
        found = bytearray()
        chunk = _CHUNK
        while start < self._limit:
            end = min(start + chunk, self._limit)
            bits = bytes(map(get, self._keys[start:end], _ABSENT))
            tiers = bits.translate(table)
            hole = tiers.find(0)
            if hole >= 0 and shared:
                remote = self._remote_bits(reach.remote, end)[start:end]
                tiers = _either(bits, bytes(remote)).translate(table)
                hole = tiers.find(0)
            if hole >= 0:
                found += tiers[:hole]
                break
            found += tiers
            start, chunk = end, min(chunk * 4, _WIDEST_CHUNK)
        return bytes(found)

    def _remote_bits(self, remote: Sequence[Holding], end: int) -> bytearray:
        """G4's bit for each block that any of the holdings has there, at least up to `end`."""
        bits = self._remote.setdefault(id(remote), bytearray())
        start = len(bits)
        if start < end:
            part = self._keys[start:end]
            more = bytes(end - start)
            for holding in remote:
                more = _either(more, bytes(map(holding.blocks.get, part, _ABSENT)))
            bits += more.translate(_ONLY_G4)
        return bits


def _either(a: bytes, b: bytes) -> bytes:
    return (int.from_bytes(a) | int.from_bytes(b)).to_bytes(len(a))


def overlap_of(g1: int, run: bytes) -> Overlap:
    """`g1` blocks and a run of lower tiers behind them."""
    if not run:
        return Overlap(g1)
    return Overlap(g1, run.count(Tier.G2), run.count(Tier.G3), run.count(Tier.G4))
