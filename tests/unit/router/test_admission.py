"""Admission: at once while a worker is free soon, else a turn in the queue, else a refusal."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from forebay.router.v1 import router_pb2 as pb
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from opentelemetry.trace import NoOpTracer
from prometheus_client import CollectorRegistry

from services.common.errors import Overloaded, Unavailable
from services.common.events.model import (
    Batch,
    BlocksStored,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    Snapshot,
    Tier,
)
from services.common.events.subscriber import FollowStats
from services.common.ids import AttemptId, BlockKey
from services.router.adapters.metrics import RouterMetrics
from services.router.core.admission import Admission, AdmissionConfig, Answered, Waiting
from services.router.core.answers import Placement, Query, Refusal, RefusalKind
from services.router.core.eligibility import bar_of, has_own_workers
from services.router.core.lives import Status
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.rates import RateDefaults
from services.router.core.workers import HolderId, WorkerInfo, WorkerRole
from services.router.server import RouterServicer

SIZE = 16
KEYS = tuple(BlockKey(1000 + i) for i in range(240))
RATES = RateDefaults(prefill_tokens_per_s=1000.0, context_tokens=1e30, learn=False)
"""A prompt of a thousand tokens takes a second."""
LIMITS = AdmissionConfig(max_wait_s=2.0, queue_length=5, queue_wait_s=10.0)


class Rig:
    """Workers w0, w1 ... of which each does a thousand tokens a second, when told to."""

    def __init__(self, workers: int = 1, limits: AdmissionConfig = LIMITS) -> None:
        self.now = 100.0
        self.core = RouterCore(CoreConfig(rates=RATES, booking_ttl_s=1e9), random.Random(1))
        self.core.synced()
        self.count = 0
        self.sequences: dict[str, int] = {}
        for i in range(workers):
            self.core.record(WorkerInfo(f"w{i}", 1, f"w{i}:1", "m", SIZE, 10_000, 100_000), 100.0)
            self.core.reset(Snapshot(f"w{i}", 1, 0, (), ()), 100.0)
            self.sequences[f"w{i}"] = 0
        self.admission = Admission(self.core, limits, self.attempt)
        self.there: list[Placement] = []

    def attempt(self) -> AttemptId:
        self.count += 1
        return AttemptId(f"a{self.count}")

    def ask(self, tokens: int = 1000, **fields: Any) -> Placement | Refusal | Waiting:
        keys = fields.pop("keys", ())
        model = fields.pop("model", "m")
        answer = self.admission.ask(Query(model, tokens, keys, SIZE, **fields), self.now)
        if isinstance(answer, Placement):
            self.there.append(answer)
        self.check()
        return answer

    def place(self, times: int, **fields: Any) -> None:
        for _ in range(times):
            assert isinstance(self.ask(**fields), Placement)

    def wait(self, **fields: Any) -> Waiting:
        answer = self.ask(**fields)
        assert isinstance(answer, Waiting), answer
        return answer

    def refuse(self, **fields: Any) -> Refusal:
        answer = self.ask(**fields)
        assert isinstance(answer, Refusal), answer
        return answer

    def beat(self) -> None:
        for worker in self.sequences:
            self.core.heard(worker, 1, self.now)

    def finish(self, placement: Placement | None = None, tokens: int = 1000) -> None:
        """A worker has done with a placement, the oldest unless named."""
        p = placement or self.there[0]
        self.there.remove(p)
        if p.prefill is not None:
            leg = p.prefill
            self.sequences[leg.holder.id] += 1
            first = (
                RequestAdmitted(leg.attempt_id, tokens, 1, (), prefill_only=True),
                RequestFirstToken(leg.attempt_id, 0),
                RequestFinished(leg.attempt_id, 0, 1),
            )
            batch = Batch(leg.holder.id, 1, self.sequences[leg.holder.id], 0, first)
            self.core.apply(batch, self.now)
        self.sequences[p.holder.id] += 1
        came = p.prefill.transfer_tokens if p.prefill else 0
        events = (
            RequestAdmitted(p.attempt_id, tokens, 1, (), transfer_tokens=came),
            RequestFirstToken(p.attempt_id, came, transferred_tokens=came),
            RequestFinished(p.attempt_id, came, 1),
        )
        batch = Batch(p.holder.id, 1, self.sequences[p.holder.id], 0, events)
        self.core.apply(batch, self.now)

    def pump(self, limit: int = 100) -> list[Answered]:
        self.beat()
        answered = list(self.admission.pump(self.now, limit))
        while self.admission.more:
            answered += self.admission.pump(self.now, limit)
        self.there += [a.answer for a in answered if isinstance(a.answer, Placement)]
        self.check()
        return answered

    def check(self) -> None:
        self.admission.check_invariants()
        self.core.check_invariants()


def rewrite(rig: Rig, worker: str, **fields: Any) -> None:
    """Changes a worker's record."""
    record = WorkerInfo(worker, 1, f"{worker}:1", "m", SIZE, 10_000, 100_000)
    rig.core.record(replace(record, **fields), rig.now)
    rig.core.reset(Snapshot(worker, 1, 0, (), ()), rig.now)


def test_placed_at_once_until_the_limit_then_in_turn() -> None:
    rig = Rig()
    rig.place(3)
    first, second = rig.wait(), rig.wait()
    assert first.predicted_s == pytest.approx(1.0)
    assert second.predicted_s == pytest.approx(2.0)
    assert rig.pump() == [], "nothing has happened yet"
    rig.finish()
    (placed,) = rig.pump()
    assert (placed.number, placed.result) == (first.number, "placed")
    rig.finish()
    assert [a.number for a in rig.pump()] == [second.number]
    assert not len(rig.admission)


def test_nobody_overtakes_those_who_wait() -> None:
    rig = Rig()
    rig.place(3)
    first = rig.wait()
    rig.finish()
    second = rig.wait()
    assert [a.number for a in rig.pump()] == [first.number]
    rig.finish()
    assert [a.number for a in rig.pump()] == [second.number]


def test_a_free_worker_is_taken_though_the_policy_likes_a_busy_one_better() -> None:
    rig = Rig(workers=2)
    rig.place(3, pinned="w0")
    rig.core.apply(Batch("w0", 1, 1, 0, (BlocksStored(Tier.G1, KEYS),)), rig.now)
    rig.sequences["w0"] = 1
    query = Query("m", 4000, KEYS, SIZE)
    liked = rig.core.place(query, AttemptId("x"), rig.now)
    assert isinstance(liked, Placement) and liked.holder.id == "w0", "without a limit"
    rig.core.release(liked.attempt_id)
    answer = rig.ask(tokens=4000, keys=KEYS)
    assert isinstance(answer, Placement) and answer.holder.id == "w1"


def test_refused_at_once_with_the_predicted_wait() -> None:
    rig = Rig()
    rig.place(2)
    rig.place(1, tokens=9500)
    rig.wait()
    refusal = rig.refuse(tokens=2000)
    # 11.5 s at the worker, of which 2 may be left, and 1 s before it in the queue.
    assert refusal.kind is RefusalKind.OVERLOADED
    assert refusal.retry_s == pytest.approx(10.5)
    assert refusal.wait_s == pytest.approx(12.5)
    assert "12.5 s" in refusal.message


def test_refused_at_once_if_its_client_would_not_wait_so_long() -> None:
    rig = Rig()
    rig.place(3)
    assert rig.refuse(patience_s=0.5).kind is RefusalKind.OVERLOADED
    assert rig.wait(patience_s=1.5).most_s == 1.5


def test_waits_end() -> None:
    rig = Rig()
    rig.place(3)
    late, early = rig.wait(), rig.wait(patience_s=3.0)
    rig.now += 3.0
    (gone,) = rig.pump()
    assert (gone.number, gone.result, gone.waited_s) == (early.number, "expired", 3.0)
    assert isinstance(gone.answer, Refusal) and gone.answer.kind is RefusalKind.OVERLOADED
    rig.now += 7.0
    assert [a.number for a in rig.pump()] == [late.number]


def test_a_full_queue_refuses_or_displaces() -> None:
    rig = Rig()
    rig.place(3)
    waiting = [rig.wait(tenant="a", tokens=100) for _ in range(5)]
    assert rig.refuse(tenant="a", tokens=100).wait_s > 0
    rig.wait(tenant="b", tokens=100)
    (gone,) = rig.pump()
    assert (gone.number, gone.result) == (waiting[-1].number, "displaced")
    assert gone.heavy


def test_tenants_take_turns_and_priorities_go_first() -> None:
    rig = Rig()
    rig.place(3)
    first, second = rig.wait(tenant="a"), rig.wait(tenant="a")
    other, urgent = rig.wait(tenant="b"), rig.wait(tenant="a", priority=1)
    order = []
    for _ in range(4):
        rig.finish()
        order += [a.number for a in rig.pump()]
    # What `urgent` got was on a's account.
    assert order == [urgent.number, other.number, first.number, second.number]


def test_one_who_waits_for_a_certain_worker_holds_up_nobody() -> None:
    rig = Rig(workers=2)
    rig.place(3, pinned="w0")
    pinned = rig.wait(pinned="w0")
    rig.place(1)
    rig.finish()
    assert [a.number for a in rig.pump()] == [pinned.number]


def test_a_long_prompt_holds_up_no_shorter_one() -> None:
    rig = Rig(workers=2)
    rig.core.record(WorkerInfo("w1", 1, "w1:1", "m", SIZE, 10_000, 2000), rig.now)
    rig.place(3, pinned="w0")
    rig.wait(tokens=3000)
    rig.place(1)


def test_a_tenant_that_waits_for_workers_of_its_own_holds_up_nobody() -> None:
    rig = Rig(workers=2)
    rewrite(rig, "w0", tenants=frozenset({"acme"}))
    rig.place(3, tenant="acme")
    mine = rig.wait(tenant="acme")
    rig.place(3)
    other = rig.wait()
    rig.finish(rig.there[-1])
    assert [a.number for a in rig.pump()] == [other.number]
    rig.finish(rig.there[0])
    assert [a.number for a in rig.pump()] == [mine.number]


def test_one_who_waits_for_a_rank_holds_up_no_other_rank() -> None:
    rig = Rig()
    rewrite(rig, "w0", dp_size=2)
    rig.place(3, rank=0)
    rig.wait(rank=0)
    rig.place(3)
    assert [p.holder.dp_rank for p in rig.there] == [0, 0, 0, 1, 1, 1]
    rig.wait()


def test_who_came_before_a_reservation_goes_where_it_says() -> None:
    """The lane of one who waits is another when a record changes what it may run on."""
    rig = Rig(workers=2)
    rig.place(6)
    mine, other = rig.wait(tenant="acme", patience_s=5.0), rig.wait(tenant="bee")
    rewrite(rig, "w0", tenants=frozenset({"acme"}))
    for placement in [p for p in rig.there if p.holder.id == "w1"]:
        rig.finish(placement)
    assert [a.number for a in rig.pump()] == [other.number]
    for placement in [p for p in rig.there if p.holder.id == "w0"]:
        rig.finish(placement)
    assert [a.number for a in rig.pump()] == [mine.number]


def test_an_idle_worker_takes_its_own_however_many_wait_for_others() -> None:
    rig = Rig(workers=5, limits=replace(LIMITS, queue_length=50))
    for i in range(5):
        rewrite(rig, f"w{i}", labels={"zone": "b" if i == 4 else "a"})
    rig.place(12, labels={"zone": "a"})
    for _ in range(30):
        rig.wait(labels={"zone": "a"})
    rig.place(3, labels={"zone": "b"}, patience_s=1.5)
    assert rig.wait(labels={"zone": "b"}, patience_s=1.5).predicted_s == pytest.approx(1.0)
    # Those of all zones fall to a worker of this one, too, in part: five seconds of work for five.
    for _ in range(5):
        rig.wait(priority=1)
    assert rig.wait(labels={"zone": "b"}).predicted_s == pytest.approx(3.0)


def test_an_adapters_requests_do_not_overtake_its_models() -> None:
    rig = Rig()
    rewrite(rig, "w0", adapters={"tuned": "/tuned"})
    rig.place(3)
    first = rig.wait()
    rig.finish()
    second = rig.wait(model="tuned")
    assert second.predicted_s == pytest.approx(1.0)
    assert [a.number for a in rig.pump()] == [first.number]
    rig.finish()
    assert [a.number for a in rig.pump()] == [second.number]


def test_a_worker_that_comes_free_is_for_those_whose_turn_was_before() -> None:
    rig = Rig(workers=2)
    rig.place(6)
    pinned = rig.wait(pinned="w0", priority=1)
    rig.beat()
    assert list(rig.admission.pump(rig.now, 1)) == [] and rig.admission.more
    rig.finish(next(p for p in rig.there if p.holder.id == "w0"))
    other = rig.wait()
    assert rig.pump() == [], "between two parts of one pass"
    assert [a.number for a in rig.pump()] == [pinned.number]
    assert rig.admission.cancel(other.number)


def test_a_cancelled_one_is_forgotten() -> None:
    rig = Rig()
    rig.place(3)
    waiting = rig.wait()
    assert rig.admission.cancel(waiting.number)
    assert not rig.admission.cancel(waiting.number)
    rig.finish()
    assert rig.pump() == [] and rig.core.bookings == 2


def test_when_the_last_worker_goes_those_who_wait_are_told() -> None:
    rig = Rig()
    rig.place(3)
    waiting = rig.wait()
    rig.core.record_vanished("w0", 1)
    rig.core.refused("w0", 1, rig.now)
    rig.now += 100
    rig.core.tick(rig.now)
    (one,) = rig.admission.pump(rig.now - 95, 100)
    assert one.number == waiting.number and isinstance(one.answer, Refusal)
    assert one.answer.kind is RefusalKind.NO_WORKER


def test_without_a_limit_all_is_placed_at_once() -> None:
    rig = Rig(limits=AdmissionConfig(max_wait_s=0))
    rig.place(50)


def test_who_has_had_a_turn_does_not_wait_again() -> None:
    rig = Rig()
    rig.place(3)
    rig.wait()
    rig.place(1, admitted=True)


class TestApart:
    """w0 and w1 decode, and are busy with that; w2 prefills for them."""

    def rig(self, decodes: int = 4) -> Rig:
        rig = Rig(workers=3)
        for worker in ("w0", "w1"):
            rewrite(rig, worker, transfer="nixl")
            for i in range(decodes):
                name = AttemptId(f"x{i}{worker}")
                rig.sequences[worker] += 1
                events = RequestAdmitted(name, 1, 99), RequestFirstToken(name, 0)
                batch = Batch(worker, 1, rig.sequences[worker], 0, events)
                rig.core.apply(batch, rig.now)
        rewrite(rig, "w2", transfer="nixl", role=WorkerRole.PREFILL)
        return rig

    def test_a_prefill_worker_gets_no_more_than_its_share(self) -> None:
        rig = self.rig()
        rig.place(9)
        assert [p.prefill is not None for p in rig.there].count(True) == 3
        rig.wait()
        rig.wait(whole=True)

    def test_nobody_overtakes_those_who_wait_where_they_would_be_prefilled(self) -> None:
        rig = self.rig()
        rig.place(3, pinned="w0", whole=True)
        rig.place(1, pinned="w1")
        assert rig.there[-1].prefill is not None
        rig.finish(rig.there[-1])
        waiting = rig.wait(pinned="w0")
        rig.place(1, pinned="w1")
        assert rig.there[-1].prefill is None, "w2 is for the one who waits"
        rig.admission.cancel(waiting.number)
        rig.wait(pinned="w0", whole=True)
        rig.place(1, pinned="w1")
        assert rig.there[-1].prefill is not None, "who waits has no use for w2"

    def test_one_behind_who_has_no_use_for_it_is_not_overtaken_either(self) -> None:
        rig = self.rig()
        rig.place(3, pinned="w0", whole=True)
        rig.wait(pinned="w0", whole=True)
        rig.wait(pinned="w0")
        rig.place(1, pinned="w1")
        assert rig.there[-1].prefill is None

    def test_who_waits_is_placed_apart(self) -> None:
        rig = self.rig()
        rig.place(3, pinned="w0", whole=True)
        waiting = rig.wait(pinned="w0")
        assert rig.pump() == []
        rig.finish()
        (one,) = rig.pump()
        assert one.number == waiting.number
        assert isinstance(one.answer, Placement) and one.answer.prefill is not None

    def test_one_that_waits_is_not_overtaken_within_a_pass(self) -> None:
        rig = self.rig()
        rig.place(3, pinned="w0", whole=True)
        rig.place(3, pinned="w1", whole=True)
        first, second = rig.wait(pinned="w0", priority=1), rig.wait(pinned="w1")
        rig.finish(next(p for p in rig.there if p.holder.id == "w1"))
        (one,) = rig.pump()
        assert one.number == second.number and isinstance(one.answer, Placement)
        assert one.answer.prefill is None, "w2 is for the first"
        assert rig.admission.cancel(first.number)


def test_the_outlook() -> None:
    rig = Rig()
    query = Query("m", 1000, (), SIZE)
    assert rig.admission.outlook(query, rig.now) == (0.0, False)
    rig.place(3)
    wait_s, would_wait = rig.admission.outlook(query, rig.now)
    assert would_wait and wait_s == pytest.approx(3.0)
    rig.wait()
    assert rig.admission.outlook(query, rig.now)[0] == pytest.approx(4.0)


class AdmissionMachine(RuleBasedStateMachine):
    """Everyone who waits is answered once: placed, refused, or gone by their own will. Nobody is
    passed over by who came later, where it runs or where it is prefilled, nor waits while a worker
    is free that only others wait for. Roles change at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(workers=3)
        rewrite(self.rig, "w0", transfer="nixl")
        rewrite(self.rig, "w1", dp_size=2, adapters={"tuned": "/tuned"}, transfer="nixl")
        rewrite(self.rig, "w2", labels={"zone": "b"}, transfer="nixl")
        self.roles = dict.fromkeys(["w3", "w4"], WorkerRole.PREFILL)
        for worker in self.roles:
            rewrite(self.rig, worker, role=WorkerRole.PREFILL, transfer="nixl")
            self.rig.sequences[worker] = 0
        self.queries: dict[int, Query] = {}
        """Of those that wait."""
        self.until: dict[int, float] = {}

    @rule(
        tokens=st.one_of(st.sampled_from([500, 1000, 2000]), st.integers(1, 2000)),
        model=st.sampled_from(["m", "tuned"]),
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        only=st.sampled_from(
            [
                {},
                {},
                {},
                {},
                {"pinned": "w0"},
                {"rank": 1},
                {"labels": {"zone": "b"}},
                {"whole": True},
            ]
        ),
        patience_s=st.sampled_from([float("inf"), float("inf"), 1.0]),
    )
    def ask(self, tokens: int, only: dict[str, Any], **fields: Any) -> None:
        query = Query(prompt_tokens=tokens, keys=(), block_size=SIZE, **only, **fields)
        self.rig.beat()
        before = self.contested()
        soonest = {slot: self.soonest(slot) for slot in self.slots(query)}
        answer = self.rig.admission.ask(query, self.rig.now)
        free = {slot for slot, wait_s in soonest.items() if wait_s <= LIMITS.max_wait_s} - before
        if isinstance(answer, Waiting):
            assert not free
            assert answer.predicted_s <= answer.most_s <= LIMITS.queue_wait_s
            self.queries[answer.number] = query
            self.until[answer.number] = self.rig.now + answer.most_s
        elif isinstance(answer, Placement):
            self.rig.there.append(answer)
            assert self.slot(answer.holder) in free
            if answer.prefill is not None:
                slot = self.slot(answer.prefill.holder)
                assert slot not in before
                assert slot in self.pool(query)
        elif answer.kind is RefusalKind.OVERLOADED:
            assert answer.wait_s > 0 and soonest and not free
        else:
            assert not soonest

    @initialize(tenants=st.sampled_from([set(), {"a"}]), tokens=st.sampled_from([1500, 3000]))
    def fill(self, tenants: set[str], tokens: int) -> None:
        """All begin busy, with one prompt each."""
        for worker, rank in (("w0", 0), ("w1", 0), ("w1", 1), ("w2", 0)):
            self.rig.place(1, tokens=tokens, pinned=worker, rank=rank)
            self.decode(worker, rank, 2)
        self.reserve(tenants)

    @rule(tenants=st.sampled_from([set(), {"a"}]))
    def reserve(self, tenants: set[str]) -> None:
        info = self.rig.core.model_worker("m")
        assert info is not None and info.id == "w0"
        self.rig.core.record(replace(info, tenants=frozenset(tenants)), self.rig.now)

    @rule(
        worker=st.sampled_from(["w3", "w4"]),
        role=st.sampled_from([WorkerRole.PREFILL, WorkerRole.PREFILL, WorkerRole.DECODE]),
    )
    def change_role(self, worker: str, role: WorkerRole) -> None:
        self.roles[worker] = role
        info = self.rig.core._books.table.get(worker)
        assert info is not None
        self.rig.core.record(replace(info.info, role=role), self.rig.now)

    def decode(self, worker: str, rank: int, count: int) -> None:
        """So that it pays to prefill elsewhere."""
        for _ in range(count):
            self.rig.sequences[worker] += 1
            name = AttemptId(f"x{self.rig.sequences[worker]}{worker}")
            events = RequestAdmitted(name, 1, 1, (), rank), RequestFirstToken(name, 0, rank)
            batch = Batch(worker, 1, self.rig.sequences[worker], 0, events)
            self.rig.core.apply(batch, self.rig.now)

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.rig.there:
            self.rig.finish(data.draw(st.sampled_from(self.rig.there)))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.queries:
            number = data.draw(st.sampled_from(sorted(self.queries)))
            # One that was displaced, and not told yet, is not there any more.
            self.rig.admission.cancel(number)

    @rule(seconds=st.sampled_from([0.0, 0.3, 4.0]), limit=st.integers(1, 4))
    def pump(self, seconds: float, limit: int) -> None:
        self.rig.now += seconds
        for one in self.rig.pump(limit):
            self.queries.pop(one.number, None)
        left = {entry.number for entry in self.rig.admission._queue}
        self.queries = {n: query for n, query in self.queries.items() if n in left}
        assert left == set(self.queries)
        assert all(self.until[n] > self.rig.now for n in left)
        for query in self.queries.values():
            for slot in self.slots(query):
                assert self.soonest(slot) > LIMITS.max_wait_s, "it waits for one that is free"

    @invariant()
    def holds(self) -> None:
        self.rig.check()
        assert len(self.rig.admission) <= LIMITS.queue_length

    # The same by looking at each rank alone.

    def able(self, query: Query, prefill: bool) -> set[int]:
        core = self.rig.core
        own = has_own_workers(query, (w.info for w in core._books.table))
        return {
            rank.slot
            for worker in core._books.table
            if bar_of(worker.info, Status.READY, query, own) is None
            and (worker.info.role is WorkerRole.PREFILL) == prefill
            for rank in worker.ranks
            if query.rank in (None, rank.holder.dp_rank)
        }

    def slots(self, query: Query) -> set[int]:
        return self.able(query, False) or self.able(query, True)

    def pool(self, query: Query) -> set[int]:
        """Who may prefill for it."""
        if query.whole or not self.able(query, False):
            return set()
        return self.able(replace(query, pinned="", rank=None), True)

    def soonest(self, slot: int) -> float:
        self.rig.core._books.refresh()
        return self.rig.core._books.pages[slot].candidate.queue_s(self.rig.now)

    def slot(self, holder: HolderId) -> int:
        pages = self.rig.core._books.pages
        return next(slot for slot, page in pages.items() if page.rank.holder == holder)

    def contested(self) -> set[int]:
        left = {entry.number for entry in self.rig.admission._queue}
        waiting = [q for n, q in self.queries.items() if n in left]
        return set().union(*(self.slots(q) | self.pool(q) for q in waiting))


AdmissionMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None
)
TestAdmissionMachine = AdmissionMachine.TestCase


class Service(Rig):
    """A servicer over such workers."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = CollectorRegistry()
        self.servicer = RouterServicer(
            self.core,
            lambda: self.now,
            RouterMetrics(self.registry),
            NoOpTracer(),
            router_id="r",
            policy="kv",
            new_attempt=self.attempt,
            streams=FollowStats(),
            admission=LIMITS,
        )

    def route(self, number: int, **fields: Any) -> pb.RouteStreamRequest:
        return pb.RouteStreamRequest(correlation_id=number, route=self.request(**fields))

    def request(self, **fields: Any) -> pb.RouteRequest:
        return pb.RouteRequest(model="m", block_size_tokens=SIZE, prompt_tokens=1000, **fields)

    def confirm(self, attempt_id: str) -> None:
        """The worker does all of a placement."""
        self.sequences["w0"] += 1
        attempt = AttemptId(attempt_id)
        events = (
            RequestAdmitted(attempt, 1000, 1, ()),
            RequestFirstToken(attempt, 0),
            RequestFinished(attempt, 0, 1),
        )
        self.core.apply(Batch("w0", 1, self.sequences["w0"], 0, events), self.now)
        self.servicer.news()

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"forebay_router_{name}", labels)


CONTEXT = SimpleNamespace(invocation_metadata=tuple, time_remaining=lambda: None)


class Gateway:
    """A stream whose messages the test sends and takes."""

    def __init__(self, service: Service) -> None:
        self.outbox: asyncio.Queue[pb.RouteStreamRequest | None] = asyncio.Queue()
        self.answers: Any = service.servicer.RouteStream(self._messages(), None)

    async def _messages(self) -> AsyncIterator[pb.RouteStreamRequest]:
        while (message := await self.outbox.get()) is not None:
            yield message

    def send(self, *messages: pb.RouteStreamRequest | None) -> None:
        for message in messages:
            self.outbox.put_nowait(message)

    async def hear(self) -> pb.RouteStreamResponse:
        async with asyncio.timeout(5):
            message: pb.RouteStreamResponse = await anext(self.answers)
            return message


async def full() -> tuple[Service, Gateway, list[str]]:
    """Three placed, and number 4 waits."""
    service = Service()
    gateway = Gateway(service)
    gateway.send(*(service.route(i, tenant="t") for i in range(1, 5)))
    heard = [await gateway.hear() for _ in range(4)]
    assert [m.WhichOneof("result") for m in heard] == ["placement"] * 3 + ["waiting"]
    assert heard[3].waiting.predicted_wait_ms == 1000
    assert heard[3].waiting.at_most_ms == 10_000
    return service, gateway, [m.placement.attempt_id for m in heard[:3]]


async def test_a_question_that_waits_is_answered_later_and_holds_up_no_other() -> None:
    service, gateway, placed = await full()
    gateway.send(pb.RouteStreamRequest(correlation_id=9, route=pb.RouteRequest(model="none")))
    assert (await gateway.hear()).correlation_id == 9
    service.confirm(placed[0])
    late = await gateway.hear()
    assert (late.correlation_id, late.WhichOneof("result")) == (4, "placement")
    service.servicer.tick()
    assert service.metric("waiting_requests") == 0
    assert service.metric("wait_seconds_count", result="placed") == 1
    await gateway.answers.aclose()


async def test_a_gateway_sees_signs_of_life_while_it_waits() -> None:
    service, gateway, _ = await full()
    service.servicer.tick()
    sign = await gateway.hear()
    assert (sign.correlation_id, sign.waiting.at_most_ms) == (4, 0)
    assert service.metric("waiting_requests") == 1
    assert service.metric("waiting_tokens") == 1000
    await gateway.answers.aclose()


async def test_waits_end_with_a_failure_that_says_how_long() -> None:
    service, gateway, _ = await full()
    service.now += 10
    service.beat()
    service.servicer.tick()
    while (message := await gateway.hear()).HasField("waiting"):
        pass
    failure = message.failure
    assert failure.reason == "OVERLOADED" and failure.retry_after_ms >= 1
    assert failure.predicted_wait_ms >= 2000
    assert service.metric("overload_refusals_total", tenant_class="light") == 1
    await gateway.answers.aclose()


async def test_a_cancelled_question_and_a_gone_gateway_leave_nothing() -> None:
    service, gateway, placed = await full()
    gateway.send(pb.RouteStreamRequest(correlation_id=4, cancel=pb.CancelRoute()), service.route(5))
    assert (await gateway.hear()).correlation_id == 5
    assert service.metric("cancelled_waits_total") == 1
    await gateway.answers.aclose()
    assert service.metric("cancelled_waits_total") == 2
    service.confirm(placed[0])
    service.servicer.tick()
    assert service.core.bookings == 2


async def test_a_half_closed_stream_gets_its_late_answers() -> None:
    service, gateway, placed = await full()
    gateway.send(None)
    service.confirm(placed[0])
    assert (await gateway.hear()).HasField("placement")
    with pytest.raises(StopAsyncIteration):
        await gateway.hear()


async def test_a_drain_sends_away_who_waits() -> None:
    """Streams end without an answer: their gateways ask another router."""
    service, gateway, _ = await full()
    call = asyncio.create_task(service.servicer.Route(service.request(), CONTEXT))
    await asyncio.sleep(0)
    service.servicer.drain()
    with pytest.raises(Unavailable, match="draining"):
        await gateway.hear()
    with pytest.raises(Unavailable, match="draining"):
        await call


async def test_a_call_waits_too() -> None:
    service, gateway, placed = await full()
    call = asyncio.create_task(service.servicer.Route(service.request(), CONTEXT))
    await asyncio.sleep(0)
    service.confirm(placed[0])
    service.confirm(placed[1])
    assert (await gateway.hear()).correlation_id == 4
    assert (await call).worker.id == "w0"
    given_up = asyncio.create_task(service.servicer.Route(service.request(), CONTEXT))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert service.metric("cancelled_waits_total") == 1
    await gateway.answers.aclose()


async def test_a_call_is_told_in_time_that_it_would_wait_too_long() -> None:
    service, gateway, _ = await full()
    hurry = SimpleNamespace(invocation_metadata=tuple, time_remaining=lambda: 0.5)
    with pytest.raises(Overloaded) as caught:
        await service.servicer.Route(service.request(), hurry)
    assert caught.value.reason == "OVERLOADED" and caught.value.retry_after_s > 0
    assert float(caught.value.metadata["predicted_wait_s"]) >= 3
    await gateway.answers.aclose()


async def test_an_explanation_tells_of_the_wait() -> None:
    service, gateway, _ = await full()
    answer = await service.servicer.Explain(pb.ExplainRequest(request=service.request()), CONTEXT)
    assert answer.would_wait and answer.predicted_wait_s == pytest.approx(4.0)
    assert (answer.max_wait_s, answer.waiting_requests) == (2.0, 1)
    assert [c.chosen for c in answer.candidates] == [True]
    await gateway.answers.aclose()


async def test_a_decision_that_fails_late_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    service, gateway, placed = await full()

    def boom(*args: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(service.core, "place", boom)
    service.confirm(placed[0])
    answer = await gateway.hear()
    assert (answer.correlation_id, answer.failure.reason) == (4, "INTERNAL")
    await gateway.answers.aclose()


def failing_at(count: int, function: Any) -> Any:
    """The function, but the call of that number raises."""
    calls = 0

    def call(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise RuntimeError("boom")
        return function(*args)

    return call


async def test_a_failing_decision_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    service, gateway, placed = await full()
    gateway.send(service.route(5, tenant="t"), service.route(6, tenant="t"))
    assert [(await gateway.hear()).correlation_id for _ in range(2)] == [5, 6]
    monkeypatch.setattr(service.core, "place", failing_at(3, service.core.place))
    for attempt_id in placed:
        service.confirm(attempt_id)
    answers = [await gateway.hear() for _ in range(3)]
    assert [a.correlation_id for a in answers] == [4, 5, 6]
    assert [a.WhichOneof("result") for a in answers] == ["placement", "placement", "failure"]
    assert not len(service.servicer._admission)
    assert [inbox.waiting for inbox in service.servicer._inboxes] == [{}]
    await gateway.answers.aclose()


async def test_an_end_of_a_wait_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    service, gateway, _ = await full()
    gateway.send(service.route(5, tenant="t"), service.route(6, tenant="t"))
    assert [(await gateway.hear()).correlation_id for _ in range(2)] == [5, 6]
    monkeypatch.setattr(service.core, "backlog", failing_at(2, service.core.backlog))
    service.now += 10
    service.beat()
    service.servicer.news()
    answers = [await gateway.hear() for _ in range(3)]
    assert [a.correlation_id for a in answers] == [4, 5, 6]
    assert [a.failure.reason for a in answers] == ["OVERLOADED", "INTERNAL", "OVERLOADED"]
    await gateway.answers.aclose()


def test_who_is_displaced_is_told_though_the_decision_after_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.place(3)
    waiting = [rig.wait(tenant="a", tokens=100) for _ in range(5)]
    rig.wait(tenant="b", tokens=100)
    monkeypatch.setattr(rig.core, "place", failing_at(1, rig.core.place))
    answers = rig.admission.pump(rig.now, 10)
    assert next(answers).number == waiting[-1].number
    with pytest.raises(RuntimeError):
        next(answers)
    assert rig.admission.cancel(rig.admission.deciding)
    assert rig.pump() == [] and len(rig.admission) == 4
