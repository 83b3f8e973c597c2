"""Faults of a simulated worker, set off at their times: in its engine, or on its event stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence

from services.common.events.model import Event
from services.common.events.publisher import EventPublisher
from services.common.telemetry.logging import get_logger
from services.worker.engines.sim.core.faults import Fault, FaultKind
from services.worker.engines.sim.engine import SimEngine

log = get_logger(__name__)


class FaultyPublisher:
    """An event stream that loses batches when told to: with a hole in the numbers, or without."""

    def __init__(self, publisher: EventPublisher, dice: random.Random) -> None:
        self._publisher = publisher
        self._dice = dice
        self.drop_share = 0.0
        """Batches that are lost; their numbers are missing."""
        self.lie_share = 0.0
        """Batches that are lost; their numbers are given out again."""
        self.lost = 0
        """Batches lost so far."""

    @property
    def sequence(self) -> int:
        """The last number given out."""
        return self._publisher.sequence

    def publish(self, events: Sequence[Event]) -> int:
        """Sends or loses one batch."""
        if events and self.lie_share and self._dice.random() < self.lie_share:
            self.lost += 1
            return self._publisher.sequence
        if events and self.drop_share and self._dice.random() < self.drop_share:
            self.lost += 1
            self._publisher.sequence += 1
            return self._publisher.sequence
        return self._publisher.publish(events)


class FaultRunner:
    """Sets off the faults of one worker's life. `close` takes back those that have not begun."""

    def __init__(
        self,
        worker: str,
        faults: Iterable[Fault],
        engine: SimEngine,
        publisher: FaultyPublisher,
        *,
        elapsed_s: float = 0.0,
        again: bool = False,
    ) -> None:
        """`elapsed_s`: since the faults' times are counted; earlier ones are over, or still on.

        `again`: this is not its first life, so a death that is due has been.
        """
        self._worker = worker
        self._engine = engine
        self._publisher = publisher
        self._timers: list[asyncio.TimerHandle] = []
        self._ends: dict[FaultKind, asyncio.TimerHandle] = {}
        """Of faults that were set off by hand."""
        loop = asyncio.get_running_loop()
        for fault in faults:
            left_s = fault.at_s + fault.for_s - elapsed_s
            has_been = again and fault.kind is FaultKind.DIE and fault.at_s < elapsed_s
            if left_s <= 0 or has_been:
                continue
            wait_s = max(0.0, fault.at_s - elapsed_s)
            self._timers.append(loop.call_later(wait_s, self._begin, fault, left_s - wait_s))
            if left_s < float("inf"):
                self._timers.append(loop.call_later(left_s, self._end, fault))

    def inject(self, fault: Fault) -> None:
        """Sets off a fault now, whatever its time; it takes the place of one of its kind."""
        if (timer := self._ends.pop(fault.kind, None)) is not None:
            timer.cancel()
        self._begin(fault, fault.for_s)
        if fault.for_s < float("inf"):
            later = asyncio.get_running_loop().call_later
            self._ends[fault.kind] = later(fault.for_s, self._end, fault)

    def _begin(self, fault: Fault, left_s: float) -> None:
        log.warning("simulated fault", worker=self._worker, kind=fault.kind, seconds=left_s)
        match fault.kind:
            case FaultKind.STALL:
                self._engine.stall(left_s)
            case FaultKind.SLOW:
                self._engine.slow(fault.factor)
            case FaultKind.DIE:
                self._engine.die("a simulated fault")
            case FaultKind.DROP:
                self._publisher.drop_share = fault.share
            case FaultKind.LIE:
                self._publisher.lie_share = fault.share

    def _end(self, fault: Fault) -> None:
        match fault.kind:
            case FaultKind.SLOW:
                self._engine.slow(1.0)
            case FaultKind.DROP:
                self._publisher.drop_share = 0.0
            case FaultKind.LIE:
                self._publisher.lie_share = 0.0
            case FaultKind.STALL | FaultKind.DIE:
                pass  # ends by itself

    def close(self) -> None:
        """Nothing begins or ends any more."""
        for timer in (*self._timers, *self._ends.values()):
            timer.cancel()
