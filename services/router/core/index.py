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

from services.router.core.holders import NOBODY, HolderSet
from services.router.core.runs import KNIT_FROM, Held, Runs
from services.router.core.segments import LONGEST, SHORTEST, Part, Segment

_UNBOUNDED_BLOCKS = 1 << 20
"""Blocks granted to a holder that doesn't say what it can hold."""
_NONE: frozenset[int] = frozenset()
_MENDS_AT_ONCE = 4
"""Most runs that a single question takes apart because they are no chain."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A set of blocks, condensed, in any order."""

    blocks: int
    xor: int


class PrefixIndex:
    """Block keys to holders. Not thread-safe; each call is synchronous and leaves it consistent."""

    def __init__(self) -> None:
        self._runs = Runs()
        # In runs a holder has a number that changes when it is emptied: what it had then goes
        # bit by bit, like what a removed holder had.
        self._inner: dict[int, int] = {}
        self._outer: dict[int, int] = {}
        self._numbers = 0

    # Holders.

    def add_holder(self, slot: int, capacity_blocks: int) -> None:
        """Makes room for a holder of at most `capacity_blocks` (0: not known)."""
        if slot in self._inner:
            raise ValueError(f"slot {slot} is taken")
        self._renumber(slot, Held(capacity_blocks or _UNBOUNDED_BLOCKS))

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Changes what a holder may hold; what it has already stays."""
        held = self._runs.held[self._inner[slot]]
        held.capacity = capacity_blocks or _UNBOUNDED_BLOCKS
        held.widest = max(held.widest, held.capacity)

    def remove_holder(self, slot: int) -> None:
        """Forgets a holder at once; `sweep` frees its entries, in time linear in their number."""
        inner = self._inner.pop(slot, None)
        if inner is not None:
            del self._outer[inner]
            self._runs.retired[inner] = self._runs.held.pop(inner)

    def sweep(self, limit: int = 1 << 62) -> bool:
        """Frees up to `limit` entries of removed or emptied holders; True while some are left."""
        runs = self._runs
        while runs.retired and limit > 0:
            slot, held = next(iter(runs.retired.items()))
            if held.segments:
                segment = held.segments.pop()
                limit -= len(segment.keys)
                runs.detach(slot, segment)
            elif held.single:
                batch = [held.single.pop() for _ in range(min(limit, len(held.single)))]
                runs.unlink(slot, batch)
                limit -= len(batch)
            else:
                del runs.retired[slot]
                runs.sets.forget_moves()
        return bool(runs.retired)

    # Blocks.

    def store(self, slot: int, keys: Iterable[int]) -> None:
        """Blocks came to a holder. Known ones are skipped, those beyond its capacity refused.

        Keys in chain order make runs; any order is right.
        """
        slot = self._inner[slot]
        runs = self._runs
        held, cells = runs.held[slot], runs.cells
        keys = list(keys)  # A run keeps it.
        count = len(keys)
        if count >= SHORTEST and cells.keys().isdisjoint(keys) and runs.lay(held, keys):
            return
        moves = runs.sets.moves(slot, True)
        at = looked = 0
        while at < count:
            key = keys[at]
            cell = cells.get(key)
            if type(cell) is Segment:
                at += runs.join(slot, held, cell, keys, at)
                continue
            if cell is None:
                if at >= looked:
                    looked = at + 1
                    while looked < count and keys[looked] not in cells:
                        looked += 1
                    size = min(looked - at, held.capacity - held.count)
                    if size >= SHORTEST and runs.lay(held, keys[at : at + size]):
                        at += size
                        continue
                cell = NOBODY
            at += 1
            assert isinstance(cell, HolderSet)
            if slot in cell.members:
                continue
            if held.count >= held.capacity:
                runs.refused += 1
                continue
            cells[key] = moves.get(cell) or runs.sets.move(moves, cell, cell.members | {slot})
            held.single.add(key)
            held.count += 1
            held.xor ^= key

    def remove(self, slot: int, keys: Iterable[int]) -> None:
        """Blocks left a holder; those it was not known to hold are skipped."""
        slot = self._inner[slot]
        runs = self._runs
        held, cells = runs.held[slot], runs.cells
        moves = runs.sets.moves(slot, False)
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
                elif not runs.leave(slot, held, cell, key):
                    continue
            else:
                assert isinstance(cell, HolderSet)
                if slot not in cell.members:
                    continue
                new = moves.get(cell) or runs.sets.move(moves, cell, cell.members - {slot})
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
        held = self._runs.held.pop(inner)
        del self._outer[inner]
        self._runs.retired[inner] = held
        new = Held(held.capacity)
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
            had = set(self._runs.keys_of(inner, self._runs.held[inner]))
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
        get = self._runs.cells.get
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
                            if pieces > 1 and at - loose_from >= KNIT_FROM:
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
                        self._runs.dissolve(cell)
                        continue
                group, parts = cell.full, cell.partial
                whole = count == len(mine) and not parts and count < LONGEST // 2
            else:
                assert isinstance(cell, HolderSet)
                group, parts, whole, count = cell, None, True, 1
            if group is not within:
                if pieces > 1 and within is not None and at - loose_from >= KNIT_FROM:
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
                if pieces > 1 and within is not None and at - count - loose_from >= KNIT_FROM:
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
        if pieces > 1 and within is not None and at - loose_from >= KNIT_FROM:
            knit = knit or (loose_from, at, within)
        if knit is not None:
            self._runs.knit(keys, *knit)
        outer = self._outer
        return {outer[inner]: depth for inner, depth in found.items() if inner in outer}

    def digest(self, slot: int) -> Digest:
        """Count and xor of a holder's keys."""
        held = self._runs.held[self._inner[slot]]
        return Digest(held.count, held.xor)

    @property
    def refused(self) -> int:
        """Entries refused so far because their holder was full already."""
        return self._runs.refused

    @property
    def blocks(self) -> int:
        """Different block keys known (what holders had before counts until it is swept)."""
        return len(self._runs.cells)

    @property
    def entries(self) -> int:
        """(block, holder) pairs known of present holders."""
        return sum(held.count for held in self._runs.held.values())

    @property
    def capacity_entries(self) -> int:
        """Most entries that the present holders may have."""
        return sum(held.capacity for held in self._runs.held.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the two sides of the index disagree or a bound is broken."""
        runs, cells = self._runs, self._runs.cells
        assert self._inner == {slot: inner for inner, slot in self._outer.items()}
        assert self._outer.keys() == runs.held.keys()
        told: dict[int, set[int]] = {}
        for slot, held in [*runs.held.items(), *runs.retired.items()]:
            assert all(type(cells[key]) is HolderSet for key in held.single)
            assert all(segment.held_by(slot) for segment in held.segments)
            for key in runs.keys_of(slot, held):
                assert slot not in told.setdefault(key, set()), "counted twice"
                told[key].add(slot)
        for slot, held in runs.held.items():
            keys = list(runs.keys_of(slot, held))
            assert len(keys) == held.count <= held.widest, f"slot {slot}"
            assert reduce(xor, keys, 0) == held.xor, f"xor of slot {slot}"
        seen = {
            key: set(cell.members if isinstance(cell, HolderSet) else cell.holders(key))
            for key, cell in cells.items()
        }
        assert seen == told
        for key, cell in cells.items():
            if isinstance(cell, HolderSet):
                continue
            assert key in cell.keys
            for part in (cell.partial or {}).values():
                assert 0 < (part if isinstance(part, int) else len(part)) < len(cell.keys)
            assert not (cell.partial or {}).keys() & cell.full.members
        for members, interned in runs.sets.interned.items():
            assert members == interned.members

    def _renumber(self, slot: int, held: Held) -> None:
        inner = self._inner[slot] = self._numbers
        self._outer[inner] = slot
        self._runs.held[inner] = held
        held.alone = self._runs.sets.of(frozenset((inner,)))
        self._numbers += 1
