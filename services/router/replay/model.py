"""What a replay needs of a worker model. Two have it: `simple`, and the simulator's engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.common.events.model import Event, Snapshot
from services.common.ids import AttemptId
from services.router.replay.trace import TraceRequest


class WorkerModel(Protocol):
    """One worker in simulated time: requests go in, the events of its stream come out."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""

    @property
    def first_gap(self) -> int:
        """1 where the first output token is the prefill's own, 0 where it is a decode's."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far, for the imbalance."""

    def submit(self, request: TraceRequest, attempt_id: AttemptId, now: float) -> Sequence[Event]:
        """Takes a request; returns what is told at once."""

    def next_time(self) -> float:
        """When something happens by itself; infinity if nothing does."""

    def advance(self, now: float) -> Sequence[Event]:
        """Lets happen what is due at `now`; returns what is told of it."""

    def snapshot(self, publisher: str, sequence: int, now: float) -> Snapshot:
        """Its whole state, as of event number `sequence`."""

    @property
    def tiers(self) -> TierModel | None:
        """The tiers below it, which have a stream of their own; None: there are none."""


class TierModel(Protocol):
    """What a kvbm daemon would tell of the tiers below one worker."""

    @property
    def namespace(self) -> bytes:
        """Of its blocks."""

    def take_news(self) -> Sequence[Event]:
        """What changed since the last call."""

    def snapshot(self, publisher: str, sequence: int) -> Snapshot:
        """All that it holds, as of event number `sequence`."""
