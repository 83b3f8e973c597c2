"""When loads are told: the loop's side of core/loads.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from services.common.events.model import LoadReport
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.core.loads import LoadBook
from services.worker.engines.port import EngineLoad


class LoadReports:
    """Loads of an engine's data-parallel ranks. Loop's thread only."""

    def __init__(
        self,
        book: LoadBook,
        pending: Callable[[], int],
        metrics: WorkerMetrics,
        publish: Callable[[Sequence[LoadReport]], None],
    ) -> None:
        """`pending`: tokens to prefill, for engines that don't tell them.

        `publish` is called with reports that come due while the engine says nothing.
        """
        self._pending = pending
        self._book = book
        self._metrics = metrics
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.changed = asyncio.Event()
        """Set whenever the engine has told a load."""
        for report in book.reports():
            metrics.load(report)

    @property
    def first(self) -> LoadReport:
        """The first rank's, now."""
        return self._book.reports()[0]

    @property
    def held_transfers(self) -> int:
        """Finished prefills whose KV waits to be taken, on all ranks."""
        return sum(report.held_transfers for report in self._book.reports())

    def take(self, load: EngineLoad, step: int) -> None:
        """Takes a rank's load."""
        pending = load.pending_prefill_tokens
        report = LoadReport(
            running_requests=load.running,
            waiting_requests=load.waiting,
            pending_prefill_tokens=self._pending() if pending is None else pending,
            used_blocks=load.used_blocks,
            steps=step,
            dp_rank=load.dp_rank,
            held_transfers=load.held_transfers,
        )
        self._metrics.load(self._book.update(report))
        self.changed.set()

    def clear(self) -> None:
        """The engine is dead: all ranks are idle for good."""
        for report in self._book.clear():
            self._metrics.load(report)
        self.changed.set()

    def due(self) -> Sequence[LoadReport]:
        """Those to be told now; the others are published when their time comes."""
        due = self._book.due(self._loop.time())
        if due.again_s is None:
            self.close()
        elif self._timer is None:
            self._timer = self._loop.call_later(due.again_s, self._tell)
        return due.reports

    def _tell(self) -> None:
        self._timer = None
        self._publish(self.due())

    def close(self) -> None:
        """Publishes nothing by itself any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
