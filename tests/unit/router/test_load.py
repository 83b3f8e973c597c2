"""The load book: bookings count at once, expire, are confirmed; sums never go wrong."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.events.model import LoadReport, RequestAdmitted, RunningRequest
from services.common.ids import AttemptId, BlockKey
from services.router.core.cost import Candidate
from services.router.core.inflight import InflightPrefixes, Mates
from services.router.core.load import LoadBook
from services.router.core.requests import Decoded, Estimate, Finished, Incoming, LoadView

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


def leg(
    attempt_id: str, tokens: int = 100, transfer: int = 0, prefill_only: bool = False
) -> RequestAdmitted:
    return RequestAdmitted(AttemptId(attempt_id), tokens, 10, KEYS, 0, transfer, prefill_only)


def book_apart(
    load: LoadBook, attempt_id: str, now: float = 0.0, prefill: int = 0, decode: int = 1
) -> None:
    """100 tokens, of which 40 are cached where they are prefilled, and 30 where they go on."""
    first = AttemptId(f"{attempt_id}-p")
    load.book(
        prefill,
        first,
        prompt_tokens=100,
        cached_tokens=40,
        keys=KEYS,
        now=now,
        then=AttemptId(attempt_id),
    )
    load.book(
        decode,
        AttemptId(attempt_id),
        prompt_tokens=100,
        cached_tokens=30,
        keys=KEYS,
        now=now,
        incoming=Incoming(70, "p", 0.1, first),
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
    assert load.mates(KEYS, 6) == Mates()
    assert load.expired == 2


def test_an_admission_confirms_and_the_end_tells_the_outcome() -> None:
    load = opened()
    book(load, "a")
    load.admitted(0, admitted("a", 101), Estimate(0), now=1)
    assert load.view(0) == LoadView(queued=1, queued_tokens=41, active_tokens=101)
    assert load.expire(1000) == 0
    done = load.first_token(0, AttemptId("a"), 64, 3)
    assert done is not None and (done.computed_tokens, done.admitted_at) == (37, 1)
    assert load.view(0) == LoadView(decoding=1, active_tokens=101)
    assert load.first_token(0, AttemptId("a"), 64, 3) is None
    end = load.finished(0, AttemptId("a"), 64, False, 11, 5)
    assert end == Finished(0, AttemptId("a"), 101, 64, 60, False, Decoded(10, 2, 1, 101))
    assert load.finished(0, AttemptId("a"), 64, False, 11, 5) is None
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
    end = load.finished(0, AttemptId("x"), 96, True, 0, 1)
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
    load.report(0, LoadReport(running_requests=1, pending_prefill_tokens=300), 1)
    assert load.view(0).queued_tokens == 300
    load.admitted(0, admitted("b", 50), Estimate(0), now=0)
    assert load.view(0).queued_tokens == 350
    book(load, "c")
    assert load.view(0).queued_tokens == 390
    # An engine that doesn't know its cache yet can't raise what we know to be less.
    load.report(0, LoadReport(waiting_requests=2, pending_prefill_tokens=9999), 2)
    assert load.view(0).queued_tokens == 1050 + 40


def test_a_snapshot_replaces_all_but_bookings() -> None:
    load = opened()
    book(load, "mine")
    book(load, "booked")
    load.admitted(0, admitted("mine"), Estimate(0), now=0)
    load.admitted(0, admitted("gone"), Estimate(0), now=0)
    running = [
        RunningRequest(admitted("mine"), True),
        RunningRequest(admitted("new", 70), False),
    ]
    load.reset(0, running, lambda event: Estimate(32), LoadReport(pending_prefill_tokens=20), now=1)
    load.check_invariants()
    view = load.view(0)
    assert (view.booked, view.queued, view.decoding) == (1, 1, 1)
    assert view.queued_tokens == 20 + 40
    end = load.finished(0, AttemptId("mine"), 64, False, 5, 2)
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


class TestApart:
    """A request whose prefill is at slot 0, and which goes on at slot 1."""

    def test_bookings_of_both_legs(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a")
        assert load.view(0) == LoadView(booked=1, queued_tokens=60, active_tokens=100)
        assert load.view(1) == LoadView(booked=1, active_tokens=100)
        assert load.mates(KEYS, 6).depth == {0: 6}, "its blocks come to slot 1 later"
        load.check_invariants()
        assert load.release(AttemptId("a-p")) == 0
        assert load.view(0) == LoadView() and load.view(1).booked == 1
        assert load.release(AttemptId("a")) == 1
        assert load.view(1) == LoadView() and load.bookings == 0

    def test_a_prefill_leg_never_decodes(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a")
        load.admitted(0, leg("a-p", prefill_only=True), Estimate(), now=1)
        assert load.view(0) == LoadView(queued=1, queued_tokens=60, active_tokens=100)
        done = load.first_token(0, AttemptId("a-p"), 40, 2)
        assert done is not None and (done.computed_tokens, done.admitted_at) == (60, 1)
        assert load.view(0) == LoadView(active_tokens=100), "its KV is held until it ends"
        load.check_invariants()
        end = load.finished(0, AttemptId("a-p"), 40, False, 1, 2)
        assert end == Finished(0, AttemptId("a-p"), 100, 40, 40, False)
        assert load.view(0) == LoadView()

    def test_what_comes_is_neither_queued_nor_a_sample(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a")
        admitted = load.admitted(1, leg("a", transfer=70), Estimate(), now=1)
        assert (admitted.filled_tokens, admitted.missed) == (70, None)
        assert load.view(1) == LoadView(queued=1, active_tokens=100)
        candidate = Candidate(1, request_s=0.5, token_s=0.001)
        load.fill(candidate)
        assert candidate.queued_requests == 0 and candidate.queue_s(1) == 0
        incoming = load.transfer_ended(1, AttemptId("a"), 70, 2)
        assert incoming is not None and incoming.seconds == 0.1
        assert load.first_token(1, AttemptId("a"), 100, 2, 70) is None
        assert load.view(1) == LoadView(decoding=1, active_tokens=100)
        assert load.mates(KEYS, 6).depth == {0: 6, 1: 6}
        end = load.finished(1, AttemptId("a"), 100, False, 11, 4)
        assert end == Finished(1, AttemptId("a"), 30, 30, 30, False, Decoded(10, 2, 1, 100))

    def test_one_that_waits_for_kv_is_not_what_the_engine_works_on(self) -> None:
        load = opened(0, 1)
        load.admitted(1, leg("a", 5000, transfer=5000), Estimate(), now=0)
        load.admitted(1, admitted("b", 1000), Estimate(), now=0)
        candidate = Candidate(1, token_s=0.001)
        load.fill(candidate)
        assert candidate.queue_s(0.6) == pytest.approx(0.4)
        load.first_token(1, AttemptId("a"), 4999, 0.6, 4999)
        load.fill(candidate)
        assert candidate.queue_s(0.6) == pytest.approx(0.4), "b goes on"
        done = load.first_token(1, AttemptId("b"), 0, 1.0)
        assert done is not None and done.admitted_at == 0

    def test_a_failed_transfer_is_computed(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a")
        load.admitted(1, leg("a", transfer=70), Estimate(), now=1)
        assert load.transfer_ended(1, AttemptId("a"), 0, 6) is not None
        load.check_invariants()
        assert load.view(1) == LoadView(queued=1, queued_tokens=70, active_tokens=100)
        candidate = Candidate(1, token_s=0.01)
        load.fill(candidate)
        assert candidate.queue_s(6.2) == pytest.approx(0.5), "it has begun when that failed"
        load.transfer_ended(1, AttemptId("a"), 0, 6)
        assert load.view(1).queued_tokens == 70
        done = load.first_token(1, AttemptId("a"), 30, 7)
        assert done is not None and (done.computed_tokens, done.admitted_at) == (70, None)
        assert load.view(1) == LoadView(decoding=1, active_tokens=100)
        end = load.finished(1, AttemptId("a"), 30, False, 1, 8)
        assert end is not None and (end.prompt_tokens, end.cached_tokens) == (100, 30)

    @pytest.mark.parametrize(("cached", "transferred"), [(62, 32), (30, 0), (0, 0), (100, 900)])
    def test_fewer_than_announced_leave_nothing_behind(self, cached: int, transferred: int) -> None:
        load = opened(0, 1)
        load.admitted(1, leg("a", transfer=70), Estimate(30), now=1)
        done = load.first_token(1, AttemptId("a"), cached, 2, transferred)
        assert (done is None) == (cached == 100)
        load.check_invariants()
        assert load.view(1) == LoadView(decoding=1, active_tokens=100)
        end = load.finished(1, AttemptId("a"), cached, False, 2, 3)
        assert end is not None and 0 <= end.cached_tokens <= end.prompt_tokens <= 100
        assert load.view(1) == LoadView()

    def test_one_that_comes_without_its_kv_is_computed_and_told_of(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a")
        admitted = load.admitted(1, leg("a"), Estimate(), now=1)
        assert (admitted.filled_tokens, admitted.missed) == (70, "p")
        assert load.view(1).queued_tokens == 70
        assert load.mates(KEYS, 6).depth == {0: 6, 1: 6}

    def test_the_second_booking_lasts_as_long_as_the_first_leg_runs(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a", now=0)
        load.admitted(0, leg("a-p", prefill_only=True), Estimate(), now=9)
        assert load.expire(10) == load.expire(19) == load.expire(35) == 0
        load.finished(0, AttemptId("a-p"), 40, False, 1, 41)
        assert load.expire(50.9) == 0 and load.bookings == 1
        assert load.expire(51) == 1 and load.view(1) == LoadView()

    def test_without_a_first_leg_it_expires(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a", now=0)
        book_apart(load, "b", now=5)
        assert load.expire(10) == 2
        load.admitted(0, leg("b-p", prefill_only=True), Estimate(), now=11)
        load.remove_slot(0)
        assert load.expire(15) == 1 and load.bookings == 0
        assert load.view(1) == LoadView()

    def test_snapshots_tell_of_legs(self) -> None:
        load = opened(0, 1)
        book_apart(load, "a")
        book_apart(load, "b")
        for name in ("a", "b"):
            load.admitted(1, leg(name, transfer=70), Estimate(), now=1)
        load.transfer_ended(1, AttemptId("b"), 0, 2)
        running = [
            RunningRequest(leg("a", transfer=70), True),
            RunningRequest(leg("b", transfer=70), False),
            RunningRequest(leg("c", transfer=90), False),
        ]
        load.reset(1, running, lambda event: Estimate(10), None, now=3)
        load.check_invariants()
        view = load.view(1)
        assert (view.queued, view.decoding) == (2, 1)
        assert 70 <= view.queued_tokens <= 71, "b computes, c waits"
        end = load.finished(1, AttemptId("a"), 100, False, 2, 4)
        assert end is not None and (end.prompt_tokens, end.predicted) == (30, 30)

    def test_a_snapshot_may_contradict_what_came_before(self) -> None:
        load = opened(0, 1)
        load.admitted(1, leg("a", 101, transfer=101), Estimate(), now=1)
        load.first_token(1, AttemptId("a"), 101, 2, 101)
        load.reset(1, [RunningRequest(leg("a", 60), True)], lambda event: Estimate(), None, now=3)
        load.check_invariants()
        end = load.finished(1, AttemptId("a"), 60, False, 2, 4)
        assert end is not None and (end.prompt_tokens, end.cached_tokens) == (0, 0)


class TestQueueOverTime:
    """What candidates learn of a queue: token 1 ms, so that tokens are milliseconds."""

    def queue(self, load: LoadBook, now: float) -> float:
        candidate = Candidate(0, token_s=0.001)
        load.fill(candidate)
        assert candidate.ahead_tokens(now) == pytest.approx(candidate.queue_s(now) * 1000)
        return candidate.queue_s(now)

    def test_the_first_request_is_worked_on(self) -> None:
        load = opened()
        for name, tokens, now in (("a", 1000, 5.0), ("b", 500, 5.2)):
            load.admitted(0, admitted(name, tokens), Estimate(0), now=now)
        assert self.queue(load, 5.2) == pytest.approx(1.3)
        # The first may be late; the second has not begun for that.
        assert self.queue(load, 9.0) == pytest.approx(0.5)
        load.first_token(0, AttemptId("a"), 0, 9.0)
        assert self.queue(load, 9.1) == pytest.approx(0.4)
        load.first_token(0, AttemptId("b"), 0, 9.5)
        assert self.queue(load, 9.5) == 0

    def test_a_queue_begins_when_the_first_request_comes(self) -> None:
        load = opened()
        load.admitted(0, admitted("a", 1000), Estimate(0), now=5)
        load.first_token(0, AttemptId("a"), 0, 6)
        load.admitted(0, admitted("b", 1000), Estimate(0), now=60)
        assert self.queue(load, 60) == pytest.approx(1)

    def test_the_next_begins_when_the_first_is_aborted(self) -> None:
        load = opened()
        for name in ("a", "b"):
            load.admitted(0, admitted(name, 1000), Estimate(0), now=0)
        load.finished(0, AttemptId("a"), 0, True, 0, 0.7)
        assert self.queue(load, 0.7) == pytest.approx(1)

    def test_an_old_report_says_nothing_of_what_came_later(self) -> None:
        load = opened()
        load.report(0, LoadReport(pending_prefill_tokens=0), 0)
        book(load, "a", now=100, cached=0)
        load.admitted(0, admitted("b", 1000), Estimate(0), now=100)
        assert self.queue(load, 100) == pytest.approx(1.1)

    def test_the_report_is_nearer_when_it_tells_of_less(self) -> None:
        load = opened()
        load.admitted(0, admitted("a", 1000), Estimate(0), now=0)
        load.report(0, LoadReport(pending_prefill_tokens=300), 0.1)
        assert self.queue(load, 0.1) == pytest.approx(0.3)
        assert self.queue(load, 0.3) == pytest.approx(0.1)
        book(load, "b", now=1, cached=0)
        assert self.queue(load, 1) == pytest.approx(0.1)

    def test_paces_are_told_with_the_batch_they_ran_in(self) -> None:
        load = opened()
        for name, tokens in (("a", 100), ("b", 300)):
            load.admitted(0, admitted(name, tokens), Estimate(0), now=0)
        load.first_token(0, AttemptId("a"), 0, 1)
        load.first_token(0, AttemptId("b"), 0, 3)
        end = load.finished(0, AttemptId("a"), 0, False, 41, 5)
        assert end is not None
        # Alone for two seconds, then two seconds beside b.
        assert end.decoded == Decoded(40, 4, 1.5, 250)


class TestMates:
    def test_depth_and_crowd(self) -> None:
        prefixes = InflightPrefixes()
        prefixes.add(0, [1, 2, 3, 4])
        prefixes.add(0, [1, 2, 5])
        prefixes.add(1, [1])
        crowd = {0: 5 / 4, 1: 1 / 4}
        assert prefixes.mates([1, 2, 3, 9], 4) == Mates({0: 3, 1: 1}, crowd)
        assert prefixes.mates([1, 2, 3, 9], 2) == Mates({0: 2, 1: 1}, crowd)
        assert prefixes.mates([7], 1) == prefixes.mates([], 0) == Mates()
        prefixes.remove(0, [1, 2, 3, 4])
        prefixes.remove(0, [1, 2, 5])
        prefixes.remove(1, [1])
        assert prefixes.counts() == {}

    def test_long_prompts_are_sampled(self) -> None:
        prefixes = InflightPrefixes()
        chain = list(range(1000))
        prefixes.add(0, chain)
        prefixes.add(0, chain[:500])
        mates = prefixes.mates(chain, 999)
        assert mates.depth == {0: 999}
        assert mates.crowd[0] == pytest.approx(1.5, rel=0.02)
        assert len(prefixes.counts()) < 50

    @given(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 9)), max_size=9)
    )
    def test_long_prompts_part_where_they_part(self, others: list[tuple[int, int, int]]) -> None:
        prefixes, chain = InflightPrefixes(), list(range(180))
        shared: dict[int, list[int]] = {}
        added = []
        for i, (slot, length, more) in enumerate(others):
            keys = [*chain[:length], *range(1000 * (i + 1), 1000 * (i + 1) + more)]
            prefixes.add(slot, keys)
            added.append((slot, keys))
            if length:
                shared.setdefault(slot, []).append(min(length, 180))
            prefixes.check_invariants()
        depth = prefixes.mates(chain, 170).depth
        assert depth.keys() == shared.keys()
        for slot, lengths in shared.items():
            most = min(max(lengths), 170)
            assert depth[slot] <= most
            exact = len(lengths) <= 2 or most <= 16
            assert depth[slot] == most if exact else depth[slot] > most * 0.74
        for slot, keys in added:
            prefixes.remove(slot, keys)
            prefixes.check_invariants()
        assert not prefixes.counts()
        assert not prefixes._recent


class LoadMachine(RuleBasedStateMachine):
    """Events in any order, lost, repeated, at the wrong slot, of whole requests and of legs: sums
    hold, nothing is negative, and no booking stays for ever.
    """

    ids = st.sampled_from(["a", "b", "c", "d", "a#1", "a-p", "b-p"])
    slots = st.integers(0, 1)
    chains = st.integers(0, 6).map(lambda n: KEYS[:n])

    def __init__(self) -> None:
        super().__init__()
        self.load = opened(0, 1)
        self.now = 0.0
        self.booked_at: dict[str, float] = {}
        self.seconds: set[str] = set()
        """Those of them that wait for another leg: they may live longer."""

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
        self.seconds.discard(id)

    @rule(id=st.sampled_from(["a", "b"]), slot=slots)
    def book_apart(self, id: str, slot: int) -> None:
        book_apart(self.load, id, self.now, slot, 1 - slot)
        self.booked_at |= {id: self.now, f"{id}-p": self.now}
        self.seconds.add(id)
        self.seconds.discard(f"{id}-p")

    @rule(
        id=ids,
        slot=slots,
        keys=chains,
        tokens=st.integers(1, 200),
        cached=st.integers(0, 200),
        transfer=st.sampled_from([0, 0, 50, 300]),
        prefill_only=st.booleans(),
    )
    def admit(
        self,
        id: str,
        slot: int,
        keys: tuple[BlockKey, ...],
        tokens: int,
        cached: int,
        transfer: int,
        prefill_only: bool,
    ) -> None:
        event = replace(
            admitted(id, tokens, keys), transfer_tokens=transfer, prefill_only=prefill_only
        )
        self.load.admitted(slot, event, Estimate(min(cached, tokens)), self.now)
        self.booked_at.pop(id, None)

    @rule(id=ids, slot=slots, cached=st.integers(0, 300), transferred=st.integers(0, 300))
    def first_token(self, id: str, slot: int, cached: int, transferred: int) -> None:
        self.load.first_token(slot, AttemptId(id), cached, self.now, transferred)

    @rule(id=ids, slot=slots, tokens=st.sampled_from([0, 0, 50, 1000]))
    def transfer_ended(self, id: str, slot: int, tokens: int) -> None:
        self.load.transfer_ended(slot, AttemptId(id), tokens, self.now)

    @rule(id=ids, slot=slots)
    def finish(self, id: str, slot: int) -> None:
        end = self.load.finished(slot, AttemptId(id), 10, False, 5, self.now)
        if end is not None:
            self.booked_at.pop(id, None)
            assert min(end.cached_tokens, end.prompt_tokens) >= 0

    @rule(id=ids)
    def release(self, id: str) -> None:
        if self.load.release(AttemptId(id)) is not None:
            del self.booked_at[id]

    @rule(slot=slots, tokens=st.integers(0, 500))
    def report(self, slot: int, tokens: int) -> None:
        self.load.report(slot, LoadReport(pending_prefill_tokens=tokens), self.now)

    @rule(slot=slots, ids=st.sets(ids), decoding=st.booleans(), transfer=st.sampled_from([0, 60]))
    def reset(self, slot: int, ids: set[str], decoding: bool, transfer: int) -> None:
        event = {i: leg(i, transfer=transfer, prefill_only=i.endswith("-p")) for i in ids}
        self.load.reset(
            slot,
            [RunningRequest(event[i], decoding) for i in sorted(ids)],
            lambda event: Estimate(5),
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
            i: t for i, t in self.booked_at.items() if AttemptId(i) in self.load._ledger.bookings
        }

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.load.expire(self.now)
        self.booked_at = {
            i: t
            for i, t in self.booked_at.items()
            if self.now < t + 10
            or (i in self.seconds and AttemptId(i) in self.load._ledger.bookings)
        }
        for id in self.seconds & self.booked_at.keys():
            until = self.load._ledger.requests[AttemptId(id)].booked_until
            assert until is not None and self.now < until <= self.now + 10

    @invariant()
    def holds(self) -> None:
        self.load.check_invariants()
        assert set(self.load._ledger.bookings) == set(self.booked_at)
        for slot in (0, 1):
            view = self.load.view(slot)
            assert min(view.booked, view.queued, view.decoding, view.queued_tokens) >= 0


LoadMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoadMachine = LoadMachine.TestCase
