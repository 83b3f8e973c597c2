"""How a subscriber joins an event stream with snapshots, without gaps: a pure state machine.

Batches and snapshots go in, instructions come out. The stream may lose, repeat and reorder batches,
start anew (another incarnation), and bring snapshots of a life that is over. Rules:

- A snapshot is asked for only when the stream has been heard: what follows it then arrives too.
- While one is awaited, batches are buffered; it is taken when it is of the incarnation heard last.
- Then the buffered batches newer than it follow. Whatever still lacks means: another snapshot.
- A publisher whose stream goes on below its own snapshot's number has lied in one of them, and a
  consumer may doubt its state for reasons of its own: another snapshot, too.

How a lie is told from what the snapshot has only overtaken, of which a slow consumer's queues may
hold thousands: by the publisher's own clock, which stamps envelopes and snapshots alike. Numbers
only grow, so a message sent after the publisher was at a number tells no lower one; one that does
contradicts it, whatever was delayed, repeated or reordered on the way. All that was overtaken was
sent before. Where the times aren't told, heartbeats must insist: several in a row with one number,
since those that were under way end with ever higher ones. And more in a row than all queues hold
were not under way, whatever a clock says that was set back. A false alarm would cost one snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.common.events.model import Batch, Snapshot


@dataclass(frozen=True, slots=True)
class Reset:
    """Forget everything of the publisher and take this."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch, in order and without gaps; a heartbeat has no events."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Heard:
    """The publisher lives, but there is nothing to apply: its state is being recovered, or what was
    heard is known already.

    `sequence` is the highest heard of this incarnation.
    """

    incarnation: int
    sequence: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Fetch a snapshot and answer with `on_snapshot` or `on_snapshot_failed`. One at a time."""


StreamItem = Reset | Apply | Heard
Instruction = Reset | Apply | Heard | TakeSnapshot


@dataclass(slots=True)
class FollowStats:
    """What befell a followed stream. Only ever grows."""

    gaps: int = 0
    """Holes in the numbers that made a snapshot necessary."""
    epochs: int = 0
    """Changes of incarnation."""
    snapshots: int = 0
    """Snapshots that were taken over."""
    refused_snapshots: int = 0
    """Snapshots of another incarnation than the stream's."""
    failed_snapshots: int = 0
    """Attempts to fetch one that failed."""
    overflows: int = 0
    """Times that the buffer was full while a snapshot was awaited."""
    duplicates: int = 0
    """Batches that were known already."""
    unknown_events: int = 0
    """Events of a kind or tier that this version doesn't know."""
    lies: int = 0
    """Times that a stream contradicted a snapshot, or what it had told before."""
    doubts: int = 0
    """Times that the consumer doubted its state: a digest of the publisher's differed."""
    unreadable: int = 0
    """Messages that were no envelope, or another publisher's."""


_INSISTENT = 4
"""Heartbeats with one number: those that were under way before the snapshot are fewer."""
_MOST_UNDER_WAY = 20_000
"""Messages that were under way: as many as the queues of both ends hold."""


class Join:
    """The state of one subscription.

    `max_buffered` bounds the batches kept while a snapshot is awaited; when it is reached they are
    all dropped, which shows as a gap after the snapshot.
    """

    def __init__(self, stats: FollowStats, max_buffered: int = 10_000) -> None:
        self._stats = stats
        self._max_buffered = max_buffered
        self._incarnation: int | None = None
        """Of the batch heard last; None: nothing heard."""
        self._heard = 0
        """Highest sequence heard of that incarnation."""
        self._applied: int | None = None
        """Sequence the consumer's state is at; None: a snapshot is needed."""
        self._buffer: dict[int, Batch] = {}
        self._asked = False
        self._applied_us = 0
        """When the publisher was at `_applied`, by its own clock; 0: not told."""
        self._overtaken = 0
        """Messages in a row that told nothing new."""
        self._low = self._insisted = 0
        """The last heartbeat below `_applied`, and how many in a row have told it."""

    @property
    def live(self) -> bool:
        """Whether the consumer's state follows the stream."""
        return self._applied is not None

    def on_batch(self, batch: Batch) -> list[Instruction]:
        """Takes a batch or heartbeat from the stream."""
        if batch.incarnation != self._incarnation:
            self._stats.epochs += self._incarnation is not None
            self._incarnation = batch.incarnation
            self._heard = batch.sequence
            self._applied = None
            self._buffer.clear()
        self._heard = max(self._heard, batch.sequence)
        if self._applied is None:
            self._keep(batch)
            return [self._hearing(), *self._ask()]
        if batch.sequence == self._applied + (not batch.is_heartbeat):
            return [self._apply(batch)]
        if batch.sequence > self._applied:
            self._keep(batch)
            return self._gap()
        self._stats.duplicates += not batch.is_heartbeat
        if not self._contradicts(batch):
            return [self._hearing()]
        self._stats.lies += 1
        # The last word is believed, or no snapshot would ever be new enough.
        self._heard = batch.sequence
        return self._recover()

    def on_snapshot(self, snapshot: Snapshot) -> list[Instruction]:
        """Takes the snapshot that was asked for."""
        self._asked = False
        if snapshot.incarnation != self._incarnation:
            # Of a life that is over, or of one whose first batch is still to be heard.
            self._stats.refused_snapshots += 1
            return self._ask()
        self._stats.snapshots += 1
        self._applied = snapshot.sequence
        self._applied_us = snapshot.time_unix_us
        self._overtaken = self._low = self._insisted = 0
        instructions: list[Instruction] = [Reset(snapshot)]
        for sequence in sorted(self._buffer):
            if sequence == self._applied + 1:
                instructions.append(self._apply(self._buffer[sequence]))
        self._buffer = {n: b for n, b in self._buffer.items() if n > self._applied}
        if self._heard > self._applied:
            instructions += self._gap()
        return instructions

    def on_snapshot_failed(self) -> list[Instruction]:
        """Takes the news that the snapshot can't be had; it is asked for again."""
        self._asked = False
        self._stats.failed_snapshots += 1
        return self._ask() if self._applied is None else []

    def on_doubt(self) -> list[Instruction]:
        """The consumer doubts its state: a snapshot is taken."""
        if self._applied is None:
            return []
        self._stats.doubts += 1
        return self._recover()

    def check_invariants(self) -> None:
        """Raises AssertionError when the state contradicts itself."""
        assert len(self._buffer) <= self._max_buffered
        assert all(n == b.sequence for n, b in self._buffer.items())
        assert all(b.incarnation == self._incarnation for b in self._buffer.values())
        assert all(n <= self._heard for n in self._buffer)
        if self._applied is None:
            assert self._asked or self._incarnation is None, "waits for what nobody fetches"
        else:
            assert not self._buffer and self._applied >= self._heard

    def _contradicts(self, batch: Batch) -> bool:
        """Whether a message with a number that is known already was not just overtaken."""
        self._overtaken += 1
        if self._overtaken > _MOST_UNDER_WAY:
            return True
        if self._applied_us and batch.time_unix_us:
            return batch.time_unix_us > self._applied_us
        if not batch.is_heartbeat:
            return False
        self._insisted = self._insisted + 1 if batch.sequence == self._low else 1
        self._low = batch.sequence
        return self._insisted >= _INSISTENT

    def _apply(self, batch: Batch) -> Apply:
        self._applied = batch.sequence
        self._applied_us = batch.time_unix_us
        self._overtaken = 0
        self._stats.unknown_events += batch.unknown_events
        return Apply(batch)

    def _keep(self, batch: Batch) -> None:
        if batch.is_heartbeat:
            return
        if len(self._buffer) >= self._max_buffered:
            self._stats.overflows += 1
            self._buffer.clear()
        self._buffer[batch.sequence] = batch

    def _gap(self) -> list[Instruction]:
        self._stats.gaps += 1
        return self._recover()

    def _recover(self) -> list[Instruction]:
        self._applied = None
        return [self._hearing(), *self._ask()]

    def _hearing(self) -> Heard:
        assert self._incarnation is not None
        return Heard(self._incarnation, self._heard)

    def _ask(self) -> list[Instruction]:
        if self._asked:
            return []
        self._asked = True
        return [TakeSnapshot()]
