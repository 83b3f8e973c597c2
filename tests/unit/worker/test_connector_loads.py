"""Which blocks are loaded: leases, waiting, failures, and that each lease ends exactly once."""

from __future__ import annotations

import hashlib
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.connector.instructions import Await, Ended, Instructions
from services.worker.connector.loads import LoadPlan
from services.worker.connector.model import LeasedBlock, Loaded, LoadOrder, Slot
from services.worker.connector.terms import Lease, Terms, from_params, to_params

KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(40)]


def ready(count: int, start: int = 0) -> tuple[LeasedBlock, ...]:
    return tuple(LeasedBlock(Slot(100 + i, 7), (i + 1,)) for i in range(start, start + count))


def lease(
    first: int = 0, blocks: int = 8, promoting: int = 0, until_s: float = 2.0, id: int = 9
) -> Lease:
    return Lease(id, first, ready(blocks), promoting, until_s, expires_s=60.0)


class Rig:
    def __init__(self, terms: Terms) -> None:
        self.plan = LoadPlan(ask_s=0.25)
        self.out = Instructions()
        self.plan.arrive("r", terms, self.out)

    def match(self, local: int = 0, usable: int = 10, now_s: float = 1.0) -> int | None:
        return self.plan.match("r", KEYS[:11], usable, local, now_s, self.out)

    def allocate(self, count: int) -> LoadOrder | None:
        blocks = range(200, 211)
        return self.plan.allocated("r", KEYS[:11], blocks, count, self.out)

    def loaded(self, good: int, wanted: int, bad: tuple[int, ...] = ()) -> int | None:
        return self.plan.loaded("r", Loaded(good, bad, 0.5), wanted, self.out)


def test_what_is_leased_beyond_the_engine_s_own_is_loaded() -> None:
    """C10: keys, slots and blocks belong together, position by position."""
    rig = Rig(Terms(assumed=2, lease=lease(first=2, blocks=6)))
    assert rig.match(local=3) == 5
    assert rig.match(local=2) == 6
    order = rig.allocate(6)
    assert order is not None
    assert order.blocks == tuple(range(202, 208))
    assert [i.block for i in order.items] == list(range(202, 208))
    assert [i.key for i in order.items] == KEYS[2:8]
    assert [i.slot for i in order.items] == [Slot(100 + i, 7) for i in range(6)]
    assert rig.loaded(6, 6) is None
    assert rig.out.ended == [Ended(9, 6, 0.5)]


def test_a_match_has_no_side_effect() -> None:
    rig = Rig(Terms(lease=lease()))
    assert [rig.match(local=n) for n in (0, 3, 0, 8, 0)] == [8, 5, 8, 0, 8]
    assert not rig.out


def test_the_last_token_is_never_loaded() -> None:
    assert Rig(Terms(lease=lease(blocks=8))).match(usable=5) == 5


def test_a_lease_that_is_not_needed_is_ended_at_once() -> None:
    """L1: looked up, but the engine had it all."""
    rig = Rig(Terms(lease=lease()))
    assert rig.match(local=10) == 0
    assert rig.allocate(0) is None
    assert rig.out.ended == [Ended(9)]
    rig.plan.leave("r", rig.out)
    assert rig.out.ended == [Ended(9)]
    assert not len(rig.plan)


def test_a_request_that_leaves_the_queue_ends_its_lease() -> None:
    """L1"""
    rig = Rig(Terms(lease=lease()))
    assert rig.match() == 8
    rig.plan.leave("r", rig.out)
    assert rig.out.ended == [Ended(9)]


def test_while_promotions_run_the_answer_is_later_until_the_deadline() -> None:
    """H4: never longer."""
    rig = Rig(Terms(lease=lease(blocks=2, promoting=3, until_s=2.0)))
    assert rig.out.awaits == [Await("r", 9, 2.0)]
    assert rig.match(now_s=1.0) is None
    assert rig.match(now_s=1.999) is None
    assert rig.match(now_s=2.0) == 2


def test_promoted_blocks_are_loaded_with_the_rest() -> None:
    rig = Rig(Terms(lease=lease(blocks=2, promoting=3)))
    rig.plan.promoted("r", 8, ready(9), 0)
    assert rig.match() is None, "news of another lease"
    rig.plan.promoted("r", 9, ready(5), 0)
    assert rig.match() == 5


def test_a_failed_wait_leaves_what_was_ready() -> None:
    rig = Rig(Terms(lease=lease(blocks=2, promoting=3)))
    rig.plan.promoted("r", 9, None, 0)
    assert rig.match() == 2


def test_nothing_is_waited_for_that_the_engine_has() -> None:
    rig = Rig(Terms(lease=lease(blocks=2, promoting=3)))
    assert rig.match(local=5) == 0
    assert rig.plan.missing("r") is None


def test_what_was_promised_and_does_not_come_is_told() -> None:
    rig = Rig(Terms(lease=lease(blocks=2, promoting=3, until_s=2.0)))
    assert rig.match(now_s=2.0) == 2
    assert rig.plan.missing("r") == 2
    assert rig.match(local=4, now_s=2.0) == 0
    assert rig.plan.missing("r") == 4, "the engine has the rest"
    assert rig.plan.promoted("r", 9, ready(4), 0) == 4
    assert rig.plan.missing("r") is None, "nothing more is promised"
    assert Rig(Terms(lease=lease(blocks=2, promoting=3))).plan.promoted("r", 9, None, 0) == 2
    assert Rig(Terms(lease=lease(blocks=2, promoting=3))).plan.promoted("r", 9, ready(5), 0) is None


def test_after_a_failed_load_the_request_computes_all_the_rest() -> None:
    """C1: the lease is void for retries; the bad block is told by its number in the lease."""
    rig = Rig(Terms(assumed=1, lease=lease(first=1)))
    assert rig.match(local=2) == 7
    rig.allocate(7)
    assert rig.loaded(3, 7, bad=(3,)) == 5
    assert rig.out.ended == [Ended(9, 3, 0.5, (4,))]
    rig.plan.reachable = True
    assert rig.match(local=0) == 0
    assert not rig.out.asks
    assert rig.allocate(0) is None
    rig.plan.preempted("r", 8)
    assert rig.match(local=0) == 0
    assert len(rig.out.ended) == 1


def test_an_aborted_load_is_still_ended_once() -> None:
    """L5"""
    rig = Rig(Terms(lease=lease()))
    rig.match()
    rig.allocate(8)
    rig.plan.leave("r", rig.out)
    assert not rig.out.ended, "the copy still runs"
    assert len(rig.plan) == 1
    rig.loaded(8, 8)
    assert rig.out.ended == [Ended(9, 8, 0.5)]
    assert not len(rig.plan)


def test_an_order_without_a_lease_names_all_its_blocks() -> None:
    """The engine waits for them: they must come back as not loaded."""
    rig = Rig(Terms())
    assert rig.match() == 0
    order = rig.allocate(3)
    assert order is not None
    assert (len(order.blocks), order.items) == (3, ())


def test_an_expired_lease_is_not_used() -> None:
    rig = Rig(Terms(lease=lease()))
    assert rig.match(now_s=59.5) == 0
    assert rig.allocate(0) is None
    assert rig.out.ended == [Ended(9)]


def test_blocks_that_the_engine_lost_meanwhile_are_asked_for_again() -> None:
    rig = Rig(Terms(assumed=4, lease=lease(first=4, blocks=3)))
    assert rig.match(local=1) == 0, "kvbm is not there"
    rig.plan.reachable = True
    assert rig.match(local=1, now_s=1.0) is None
    assert rig.out.ended == [Ended(9)]
    (ask,) = rig.out.asks
    assert (ask.skip, ask.keys, ask.until_s) == (1, tuple(KEYS[:10]), 1.25)
    assert rig.match(local=1, now_s=1.2) is None
    found = Terms(assumed=1, lease=lease(first=1, blocks=6, id=10))
    assert rig.plan.found("r", found, rig.out)
    assert rig.match(local=1) == 6
    assert rig.match(local=0) == 0, "asked once only"
    assert len(rig.out.asks) == 1


def test_an_answer_that_comes_too_late_is_ended() -> None:
    """H5: the look-up's deadline bounds the wait."""
    rig = Rig(Terms(assumed=4))
    rig.plan.reachable = True
    assert rig.match(local=1, now_s=1.0) is None
    assert rig.match(local=1, now_s=1.25) == 0
    assert not rig.plan.found("r", Terms(lease=lease(id=11)), rig.out)
    assert rig.out.ended == [Ended(11)]
    assert not rig.plan.found("gone", Terms(lease=lease(id=12)), rig.out)
    assert rig.out.ended[-1] == Ended(12)


def test_a_preempted_request_may_take_its_blocks_from_below() -> None:
    """K2"""
    rig = Rig(Terms())
    rig.plan.reachable = True
    assert rig.match() == 0
    rig.allocate(0)
    rig.plan.preempted("r", 9)
    assert rig.match(local=2, now_s=5.0) is None
    rig.plan.found("r", Terms(assumed=2, lease=lease(first=2, blocks=7)), rig.out)
    assert rig.match(local=2) == 7


def test_terms_travel_as_plain_values() -> None:
    terms = Terms(3, 4, 5.5, 0.25, "acme", lease(first=3, promoting=2))
    assert from_params(to_params(terms)) == terms
    assert from_params(to_params(Terms())) == Terms()
    assert from_params(None) is None
    assert from_params({"do_remote_prefill": True}) is None


class Machine(RuleBasedStateMachine):
    """Whatever happens in whatever order: every lease ends once, and no wait outlives its bound."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = LoadPlan(ask_s=0.25)
        self.plan.reachable = True
        self.out = Instructions()
        self.now_s = 1.0
        self.next = 0
        self.given: set[int] = set()
        self.live: dict[str, int] = {}
        """Waiting requests, and what they were last offered."""
        self.loading: dict[str, LoadOrder] = {}
        self.placed: set[str] = set()
        self.waited: dict[str, float] = {}
        self.seen = 0

    def make_terms(self, first: int, blocks: int, promoting: int) -> Terms:
        self.next += 1
        self.given.add(self.next)
        made = Lease(self.next, first, ready(blocks), promoting, self.now_s + 2, self.now_s + 30)
        return Terms(assumed=first, lease=made)

    @rule(
        first=st.integers(0, 4),
        blocks=st.integers(0, 6),
        promoting=st.integers(0, 3),
        found=st.booleans(),
    )
    def arrive(self, first: int, blocks: int, promoting: int, found: bool) -> None:
        self.next += 1
        id = f"r{self.next}"
        terms = self.make_terms(first, blocks, promoting) if found else Terms(assumed=first)
        self.plan.arrive(id, terms, self.out)
        self.live[id] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), local=st.integers(0, 10), place=st.booleans())
    def match(self, data: st.DataObject, local: int, place: bool) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        answer = self.plan.match(id, KEYS, 9, local, self.now_s, self.out)
        if answer is None:
            since = self.waited.setdefault(id, self.now_s)
            assert self.now_s - since <= 2.0 + 0.25, "waits longer than any bound"
            return
        self.waited.pop(id, None)
        assert 0 <= answer <= max(0, 9 - local)
        if place:
            order = self.plan.allocated(id, KEYS, range(40), answer, self.out)
            assert (order is None) == (answer == 0)
            if order is not None:
                assert len(order.items) == len(order.blocks) == answer
                self.loading[id] = order
            else:
                self.placed.add(id)
            del self.live[id]

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.loading)))
        order = self.loading.pop(id)
        wanted = len(order.blocks)
        good = data.draw(st.integers(0, wanted))
        bad = (good,) if good < wanted else ()
        self.plan.loaded(id, Loaded(good, bad), wanted, self.out)
        self.placed.add(id)

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.placed)))
        self.placed.remove(id)
        self.plan.preempted(id, 8)
        self.live[id] = 0

    @precondition(lambda self: self.live or self.placed or self.loading)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ids = sorted([*self.live, *self.placed, *self.loading])
        id = data.draw(st.sampled_from(ids))
        self.plan.leave(id, self.out)
        self.live.pop(id, None)
        self.placed.discard(id)

    @rule(answered=st.booleans(), blocks=st.integers(0, 5))
    def kvbm_answers(self, answered: bool, blocks: int) -> None:
        for ask in self.out.asks[self.seen :]:
            terms = self.make_terms(ask.skip, blocks, 0) if answered else None
            self.plan.found(ask.request, terms, self.out)
        self.seen = len(self.out.asks)

    @rule()
    def promotions_end(self) -> None:
        for order in self.out.awaits:
            self.plan.promoted(order.request, order.lease, ready(4), 0)

    @rule(seconds=st.floats(0.01, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.waited.clear()

    @invariant()
    def sound(self) -> None:
        self.plan.check_invariants()
        counts = Counter(e.lease for e in self.out.ended)
        assert all(n == 1 for n in counts.values()), "a lease ended twice"

    def teardown(self) -> None:
        for ask in self.out.asks[self.seen :]:
            self.plan.found(ask.request, self.make_terms(ask.skip, 1, 0), self.out)
        for id in [*self.live, *self.placed]:
            self.plan.leave(id, self.out)
        for id, order in self.loading.items():
            self.plan.leave(id, self.out)
            self.plan.loaded(id, Loaded(0), len(order.blocks), self.out)
        assert not len(self.plan)
        assert {e.lease for e in self.out.ended} == self.given, "a lease was never ended"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
