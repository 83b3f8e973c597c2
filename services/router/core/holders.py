"""Sets of holders, interned: a million blocks with the same holders share one set.

Holders are small integers. A step from a set to the one with or without a holder is remembered, so
that it costs two dict look-ups.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

_MOST_MOVES = 1 << 16
"""Remembered steps; forgotten all at once beyond that."""


class HolderSet:
    """Holders of a block, immutable and interned: equal sets are the same object."""

    __slots__ = ("__weakref__", "members")

    def __init__(self, members: frozenset[int]) -> None:
        self.members = members


NOBODY = HolderSet(frozenset())


class HolderSets:
    """All sets in use."""

    def __init__(self) -> None:
        self.interned: WeakValueDictionary[frozenset[int], HolderSet] = WeakValueDictionary()
        self._moves: dict[tuple[int, bool], dict[HolderSet, HolderSet]] = {}
        self._move_count = 0

    def of(self, members: frozenset[int]) -> HolderSet:
        """The set of these."""
        if not members:
            return NOBODY
        found = self.interned.get(members)
        if found is None:
            found = self.interned[members] = HolderSet(members)
        return found

    def joined(self, slot: int, old: HolderSet) -> HolderSet:
        """The set with a holder more."""
        moves = self.moves(slot, True)
        return moves.get(old) or self.move(moves, old, old.members | {slot})

    def left(self, slot: int, old: HolderSet) -> HolderSet:
        """The set with a holder less."""
        moves = self.moves(slot, False)
        return moves.get(old) or self.move(moves, old, old.members - {slot})

    def moves(self, slot: int, add: bool) -> dict[HolderSet, HolderSet]:
        """Remembered steps by which a holder joins or leaves sets, for loops over many blocks."""
        if self._move_count > _MOST_MOVES:
            self.forget_moves()
        return self._moves.setdefault((slot, add), {})

    def move(
        self, moves: dict[HolderSet, HolderSet], old: HolderSet, members: frozenset[int]
    ) -> HolderSet:
        """Remembers a step from `old` to the set of `members`; that set."""
        new = moves[old] = self.of(members)
        self._move_count += 1
        return new

    def forget_moves(self) -> None:
        """Steps keep their sets alive; without them, unused sets go by themselves."""
        self._moves.clear()
        self._move_count = 0
