"""Damage to stored blocks, seeded: what disks, buses, bugs and half-finished writes do to them.

A record is a header of 256 bytes and a payload, wherever they lie: in an arena's slot, on disk, in
an object. Each damage changes bytes for certain, and every damaged record is one that must not be
served under its key.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum

from services.common.arena import SlotHeader, SlotState


class Damage(StrEnum):
    """Kinds of damage."""

    HEADER = "header"
    """Some bytes of the header."""
    PAYLOAD = "payload"
    """Some bytes of the payload, from one bit on."""
    TRUNCATED = "truncation"
    """Zeros from somewhere on: a write that never got to its end."""
    SWAPPED = "swapped"
    """Two records, or their payloads or headers, have changed places."""
    STALE = "stale"
    """What was there before, or a part of it."""
    FOREIGN = "foreign"
    """A sound header of another namespace."""
    UNSEALED = "unsealed"
    """A sound header that says that the slot is free, or being filled."""
    GENERATION = "generation"
    """The same block, in another use of its slot. Only a lease can tell: arenas alone."""


KINDS = tuple(kind for kind in Damage if kind is not Damage.GENERATION)
"""What can befall a record on any tier."""

Record = tuple[bytes, bytes]
Write = Callable[[int, bytes, bytes], None]


class Corrupter:
    """Damages records and puts them right again; `write` stores header and payload of record i."""

    def __init__(
        self,
        seed: int,
        records: Sequence[Record],
        earlier: Sequence[Record],
        namespace: bytes,
        write: Write,
        kinds: Sequence[Damage] = KINDS,
    ) -> None:
        """`earlier`: sound records, of other keys, that once were in these places."""
        self.counts: Counter[Damage] = Counter()
        self._random = random.Random(seed)
        self._good = list(records)
        self._earlier = earlier
        self._namespace = namespace
        self._write = write
        self._kinds = kinds
        self._bad: dict[int, Record] = {}

    @property
    def total(self) -> int:
        """Damages done so far."""
        return self.counts.total()

    def hit(self, times: int) -> set[int]:
        """Damages that often, of all kinds in turn; the numbers of the records that are bad now."""
        before = self.total
        while self.total < before + times:
            kind = self._kinds[self.total % len(self._kinds)]
            free = sorted(set(range(len(self._good))) - self._bad.keys())
            assert len(free) >= 2, "there must be more records than damages at a time"
            one, other = self._random.sample(free, 2)
            for number, record in self._damaged(kind, one, other).items():
                assert record != self._good[number]
                self._bad[number] = record
                self._write(number, *record)
            self.counts[kind] += 1
        return set(self._bad)

    def heal(self) -> None:
        """Puts all records back as they were."""
        for number in self._bad:
            self._write(number, *self._good[number])
        self._bad.clear()

    def _damaged(self, kind: Damage, one: int, other: int) -> dict[int, Record]:
        header, payload = self._good[one]
        match kind:
            case Damage.HEADER:
                return {one: (self._flipped(header), payload)}
            case Damage.PAYLOAD:
                return {one: (header, self._flipped(payload))}
            case Damage.TRUNCATED:
                return {one: self._cut(header, payload)}
            case Damage.SWAPPED:
                other_header, other_payload = self._good[other]
                if self._random.random() < 0.5:
                    return {one: (other_header, other_payload), other: (header, payload)}
                return {one: (header, other_payload), other: (other_header, payload)}
            case Damage.STALE:
                old_header, old_payload = self._earlier[one]
                old = [(old_header, old_payload), (header, old_payload), (old_header, payload)]
                return {one: self._random.choice(old)}
            case Damage.FOREIGN:
                foreign = self._random.randbytes(32)
                found = SlotHeader.unpack(header, self._namespace)
                kept = self._random.choice([payload, self._random.randbytes(len(payload))])
                return {one: (found.pack(foreign), kept)}
            case Damage.UNSEALED:
                state = self._random.choice([SlotState.FREE, SlotState.FILLING])
                return {one: (self._changed(header, state=state), payload)}
            case Damage.GENERATION:
                found = SlotHeader.unpack(header, self._namespace)
                generation = found.generation + self._random.choice([-1, 1, 2])
                return {one: (self._changed(header, generation=generation), payload)}

    def _changed(self, header: bytes, **change: object) -> bytes:
        found = SlotHeader.unpack(header, self._namespace)
        return replace(found, **change).pack(self._namespace)  # type: ignore[arg-type]

    def _flipped(self, good: bytes) -> bytes:
        """At least one bit, at most sixteen bytes."""
        bad = bytearray(good)
        for _ in range(self._random.choice([1, 1, 2, 16])):
            at = self._random.randrange(len(bad))
            bad[at] ^= self._random.choice([1 << self._random.randrange(8), 255])
        return bytes(bad) if bad != good else self._flipped(good)

    def _cut(self, header: bytes, payload: bytes) -> Record:
        whole = header + payload
        end = self._random.randrange(len(whole))
        # A header's padding is zeros anyway, and so may the last bytes be.
        while whole[:end].ljust(len(whole), b"\0") == whole:
            end -= 1
        whole = whole[:end].ljust(len(whole), b"\0")
        return whole[: len(header)], whole[len(header) :]
