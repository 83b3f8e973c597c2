"""The snapshot join: rules one by one, and a state machine of a lossy world that must converge."""

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.common.events.join import (
    Apply,
    FollowStats,
    Heard,
    Instruction,
    Join,
    Reset,
    TakeSnapshot,
)
from services.common.events.model import (
    Batch,
    BlocksRemoved,
    BlocksStored,
    Snapshot,
    Tier,
    TierBlocks,
)
from services.common.ids import BlockKey


def batch(sequence: int, *keys: int, incarnation: int = 1, at: int = 0) -> Batch:
    events = (BlocksStored(Tier.G1, [BlockKey(k) for k in keys]),) if keys else ()
    return Batch("w", incarnation, sequence, at, events)


def snapshot(sequence: int, incarnation: int = 1, at: int = 0) -> Snapshot:
    return Snapshot("w", incarnation, sequence, time_unix_us=at)


def live_at(sequence: int, **options: int) -> tuple[Join, FollowStats]:
    stats = FollowStats()
    join = Join(stats, **options)
    join.on_batch(batch(sequence))
    join.on_snapshot(snapshot(sequence))
    assert join.live
    return join, stats


def test_the_snapshot_is_taken_when_the_stream_is_heard_and_buffered_batches_follow() -> None:
    join = Join(FollowStats())
    assert join.on_batch(batch(3)) == [Heard(1, 3), TakeSnapshot()]
    assert join.on_batch(batch(4, 40)) == [Heard(1, 4)]
    assert join.on_batch(batch(5, 50)) == [Heard(1, 5)]
    assert join.on_snapshot(snapshot(4)) == [Reset(snapshot(4)), Apply(batch(5, 50))]
    assert join.on_batch(batch(5)) == [Apply(batch(5))]
    assert join.on_batch(batch(6, 60)) == [Apply(batch(6, 60))]


def test_a_snapshot_ahead_of_the_stream_swallows_what_it_holds() -> None:
    join = Join(FollowStats())
    join.on_batch(batch(1))
    assert join.on_snapshot(snapshot(3)) == [Reset(snapshot(3))]
    assert join.on_batch(batch(1)) == [Heard(1, 1)]
    assert join.on_batch(batch(2, 2)) == [Heard(1, 2)]
    assert join.on_batch(batch(3, 3)) == [Heard(1, 3)]
    assert join.on_batch(batch(4, 4)) == [Apply(batch(4, 4))]


def test_a_hole_means_a_snapshot() -> None:
    join, stats = live_at(5)
    assert join.on_batch(batch(7, 70)) == [Heard(1, 7), TakeSnapshot()]
    assert join.on_snapshot(snapshot(6)) == [Reset(snapshot(6)), Apply(batch(7, 70))]
    assert stats.gaps == 1 and stats.snapshots == 2


def test_a_heartbeat_shows_the_loss_of_the_last_batch() -> None:
    join, stats = live_at(5)
    assert join.on_batch(batch(6)) == [Heard(1, 6), TakeSnapshot()]
    assert stats.gaps == 1


def test_a_snapshot_too_old_for_the_buffer_is_followed_by_another() -> None:
    join, _ = live_at(5)
    join.on_batch(batch(8, 80))
    assert join.on_snapshot(snapshot(6)) == [Reset(snapshot(6)), Heard(1, 8), TakeSnapshot()]
    assert join.on_snapshot(snapshot(7)) == [Reset(snapshot(7)), Apply(batch(8, 80))]


def test_another_incarnation_voids_everything() -> None:
    join, stats = live_at(5)
    assert join.on_batch(batch(1, 10, incarnation=2)) == [Heard(2, 1), TakeSnapshot()]
    assert join.on_snapshot(snapshot(9, incarnation=1)) == [TakeSnapshot()]
    expected = [Reset(snapshot(0, 2)), Apply(batch(1, 10, incarnation=2))]
    assert join.on_snapshot(snapshot(0, incarnation=2)) == expected
    assert (stats.epochs, stats.refused_snapshots) == (1, 1)


def test_a_snapshot_of_the_next_life_waits_until_that_is_heard() -> None:
    join, _ = live_at(5)
    join.on_batch(batch(7, 70))
    assert join.on_snapshot(snapshot(0, incarnation=2)) == [TakeSnapshot()]
    assert join.on_batch(batch(0, incarnation=2)) == [Heard(2, 0)]
    assert join.on_snapshot(snapshot(0, incarnation=2)) == [Reset(snapshot(0, 2))]


def test_an_overflow_is_repaired_by_a_later_snapshot() -> None:
    join, stats = live_at(0, max_buffered=2)
    for n in range(2, 7):
        join.on_batch(batch(n, n))
        join.check_invariants()
    assert stats.overflows == 2
    assert join.on_snapshot(snapshot(3))[0] == Reset(snapshot(3))
    assert not join.live
    assert join.on_snapshot(snapshot(5)) == [Reset(snapshot(5)), Apply(batch(6, 6))]


def test_a_failed_snapshot_is_asked_for_again_once() -> None:
    join = Join(FollowStats())
    join.on_batch(batch(1))
    assert join.on_snapshot_failed() == [TakeSnapshot()]
    assert join.on_batch(batch(1)) == [Heard(1, 1)]


def test_duplicates_are_counted_and_not_applied() -> None:
    join, stats = live_at(5)
    join.on_batch(batch(6, 60))
    assert join.on_batch(batch(6, 60)) == [Heard(1, 6)]
    assert stats.duplicates == 1


def test_a_batch_of_events_nobody_knows_still_takes_its_number() -> None:
    join, stats = live_at(5)
    strange = Batch("w", 1, 6, 0, (), unknown_events=2)
    assert join.on_batch(strange) == [Apply(strange)]
    assert join.on_batch(batch(7, 70)) == [Apply(batch(7, 70))]
    assert stats.unknown_events == 2


class LossyWorld(RuleBasedStateMachine):
    """A publisher that changes, restarts and is snapshotted; a network that does its worst."""

    @initialize(max_buffered=st.integers(1, 4))
    def start(self, max_buffered: int) -> None:
        self.stats = FollowStats()
        self.join = Join(self.stats, max_buffered)
        self.incarnation = 1
        self.sequence = 0
        self.clock = 1
        self.truth: frozenset[int] = frozenset()
        self.history: dict[tuple[int, int], frozenset[int]] = {(1, 0): self.truth}
        self.network: list[Batch] = []
        self.wanted = 0
        self.snapshots: list[Snapshot] = []
        self.state: set[int] | None = None
        self.at: tuple[int, int] | None = None

    def now(self) -> int:
        self.clock += 1
        return self.clock

    # What the publisher does.

    @rule(key=st.integers(0, 5), stored=st.booleans())
    def change(self, key: int, stored: bool) -> None:
        self.sequence += 1
        kind = BlocksStored if stored else BlocksRemoved
        self.truth = self.truth | {key} if stored else self.truth - {key}
        self.history[self.incarnation, self.sequence] = self.truth
        event = kind(Tier.G1, [BlockKey(key)])
        self.network.append(Batch("w", self.incarnation, self.sequence, self.now(), (event,)))

    @rule()
    def beat(self) -> None:
        self.network.append(Batch("w", self.incarnation, self.sequence, self.now()))

    @rule()
    def restart(self) -> None:
        self.incarnation += 1
        self.sequence = 0
        self.truth = frozenset()
        self.history[self.incarnation, 0] = self.truth

    # What the network does.

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """In order most of the time; any other message, now and then."""
        last = len(self.network) - 1
        which = data.draw(st.one_of(st.just(0), st.just(0), st.integers(0, last)))
        self.follow(self.join.on_batch(self.network.pop(which)))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        self.network.append(data.draw(st.sampled_from(self.network)))

    # What happens to snapshots: taken at one time, answered at another, or never.

    @precondition(lambda self: self.wanted > len(self.snapshots))
    @rule()
    def take_snapshot(self) -> None:
        blocks = TierBlocks(Tier.G1, [BlockKey(k) for k in self.truth])
        taken = Snapshot("w", self.incarnation, self.sequence, (blocks,), time_unix_us=self.now())
        self.snapshots.append(taken)

    @precondition(lambda self: self.snapshots)
    @rule()
    def answer(self) -> None:
        self.wanted -= 1
        self.follow(self.join.on_snapshot(self.snapshots.pop()))

    @precondition(lambda self: self.wanted)
    @rule()
    def fail(self) -> None:
        self.wanted -= 1
        self.snapshots.clear()
        self.follow(self.join.on_snapshot_failed())

    def follow(self, instructions: Iterable[Instruction]) -> None:
        """Does what a consumer does, and holds it against the publisher's history."""
        for instruction in instructions:
            match instruction:
                case TakeSnapshot():
                    self.wanted += 1
                    assert self.wanted == 1, "two snapshots at once"
                case Reset(taken):
                    self.state = {k for t in taken.blocks for k in t.keys}
                    self.at = (taken.incarnation, taken.sequence)
                case Apply(applied):
                    assert self.state is not None and self.at is not None
                    assert applied.incarnation == self.at[0]
                    assert applied.sequence == self.at[1] + (not applied.is_heartbeat)
                    self.at = (applied.incarnation, applied.sequence)
                    for event in applied.events:
                        if isinstance(event, BlocksStored):
                            self.state.update(event.keys)
                        elif isinstance(event, BlocksRemoved):
                            self.state.difference_update(event.keys)
                case Heard(incarnation):
                    assert incarnation <= self.incarnation
            if self.at is not None:
                assert self.state == self.history[self.at]

    @invariant()
    def holds(self) -> None:
        self.join.check_invariants()
        assert self.stats.lies == 0, "an honest publisher"

    def teardown(self) -> None:
        """When the network behaves again, a few heartbeats and snapshots lead to the truth."""
        if not hasattr(self, "join"):
            return
        for _ in range(4):
            self.beat()
            while self.network:
                self.follow(self.join.on_batch(self.network.pop(0)))
            if self.wanted:
                if not self.snapshots:
                    self.take_snapshot()
                self.answer()
        self.holds()
        assert self.join.live
        assert self.at == (self.incarnation, self.sequence)
        assert self.state == self.truth


TestLossyWorld = LossyWorld.TestCase
TestLossyWorld.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_publisher_whose_heartbeats_contradict_its_snapshot_is_asked_again() -> None:
    join, stats = live_at(9)
    assert [join.on_batch(batch(5)) for _ in range(3)] == [[Heard(1, 9)]] * 3
    # Old ones that were under way end with ever higher numbers.
    assert [join.on_batch(batch(6)) for _ in range(3)] == [[Heard(1, 9)]] * 3
    assert stats.lies == 0
    assert join.on_batch(batch(6)) == [Heard(1, 6), TakeSnapshot()]
    assert stats.lies == 1
    assert join.on_snapshot(snapshot(6)) == [Reset(snapshot(6))]


def test_a_doubt_means_a_snapshot_once() -> None:
    join, stats = live_at(3)
    assert join.on_doubt() == [Heard(1, 3), TakeSnapshot()]
    assert join.on_doubt() == []
    assert stats.doubts == 1
    assert not join.live


def joined(snapshot_sequence: int, at: int) -> tuple[Join, FollowStats]:
    """Heard at 5, and then told by a snapshot that it is elsewhere."""
    stats = FollowStats()
    join = Join(stats)
    join.on_batch(batch(5, 5, at=at - 10))
    taken = snapshot(snapshot_sequence, at=at)
    assert join.on_snapshot(taken) == [Reset(taken)]
    return join, stats


def test_a_busy_publisher_below_its_snapshot_is_asked_again_at_its_next_word() -> None:
    join, stats = joined(1000, at=100)
    assert join.on_batch(batch(6, 6, at=101)) == [Heard(1, 6), TakeSnapshot()]
    assert (stats.lies, stats.duplicates) == (1, 1)
    # It lies again and again, and is heard all the time.
    for n in range(7, 47):
        assert Heard(1, n) in join.on_batch(batch(n, n, at=2 * n + 100))
        assert Heard(1, n) in join.on_batch(batch(n, at=2 * n + 101))
        if n % 10 == 0:
            join.on_snapshot(snapshot(1000, at=2 * n + 101))
        join.check_invariants()
    assert stats.lies == 5
    # The truth, at last.
    assert join.on_snapshot(snapshot(46, at=300)) == [Reset(snapshot(46, at=300))]
    assert join.on_batch(batch(47, 47, at=301)) == [Apply(batch(47, 47, at=301))]


def test_a_heartbeat_below_the_snapshot_is_a_lie_when_it_was_sent_later() -> None:
    join, stats = joined(9, at=100)
    assert join.on_batch(batch(8, at=99)) == [Heard(1, 8)]
    assert join.on_batch(batch(8, at=101)) == [Heard(1, 8), TakeSnapshot()]
    assert stats.lies == 1


def test_a_number_that_the_snapshot_had_is_not_given_again() -> None:
    join, stats = joined(6, at=100)
    assert join.on_batch(batch(6, at=101)) == [Apply(batch(6, at=101))]
    assert join.on_batch(batch(6, 6, at=102)) == [Heard(1, 6), TakeSnapshot()]
    assert stats.lies == 1


def test_a_stream_that_goes_back_below_what_it_told_is_a_lie() -> None:
    join, stats = joined(6, at=100)
    join.on_batch(batch(7, 7, at=101))
    assert join.on_batch(batch(2, 2, at=102)) == [Heard(1, 2), TakeSnapshot()]
    assert stats.lies == 1


def test_thousands_of_queued_messages_that_a_snapshot_overtook_are_no_lie() -> None:
    join, stats = joined(9000, at=100_000)
    for n in range(6, 9001):
        assert join.on_batch(batch(n, n, at=n * 10)) == [Heard(1, n)]
        join.on_batch(batch(n, at=n * 10 + 5))
    assert join.on_batch(batch(9001, 1, at=100_001)) == [Apply(batch(9001, 1, at=100_001))]
    assert stats.lies == 0 and stats.snapshots == 1


def test_reordered_and_repeated_messages_are_no_lie() -> None:
    join, stats = joined(20, at=1000)
    for n in (8, 7, 7, 12, 12, 12, 12, 12, 20, 6, 20):
        join.on_batch(batch(n, n, at=n * 10))
        join.on_batch(batch(n, at=n * 10 + 5))
    for n in range(21, 41):
        assert join.on_batch(batch(n, n, at=1000 + n)) == [Apply(batch(n, n, at=1000 + n))]
        for old in (n, n - 1, n - 15):
            join.on_batch(batch(old, old, at=1000 + old if old > 20 else 10 * old))
    assert stats.lies == 0 and stats.snapshots == 1


def test_more_in_a_row_than_all_queues_hold_were_not_under_way() -> None:
    """Whatever the clock says: it may have been set back, or not be told."""
    join, stats = joined(1_000_000, at=0)
    count = 6
    while join.live and count < 100_000:
        join.on_batch(batch(count, count))
        count += 1
    assert stats.lies == 1 and count > 20_000
