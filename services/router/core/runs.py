"""Blocks of engines as single ones and as runs (segments.py), and what becomes of them as holders
come and go. The index (index.py) asks and answers; here blocks change their form.

A block's cell is the run that it is part of, or the set of its holders. Both sides, cells and what
each holder has, are changed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import xor

from services.router.core.holders import NOBODY, HolderSet, HolderSets
from services.router.core.segments import LONGEST, SHORTEST, Part, Segment

KNIT_FROM = 32
"""Blocks in a row, held by the same, that are worth joining to one run."""
_KNIT_ENTRIES = 2048
"""Most entries (blocks times holders) moved by joining a run: some 100 microseconds."""


class Held:
    """What one holder has: single blocks, and runs of which it has all or some."""

    __slots__ = ("alone", "capacity", "count", "segments", "single", "widest", "xor")

    def __init__(self, capacity: int) -> None:
        self.capacity = self.widest = capacity
        self.alone = NOBODY
        """The set of this holder and no other."""
        self.single: set[int] = set()
        self.segments: set[Segment] = set()
        self.count = 0
        self.xor = 0


class Runs:
    """All blocks of all holders. Not thread-safe."""

    def __init__(self) -> None:
        self.cells: dict[int, HolderSet | Segment] = {}
        self.sets = HolderSets()
        self.held: dict[int, Held] = {}
        self.retired: dict[int, Held] = {}
        """What holders had that are removed or emptied: it goes bit by bit."""
        self.refused = 0
        """Entries refused so far because their holder was full already."""

    def keys_of(self, slot: int, held: Held) -> Iterator[int]:
        """All that a holder has."""
        yield from held.single
        for segment in held.segments:
            yield from segment.held_by(slot)

    def lay(self, held: Held, keys: list[int]) -> bool:
        """Blocks that nobody has come as runs. False, and nothing done, if that can't be."""
        count, cells = len(keys), self.cells
        if count > held.capacity - held.count:
            return False
        before, alone = len(cells), held.alone
        laid = []
        for start in range(0, count, LONGEST):
            part = keys if count <= LONGEST else keys[start : start + LONGEST]
            segment = Segment(part, alone)
            cells.update(dict.fromkeys(part, segment))
            laid.append(segment)
        if len(cells) - before != count:
            # Some key is there twice.
            for key in keys:
                cells.pop(key, None)
            return False
        held.segments.update(laid)
        held.count += count
        held.xor = reduce(xor, keys, held.xor)
        return True

    def join(self, slot: int, held: Held, segment: Segment, keys: list[int], at: int) -> int:
        """A holder gets blocks of a run, from keys[at] on; how many keys are done with."""
        mine, key = segment.keys, keys[at]
        if slot in segment.full.members:
            return 1
        part: Part = segment.partial.get(slot, 0) if segment.partial else 0
        if isinstance(part, set):
            if key in part:
                return 1
        elif mine.index(key) < part:
            return 1
        room = held.capacity - held.count
        if room <= 0:
            self.refused += 1
            return 1
        count = 1
        if isinstance(part, int) and mine[part] == key:
            most = min(len(mine) - part, len(keys) - at, room)
            if mine[part : part + most] == keys[at : at + most]:
                count = most
            else:
                while count < most and mine[part + count] == keys[at + count]:
                    count += 1
            part += count
            size = part
            apart = count < room and at + count < len(keys)
            if apart and SHORTEST <= part <= len(mine) - SHORTEST:
                # Chains part here: questions will, too.
                self._split(segment, part)
                mine = segment.keys
        else:
            part = {*mine[:part], key} if isinstance(part, int) else part
            part.add(key)
            size = len(part)
        if size == len(mine):
            if segment.partial:
                segment.partial.pop(slot, None)
            segment.full = self.sets.joined(slot, segment.full)
        elif segment.partial is None:
            segment.partial = {slot: part}
        else:
            segment.partial[slot] = part
        held.segments.add(segment)
        held.count += count
        held.xor = reduce(xor, keys[at : at + count], held.xor)
        return count

    def _split(self, segment: Segment, at: int) -> None:
        """Makes two runs of one."""
        left, right = segment, Segment(segment.keys[at:], segment.full)
        right.proven = max(0, left.proven - at)
        del left.keys[at:]
        left.proven = min(left.proven, at)
        self.cells.update(dict.fromkeys(right.keys, right))
        parts, left.partial = left.partial or {}, None
        for slot, part in parts.items():
            if isinstance(part, int):
                sides: tuple[Part, Part] = min(part, at), max(0, part - at)
            else:
                sides = part.intersection(left.keys), part.intersection(right.keys)
            held = self._owner(slot)
            held.segments.discard(left)
            for side, has in zip((left, right), sides, strict=True):
                if not has:
                    continue
                held.segments.add(side)
                if (has if isinstance(has, int) else len(has)) == len(side.keys):
                    side.full = self.sets.joined(slot, side.full)
                elif side.partial is None:
                    side.partial = {slot: has}
                else:
                    side.partial[slot] = has
        for slot in segment.full.members & right.full.members:
            self._owner(slot).segments.add(right)

    def leave(self, slot: int, held: Held, segment: Segment, key: int) -> bool:
        """A holder loses a block of a run; False: it did not have it."""
        mine = segment.keys
        part: Part
        if slot in segment.full.members:
            segment.full = self.sets.left(slot, segment.full)
            part = len(mine) - 1 if mine[-1] == key else {*mine} - {key}
        else:
            part = segment.partial.get(slot, 0) if segment.partial else 0
            if isinstance(part, set):
                if key not in part:
                    return False
                part.discard(key)
            elif mine.index(key) >= part:
                return False
            elif mine[part - 1] == key:
                part -= 1
            else:
                part = {*mine[:part]} - {key}
        if segment.partial is None:
            segment.partial = {}
        if part:
            segment.partial[slot] = part
        else:
            segment.partial.pop(slot, None)
            held.segments.discard(segment)
        if not segment.full.members:
            self._settle(segment)
        return True

    def detach(self, slot: int, segment: Segment) -> None:
        """A holder loses all it has of a run; its own page is the caller's."""
        if slot in segment.full.members:
            segment.full = self.sets.left(slot, segment.full)
        elif segment.partial:
            segment.partial.pop(slot, None)
        if not segment.full.members:
            self._settle(segment)

    def _settle(self, segment: Segment) -> None:
        """Nobody has the whole run: what nobody has at all goes."""
        mine, parts = segment.keys, segment.partial or {}
        first = [part for part in parts.values() if isinstance(part, int)]
        if len(first) < len(parts):
            some = set(mine[: max(first, default=0)])
            some.update(*(part for part in parts.values() if isinstance(part, set)))
            if len(some) < len(mine):
                self.dissolve(segment)
            return
        reach = max(first, default=0)
        for key in mine[reach:]:
            del self.cells[key]
        del mine[reach:]
        full = frozenset(slot for slot, part in parts.items() if part == reach)
        segment.full = self.sets.of(full)
        segment.partial = {s: part for s, part in parts.items() if part != reach} or None

    def dissolve(self, segment: Segment) -> None:
        """Makes single blocks of a run."""
        cells = self.cells
        for slot in (*segment.full.members, *(segment.partial or ())):
            held = self._owner(slot)
            held.segments.discard(segment)
            held.single.update(segment.held_by(slot))
        for key in segment.keys:
            members = segment.holders(key)
            if members:
                cells[key] = self.sets.of(members)
            else:
                del cells[key]

    def knit(self, keys: Sequence[int], start: int, end: int, group: HolderSet) -> None:
        """Makes one run of blocks of a prompt that all of `group`, and no others, hold."""
        most = min(LONGEST, _KNIT_ENTRIES // len(group.members))
        run = list(keys[start : min(end, start + most)])
        pieces: dict[Segment, None] = {}
        for i, key in enumerate(run):
            cell = self.cells.get(key)
            if type(cell) is Segment:
                if cell.full is not group or cell.partial:
                    return
                pieces[cell] = None
                if key == cell.keys[0] and len(cell.keys) > len(run) - i:
                    # Would be cut in two.
                    del run[i:], pieces[cell]
                    break
            elif cell is not group:
                return
        if len(run) < KNIT_FROM or len(set(run)) < len(run):
            return
        segment = Segment(run, group, proven=True)
        self.cells.update(dict.fromkeys(run, segment))
        for slot in group.members:
            held = self._owner(slot)
            held.single.difference_update(run)
            held.segments.difference_update(pieces)
            held.segments.add(segment)

    def unlink(self, slot: int, keys: Iterable[int]) -> None:
        """A holder loses single blocks; its own page is the caller's."""
        cells = self.cells
        for key in keys:
            cell = cells[key]
            assert isinstance(cell, HolderSet)
            new = self.sets.left(slot, cell)
            if new is NOBODY:
                del cells[key]
            else:
                cells[key] = new

    def _owner(self, slot: int) -> Held:
        return self.held.get(slot) or self.retired[slot]
