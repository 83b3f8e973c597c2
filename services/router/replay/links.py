"""Event streams in simulated time: from a worker to a router, late or with losses.

A link numbers nothing and decides nothing: what arrives goes through the same state machine that
the service joins streams with (services/common/events/join.py), and from there into the core.
"""

from __future__ import annotations

from typing import Protocol

from services.common.events.join import Apply, FollowStats, Heard, Instruction, Join, TakeSnapshot
from services.common.events.join import Reset as TakeState
from services.common.events.model import Batch, Snapshot

HEARTBEAT_S = 0.25
"""How often a silent worker tells its last number."""


class ReadModel(Protocol):
    """What takes a stream's news: a router's core, or its table of daemons."""

    def heard(self, publisher: str, incarnation: int, now: float, /) -> bool:
        """It lives."""

    def reset(self, snapshot: Snapshot, now: float, /) -> bool:
        """It holds exactly this."""

    def apply(self, batch: Batch, now: float, /) -> object:
        """What is new."""


class Link:
    """One publisher's stream at one router. `wants_snapshot` is for the caller to answer."""

    def __init__(self, core: ReadModel, publisher: str) -> None:
        self.stats = FollowStats()
        self._core = core
        self._publisher = publisher
        self._join = Join(self.stats)
        self._heard_at = 0.0
        self._passed = 0
        self.wants_snapshot = False
        self.fetching = False
        """Whether somebody is on the way with one."""

    def arrives(self, batch: Batch, now: float) -> None:
        """A batch is there."""
        self._passed = batch.sequence
        self._heard_at = now
        self._do(self._join.on_batch(batch), now)

    def lost(self, batch: Batch) -> None:
        """A batch would be there, but was dropped on its way."""
        self._passed = batch.sequence

    def catch_up(self, now: float) -> None:
        """Delivers the heartbeat that a silent worker has sent meanwhile.

        Only the last one changes anything, so this is called before anybody asks, instead of four
        times a second.
        """
        if now - self._heard_at >= HEARTBEAT_S:
            self._heard_at = now
            beat = Batch(self._publisher, 1, self._passed, round(now * 1e6))
            self._do(self._join.on_batch(beat), now)

    def take(self, snapshot: Snapshot, now: float) -> None:
        """The snapshot that was wanted."""
        self.wants_snapshot = self.fetching = False
        self._do(self._join.on_snapshot(snapshot), now)

    def _do(self, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            match instruction:
                case Apply(batch=batch):
                    self._core.apply(batch, now)
                case TakeState(snapshot=snapshot):
                    self._core.reset(snapshot, now)
                case Heard(incarnation=incarnation):
                    self._core.heard(self._publisher, incarnation, now)
                case TakeSnapshot():
                    self.wants_snapshot = True
