"""When to tell others how busy the engine is. Time is an argument.

Only changes are told, not more often than an interval; a state left untold is due when it is over,
and an idle one at once, so that the last thing told is always true.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.common.events.model import LoadReport


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be told now, and after how many seconds to ask again (None: at the next news)."""

    reports: tuple[LoadReport, ...] = ()
    again_s: float | None = None


class LoadBook:
    """The load of each data-parallel rank, and what was told of it."""

    def __init__(self, ranks: int, blocks_per_rank: int, interval_s: float) -> None:
        self._interval_s = interval_s
        self._now = {
            rank: LoadReport(total_blocks=blocks_per_rank, dp_rank=rank) for rank in range(ranks)
        }
        self._told: dict[int, LoadReport] = {}
        self._told_s = float("-inf")

    def reports(self) -> tuple[LoadReport, ...]:
        """The load now, told or not."""
        return tuple(self._now.values())

    def update(self, report: LoadReport) -> LoadReport:
        """Takes a rank's load (its total of blocks is kept); returns the whole report."""
        total = self._now[report.dp_rank].total_blocks
        self._now[report.dp_rank] = whole = replace(report, total_blocks=total)
        return whole

    def clear(self) -> Iterable[LoadReport]:
        """All ranks are idle for good (the engine died); returns their reports."""
        for rank, load in self._now.items():
            self.update(LoadReport(dp_rank=rank, steps=load.steps))
        return self.reports()

    def due(self, now_s: float) -> Due:
        """What is to be told at `now_s` (monotonic); counts as told."""
        # The step counter alone is no news.
        changed = {
            rank: load
            for rank, load in self._now.items()
            if replace(load, steps=0) != self._told.get(rank)
        }
        if not changed:
            return Due()
        wait_s = self._told_s + self._interval_s - now_s
        idle = all(not c.running_requests and not c.waiting_requests for c in changed.values())
        if wait_s > 0 and not idle:
            return Due(again_s=wait_s)
        self._told_s = now_s
        self._told.update((rank, replace(load, steps=0)) for rank, load in changed.items())
        return Due(tuple(changed.values()))
