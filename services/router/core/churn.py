"""Churn book: how fast each worker's cache is filled with new blocks, beside others of its model.

Where caches of equal size are refilled equally fast, what leaves has been unused for equally long
everywhere, as in one cache of all their capacity. A worker that is refilled faster throws out what
another would still keep: a block costs more there. Counted is what requests have to compute, when
they are admitted: that shows sooner than blocks stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

_PRIOR = 0.1
"""Turnovers that every worker is thought to have behind it: the first requests tell little."""
_MOST_WEIGHT = 40.0
"""Exponent at which weights are scaled down again."""


@dataclass(slots=True)
class _Group:
    slots: set[int] = field(default_factory=set)
    total: float = 0.0
    age: float = 0.0
    """Turnovers of the group's whole capacity since weights were scaled."""


@dataclass(slots=True)
class _Page:
    group: _Group
    name: str
    capacity: int
    sum: float = 0.0


class ChurnBook:
    """Turnovers by slot, each one forgotten as the group's capacity is turned over once more."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._pages: dict[int, _Page] = {}

    def add_slot(self, slot: int, group: str, capacity_blocks: int) -> None:
        """Opens a page for a worker of a model; `capacity_blocks` 0: not known."""
        known = self._groups.setdefault(group, _Group())
        known.slots.add(slot)
        page = self._pages[slot] = _Page(known, group, max(0, capacity_blocks))
        # A newcomer is where the others are: an empty cache is no reason to send it everything.
        others = len(known.slots) - 1
        if others:
            page.sum = known.total / others
            known.total += page.sum

    def set_capacity(self, slot: int, capacity_blocks: int) -> None:
        """Changes the blocks that it can hold."""
        self._pages[slot].capacity = max(0, capacity_blocks)

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker."""
        page = self._pages.pop(slot, None)
        if page is not None:
            page.group.slots.discard(slot)
            page.group.total -= page.sum
            if not page.group.slots:
                del self._groups[page.name]

    def group(self, slot: int) -> str:
        """Beside whose workers it is looked at."""
        return self._pages[slot].name

    def stored(self, slot: int, blocks: float) -> None:
        """So many blocks come to a worker's cache (parts of blocks count as such)."""
        page = self._pages[slot]
        if not page.capacity:
            return
        group = page.group
        turnover = blocks / page.capacity
        group.age += turnover / len(group.slots)
        if group.age > _MOST_WEIGHT:
            self._rescale(group)
        weighted = turnover * exp(group.age)
        page.sum += weighted
        group.total += weighted

    def excess(self, slot: int) -> float:
        """By what share it is refilled faster (or, negative, slower) than the mean of its model."""
        page = self._pages[slot]
        group = page.group
        prior = _PRIOR * exp(group.age)
        mean = group.total / len(group.slots) + prior
        return (page.sum + prior) / mean - 1

    def check_invariants(self) -> None:
        """Raises AssertionError when a total differs from what it sums up."""
        for name, group in self._groups.items():
            mine = [p.sum for p in self._pages.values() if p.group is group]
            assert len(mine) == len(group.slots) > 0
            assert all(self._pages[slot].name == name for slot in group.slots)
            assert abs(sum(mine) - group.total) <= 1e-6 * max(1.0, group.total)

    def _rescale(self, group: _Group) -> None:
        scale = exp(-group.age)
        group.age = 0.0
        for slot in group.slots:
            self._pages[slot].sum *= scale
        group.total = sum(self._pages[slot].sum for slot in group.slots)
