"""The load book: bookings count at once, expire, are confirmed; sums never go wrong."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.events.model import LoadReport, RequestAdmitted, RunningRequest
from services.common.ids import AttemptId, BlockKey
from services.router.core.inflight import InflightPrefixes, Mates
from services.router.core.load import Estimate, Finished, LoadBook, LoadView

KEYS = tuple(BlockKey(k) for k in range(6))


def admitted(
    attempt_id: str, tokens: int = 100, keys: tuple[BlockKey, ...] = KEYS
) -> RequestAdmitted:
    return RequestAdmitted(AttemptId(attempt_id), tokens, 10, keys)


def book(
    load: LoadBook, attempt_id: str, now: float = 0.0, slot: int = 0, cached: int = 60
) -> None:
    load.book(
        slot, AttemptId(attempt_id), prompt_tokens=100, cached_tokens=cached, keys=KEYS, now=now
    )


def opened(*slots: int) -> LoadBook:
    load = LoadBook(booking_ttl_s=10)
    for slot in slots or (0,):
        load.add_slot(slot)
    return load


def test_a_booking_counts_at_once_and_expires() -> None:
    load = opened()
    book(load, "a", now=0)
    book(load, "b", now=5)
    assert load.view(0) == LoadView(booked=2, queued_tokens=80, active_tokens=200)
    assert load.expire(10) == 1
    assert load.view(0).booked == load.bookings == 1
    assert load.expire(14.9) == 0
    assert load.expire(15) == 1
    assert load.view(0) == LoadView()
    assert load.mates(KEYS, 6) == {}
    assert load.expired == 2


def test_an_admission_confirms_and_the_end_tells_the_outcome() -> None:
    load = opened()
    book(load, "a")
    load.admitted(0, admitted("a", 101), Estimate(0), now=1)
    assert load.view(0) == LoadView(queued=1, queued_tokens=41, active_tokens=101)
    assert load.expire(1000) == 0
    done = load.first_token(0, AttemptId("a"), 64)
    assert done is not None and (done.computed_tokens, done.admitted_at) == (37, 1)
    assert load.view(0) == LoadView(decoding=1, active_tokens=101)
    assert load.first_token(0, AttemptId("a"), 64) is None
    end = load.finished(0, AttemptId("a"), 64, False)
    assert end == Finished(0, AttemptId("a"), 101, 64, 60, False)
    assert load.finished(0, AttemptId("a"), 64, False) is None
    assert load.view(0) == LoadView()


def test_a_release_frees_bookings_only() -> None:
    load = opened()
    book(load, "a")
    assert load.release(AttemptId("a")) == 0
    assert load.release(AttemptId("a")) is None
    book(load, "b")
    load.admitted(0, admitted("b"), Estimate(0), now=1)
    assert load.release(AttemptId("b")) is None
    assert load.view(0).queued == 1


def test_others_requests_count_with_the_estimate() -> None:
    load = opened()
    load.admitted(0, admitted("x", 100), Estimate(96), now=0)
    load.admitted(0, admitted("y", 100), Estimate(100), now=0)
    assert load.view(0).queued_tokens == 4 + 1
    end = load.finished(0, AttemptId("x"), 96, True)
    assert end is not None and end.predicted is None and end.aborted


def test_an_admission_elsewhere_moves_the_request() -> None:
    load = opened(0, 1)
    book(load, "a", slot=0)
    load.admitted(1, admitted("a"), Estimate(0), now=1)
    assert load.view(0) == LoadView()
    assert load.view(1).queued == 1


def test_the_engines_own_report_bounds_the_queue() -> None:
    load = opened()
    load.admitted(0, admitted("a", 1000), Estimate(0), now=0)
    assert load.view(0).queued_tokens == 1000
    load.report(0, LoadReport(running_requests=1, pending_prefill_tokens=300))
    assert load.view(0).queued_tokens == 300
    load.admitted(0, admitted("b", 50), Estimate(0), now=0)
    assert load.view(0).queued_tokens == 350
    book(load, "c")
    assert load.view(0).queued_tokens == 390
    # An engine that doesn't know its cache yet can't raise what we know to be less.
    load.report(0, LoadReport(waiting_requests=2, pending_prefill_tokens=9999))
    assert load.view(0).queued_tokens == 1050 + 40


def test_a_snapshot_replaces_all_but_bookings() -> None:
    load = opened()
    book(load, "mine")
    book(load, "booked")
    load.admitted(0, admitted("mine"), Estimate(0), now=0)
    load.admitted(0, admitted("gone"), Estimate(0), now=0)
    running = [
        (RunningRequest(admitted("mine"), True), Estimate()),
        (RunningRequest(admitted("new", 70), False), Estimate(32)),
    ]
    load.reset(0, running, LoadReport(pending_prefill_tokens=20), now=1)
    load.check_invariants()
    view = load.view(0)
    assert (view.booked, view.queued, view.decoding) == (1, 1, 1)
    assert view.queued_tokens == 20 + 40
    end = load.finished(0, AttemptId("mine"), 64, False)
    assert end is not None and end.predicted == 60


def test_several_sequences_of_one_placement() -> None:
    load = opened()
    load.book(
        0,
        AttemptId("a"),
        prompt_tokens=100,
        cached_tokens=0,
        keys=KEYS,
        now=0,
        sequences=3,
    )
    assert load.view(0).booked == 3
    for name in ("a", "a#1", "a#2"):
        load.admitted(0, admitted(name), Estimate(96), now=0)
    view = load.view(0)
    assert (view.booked, view.queued, view.queued_tokens) == (0, 3, 108)


class TestMates:
    def test_depth_and_crowd(self) -> None:
        prefixes = InflightPrefixes()
        prefixes.add(0, [1, 2, 3, 4])
        prefixes.add(0, [1, 2, 5])
        prefixes.add(1, [1])
        assert prefixes.mates([1, 2, 3, 9], 4) == {0: Mates(3, 5 / 4), 1: Mates(1, 1 / 4)}
        assert prefixes.mates([1, 2, 3, 9], 2) == {0: Mates(2, 5 / 4), 1: Mates(1, 1 / 4)}
        assert prefixes.mates([7], 1) == prefixes.mates([], 0) == {}
        prefixes.remove(0, [1, 2, 3, 4])
        prefixes.remove(0, [1, 2, 5])
        prefixes.remove(1, [1])
        assert prefixes.counts() == {}

    def test_long_prompts_are_sampled(self) -> None:
        prefixes = InflightPrefixes()
        chain = list(range(1000))
        prefixes.add(0, chain)
        prefixes.add(0, chain[:500])
        assert prefixes.mates(chain, 999) == {0: Mates(999, 1.5)}


class LoadMachine(RuleBasedStateMachine):
    """Events in any order, lost, repeated, at the wrong slot: sums hold, nothing is negative."""

    ids = st.sampled_from(["a", "b", "c", "d", "a#1"])
    slots = st.integers(0, 1)
    chains = st.integers(0, 6).map(lambda n: KEYS[:n])

    def __init__(self) -> None:
        super().__init__()
        self.load = opened(0, 1)
        self.now = 0.0
        self.booked_at: dict[str, float] = {}

    @rule(id=ids, slot=slots, keys=chains, cached=st.integers(0, 100))
    def book(self, id: str, slot: int, keys: tuple[BlockKey, ...], cached: int) -> None:
        self.load.book(
            slot,
            AttemptId(id),
            prompt_tokens=100,
            cached_tokens=cached,
            keys=keys,
            now=self.now,
            sequences=2,
        )
        self.booked_at[id] = self.now

    @rule(id=ids, slot=slots, keys=chains, tokens=st.integers(1, 200), cached=st.integers(0, 200))
    def admit(
        self, id: str, slot: int, keys: tuple[BlockKey, ...], tokens: int, cached: int
    ) -> None:
        self.load.admitted(
            slot, admitted(id, tokens, keys), Estimate(min(cached, tokens)), self.now
        )
        self.booked_at.pop(id, None)

    @rule(id=ids, slot=slots)
    def first_token(self, id: str, slot: int) -> None:
        self.load.first_token(slot, AttemptId(id), 10)

    @rule(id=ids, slot=slots)
    def finish(self, id: str, slot: int) -> None:
        if self.load.finished(slot, AttemptId(id), 10, False):
            self.booked_at.pop(id, None)

    @rule(id=ids)
    def release(self, id: str) -> None:
        if self.load.release(AttemptId(id)) is not None:
            del self.booked_at[id]

    @rule(slot=slots, tokens=st.integers(0, 500))
    def report(self, slot: int, tokens: int) -> None:
        self.load.report(slot, LoadReport(pending_prefill_tokens=tokens))

    @rule(slot=slots, ids=st.sets(ids), decoding=st.booleans())
    def reset(self, slot: int, ids: set[str], decoding: bool) -> None:
        self.load.reset(
            slot,
            [(RunningRequest(admitted(i), decoding), Estimate(5)) for i in sorted(ids)],
            None,
            self.now,
        )
        for id in ids:
            self.booked_at.pop(id, None)

    @rule(slot=slots)
    def worker_restarts(self, slot: int) -> None:
        self.load.remove_slot(slot)
        self.load.add_slot(slot)
        self.booked_at = {
            i: t for i, t in self.booked_at.items() if AttemptId(i) in self.load._bookings
        }

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.load.expire(self.now)
        self.booked_at = {i: t for i, t in self.booked_at.items() if self.now < t + 10}

    @invariant()
    def holds(self) -> None:
        self.load.check_invariants()
        assert set(self.load._bookings) == set(self.booked_at)
        for slot in (0, 1):
            view = self.load.view(slot)
            assert min(view.booked, view.queued, view.decoding, view.queued_tokens) >= 0


LoadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoadMachine = LoadMachine.TestCase
