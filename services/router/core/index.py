"""Prefix index: who holds which KV block, in which tier. Knows nothing of load, models or time.

A flat dict maps a block's 64-bit key to an interned HolderSet; blocks held by the same workers
share one object, so a block costs a dict entry and a walk along a chain mostly compares identities.
Holders are small integers (slots) that are never used twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from services.common.events.model import Tier

_MOST_MOVES = 1 << 16
"""Remembered set transitions; forgotten all at once beyond that."""
_UNBOUNDED_BLOCKS = 1 << 20
"""Blocks granted in a tier to a holder that doesn't say what it can hold."""
_LOWER_TIERS_FACTOR = 64
"""A holder's tiers below G1 may hold this many times its G1 blocks."""


class HolderSet:
    """Holders of a block, immutable and interned: equal sets are the same object."""

    __slots__ = ("__weakref__", "g1", "lower", "members")

    def __init__(self, members: frozenset[tuple[int, Tier]]) -> None:
        self.members = members
        self.g1 = frozenset(slot for slot, tier in members if tier is Tier.G1)
        lower: dict[int, Tier] = {}
        for slot, tier in members:
            if tier is not Tier.G1:
                lower[slot] = min(tier, lower.get(slot, tier))
        self.lower = lower


_NOBODY = HolderSet(frozenset())


@dataclass(frozen=True, slots=True)
class Overlap:
    """Usable leading blocks of a prompt at one holder: G1, then each tier beyond those before."""

    g1: int = 0
    g2: int = 0
    g3: int = 0
    g4: int = 0

    @property
    def total(self) -> int:
        """Usable blocks in all tiers."""
        return self.g1 + self.g2 + self.g3 + self.g4


@dataclass(frozen=True, slots=True)
class Digest:
    """What a holder has in one tier, condensed, in any order."""

    blocks: int
    xor: int


class _Held:
    """One holder's keys by tier, with the running xor of each."""

    __slots__ = ("capacity", "keys", "widest", "xor")

    def __init__(self, capacity: int) -> None:
        self.capacity = self.widest = capacity
        self.keys: dict[Tier, set[int]] = {}
        self.xor: dict[Tier, int] = {}

    def room(self, tier: Tier) -> int:
        most = self.capacity if tier is Tier.G1 else self.capacity * _LOWER_TIERS_FACTOR
        return most - len(self.keys.get(tier, ()))


class _Tail:
    """A holder's run below G1 during a walk."""

    __slots__ = ("counts", "since", "tier")

    def __init__(self, tier: Tier, since: int) -> None:
        self.tier, self.since = tier, since
        self.counts = [0, 0, 0, 0, 0]

    def settle(self, depth: int) -> None:
        self.counts[self.tier] += depth - self.since
        self.since = depth


class PrefixIndex:
    """Block keys to holders. Not thread-safe; each call is synchronous and leaves it consistent."""

    def __init__(self) -> None:
        self._sets: dict[int, HolderSet] = {}
        self._interned: WeakValueDictionary[frozenset[tuple[int, Tier]], HolderSet] = (
            WeakValueDictionary()
        )
        self._moves: dict[tuple[int, Tier, bool], dict[HolderSet, HolderSet]] = {}
        self._move_count = 0
        self._held: dict[int, _Held] = {}
        self._retired: list[tuple[int, _Held]] = []
        self.refused = 0
        """Entries refused so far because their holder was full already."""

    # Holders.

    def add_holder(self, slot: int, capacity_blocks: int) -> None:
        """Makes room for a holder of at most `capacity_blocks` G1 blocks (0: not known)."""
        if slot in self._held:
            raise ValueError(f"slot {slot} is taken")
        self._held[slot] = _Held(capacity_blocks or _UNBOUNDED_BLOCKS)

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Changes what a holder may hold in G1; what it has already stays."""
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
            tier = next((t for t, keys in held.keys.items() if keys), None)
            if tier is None:
                self._retired.pop()
                self._forget_moves()
                continue
            keys = held.keys[tier]
            batch = [keys.pop() for _ in range(min(limit, len(keys)))]
            self._unlink(slot, tier, batch)
            limit -= len(batch)
        return bool(self._retired)

    # Blocks.

    def store(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Blocks came to a holder. Known ones are skipped, those beyond its capacity refused."""
        held = self._held[slot]
        mine = held.keys.setdefault(tier, set())
        xor = held.xor.get(tier, 0)
        room = held.room(tier)
        sets = self._sets
        moves = self._moves_of(slot, tier, True)
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
                new = self._move(moves, old, old.members | {(slot, tier)})
            sets[key] = new
            mine.add(key)
            xor ^= key
        held.xor[tier] = xor

    def remove(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        """Blocks left a holder; those it was not known to hold are skipped."""
        held = self._held[slot]
        mine = held.keys.get(tier)
        if not mine:
            return
        gone = []
        xor = held.xor[tier]
        for key in keys:
            if key in mine:
                mine.remove(key)
                xor ^= key
                gone.append(key)
        held.xor[tier] = xor
        self._unlink(slot, tier, gone)

    def clear(self, slot: int, tier: Tier) -> None:
        """A holder's tier is empty now."""
        held = self._held[slot]
        keys = held.keys.pop(tier, None)
        held.xor.pop(tier, None)
        if keys:
            self._unlink(slot, tier, keys)

    def replace(self, slot: int, blocks: dict[Tier, set[int]]) -> None:
        """A holder has exactly `blocks` now. Costs little where it knew most of them."""
        held = self._held[slot]
        for tier in list(held.keys):
            if not blocks.get(tier):
                self.clear(slot, tier)
        for tier, keys in blocks.items():
            self.remove(slot, tier, held.keys.get(tier, set()) - keys)
            self.store(slot, tier, keys)

    # Questions.

    def overlaps(self, keys: Sequence[int], limit: int) -> dict[int, Overlap]:
        """Usable overlap of the first `limit` keys of a chain, for each holder that has any.

        A holder's G1 run ends at the first block it lacks there; from that block on its run goes on
        as long as some lower tier has each block. Whatever lies behind a hole does not count.
        """
        found: dict[int, Overlap] = {}
        get = self._sets.get
        alive: set[int] = set()
        tails: dict[int, _Tail] = {}
        heads: dict[int, int] = {}
        last: HolderSet | None = None
        depth = 0
        for key in keys if limit >= len(keys) else keys[:limit]:
            current = get(key, _NOBODY)
            if current is not last:
                for slot in [s for s in tails if current.lower.get(s) is not tails[s].tier]:
                    tail = tails[slot]
                    tail.settle(depth)
                    if slot in current.lower:
                        tail.tier = current.lower[slot]
                    else:
                        found[slot] = Overlap(heads[slot], *tails.pop(slot).counts[2:])
                if last is None:
                    alive = set(current.g1)
                    ended = current.lower.keys() - alive
                else:
                    ended = alive - current.g1
                    alive -= ended
                for slot in ended:
                    if slot in current.lower:
                        heads[slot] = depth
                        tails[slot] = _Tail(current.lower[slot], depth)
                    else:
                        found[slot] = Overlap(depth)
                if not alive and not tails:
                    break
                last = current
            depth += 1
        for slot in alive:
            found[slot] = Overlap(depth)
        for slot, tail in tails.items():
            tail.settle(depth)
            found[slot] = Overlap(heads[slot], *tail.counts[2:])
        if self._retired:
            found = {slot: overlap for slot, overlap in found.items() if slot in self._held}
        return found

    def digest(self, slot: int, tier: Tier = Tier.G1) -> Digest:
        """Count and xor of a holder's keys in a tier."""
        held = self._held[slot]
        return Digest(len(held.keys.get(tier, ())), held.xor.get(tier, 0))

    @property
    def blocks(self) -> int:
        """Different block keys known (those of removed holders count until they are swept)."""
        return len(self._sets)

    @property
    def entries(self) -> int:
        """(block, holder, tier) triples known of present holders."""
        return sum(len(keys) for held in self._held.values() for keys in held.keys.values())

    @property
    def capacity_entries(self) -> int:
        """Most G1 entries that the present holders may have."""
        return sum(held.capacity for held in self._held.values())

    def check_invariants(self) -> None:
        """Raises AssertionError if the two sides of the index disagree or a bound is broken."""
        told: dict[int, set[tuple[int, Tier]]] = {}
        present = list(self._held.items())
        for slot, held in [*present, *self._retired]:
            for tier, keys in held.keys.items():
                for key in keys:
                    told.setdefault(key, set()).add((slot, tier))
        for slot, held in present:
            assert len(held.keys.get(Tier.G1, ())) <= held.widest, f"slot {slot} over its bound"
            for tier, keys in held.keys.items():
                xor = 0
                for key in keys:
                    xor ^= key
                assert xor == held.xor.get(tier, 0), f"xor of slot {slot} {tier}"
        assert {key: set(s.members) for key, s in self._sets.items()} == told
        for members, interned in self._interned.items():
            assert members == interned.members

    # The set machinery.

    def _unlink(self, slot: int, tier: Tier, keys: Iterable[int]) -> None:
        sets = self._sets
        moves = self._moves_of(slot, tier, False)
        for key in keys:
            old = sets[key]
            new = moves.get(old)
            if new is None:
                new = self._move(moves, old, old.members - {(slot, tier)})
            if new is _NOBODY:
                del sets[key]
            else:
                sets[key] = new

    def _moves_of(self, slot: int, tier: Tier, add: bool) -> dict[HolderSet, HolderSet]:
        if self._move_count > _MOST_MOVES:
            self._forget_moves()
        return self._moves.setdefault((slot, tier, add), {})

    def _move(
        self,
        moves: dict[HolderSet, HolderSet],
        old: HolderSet,
        members: frozenset[tuple[int, Tier]],
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
