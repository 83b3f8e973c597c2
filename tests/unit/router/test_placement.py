"""The router core as one: liveness, constraints, bookings, predictions, no herds, twins."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
    TransferEnded,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.answers import (
    Placement,
    Query,
    Refusal,
    RefusalKind,
    Scorecard,
)
from services.router.core.apart import ApartConfig
from services.router.core.drafts import Drafts
from services.router.core.eligibility import bar_of
from services.router.core.lives import Status
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.policies import PolicyName
from services.router.core.transfers import TransferDefaults
from services.router.core.workers import WorkerInfo, WorkerRole

SIZE = 32
KEYS = tuple(BlockKey(1000 + i) for i in range(12))


class Rig:
    """A core with workers w0, w1 ... that are all ready, and words for what happens to them."""

    def __init__(self, workers: int = 2, policy: PolicyName = PolicyName.KV, **info: Any) -> None:
        self.core = RouterCore(CoreConfig(policy=policy), random.Random(7))
        self.now = 100.0
        self.sequences: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self.count = 0
        self.core.synced()
        for i in range(workers):
            self.join(f"w{i}", incarnation=i + 1, **info)

    def info(self, id: str, incarnation: int, **changes: Any) -> WorkerInfo:
        base = WorkerInfo(id, incarnation, f"{id}:1", "m", SIZE, 1000, 8192)
        return replace(base, **changes)

    def join(self, id: str, incarnation: int, keys: Sequence[int] = (), **changes: Any) -> None:
        self.core.record(self.info(id, incarnation, **changes), self.now)
        self.lives[id] = incarnation
        self.snapshot(id, keys)

    def snapshot(
        self, id: str, keys: Sequence[int] = (), requests: tuple[RunningRequest, ...] = ()
    ) -> None:
        self.sequences[id] = 0
        blocks = (TierBlocks(Tier.G1, tuple(BlockKey(k) for k in keys)),)
        self.core.reset(Snapshot(id, self.lives[id], 0, blocks, requests), self.now)

    def say(self, id: str, *events: Event) -> tuple[Any, ...]:
        self.sequences[id] += bool(events)
        return self.core.apply(
            Batch(id, self.lives[id], self.sequences[id], 0, tuple(events)), self.now
        )

    def beat(self, *ids: str) -> None:
        for id in ids or self.lives:
            self.say(id)

    def query(self, keys: Sequence[int] = KEYS, tokens: int = 0, **changes: Any) -> Query:
        keys = [BlockKey(k) for k in keys]
        return replace(Query("m", tokens or len(keys) * SIZE + 1, keys, SIZE), **changes)

    def place(self, keys: Sequence[int] = KEYS, tokens: int = 0, **changes: Any) -> Placement:
        answer = self.try_place(keys, tokens, **changes)
        assert isinstance(answer, Placement), answer
        return answer

    def try_place(
        self, keys: Sequence[int] = KEYS, tokens: int = 0, **changes: Any
    ) -> Placement | Refusal:
        self.count += 1
        answer = self.core.place(
            self.query(keys, tokens, **changes), AttemptId(f"a{self.count}"), self.now
        )
        self.core.check_invariants()
        return answer

    def refusal(self, keys: Sequence[int] = KEYS, tokens: int = 0, **changes: Any) -> RefusalKind:
        answer = self.try_place(keys, tokens, **changes)
        assert isinstance(answer, Refusal)
        assert answer.message
        return answer.kind

    def serve(self, p: Placement, keys: Sequence[int], tokens: int) -> tuple[Any, ...]:
        """What an engine does with a request, all at once."""
        held = {k for k in keys if k in self.core._books.index._runs.cells}
        cached = p.predicted_cached_tokens
        self.say(p.holder.id, RequestAdmitted(p.attempt_id, tokens, 1, tuple(map(BlockKey, keys))))
        new = tuple(BlockKey(k) for k in keys if k not in held)
        self.say(p.holder.id, BlocksStored(Tier.G1, new), RequestFirstToken(p.attempt_id, cached))
        return self.say(p.holder.id, RequestFinished(p.attempt_id, cached, 1))

    def compute(self, p: Placement, keys: Sequence[int]) -> None:
        """The same by an engine that has none of it but what the placement says."""
        mine, tokens = tuple(map(BlockKey, keys)), len(keys) * SIZE + 1
        cached = p.predicted_cached_tokens
        self.say(
            p.holder.id,
            RequestAdmitted(p.attempt_id, tokens, 1, mine),
            BlocksStored(Tier.G1, mine[cached // SIZE :]),
            RequestFirstToken(p.attempt_id, cached),
            RequestFinished(p.attempt_id, cached, 1),
        )

    def status(self) -> dict[str, Status]:
        return {w.info.id: w.status for w in self.core.workers(self.now)}


class TestPredictions:
    @pytest.mark.parametrize(
        ("tokens", "want"),
        [
            (12 * SIZE + 1, 12),
            (12 * SIZE, 11),
            (13 * SIZE - 1, 12),
            (5 * SIZE, 4),
            (1, 0),
            (SIZE, 0),
        ],
    )
    def test_the_last_token_is_always_computed(self, tokens: int, want: int) -> None:
        rig = Rig()
        rig.say("w1", BlocksStored(Tier.G1, KEYS))
        p = rig.place(KEYS[: tokens // SIZE], tokens, pinned="w1")
        assert p.predicted_cached_tokens == want * SIZE

    @pytest.mark.parametrize("policy", list(PolicyName))
    def test_every_policy_predicts(self, policy: PolicyName) -> None:
        rig = Rig(workers=1, policy=policy)
        rig.say("w0", BlocksStored(Tier.G1, KEYS))
        p = rig.place()
        assert (p.predicted_cached_tokens, p.policy) == (12 * SIZE, policy)

    def test_requests_ahead_bring_blocks(self) -> None:
        rig = Rig(workers=1)
        assert rig.place().predicted_cached_tokens == 0
        assert rig.place().predicted_cached_tokens == 12 * SIZE
        assert rig.place((*KEYS[:4], BlockKey(1))).predicted_cached_tokens == 4 * SIZE

    def test_blocks_behind_a_hole_count_for_nothing(self) -> None:
        rig = Rig(workers=1)
        rig.say("w0", BlocksStored(Tier.G1, KEYS), BlocksRemoved(Tier.G1, KEYS[3:4]))
        assert rig.place().predicted_cached_tokens == 3 * SIZE

    def test_outcomes_of_own_placements_only(self) -> None:
        rig = Rig(workers=1)
        p = rig.place()
        rig.say("w0", RequestAdmitted(p.attempt_id, 385, 1, KEYS))
        rig.say("w0", RequestAdmitted(AttemptId("twin's"), 385, 1, KEYS))
        assert rig.say("w0", RequestFinished(AttemptId("twin's"), 352, 1)) == ()
        (outcome,) = rig.say("w0", RequestFinished(p.attempt_id, 32, 1))
        assert (outcome.predicted_cached_tokens, outcome.cached_tokens) == (0, 32)
        (view,) = rig.core.workers(rig.now)
        assert (view.prompt_tokens, view.cached_tokens) == (770, 384)
        p = rig.place()
        rig.say("w0", RequestAdmitted(p.attempt_id, 385, 1, KEYS))
        assert rig.say("w0", RequestFinished(p.attempt_id, 0, 0, aborted=True)) == ()


class TestSpread:
    """The experiment everybody knows, and the burst that breaks routers (cases, row 69)."""

    @pytest.mark.parametrize(
        ("policy", "shares"), [(PolicyName.KV, [10]), (PolicyName.ROUND_ROBIN, [5, 5])]
    )
    @pytest.mark.parametrize("tokens", [300, 330, 3000])
    def test_the_same_prompt_one_after_the_other(
        self, policy: PolicyName, shares: list[int], tokens: int
    ) -> None:
        rig = Rig(policy=policy)
        keys = [5000 + i for i in range(tokens // SIZE)]
        served: Counter[str] = Counter()
        for _ in range(10):
            p = rig.place(keys, tokens)
            served[p.holder.id] += 1
            rig.now += 0.1
            rig.beat()
            rig.serve(p, keys, tokens)
        assert sorted(served.values()) == shares

    def test_the_end_may_be_heard_late(self) -> None:
        rig = Rig()
        rig.say("w1", BlocksStored(Tier.G1, KEYS))
        for _ in range(10):
            p = rig.place()
            assert p.holder.id == "w1"
            rig.say("w1", RequestAdmitted(p.attempt_id, 385, 16, KEYS))
            rig.say("w1", RequestFirstToken(p.attempt_id, 384))
            q = rig.place()
            assert q.holder.id == "w1", "the one before is over, but that is not heard yet"
            rig.core.release(q.attempt_id)
            rig.say("w1", RequestFinished(p.attempt_id, 384, 16))

    @pytest.mark.parametrize("blocks", [2, 10, 62, 300])
    @pytest.mark.parametrize("tail", [1, 30])
    @pytest.mark.parametrize("warm", [False, True])
    @pytest.mark.parametrize("admit", [False, True])
    def test_a_burst_is_spread(self, blocks: int, tail: int, warm: bool, admit: bool) -> None:
        rig = Rig(workers=4, max_model_len=100_000)
        keys = [5000 + i for i in range(blocks)]
        if warm:
            rig.say("w2", BlocksStored(Tier.G1, tuple(map(BlockKey, keys))))
        shares: Counter[str] = Counter()
        for _ in range(64):
            p = rig.place(keys, blocks * SIZE + tail)
            shares[p.holder.id] += 1
            if admit:
                event = RequestAdmitted(p.attempt_id, blocks * SIZE + tail, 1, rig.query(keys).keys)
                rig.say(p.holder.id, event)
        assert len(shares) == 4
        assert max(shares.values()) <= 2 * min(shares.values()), shares

    def test_the_first_word_of_speed_does_not_make_its_worker_look_unlike_others(self) -> None:
        rig = Rig(2)
        p = rig.place(KEYS[:9], 290)
        rig.say(p.holder.id, RequestAdmitted(p.attempt_id, 290, 1, KEYS[:9]))
        rig.now += 0.005  # much less than by the defaults
        rig.say(p.holder.id, BlocksStored(Tier.G1, KEYS[:9]), RequestFirstToken(p.attempt_id, 0))
        chosen = Counter(
            rig.place([*KEYS[:1], *range(100 * i, 100 * i + 2)], 100).holder.id
            for i in range(1, 13)
        )
        assert abs(chosen["w0"] - chosen["w1"]) <= 2, chosen

    def test_a_shared_system_prompt_does_not_pile_up(self) -> None:
        """Everybody shares the first blocks, one worker has them; requests run for a while."""
        rig = Rig(workers=4)
        rig.say("w0", BlocksStored(Tier.G1, KEYS[:8]))
        shares: Counter[str] = Counter()
        running: list[Placement] = []
        for i in range(400):
            rig.now += 0.05
            rig.beat()
            keys = [*KEYS[:8], 10_000 + i, 20_000 + i]
            p = rig.place(keys)
            shares[p.holder.id] += 1
            new = tuple(BlockKey(k) for k in keys)
            rig.say(p.holder.id, RequestAdmitted(p.attempt_id, 321, 50, new))
            rig.say(p.holder.id, BlocksStored(Tier.G1, new), RequestFirstToken(p.attempt_id, 256))
            running.append(p)
            if len(running) > 40:
                end = running.pop(0)
                rig.say(end.holder.id, RequestFinished(end.attempt_id, 256, 50))
        assert max(shares.values()) <= 1.5 * 400 / 4, shares

    @pytest.mark.parametrize("workers", [8, 20])
    @pytest.mark.parametrize(("shared", "tail", "most"), [(1, 3, 2), (2, 1, 2), (60, 8, 3)])
    def test_nor_does_it_where_all_are_idle(
        self, workers: int, shared: int, tail: int, most: float
    ) -> None:
        """One request after the other, each over before the next; caches fill evenly all the same.

        A short prefix is copied at once. A long one when it has drawn enough work to pay for that.
        """
        rig = Rig(workers=workers, total_blocks=100_000)
        head = [BlockKey(k) for k in range(500, 500 + shared)]
        shares: Counter[str] = Counter()
        for i in range(50 * workers):
            rig.now += 0.5
            rig.beat()
            keys = [*head, *(100_000 + 10 * i + k for k in range(tail))]
            p = rig.core.place(rig.query(keys), AttemptId(f"a{i}"), rig.now)
            assert isinstance(p, Placement)
            shares[p.holder.id] += 1
            rig.compute(p, keys)
        rig.core.check_invariants()
        assert max(shares.values()) <= most * 50, shares

    @pytest.mark.parametrize("busy", [False, True])
    def test_a_conversation_stays(self, busy: bool) -> None:
        """Turn by turn, alone in an idle cluster or beside others with the same system prompt."""
        rig = Rig(workers=8, max_model_len=0)
        keys: list[int] = list(KEYS)
        homes = set()
        for turn in range(60):
            rig.now += 1
            rig.beat()
            p = rig.place(keys)
            homes.add(p.holder.id)
            rig.compute(p, keys)
            keys += [10_000 + 10 * turn + k for k in range(5)]
            for k in range(6 * busy):
                other = [*KEYS, *(50_000 + 100 * turn + 10 * k + j for j in range(5))]
                p = rig.place(other)
                rig.compute(p, other)
        assert len(homes) == 1

    def test_so_does_a_long_document(self) -> None:
        """Short questions about it, one by one: computing it anew would cost far more."""
        rig = Rig(workers=8, max_model_len=0)
        document = range(1000, 2000)
        homes = set()
        for i in range(100):
            rig.now += 1
            rig.beat()
            keys = [*document, 10_000 + i]
            p = rig.place(keys)
            homes.add(p.holder.id)
            rig.compute(p, keys)
        assert len(homes) == 1


class TestLiveness:
    def test_suspect_after_a_second_and_back_with_its_blocks(self) -> None:
        rig = Rig()
        rig.say("w0", BlocksStored(Tier.G1, KEYS))
        rig.now += 1.1
        rig.beat("w1")
        assert rig.status() == {"w0": Status.SUSPECT, "w1": Status.READY}
        assert rig.place().holder.id == "w1"
        rig.beat("w0")
        assert rig.status()["w0"] is Status.READY
        assert rig.place().holder.id == "w0"

    def test_when_all_are_suspect_one_of_them_is_chosen(self) -> None:
        rig = Rig()
        rig.now += 5
        assert rig.place().holder.id in ("w0", "w1")

    def test_refused_is_out_at_once_and_back_when_heard_later(self) -> None:
        rig = Rig(workers=1)
        rig.say("w0", BlocksStored(Tier.G1, KEYS))
        assert rig.core.refused("w0", 1, rig.now)
        assert rig.refusal() is RefusalKind.NO_WORKER
        rig.beat()
        assert rig.refusal() is RefusalKind.NO_WORKER, "those words may be older than the refusal"
        rig.now += 0.6
        assert rig.refusal() is RefusalKind.NO_WORKER, "nothing was heard"
        rig.beat()
        assert rig.place().predicted_cached_tokens == 384
        # Again and again: each time it waits longer.
        waits = []
        for _ in range(6):
            assert rig.core.refused("w0", 1, rig.now)
            assert not rig.core.refused("w0", 1, rig.now)
            start = rig.now
            while rig.status()["w0"] is Status.UNREACHABLE:
                rig.now += 0.1
                rig.beat()
            waits.append(rig.now - start)
        assert waits == sorted(waits) and 9 < waits[-1] < 11

    def test_a_snapshot_proves_that_it_can_be_reached(self) -> None:
        rig = Rig(workers=1)
        rig.core.refused("w0", 0, rig.now)
        rig.snapshot("w0", KEYS)
        assert rig.place().predicted_cached_tokens == 384

    def test_a_report_about_a_former_life_is_ignored(self) -> None:
        rig = Rig(workers=1)
        assert not rig.core.refused("w0", 99, rig.now)
        assert not rig.core.refused("nobody", 0, rig.now)
        assert rig.status()["w0"] is Status.READY

    def test_a_vanished_record_alone_removes_nobody(self) -> None:
        rig = Rig(workers=1)
        rig.core.record_vanished("w0", 1)
        for _ in range(100):
            rig.now += 1
            rig.beat()
            assert rig.core.tick(rig.now) == []
        rig.now += 29
        assert rig.core.tick(rig.now) == []
        rig.now += 2
        assert rig.core.tick(rig.now) == ["w0"]
        rig.core.check_invariants()
        assert rig.refusal() is RefusalKind.NO_WORKER, "the model is remembered for a while"
        rig.now += 1000
        assert rig.refusal() is RefusalKind.MODEL_NOT_FOUND

    def test_silent_for_long_but_recorded_stays(self) -> None:
        rig = Rig(workers=1)
        rig.now += 1000
        assert rig.core.tick(rig.now) == []
        assert rig.status() == {"w0": Status.SUSPECT}

    def test_one_that_drained_and_left_is_gone_soon(self) -> None:
        rig = Rig(workers=1)
        rig.core.record(rig.info("w0", 1, draining=True), rig.now)
        rig.now += 5
        assert rig.core.tick(rig.now) == [], "its record stands"
        rig.core.record_vanished("w0", 1)
        assert rig.core.tick(rig.now) == ["w0"]

    def test_refused_silent_and_without_record_is_gone(self) -> None:
        rig = Rig(workers=1)
        rig.core.record_vanished("w0", 1)
        rig.core.refused("w0", 1, rig.now)
        assert rig.core.tick(rig.now) == []
        rig.now += 1.1
        assert rig.core.tick(rig.now) == ["w0"]
        while rig.core.sweep(1):
            pass
        assert rig.core.index_stats().blocks == 0

    @pytest.mark.parametrize("told_by", ["record", "heard", "snapshot", "batch"])
    def test_a_new_life_voids_the_old_one(self, told_by: str) -> None:
        rig = Rig(workers=1)
        rig.say("w0", BlocksStored(Tier.G1, KEYS), RequestAdmitted(AttemptId("x"), 99, 1, KEYS))
        rig.place()
        match told_by:
            case "record":
                rig.core.record(rig.info("w0", 50), rig.now)
            case "heard":
                rig.core.heard("w0", 50, rig.now)
            case "snapshot":
                rig.core.reset(Snapshot("w0", 50, 0), rig.now)
            case "batch":
                rig.core.apply(Batch("w0", 50, 1, 0, ()), rig.now)
        (view,) = rig.core.workers(rig.now)
        assert view.holder.incarnation == 50
        assert (view.indexed_blocks, view.load.active, rig.core.bookings) == (0, 0, 0)
        assert rig.place().predicted_cached_tokens == 0
        # Late words of the old life change nothing.
        assert rig.core.apply(Batch("w0", 1, 9, 0, (BlocksStored(Tier.G1, KEYS),)), rig.now) == ()
        assert not rig.core.record(rig.info("w0", 1), rig.now)
        (view,) = rig.core.workers(rig.now)
        assert (view.holder.incarnation, view.indexed_blocks) == (50, 0)
        rig.core.check_invariants()

    @pytest.mark.parametrize("early", [False, True])
    def test_a_life_with_another_model_teaches_the_old_one_nothing(self, early: bool) -> None:
        rig = Rig(workers=2)
        rates = {v.holder.id: v.prefill_rate for v in rig.core.workers(rig.now)}

        def serve_slowly() -> None:
            for _ in range(20):
                rig.count += 1
                id = AttemptId(f"x{rig.count}")
                rig.say("w0", RequestAdmitted(id, 1000, 50))
                rig.now += 10
                rig.beat("w1")
                rig.say("w0", RequestFirstToken(id, 0))
                rig.now += 50
                rig.say("w0", RequestFinished(id, 0, 50))
                rig.core.check_invariants()

        # Heard before its record comes, and perhaps at work.
        rig.lives["w0"] = 50
        rig.snapshot("w0")
        if early:
            serve_slowly()
            assert {v.holder.id: v.prefill_rate for v in rig.core.workers(rig.now)} == rates
        rig.core.record(rig.info("w0", 50, model="other"), rig.now)
        rig.core.check_invariants()
        serve_slowly()
        rig.core.tick(rig.now)
        rig.core.check_invariants()
        w0, w1 = rig.core.workers(rig.now)
        assert w0.prefill_rate < 150
        assert w1.prefill_rate == rates["w1"]
        # And everybody has what is asked for, at its own speed.
        assert rig.place().holder.id == "w1"
        other = rig.place(model="other")
        assert other.holder.id == "w0" and other.predicted_ttft_s > 1
        # The model that it comes back to is as it was.
        rig.core.record(rig.info("w0", 51), rig.now)
        rig.core.check_invariants()
        assert [v.prefill_rate for v in rig.core.workers(rig.now)] == list(rates.values())

    def test_a_life_that_starts_is_avoided_until_it_serves(self) -> None:
        """Ports are open and heartbeats come long before the engine is ready."""
        rig = Rig()
        rig.core.refused("w0", 1, rig.now)
        rig.lives["w0"] = 50
        assert rig.core.heard("w0", 50, rig.now)
        assert rig.status()["w0"] is Status.JOINING
        assert {rig.place([i]).holder.id for i in range(10)} == {"w1"}
        card = rig.core.explain(rig.query(), rig.now)
        assert isinstance(card, Scorecard)
        assert card.workers[-1].reason == "starts anew, and others are there"
        last = rig.place(pinned="w0")
        assert last.holder.id == "w0", "it may be ready by now"
        rig.core.release(last.attempt_id)
        rig.snapshot("w0")
        assert {rig.place([i]).holder.id for i in range(100, 105)} == {"w0"}

    def test_a_record_of_the_new_life_says_that_it_serves(self) -> None:
        rig = Rig(workers=1)
        rig.core.heard("w0", 50, rig.now)
        rig.join("w1", 2)
        assert rig.core.record(rig.info("w0", 50), rig.now)
        assert {rig.place([i]).holder.id for i in range(10)} == {"w0", "w1"}

    def test_one_gateway_that_reaches_nobody_does_not_take_all_from_the_others(self) -> None:
        rig = Rig(workers=1)
        for _ in range(6):
            rig.core.refused("w0", 1, rig.now)
            assert rig.refusal() is RefusalKind.NO_WORKER
            rig.now += 0.6
            assert rig.refusal() is RefusalKind.NO_WORKER, "nothing was heard"
            rig.beat()
            assert rig.place().holder.id == "w0"
            rig.now += 10
            rig.beat()
        rig.core.refused("w0", 1, rig.now)
        rig.join("w1", 2)
        rig.now += 0.6
        rig.beat()
        assert {rig.place([i]).holder.id for i in range(10)} == {"w1"}, "only if nobody else is"

    def test_prefills_of_unknown_age_teach_no_rate(self) -> None:
        """After a gap: when a request in the snapshot was admitted, nobody knows."""
        rig = Rig(workers=1)
        before = rig.core.workers(rig.now)[0].prefill_rate
        running = RunningRequest(RequestAdmitted(AttemptId("x"), 8000, 10, ()), False)
        rig.snapshot("w0", (), (running,))
        rig.now += 0.001
        rig.say("w0", RequestFirstToken(AttemptId("x"), 0))
        assert rig.core.workers(rig.now)[0].prefill_rate == before
        # One whose admission was heard goes on counting from there.
        rig.say("w0", RequestAdmitted(AttemptId("y"), 8000, 10, ()))
        again = RunningRequest(RequestAdmitted(AttemptId("y"), 8000, 10, ()), False)
        rig.snapshot("w0", (), (again,))
        rig.now += 100
        rig.say("w0", RequestFirstToken(AttemptId("y"), 0))
        assert rig.core.workers(rig.now)[0].prefill_rate < before

    def test_a_snapshot_leaves_the_queue_as_it_was(self) -> None:
        """None of its requests finds its own blocks on their way."""
        rig = Rig(1, max_model_len=100_000)
        events = []
        for i in range(10):
            keys = tuple(BlockKey(1000 * (i + 1) + n) for n in range(500))
            p = rig.place(keys, 16_000)
            # Some were placed here, the others by a twin.
            attempt = p.attempt_id if i % 2 else AttemptId(f"twin's {i}")
            if attempt != p.attempt_id:
                rig.core.release(p.attempt_id)
            events.append(RequestAdmitted(attempt, 16_000, 5, keys))
            rig.say("w0", events[-1])
        before = rig.core.workers(rig.now)[0].load
        assert before.queued_tokens == 160_000
        rig.snapshot("w0", requests=tuple(RunningRequest(e, False) for e in events))
        rig.core.check_invariants()
        assert rig.core.workers(rig.now)[0].load == before

    def test_serves_before_the_snapshot(self) -> None:
        rig = Rig(workers=0)
        rig.core.record(rig.info("w0", 1), rig.now)
        assert rig.status() == {"w0": Status.JOINING}
        assert rig.place().holder.id == "w0"


class TestConstraints:
    def test_models(self) -> None:
        rig = Rig(workers=1, adapters={"tuned": "/a/1"})
        assert rig.place(model="tuned").holder.id == "w0"
        assert rig.refusal(model="nope") is RefusalKind.MODEL_NOT_FOUND
        info = rig.core.model_worker("tuned", 99)
        assert info is not None and info.adapters["tuned"] == "/a/1"
        assert rig.core.model_worker("nope") is None

    def test_before_discovery_is_read_nobody_can_say_that_a_model_is_unknown(self) -> None:
        core = RouterCore(CoreConfig(), random.Random(1))
        answer = core.place(Query("m", 1, [], SIZE), AttemptId("a"), 0.0)
        assert isinstance(answer, Refusal) and answer.kind is RefusalKind.NO_WORKER

    def test_excluded_pinned_labels(self) -> None:
        rig = Rig()
        rig.join("w2", 3, labels={"zone": "b"})
        assert rig.place(excluded=frozenset({"w0", "w2"})).holder.id == "w1"
        assert rig.place(pinned="w1").holder.id == "w1"
        assert rig.place(labels={"zone": "b"}).holder.id == "w2"
        assert rig.refusal(labels={"zone": "c"}) is RefusalKind.NO_WORKER
        assert rig.refusal(pinned="w9") is RefusalKind.NO_WORKER
        assert rig.refusal(excluded=frozenset({"w0", "w1", "w2"})) is RefusalKind.NO_WORKER

    def test_tenants(self) -> None:
        rig = Rig(workers=1)
        rig.join("own", 2, tenants=frozenset({"acme", "bee"}))
        assert {rig.place(tenant="acme").holder.id for _ in range(9)} == {"own"}
        assert {rig.place().holder.id for _ in range(9)} == {"w0"}
        assert {rig.place(tenant="other").holder.id for _ in range(9)} == {"w0"}
        assert rig.refusal(tenant="acme", pinned="w0") is RefusalKind.NO_WORKER
        assert rig.refusal(tenant="other", pinned="own") is RefusalKind.NO_WORKER
        assert rig.refusal((), 9000, tenant="acme") is RefusalKind.PROMPT_TOO_LONG
        assert rig.refusal((), 9000) is RefusalKind.PROMPT_TOO_LONG
        card = rig.core.explain(rig.query(tenant="acme"), rig.now)
        assert isinstance(card, Scorecard)
        assert [row.reason for row in card.workers] == [
            "",
            "the request's tenant has workers of its own",
        ]
        card = rig.core.explain(rig.query(), rig.now)
        assert isinstance(card, Scorecard)
        assert card.workers[1].reason == "is reserved for other tenants"
        rig.core.record(rig.info("own", 2, tenants=frozenset({"acme"}), draining=True), rig.now)
        assert rig.refusal(tenant="acme") is RefusalKind.NO_WORKER, "those of others will not do"
        assert rig.place(tenant="bee").holder.id == "w0", "no longer reserved for it"

    def test_a_tenant_has_workers_of_its_own_by_model(self) -> None:
        rig = Rig(workers=1)
        rig.join("own", 2, model="n", tenants=frozenset({"acme"}))
        assert rig.place(tenant="acme").holder.id == "w0"
        assert rig.place(tenant="acme", model="n").holder.id == "own"
        assert rig.refusal(tenant="bee", model="n") is RefusalKind.NO_WORKER

    def test_ranks(self) -> None:
        rig = Rig(workers=1, dp_size=3)
        rig.join("w1", 2)
        pinned = [rig.place(pinned="w0", rank=2).holder for _ in range(5)]
        assert {(h.id, h.dp_rank) for h in pinned} == {("w0", 2)}
        assert rig.place(rank=1).holder.dp_rank == 1
        assert {rig.place(rank=0).holder.id for _ in range(9)} == {"w0", "w1"}
        assert rig.refusal(pinned="w0", rank=3) is RefusalKind.NO_WORKER
        assert rig.refusal(pinned="w1", rank=1) is RefusalKind.NO_WORKER
        card = rig.core.explain(rig.query(pinned="w0", rank=1), rig.now)
        assert isinstance(card, Scorecard)
        assert [(row.holder.id, row.holder.dp_rank, row.reason) for row in card.workers] == [
            ("w0", 1, ""),
            ("w0", 0, "the request is pinned to another data-parallel rank"),
            ("w0", 2, "the request is pinned to another data-parallel rank"),
            ("w1", 0, "the request is pinned to another worker"),
        ]

    def test_role_and_draining(self) -> None:
        rig = Rig(workers=1, role=WorkerRole.PREFILL)
        assert rig.place().holder.id == "w0", "nobody else is there"
        rig.join("w1", 2, role=WorkerRole.DECODE)
        assert {rig.place([i]).holder.id for i in range(9)} == {"w1"}
        rig.core.record(rig.info("w1", 2, draining=True), rig.now)
        assert rig.place([0]).holder.id == "w0"
        rig.core.record(rig.info("w0", 1, role=WorkerRole.PREFILL, draining=True), rig.now)
        assert rig.refusal() is RefusalKind.NO_WORKER
        rig.now += 5
        assert rig.status()["w1"] is Status.DRAINING

    def test_block_size_and_length(self) -> None:
        rig = Rig(max_model_len=500)
        assert rig.refusal(block_size=16) is RefusalKind.WRONG_BLOCK_SIZE
        assert rig.refusal((), 501) is RefusalKind.PROMPT_TOO_LONG
        assert rig.place((), 500)


class TestSessions:
    def one(self, rig: Rig, session: str = "s", **changes: Any) -> str:
        rig.now += 1
        rig.beat()
        p = rig.place([], 100, session=session, **changes)
        rig.compute(p, [])
        return p.holder.id

    @pytest.mark.parametrize("policy", [PolicyName.KV, PolicyName.ROUND_ROBIN])
    def test_stays_and_is_spread(self, policy: PolicyName) -> None:
        rig = Rig(workers=4, policy=policy)
        homes = {s: self.one(rig, s) for s in map(str, range(60))}
        assert all(self.one(rig, s) == home for s, home in homes.items())
        assert min(Counter(homes.values()).values()) > 5
        assert len({self.one(rig, "0", tenant=t) for t in map(str, range(20))}) > 1

    def test_routers_agree_without_a_word(self) -> None:
        one, other = Rig(workers=4), Rig(workers=0)
        for i in reversed(range(4)):
            other.join(f"w{i}", i + 1)
        sessions = [str(s) for s in range(30)]
        assert [self.one(one, s) for s in sessions] == [self.one(other, s) for s in sessions]

    def test_newcomers_draw_nobody_away(self) -> None:
        rig = Rig(workers=2)
        homes = {s: self.one(rig, s) for s in map(str, range(30))}
        rig.join("w2", 3)
        assert all(self.one(rig, s) == home for s, home in homes.items())
        assert "w2" in {self.one(rig, s) for s in map(str, range(100, 130))}
        rig.now += 3601
        rig.core.tick(rig.now)
        assert len(rig.core._sessions) == 0, "forgotten after its time"

    def test_leaves_one_that_is_out_of_choice_and_stays_where_it_went(self) -> None:
        rig = Rig(workers=3)
        home = self.one(rig)
        rest = frozenset({home})
        then = self.one(rig, excluded=rest)
        assert then != home
        assert self.one(rig) == then

    def test_does_not_wait_at_any_price(self) -> None:
        rig = Rig(workers=2)
        home = self.one(rig)
        rig.say(home, RequestAdmitted(AttemptId("x"), 2000, 1, ()))
        p = rig.place([], 100, session="s")
        assert p.holder.id == home, "half a second more"
        rig.core.release(p.attempt_id)
        rig.say(home, RequestAdmitted(AttemptId("y"), 40_000, 1, ()))
        assert rig.place([], 100, session="s").holder.id != home

    def test_the_limit_of_queues_holds_for_sessions(self) -> None:
        rig = Rig(workers=2)
        home = self.one(rig)
        rig.say(home, RequestAdmitted(AttemptId("x"), 2000, 1, ()))
        query = rig.query([], 100, session="s")
        card = rig.core.explain(query, rig.now, 0.1)
        p = rig.core.place(query, AttemptId("a"), rig.now, 0.1)
        assert isinstance(p, Placement) and p.holder.id != home
        assert isinstance(card, Scorecard) and card.workers[0].holder == p.holder
        assert "session" not in card.workers[1].reason

    def test_explained(self) -> None:
        rig = Rig(workers=2)
        home = self.one(rig)
        other = "w1" if home == "w0" else "w0"
        rig.say(other, BlocksStored(Tier.G1, KEYS))
        card = rig.core.explain(rig.query(tokens=400, session="s"), rig.now)
        assert isinstance(card, Scorecard)
        assert [(row.holder.id, row.chosen) for row in card.workers] == [
            (home, True),
            (other, False),
        ]
        assert card.workers[1].reason == f"the session stays with {home}"


class TestDecisions:
    def test_ties_are_broken_by_the_seed(self) -> None:
        def run(seed: int) -> list[str]:
            rig = Rig(policy=PolicyName.RANDOM, workers=4)
            rig.core._decider._dice = random.Random(seed)
            return [rig.place().holder.id for _ in range(50)]

        assert run(1) == run(1) != run(2)
        assert len(set(run(1))) == 4

    def test_explain_foretells_and_changes_nothing(self) -> None:
        rig = Rig(workers=4)
        rig.join("other", 9, model="x")
        for i in range(20):
            keys = [i]
            card = rig.core.explain(rig.query(keys), rig.now)
            assert isinstance(card, Scorecard)
            assert card == rig.core.explain(rig.query(keys), rig.now)
            assert [w.chosen for w in card.workers] == [True] + [False] * 4
            assert card.workers[-1].holder.id == "other" and card.workers[-1].candidate is None
            assert all(w.reason for w in card.workers[1:])
            assert rig.place(keys).holder == card.workers[0].holder
        nobody = rig.core.explain(rig.query(excluded=frozenset({"w0", "w1", "w2", "w3"})), rig.now)
        assert isinstance(nobody, Scorecard) and not any(w.chosen for w in nobody.workers)

    def test_a_decision_that_fails_leaves_nothing_written(self, monkeypatch: Any) -> None:
        rig = Rig(2)
        rig.say("w0", BlocksStored(Tier.G1, KEYS))
        query = rig.query()
        with monkeypatch.context() as broken:
            broken.setattr(Drafts, "totals", None)
            with pytest.raises(TypeError):
                rig.core.place(query, AttemptId("x"), rig.now)
            with pytest.raises(TypeError):
                rig.core.explain(query, rig.now)
        rig.core.check_invariants()
        assert rig.place([1, 2, 3]).predicted_cached_tokens == 0

    def test_release_frees_the_booking(self) -> None:
        rig = Rig()
        p = rig.place()
        assert rig.core.bookings == 1
        assert rig.core.release(p.attempt_id)
        assert not rig.core.release(p.attempt_id)
        assert rig.core.bookings == 0

    def test_data_parallel_ranks_are_chosen_apart(self) -> None:
        rig = Rig(workers=1, dp_size=2)
        rig.say("w0", BlocksStored(Tier.G1, KEYS, dp_rank=1))
        assert rig.place().holder.dp_rank == 1
        before = rig.core.index_stats().unknown_events
        rig.say("w0", BlocksStored(Tier.G1, KEYS, dp_rank=7))
        assert rig.core.index_stats().unknown_events == before + 1

    def test_a_snapshot_tells_load_as_well(self) -> None:
        rig = Rig()
        running = RunningRequest(RequestAdmitted(AttemptId("x"), 5000, 10, ()), False)
        rig.snapshot("w0", (), (running,))
        assert {rig.place([i]).holder.id for i in range(5)} == {"w1"}


def test_twins_agree_when_fed_the_same_stream() -> None:
    """Two routers, each placing half of the requests, hear of each other by admissions alone."""
    a, b = Rig(workers=3), Rig(workers=3)
    rng = random.Random(3)
    shares: Counter[str] = Counter()
    running: list[tuple[Placement, Sequence[int]]] = []
    for i in range(200):
        one = a if i % 2 else b
        one.count = i
        keys = [rng.randrange(4) * 100 + k for k in range(rng.randrange(1, 10))]
        p = one.place(keys)
        shares[p.holder.id] += 1
        running.append((p, keys))
        for rig in (a, b):
            rig.say(p.holder.id, RequestAdmitted(p.attempt_id, 321, 5, rig.query(keys).keys))
            rig.say(p.holder.id, BlocksStored(Tier.G1, rig.query(keys).keys))
        if len(running) > 6:
            end, _ = running.pop(0)
            for rig in (a, b):
                rig.say(end.holder.id, RequestFinished(end.attempt_id, 0, 1))
        views = [
            [(w.holder, w.indexed_blocks, w.load.queued, w.load.active_tokens) for w in core]
            for core in (a.core.workers(a.now), b.core.workers(b.now))
        ]
        assert views[0] == views[1]
        assert a.core.index_stats().digests == b.core.index_stats().digests
        assert a.core.bookings == b.core.bookings == 0
    assert len(shares) == 3


class CoreMachine(RuleBasedStateMachine):
    """Anything in any order: invariants hold, and no answer is an exception."""

    ids = st.sampled_from(["w0", "w1", "w2"])
    lives = st.sampled_from([1, 1, 1, 1, 1, 2, 3])
    chains = st.integers(0, 12).map(lambda n: KEYS[:n])
    attempts = st.tuples(st.integers(0, 30), st.sampled_from(["", "-p"])).map(
        lambda t: AttemptId(f"a{t[0]}{t[1]}")
    )

    def __init__(self) -> None:
        super().__init__()
        # So that it pays now and then, idle as these are.
        config = CoreConfig(apart=ApartConfig(min_tokens=32, handover_s=0.0))
        self.core = RouterCore(
            replace(config, transfers=TransferDefaults(0.0, 1e9)), random.Random(1)
        )
        self.now = 0.0
        self.count = 0

    @rule(
        id=ids,
        life=lives,
        draining=st.booleans(),
        size=st.sampled_from([16, 32]),
        role=st.sampled_from(WorkerRole),
        transfer=st.sampled_from(["", "a", "b"]),
    )
    def record(
        self, id: str, life: int, draining: bool, size: int, role: WorkerRole, transfer: str
    ) -> None:
        info = WorkerInfo(
            id, life, "x:1", "m", size, 10, 4000, draining=draining, role=role, transfer=transfer
        )
        self.core.record(info, self.now)

    @initialize(roles=st.lists(st.sampled_from(WorkerRole), min_size=3, max_size=3))
    def begin(self, roles: list[WorkerRole]) -> None:
        for id, role in zip(["w0", "w1", "w2"], roles, strict=True):
            self.record(id, 1, False, 32, role, "a")
            running = RunningRequest(RequestAdmitted(AttemptId(f"x{id}"), 10, 500), True)
            decodes = (running,) if role is not WorkerRole.PREFILL else ()
            self.core.reset(Snapshot(id, 1, 0, (), decodes), self.now)

    @rule(id=ids, role=st.sampled_from(WorkerRole))
    def change_role(self, id: str, role: WorkerRole) -> None:
        worker = self.core._books.table.get(id)
        if worker is not None:
            known = [(w.holder, w.indexed_blocks, w.load) for w in self.core.workers(self.now)]
            info = replace(worker.info, role=role, transfer="a")
            if worker.described and worker.record_incarnation == info.incarnation:
                self.core.record(info, self.now)
                after = [(w.holder, w.indexed_blocks, w.load) for w in self.core.workers(self.now)]
                assert after == known

    @rule(id=ids, life=lives)
    def vanish(self, id: str, life: int) -> None:
        self.core.record_vanished(id, life)

    @rule(id=ids, life=lives)
    def refuse(self, id: str, life: int) -> None:
        self.core.refused(id, life, self.now)

    @rule(id=ids, life=lives)
    def hear(self, id: str, life: int) -> None:
        self.core.heard(id, life, self.now)

    @rule(
        id=ids,
        life=lives,
        keys=chains,
        attempt=attempts,
        decoding=st.booleans(),
        transfer=st.sampled_from([0, 0, 70]),
    )
    def snapshot(
        self,
        id: str,
        life: int,
        keys: tuple[BlockKey, ...],
        attempt: AttemptId,
        decoding: bool,
        transfer: int,
    ) -> None:
        request = RunningRequest(RequestAdmitted(attempt, 100, 5, keys, 0, transfer), decoding)
        blocks = (TierBlocks(Tier.G1, keys), TierBlocks(Tier.G2, keys[::2]))
        self.core.reset(Snapshot(id, life, 3, blocks, (request,)), self.now)

    @rule(
        id=ids,
        life=lives,
        keys=chains,
        attempt=attempts,
        kind=st.integers(0, 10),
        rank=st.integers(0, 1),
    )
    def event(
        self,
        id: str,
        life: int,
        keys: tuple[BlockKey, ...],
        attempt: AttemptId,
        kind: int,
        rank: int,
    ) -> None:
        events: list[Event] = [
            BlocksStored(Tier.G1, keys, rank),
            BlocksRemoved(Tier.G1, keys, rank),
            BlocksCleared(Tier.G1, rank),
            RequestAdmitted(attempt, 100, 5, keys, rank),
            RequestFirstToken(attempt, 32, rank),
            RequestFinished(attempt, 32, 5, False, rank),
            LoadReport(1, 1, 50, 5, 10, 1, rank),
            RequestAdmitted(attempt, 100, 5, keys, rank, prefill_only=True),
            RequestAdmitted(attempt, 100, 5, keys, rank, transfer_tokens=90),
            RequestFirstToken(attempt, 96, rank, 64),
            TransferEnded(attempt, "w1", 64 * (life % 2), 1, 0.5, rank),
        ]
        self.core.apply(Batch(id, life, 1, 0, (events[kind],)), self.now)

    @rule(
        keys=chains,
        size=st.sampled_from([32, 32, 32, 16]),
        excluded=st.sampled_from([(), (), (), ("w0",), ("w1", "w2")]).map(set),
        whole=st.sampled_from([False, False, False, True]),
        spared=st.sampled_from([(), (), (0,), (1, 2), (3, 4)]).map(set),
    )
    def place(
        self,
        keys: tuple[BlockKey, ...],
        size: int,
        excluded: set[str],
        whole: bool,
        spared: set[int],
    ) -> None:
        query = Query("m", len(keys) * size + 1, keys, size, frozenset(excluded), whole=whole)
        foretold = self.core.explain(query, self.now, spared=spared)
        self.count += 1
        attempt = AttemptId(f"a{self.count % 30}")
        answer = self.core.place(query, attempt, self.now, spared=spared)
        if isinstance(answer, Placement):
            self.judge(answer, query, spared)
            assert isinstance(foretold, Scorecard)
            assert foretold.workers[0].holder == answer.holder
            apart = foretold.apart
            said = apart.prefill if apart is not None and apart.chosen else None
            assert said == (answer.prefill.holder if answer.prefill else None)
        elif answer.kind is RefusalKind.OVERLOADED:
            assert spared
        else:
            assert isinstance(foretold, Refusal) or not any(w.chosen for w in foretold.workers)

    def judge(self, answer: Placement, query: Query, spared: set[int]) -> None:
        pages = {p.rank.holder: p for p in self.core._books.pages.values()}
        page, leg = pages[answer.holder], answer.prefill
        assert answer.holder.id not in query.excluded and page.rank.slot not in spared
        assert 0 <= answer.predicted_cached_tokens < query.prompt_tokens
        there = [
            p.worker.info.role
            for p in pages.values()
            if bar_of(p.worker.info, Status.READY, query) is None
            and self.core._books.table.status(p.worker, self.now) in (Status.READY, Status.JOINING)
            and not p.worker.starting
        ]
        info = page.worker.info
        if info.role is WorkerRole.PREFILL:
            assert set(there) <= {WorkerRole.PREFILL} and leg is None
        if leg is not None:
            first = pages[leg.holder].worker.info
            assert not query.whole and first.role is WorkerRole.PREFILL
            assert (first.namespace, first.transfer) == (info.namespace, info.transfer)
            assert first.transfer and first.id not in query.excluded
            assert pages[leg.holder].rank.slot not in spared
            assert 0 <= leg.predicted_cached_tokens < query.prompt_tokens
            assert 0 < leg.transfer_tokens <= query.prompt_tokens
            assert leg.transfer_tokens + answer.predicted_cached_tokens == query.prompt_tokens

    @rule(attempt=attempts)
    def release(self, attempt: AttemptId) -> None:
        self.core.release(attempt)

    @rule(seconds=st.floats(0, 40), sweep=st.integers(0, 5), heard=st.booleans())
    def time(self, seconds: float, sweep: int, heard: bool) -> None:
        self.now += seconds
        for worker in list(self.core._books.table) if heard else ():
            self.core.heard(worker.info.id, worker.incarnation, self.now)
        self.core.tick(self.now)
        self.core.sweep(sweep)

    @invariant()
    def holds(self) -> None:
        self.core.check_invariants()
        self.core.workers(self.now)
        self.core.index_stats()


CoreMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCoreMachine = CoreMachine.TestCase
