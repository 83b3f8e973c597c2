"""Prefix index of engines' own blocks (G1): who holds which. Knows nothing of tiers below, load,
models or time.

A flat dict maps a block's 64-bit key to the run it came with (segments.py), or, for a block that
came alone, to an interned set of holders. So a block costs a dict entry, a long prompt is looked up
run by run, and another holder of a run costs next to nothing. The answers are exact: holes count.
Holders are small integers (slots) that are never used twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor
from weakref import WeakValueDictionary

from services.router.core.segments import LONGEST, NOBODY, SHORTEST, HolderSet, Part, Segment

_MOST_MOVES = 1 << 16
"""Remembered set transitions; forgotten all at once beyond that."""
_UNBOUNDED_BLOCKS = 1 << 20
"""Blocks granted to a holder that doesn't say what it can hold."""
_KNIT_FROM = 32
"""Blocks in a row, held by the same, that are worth joining to one run."""
_KNIT_ENTRIES = 2048
"""Most entries (blocks times holders) moved by joining a run: some 100 microseconds."""
_NONE: frozenset[int] = frozenset()
_MENDS_AT_ONCE = 4
"""Most runs that a single question takes apart because they are no chain."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A set of blocks, condensed, in any order."""

    blocks: int
    xor: int


class _Held:
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


class PrefixIndex:
    """Block keys to holders. Not thread-safe; each call is synchronous and leaves it consistent."""

    def __init__(self) -> None:
        self._cells: dict[int, HolderSet | Segment] = {}
        self._interned: WeakValueDictionary[frozenset[int], HolderSet] = WeakValueDictionary()
        self._moves: dict[tuple[int, bool], dict[HolderSet, HolderSet]] = {}
        self._move_count = 0
        # Inside, a holder has a number that changes when it is emptied: what it had then goes
        # bit by bit, like what a removed holder had.
        self._inner: dict[int, int] = {}
        self._outer: dict[int, int] = {}
        self._numbers = 0
        self._held: dict[int, _Held] = {}
        self._retired: dict[int, _Held] = {}
        self.refused = 0
        """Entries refused so far because their holder was full already."""

    # Holders.

    def add_holder(self, slot: int, capacity_blocks: int) -> None:
        """Makes room for a holder of at most `capacity_blocks` (0: not known)."""
        if slot in self._inner:
            raise ValueError(f"slot {slot} is taken")
        self._renumber(slot, _Held(capacity_blocks or _UNBOUNDED_BLOCKS))

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Changes what a holder may hold; what it has already stays."""
        held = self._held[self._inner[slot]]
        held.capacity = capacity_blocks or _UNBOUNDED_BLOCKS
        held.widest = max(held.widest, held.capacity)

    def remove_holder(self, slot: int) -> None:
        """Forgets a holder at once; `sweep` frees its entries, in time linear in their number."""
        inner = self._inner.pop(slot, None)
        if inner is not None:
            del self._outer[inner]
            self._retired[inner] = self._held.pop(inner)

    def sweep(self, limit: int = 1 << 62) -> bool:
        """Frees up to `limit` entries of removed or emptied holders; True while some are left."""
        while self._retired and limit > 0:
            slot, held = next(iter(self._retired.items()))
            if held.segments:
                segment = held.segments.pop()
                limit -= len(segment.keys)
                self._detach(slot, segment)
            elif held.single:
                batch = [held.single.pop() for _ in range(min(limit, len(held.single)))]
                self._unlink(slot, batch)
                limit -= len(batch)
            else:
                del self._retired[slot]
                self._forget_moves()
        return bool(self._retired)

    # Blocks.

    def store(self, slot: int, keys: Iterable[int]) -> None:
        """Blocks came to a holder. Known ones are skipped, those beyond its capacity refused.

        Keys in chain order make runs; any order is right.
        """
        slot = self._inner[slot]
        held = self._held[slot]
        keys = list(keys)  # A run keeps it.
        cells = self._cells
        count = len(keys)
        if count >= SHORTEST and cells.keys().isdisjoint(keys) and self._lay(held, keys):
            return
        moves = self._moves_of(slot, True)
        at = looked = 0
        while at < count:
            key = keys[at]
            cell = cells.get(key)
            if type(cell) is Segment:
                at += self._join(slot, held, cell, keys, at)
                continue
            if cell is None:
                if at >= looked:
                    looked = at + 1
                    while looked < count and keys[looked] not in cells:
                        looked += 1
                    size = min(looked - at, held.capacity - held.count)
                    if size >= SHORTEST and self._lay(held, keys[at : at + size]):
                        at += size
                        continue
                cell = NOBODY
            at += 1
            assert isinstance(cell, HolderSet)
            if slot in cell.members:
                continue
            if held.count >= held.capacity:
                self.refused += 1
                continue
            cells[key] = moves.get(cell) or self._move(moves, cell, cell.members | {slot})
            held.single.add(key)
            held.count += 1
            held.xor ^= key

    def remove(self, slot: int, keys: Iterable[int]) -> None:
        """Blocks left a holder; those it was not known to hold are skipped."""
        slot = self._inner[slot]
        held = self._held[slot]
        cells = self._cells
        moves = self._moves_of(slot, False)
        alone = held.alone
        for key in keys:
            cell = cells.get(key)
            if cell is None:
                continue
            if type(cell) is Segment:
                if cell.full is alone and cell.keys[-1] == key and not cell.partial:
                    cell.keys.pop()
                    del cells[key]
                    if not cell.keys:
                        held.segments.discard(cell)
                elif not self._leave(slot, held, cell, key):
                    continue
            else:
                assert isinstance(cell, HolderSet)
                if slot not in cell.members:
                    continue
                new = moves.get(cell) or self._move(moves, cell, cell.members - {slot})
                if new is NOBODY:
                    del cells[key]
                else:
                    cells[key] = new
                held.single.discard(key)
            held.count -= 1
            held.xor ^= key

    def clear(self, slot: int) -> None:
        """A holder is empty now. At once; `sweep` frees what it had."""
        inner = self._inner[slot]
        held = self._held.pop(inner)
        del self._outer[inner]
        self._retired[inner] = held
        new = _Held(held.capacity)
        new.widest = held.capacity
        self._renumber(slot, new)

    def replace(self, slot: int, keys: Sequence[int]) -> None:
        """A holder has exactly `keys` now. Costs little where it knew most of them."""
        for _ in self.replacing(slot, keys, len(keys) or 1):
            pass

    def replacing(self, slot: int, keys: Sequence[int], step: int) -> Iterator[None]:
        """`replace` in steps of about `step` keys, between which other things may happen.

        Ends early when the holder is removed meanwhile.
        """
        if not self.digest(slot).blocks:
            had: set[int] = set()
        else:
            inner = self._inner[slot]
            had = set(self._keys_of(inner, self._held[inner]))
            yield
            gone = list(had.difference(keys))
            for at in range(0, len(gone), step):
                if slot not in self._inner:
                    return
                self.remove(slot, gone[at : at + step])
                yield
        for at in range(0, len(keys), step):
            if slot not in self._inner:
                return
            part = keys[at : at + step]
            self.store(slot, [key for key in part if key not in had] if had else part)
            yield

    # Questions.

    def depths(self, keys: Sequence[int], limit: int) -> dict[int, int]:
        """How many of the first `limit` keys of a chain each holder has from the start on.

        Holders without the first block may be missing. What lies behind a hole does not count.
        Puts together what it finds to be one run, and takes apart what is none.
        """
        found: dict[int, int] = {}
        keys = keys if isinstance(keys, list) else list(keys)
        get = self._cells.get
        alive: frozenset[int] | None = None
        within: HolderSet | None = None  # All of `alive` are in it.
        mends = 0
        loose_from = at = 0  # Pieces from here on have the same holders.
        pieces = 0
        knit: tuple[int, int, HolderSet] | None = None
        end = min(limit, len(keys))
        while at < end:
            cell = get(keys[at])
            if cell is None:
                break
            if type(cell) is Segment:
                mine = cell.keys
                if cell.full is within and not cell.proven:
                    # The common case, in few words: the next run, held by the same.
                    after = at + len(mine)
                    if after <= end and mine[0] == keys[at] and mine[-1] == keys[after - 1]:
                        if after - at >= LONGEST // 2 or cell.partial:
                            if pieces > 1 and at - loose_from >= _KNIT_FROM:
                                knit = knit or (loose_from, at, within)
                            loose_from, pieces = after, 0
                        else:
                            pieces += 1
                        at = after
                        continue
                start = 0 if mine[0] == keys[at] else mine.index(keys[at])
                count = len(mine) - start
                if start < cell.proven or at + count > end or keys[at + count - 1] != mine[-1]:
                    count = cell.match(start, keys, at, end)
                    junk = count < SHORTEST and start < cell.proven and at + count < end
                    if junk and start + count < len(mine) and mends < _MENDS_AT_ONCE:
                        mends += 1
                        self._dissolve(cell)
                        continue
                group, parts = cell.full, cell.partial
                whole = count == len(mine) and not parts and count < LONGEST // 2
            else:
                assert isinstance(cell, HolderSet)
                group, parts, whole, count = cell, None, True, 1
            if group is not within:
                if pieces > 1 and within is not None and at - loose_from >= _KNIT_FROM:
                    knit = knit or (loose_from, at, within)
                loose_from, pieces = at, 0
                members = group.members
                if alive is None:
                    alive = members
                    lost = frozenset(parts or ())
                else:
                    lost = alive - members
                    alive -= lost
                if not parts:
                    found.update(dict.fromkeys(lost, at))
                    lost = _NONE
                stay = []
                for slot in lost:
                    part: Part = parts.get(slot, 0) if parts else 0
                    run = cell.run_of(part, start, count) if type(cell) is Segment else 0
                    if run == count:
                        stay.append(slot)
                    else:
                        found[slot] = at + run
                if stay:
                    alive = alive.union(stay)
                if not alive:
                    break
                within = group if alive <= members else None
            at += count
            if not whole:
                if pieces > 1 and within is not None and at - count - loose_from >= _KNIT_FROM:
                    knit = knit or (loose_from, at - count, within)
                loose_from, pieces = at, 0
                continue
            pieces += 1
            if count == 1:
                while at < end and get(keys[at]) is group:
                    at += 1
                    pieces += 1
        for slot in alive or ():
            found[slot] = at
        if pieces > 1 and within is not None and at - loose_from >= _KNIT_FROM:
            knit = knit or (loose_from, at, within)
        if knit is not None:
            self._knit(keys, *knit)
        outer = self._outer
        return {outer[inner]: depth for inner, depth in found.items() if inner in outer}

    def digest(self, slot: int) -> Digest:
        """Count and xor of a holder's keys."""
        held = self._held[self._inner[slot]]
        return Digest(held.count, held.xor)

    @property
    def blocks(self) -> int:
        """Different block keys known (what holders had before counts until it is swept)."""
        return len(self._cells)

    @property
    def entries(self) -> int:
        """(block, holder) pairs known of present holders."""
        return sum(held.count for held in self._held.values())

    @property
    def capacity_entries(self) -> int:
        """Most entries that the present holders may have."""
        return sum(held.capacity for held in self._held.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the two sides of the index disagree or a bound is broken."""
        assert self._inner == {slot: inner for inner, slot in self._outer.items()}
        assert self._outer.keys() == self._held.keys()
        told: dict[int, set[int]] = {}
        for slot, held in [*self._held.items(), *self._retired.items()]:
            assert all(type(self._cells[key]) is HolderSet for key in held.single)
            assert all(segment.held_by(slot) for segment in held.segments)
            for key in self._keys_of(slot, held):
                assert slot not in told.setdefault(key, set()), "counted twice"
                told[key].add(slot)
        for slot, held in self._held.items():
            keys = list(self._keys_of(slot, held))
            assert len(keys) == held.count <= held.widest, f"slot {slot}"
            assert reduce(xor, keys, 0) == held.xor, f"xor of slot {slot}"
        seen = {
            key: set(cell.members if isinstance(cell, HolderSet) else cell.holders(key))
            for key, cell in self._cells.items()
        }
        assert seen == told
        for key, cell in self._cells.items():
            if isinstance(cell, HolderSet):
                continue
            assert key in cell.keys
            for part in (cell.partial or {}).values():
                assert 0 < (part if isinstance(part, int) else len(part)) < len(cell.keys)
            assert not (cell.partial or {}).keys() & cell.full.members
        for members, interned in self._interned.items():
            assert members == interned.members

    # Runs. From here on slots are the inner numbers.

    def _renumber(self, slot: int, held: _Held) -> None:
        inner = self._inner[slot] = self._numbers
        self._outer[inner] = slot
        self._held[inner] = held
        held.alone = self._intern(frozenset((inner,)))
        self._numbers += 1

    def _keys_of(self, slot: int, held: _Held) -> Iterator[int]:
        yield from held.single
        for segment in held.segments:
            yield from segment.held_by(slot)

    def _lay(self, held: _Held, keys: list[int]) -> bool:
        """Blocks that nobody has come as runs. False, and nothing done, if that can't be."""
        count, cells = len(keys), self._cells
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

    def _join(self, slot: int, held: _Held, segment: Segment, keys: list[int], at: int) -> int:
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
            segment.full = self._with(slot, segment.full)
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
        self._cells.update(dict.fromkeys(right.keys, right))
        parts, left.partial = left.partial or {}, None
        for slot, part in parts.items():
            if isinstance(part, int):
                sides: tuple[Part, Part] = min(part, at), max(0, part - at)
            else:
                sides = part.intersection(left.keys), part.intersection(right.keys)
            held = self._held.get(slot) or self._retired[slot]
            held.segments.discard(left)
            for side, has in zip((left, right), sides, strict=True):
                if not has:
                    continue
                held.segments.add(side)
                if (has if isinstance(has, int) else len(has)) == len(side.keys):
                    side.full = self._with(slot, side.full)
                elif side.partial is None:
                    side.partial = {slot: has}
                else:
                    side.partial[slot] = has
        for slot in segment.full.members & right.full.members:
            (self._held.get(slot) or self._retired[slot]).segments.add(right)

    def _leave(self, slot: int, held: _Held, segment: Segment, key: int) -> bool:
        """A holder loses a block of a run; False: it did not have it."""
        mine = segment.keys
        part: Part
        if slot in segment.full.members:
            segment.full = self._without(slot, segment.full)
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

    def _detach(self, slot: int, segment: Segment) -> None:
        """A holder loses all it has of a run; its own page is the caller's."""
        if slot in segment.full.members:
            segment.full = self._without(slot, segment.full)
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
                self._dissolve(segment)
            return
        reach = max(first, default=0)
        for key in mine[reach:]:
            del self._cells[key]
        del mine[reach:]
        full = frozenset(slot for slot, part in parts.items() if part == reach)
        segment.full = self._intern(full)
        segment.partial = {s: part for s, part in parts.items() if part != reach} or None

    def _dissolve(self, segment: Segment) -> None:
        """Makes single blocks of a run."""
        cells = self._cells
        for slot in (*segment.full.members, *(segment.partial or ())):
            held = self._held.get(slot) or self._retired[slot]
            held.segments.discard(segment)
            held.single.update(segment.held_by(slot))
        for key in segment.keys:
            members = segment.holders(key)
            if members:
                cells[key] = self._intern(members)
            else:
                del cells[key]

    def _knit(self, keys: Sequence[int], start: int, end: int, group: HolderSet) -> None:
        """Makes one run of blocks of a prompt that all of `group`, and no others, hold."""
        most = min(LONGEST, _KNIT_ENTRIES // len(group.members))
        run = list(keys[start : min(end, start + most)])
        pieces: dict[Segment, None] = {}
        for i, key in enumerate(run):
            cell = self._cells.get(key)
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
        if len(run) < _KNIT_FROM or len(set(run)) < len(run):
            return
        segment = Segment(run, group, proven=True)
        self._cells.update(dict.fromkeys(run, segment))
        for slot in group.members:
            held = self._held.get(slot) or self._retired[slot]
            held.single.difference_update(run)
            held.segments.difference_update(pieces)
            held.segments.add(segment)

    # The set machinery.

    def _unlink(self, slot: int, keys: Iterable[int]) -> None:
        cells = self._cells
        for key in keys:
            cell = cells[key]
            assert isinstance(cell, HolderSet)
            new = self._without(slot, cell)
            if new is NOBODY:
                del cells[key]
            else:
                cells[key] = new

    def _with(self, slot: int, old: HolderSet) -> HolderSet:
        moves = self._moves_of(slot, True)
        return moves.get(old) or self._move(moves, old, old.members | {slot})

    def _without(self, slot: int, old: HolderSet) -> HolderSet:
        moves = self._moves_of(slot, False)
        return moves.get(old) or self._move(moves, old, old.members - {slot})

    def _intern(self, members: frozenset[int]) -> HolderSet:
        if not members:
            return NOBODY
        found = self._interned.get(members)
        if found is None:
            found = self._interned[members] = HolderSet(members)
        return found

    def _moves_of(self, slot: int, add: bool) -> dict[HolderSet, HolderSet]:
        if self._move_count > _MOST_MOVES:
            self._forget_moves()
        return self._moves.setdefault((slot, add), {})

    def _move(
        self, moves: dict[HolderSet, HolderSet], old: HolderSet, members: frozenset[int]
    ) -> HolderSet:
        new = moves[old] = self._intern(members)
        self._move_count += 1
        return new

    def _forget_moves(self) -> None:
        # Transitions keep their sets alive; without them, unused sets go by themselves.
        self._moves.clear()
        self._move_count = 0
