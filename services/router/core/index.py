"""Prefix index of engines' own blocks (G1): who holds which. Knows nothing of tiers below, load,
models or time.

A flat dict maps a block's 64-bit key to an interned set of holders; blocks held by the same workers
share one object, so a block costs a dict entry and a walk along a chain mostly compares identities.
Holders are small integers (slots) that are never used twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from weakref import WeakValueDictionary

_MOST_MOVES = 1 << 16
"""Remembered set transitions; forgotten all at once beyond that."""
_UNBOUNDED_BLOCKS = 1 << 20
"""Blocks granted to a holder that doesn't say what it can hold."""


class HolderSet:
    """Holders of a block, immutable and interned: equal sets are the same object."""

    __slots__ = ("__weakref__", "members")

    def __init__(self, members: frozenset[int]) -> None:
        self.members = members


_NOBODY = HolderSet(frozenset())


@dataclass(frozen=True, slots=True)
class Digest:
    """A set of blocks, condensed, in any order."""

    blocks: int
    xor: int


class _Held:
    """One holder's keys and their running xor."""

    __slots__ = ("capacity", "keys", "widest", "xor")

    def __init__(self, capacity: int) -> None:
        self.capacity = self.widest = capacity
        self.keys: set[int] = set()
        self.xor = 0


class PrefixIndex:
    """Block keys to holders. Not thread-safe; each call is synchronous and leaves it consistent."""

    def __init__(self) -> None:
        self._sets: dict[int, HolderSet] = {}
        self._interned: WeakValueDictionary[frozenset[int], HolderSet] = WeakValueDictionary()
        self._moves: dict[tuple[int, bool], dict[HolderSet, HolderSet]] = {}
        self._move_count = 0
        self._held: dict[int, _Held] = {}
        self._retired: list[tuple[int, _Held]] = []
        self.refused = 0
        """Entries refused so far because their holder was full already."""

    # Holders.

    def add_holder(self, slot: int, capacity_blocks: int) -> None:
        """Makes room for a holder of at most `capacity_blocks` (0: not known)."""
        if slot in self._held:
            raise ValueError(f"slot {slot} is taken")
        self._held[slot] = _Held(capacity_blocks or _UNBOUNDED_BLOCKS)

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Changes what a holder may hold; what it has already stays."""
        held = self._held[slot]
        held.capacity = capacity_blocks or _UNBOUNDED_BLOCKS
        held.widest = max(held.widest, held.capacity)

    def remove_holder(self, slot: int) -> None:
        """Forgets a holder at once; `sweep` frees its entries, in time linear in their number."""
        held = self._held.pop(slot, None)
        if held is not None:
            self._retired.append((slot, held))

    def sweep(self, limit: int = 1 << 62) -> bool:
        """Frees up to `limit` entries of removed holders; True while some are left."""
        while self._retired and limit > 0:
            slot, held = self._retired[-1]
            if not held.keys:
                self._retired.pop()
                self._forget_moves()
                continue
            batch = [held.keys.pop() for _ in range(min(limit, len(held.keys)))]
            self._unlink(slot, batch)
            limit -= len(batch)
        return bool(self._retired)

    # Blocks.

    def store(self, slot: int, keys: Iterable[int]) -> None:
        """Blocks came to a holder. Known ones are skipped, those beyond its capacity refused."""
        held = self._held[slot]
        mine = held.keys
        xor = held.xor
        room = held.capacity - len(mine)
        sets = self._sets
        moves = self._moves_of(slot, True)
        for key in keys:
            if key in mine:
                continue
            if room <= 0:
                self.refused += 1
                continue
            room -= 1
            old = sets.get(key, _NOBODY)
            new = moves.get(old)
            if new is None:
                new = self._move(moves, old, old.members | {slot})
            sets[key] = new
            mine.add(key)
            xor ^= key
        held.xor = xor

    def remove(self, slot: int, keys: Iterable[int]) -> None:
        """Blocks left a holder; those it was not known to hold are skipped."""
        held = self._held[slot]
        mine = held.keys
        gone = []
        xor = held.xor
        for key in keys:
            if key in mine:
                mine.remove(key)
                xor ^= key
                gone.append(key)
        held.xor = xor
        self._unlink(slot, gone)

    def clear(self, slot: int) -> None:
        """A holder is empty now."""
        held = self._held[slot]
        keys, held.keys, held.xor = held.keys, set(), 0
        self._unlink(slot, keys)

    def replace(self, slot: int, keys: Set[int]) -> None:
        """A holder has exactly `keys` now. Costs little where it knew most of them."""
        self.remove(slot, self._held[slot].keys - keys)
        self.store(slot, keys)

    # Questions.

    def depths(self, keys: Sequence[int], limit: int) -> dict[int, int]:
        """How many of the first `limit` keys of a chain each holder has from the start on.

        Holders without the first block may be missing. What lies behind a hole does not count.
        """
        found: dict[int, int] = {}
        get = self._sets.get
        alive: frozenset[int] | None = None
        last: HolderSet | None = None
        depth = 0
        for key in keys if limit >= len(keys) else keys[:limit]:
            current = get(key, _NOBODY)
            if current is not last:
                still = current.members if alive is None else alive & current.members
                if alive is not None:
                    for slot in alive - still:
                        found[slot] = depth
                alive, last = still, current
                if not alive:
                    break
            depth += 1
        for slot in alive or ():
            found[slot] = depth
        if self._retired:
            found = {slot: depth for slot, depth in found.items() if slot in self._held}
        return found

    def digest(self, slot: int) -> Digest:
        """Count and xor of a holder's keys."""
        held = self._held[slot]
        return Digest(len(held.keys), held.xor)

    @property
    def blocks(self) -> int:
        """Different block keys known (those of removed holders count until they are swept)."""
        return len(self._sets)

    @property
    def entries(self) -> int:
        """(block, holder) pairs known of present holders."""
        return sum(len(held.keys) for held in self._held.values())

    @property
    def capacity_entries(self) -> int:
        """Most entries that the present holders may have."""
        return sum(held.capacity for held in self._held.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the two sides of the index disagree or a bound is broken."""
        told: dict[int, set[int]] = {}
        for slot, held in [*self._held.items(), *self._retired]:
            for key in held.keys:
                told.setdefault(key, set()).add(slot)
        for slot, held in self._held.items():
            assert len(held.keys) <= held.widest, f"slot {slot} over its bound"
            xor = 0
            for key in held.keys:
                xor ^= key
            assert xor == held.xor, f"xor of slot {slot}"
        assert {key: set(s.members) for key, s in self._sets.items()} == told
        for members, interned in self._interned.items():
            assert members == interned.members

    # The set machinery.

    def _unlink(self, slot: int, keys: Iterable[int]) -> None:
        sets = self._sets
        moves = self._moves_of(slot, False)
        for key in keys:
            old = sets[key]
            new = moves.get(old)
            if new is None:
                new = self._move(moves, old, old.members - {slot})
            if new is _NOBODY:
                del sets[key]
            else:
                sets[key] = new

    def _moves_of(self, slot: int, add: bool) -> dict[HolderSet, HolderSet]:
        if self._move_count > _MOST_MOVES:
            self._forget_moves()
        return self._moves.setdefault((slot, add), {})

    def _move(
        self, moves: dict[HolderSet, HolderSet], old: HolderSet, members: frozenset[int]
    ) -> HolderSet:
        new = self._interned.get(members) if members else _NOBODY
        if new is None:
            new = HolderSet(members)
            self._interned[members] = new
        moves[old] = new
        self._move_count += 1
        return new

    def _forget_moves(self) -> None:
        # Transitions keep their sets alive; without them, unused sets go by themselves.
        self._moves.clear()
        self._move_count = 0
