"""Who waits, by the workers they may run on: who holds up whom, and by how much.

Requests under equal constraints share a lane. Two lanes compete where their workers overlap, by
whatever names these were asked for: adapters run on their model's workers, labels are on some of
these. Which they are is asked of the core, and remembered for as long as that holds; lanes are few.
"""

from __future__ import annotations

from collections.abc import Hashable, Set
from dataclasses import dataclass

from services.router.core.answers import Query
from services.router.core.choice import Reach
from services.router.core.placement import RouterCore


@dataclass(slots=True)
class _Lane:
    query: Query
    """One of those that wait in it; the others may run where it may."""
    waiting: int
    reach: Reach


class Lanes:
    """Lanes in which somebody waits. Times are seconds on the core's clock."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._lanes: dict[Hashable, _Lane] = {}
        self._taken: Reach | None = None
        """Union of all; None: to be made anew."""

    def __len__(self) -> int:
        return len(self._lanes)

    def enter(self, key: Hashable, query: Query) -> None:
        """One more waits under the core's lane `key`."""
        lane = self._lanes.get(key)
        if lane is None:
            self._lanes[key] = _Lane(query, 1, Reach(frozenset(), -1, 0.0))
            self._taken = None
        else:
            lane.waiting += 1

    def leave(self, key: Hashable) -> None:
        """One of them waits no more."""
        lane = self._lanes[key]
        lane.waiting -= 1
        if not lane.waiting:
            del self._lanes[key]
            self._taken = None

    def clear(self) -> None:
        """All leave."""
        self._lanes.clear()
        self._taken = None

    def claims(self, key: Hashable, now: float) -> frozenset[int]:
        """Whose time those of a lane wait for: where they may run now, or be prefilled."""
        return self._reach(self._lanes[key], now).all

    def taken(self, now: float) -> Set[int]:
        """Where anybody who waits may run now, or be prefilled."""
        if self._taken is None or not self._core.holds(self._taken, now):
            reaches = [self._reach(lane, now) for lane in self._lanes.values()]
            self._taken = Reach(
                frozenset[int]().union(*(reach.all for reach in reaches)),
                self._core.choices_version,
                min((reach.until for reach in reaches), default=now),
            )
        return self._taken.slots

    def shares(self, key: Hashable, query: Query, now: float) -> dict[Hashable, float]:
        """Part of each lane's work that will fall to workers which `query`, of lane `key`, may run
        on; not those of which none will. All of a lane's are taken to get as much of it.
        """
        lane = self._lanes.get(key)
        mine = (self._core.reach(query, now) if lane is None else self._reach(lane, now)).slots
        shares: dict[Hashable, float] = {}
        for key, lane in self._lanes.items():
            theirs = self._reach(lane, now).slots
            if common := len(mine & theirs):
                shares[key] = common / len(theirs)
        return shares

    def check_invariants(self, keys: dict[int, Hashable]) -> None:
        """Raises AssertionError unless just those wait; `keys` by number."""
        counts: dict[Hashable, int] = {}
        for key in keys.values():
            counts[key] = counts.get(key, 0) + 1
        assert counts == {key: lane.waiting for key, lane in self._lanes.items()}

    def _reach(self, lane: _Lane, now: float) -> Reach:
        if not self._core.holds(lane.reach, now):
            lane.reach = self._core.reach(lane.query, now)
        return lane.reach
