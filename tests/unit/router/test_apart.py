"""Prefill and decode apart: whom that pairs, when it pays, what is booked and what comes of it."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.common.events.model import (
    Batch,
    BlocksStored,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TransferEnded,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.answers import (
    Outcome,
    PathScore,
    Placement,
    Scorecard,
    Transfer,
    TransferResult,
)
from services.router.core.apart import ApartConfig, Disagg
from services.router.core.nodes import NodeInfo
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.policies import PolicyName
from services.router.core.rates import RateDefaults
from services.router.core.transfers import TransferDefaults
from services.router.core.workers import WorkerRole
from tests.unit.router.test_placement import SIZE, Rig

SPACE, OTHER = b"n" * 32, b"o" * 32
LONG = tuple(BlockKey(5000 + i) for i in range(125))
"""4,000 tokens: a second of prefill, 0.1 s of transfer."""
CONFIG = CoreConfig(
    rates=RateDefaults(prefill_tokens_per_s=4000, context_tokens=1e12, learn=False),
    apart=ApartConfig(stall_weight=1.0, min_tokens=256, handover_s=0.02),
    transfers=TransferDefaults(latency_s=0.02, tokens_per_s=50_000),
)
PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH


class Pools(Rig):
    """p0, p1 ... that prefill and d0, d1 ... that decode, all of one way."""

    def __init__(self, prefill: int = 1, decode: int = 1, **config: Any) -> None:
        super().__init__(workers=0)
        self.core = RouterCore(replace(CONFIG, **config), random.Random(7))
        self.core.synced()
        for i in range(decode):
            self.add(f"d{i}", DECODE)
        for i in range(prefill):
            self.add(f"p{i}", PREFILL)

    def add(self, id: str, role: WorkerRole, **changes: Any) -> None:
        self.join(id, 1, **self.fields(role, **changes))

    def change(self, id: str, role: WorkerRole, **changes: Any) -> None:
        """A new record of the same life."""
        self.core.record(self.info(id, self.lives[id], **self.fields(role, **changes)), self.now)

    def fields(self, role: WorkerRole, **changes: Any) -> dict[str, Any]:
        fields = {"role": role, "transfer": "nixl", "namespace": SPACE, "max_model_len": 100_000}
        return fields | changes

    def decodes(self, id: str, count: int = 1) -> None:
        """So many short requests decode there."""
        for _ in range(count):
            self.count += 1
            name = AttemptId(f"x{self.count}")
            self.say(id, RequestAdmitted(name, 10, 500), RequestFirstToken(name, 0))

    def prefills(self, id: str, tokens: int) -> None:
        """So much waits there."""
        self.count += 1
        self.say(id, RequestAdmitted(AttemptId(f"x{self.count}"), tokens, 5))

    def long(self, **changes: Any) -> Placement:
        return self.place(LONG, **changes)

    def pair(self, **changes: Any) -> tuple[str, str]:
        """Who prefills and who decodes; taken back at once."""
        p = self.long(**changes)
        for attempt_id in p.attempt_ids:
            assert self.core.release(attempt_id)
        return (p.prefill.holder.id if p.prefill else "", p.holder.id)

    def card(self, keys: Sequence[int] = LONG, tokens: int = 0, **changes: Any) -> Scorecard:
        card = self.core.explain(self.query(keys, tokens, **changes), self.now)
        assert isinstance(card, Scorecard)
        return card

    def ways(self, *args: Any, **changes: Any) -> tuple[PathScore, PathScore]:
        card = self.card(*args, **changes)
        assert card.whole is not None and card.apart is not None
        return card.whole, card.apart

    def view(self, id: str) -> Any:
        return next(w.load for w in self.core.workers(self.now) if w.info.id == id)


class TestWhenAsked:
    def test_always_asks_no_price(self) -> None:
        rig = Pools()
        assert rig.pair()[0] == "", "nobody decodes, so one worker does it sooner"
        always = replace(CONFIG.apart, when=Disagg.ALWAYS)
        rig = Pools(apart=always)
        assert rig.pair() == ("p0", "d0")
        whole, apart = rig.ways()
        assert (whole.chosen, apart.chosen) == (False, True)
        assert rig.pair(whole=True)[0] == ""

    def test_never_is_never(self) -> None:
        rig = Pools(apart=replace(CONFIG.apart, when=Disagg.NEVER))
        rig.decodes("d0", 30)
        assert rig.pair() == ("", "d0")
        _, apart = rig.ways()
        assert apart.reason == "this router takes no requests apart"


class TestPairing:
    def test_two_legs(self) -> None:
        rig = Pools()
        rig.decodes("d0", 8)
        p = rig.long()
        assert p.prefill is not None
        assert (p.prefill.holder.id, p.holder.id) == ("p0", "d0")
        assert (p.prefill.address, p.address) == ("p0:1", "d0:1")
        assert p.attempt_id != p.prefill.attempt_id
        assert p.predicted_cached_tokens == p.prefill.predicted_cached_tokens == 0
        assert p.prefill.transfer_tokens == 4001
        assert p.predicted_ttft_s == pytest.approx(1.0 + 0.02 + 0.1, abs=0.01)

    @pytest.mark.parametrize(
        "changes",
        [
            {"namespace": OTHER},
            {"transfer": "other"},
            {"transfer": ""},
            {"block_size": 16},
            {"model": "n"},
            {"tenants": frozenset({"acme"})},
            {"draining": True},
            {"max_model_len": 4000},
        ],
        ids=str,
    )
    def test_those_that_can_not_be_paired(self, changes: dict[str, Any]) -> None:
        rig = Pools(prefill=0)
        rig.add("p0", PREFILL, **changes)
        rig.decodes("d0", 8)
        assert rig.pair() == ("", "d0")
        assert rig.ways()[1].reason in (
            "no prefill worker takes requests",
            "no prefill worker can hand its KV to one that decodes: namespace or way differ",
        )
        rig.change("p0", PREFILL)
        if "model" not in changes and "block_size" not in changes:
            assert rig.pair() == ("p0", "d0"), "it was that alone"

    def test_a_decode_worker_that_takes_none_stays_whole(self) -> None:
        rig = Pools()
        rig.change("d0", DECODE, transfer="")
        rig.decodes("d0", 8)
        assert rig.pair() == ("", "d0")

    def test_pairs_are_of_one_way(self) -> None:
        rig = Pools(prefill=2, decode=2)
        rig.change("p1", PREFILL, namespace=OTHER)
        rig.change("d1", DECODE, namespace=OTHER)
        for id in ("d0", "d1"):
            rig.decodes(id, 8)
        assert {rig.pair(excluded=frozenset({"p0"})), rig.pair(excluded=frozenset({"p1"}))} == {
            ("p1", "d1"),
            ("p0", "d0"),
        }
        rig.prefills("p0", 40_000)
        assert {rig.pair() for _ in range(20)} == {("p1", "d1")}

    def test_constraints_hold_for_both_legs(self) -> None:
        rig = Pools(prefill=2, decode=2)
        for id in ("d0", "d1"):
            rig.decodes(id, 8)
        rig.change("p1", PREFILL, labels={"zone": "b"})
        rig.change("d1", DECODE, labels={"zone": "b"})
        assert {rig.pair(labels={"zone": "b"}) for _ in range(9)} == {("p1", "d1")}
        assert {rig.pair(excluded=frozenset({"p1", "d0"})) for _ in range(9)} == {("p0", "d1")}
        assert {rig.pair(pinned="d1")[1] for _ in range(9)} == {"d1"}
        assert {rig.pair(pinned="d1")[0] for _ in range(30)} == {"p0", "p1"}
        assert rig.pair(excluded=frozenset({"p0", "p1"})) == ("", rig.pair()[1])

    def test_a_tenants_own_workers_are_paired_with_each_other(self) -> None:
        rig = Pools(prefill=2, decode=2)
        for id in ("p1", "d1"):
            rig.change(id, PREFILL if id[0] == "p" else DECODE, tenants=frozenset({"acme"}))
        for id in ("d0", "d1"):
            rig.decodes(id, 8)
        assert {rig.pair(tenant="acme") for _ in range(9)} == {("p1", "d1")}
        assert {rig.pair() for _ in range(9)} == {("p0", "d0")}

    def test_pinned_to_a_prefill_worker_it_does_all(self) -> None:
        rig = Pools()
        rig.decodes("d0", 8)
        assert rig.pair(pinned="p0") == ("", "p0")
        assert rig.ways(pinned="p0")[1].reason.startswith("none but prefill workers")

    def test_prefill_workers_serve_when_nobody_else_is_there(self) -> None:
        rig = Pools(prefill=2)
        rig.decodes("d0", 8)
        rig.now += 1.1
        rig.beat("p0", "p1")
        assert {rig.pair() for _ in range(20)} == {("", "p0"), ("", "p1")}
        rig.beat("d0")
        assert {rig.pair()[1] for _ in range(20)} == {"d0"}
        rig.now += 5
        assert {rig.pair() for _ in range(20)} == {("", "d0")}, "all are silent: it before them"

    def test_a_silent_one_prefills_nothing(self) -> None:
        rig = Pools()
        rig.decodes("d0", 8)
        rig.now += 1.1
        rig.beat("d0")
        assert rig.pair() == ("", "d0")
        assert rig.ways()[1].reason == "no prefill worker takes requests"
        rig.beat("p0")
        assert rig.pair() == ("p0", "d0")
        rig.core.refused("p0", 1, rig.now)
        assert rig.pair() == ("", "d0")

    def test_workers_of_both_decode_but_prefill_for_nobody(self) -> None:
        rig = Pools(prefill=0, decode=0)
        for id in ("w0", "w1"):
            rig.add(id, BOTH)
        rig.decodes("w0", 8)
        assert rig.pair() == ("", "w1")
        assert rig.card().apart is None, "nobody has the role"
        rig.change("w1", PREFILL)
        assert rig.pair() == ("w1", "w0")

    def test_equal_ones_are_drawn_by_lot(self) -> None:
        rig = Pools(prefill=3, decode=3)
        for i in range(3):
            rig.decodes(f"d{i}", 8)
        pairs = Counter(rig.pair() for _ in range(200))
        assert len({p for p, _ in pairs}) == len({d for _, d in pairs}) == 3


class TestWhenItPays:
    def test_an_idle_worker_does_it_alone(self) -> None:
        rig = Pools()
        assert rig.pair() == ("", "d0")
        whole, apart = rig.ways()
        assert whole.chosen and not apart.chosen
        assert apart.total_s - whole.total_s == pytest.approx(0.02 + 0.02 + 0.08, abs=0.001)
        assert apart.reason == f"{(apart.total_s - whole.total_s) * 1000:.1f} ms more than whole"

    def test_decodes_beside_it_make_it_pay(self) -> None:
        rig = Pools()
        rig.decodes("d0", 1)
        assert rig.pair() == ("p0", "d0")
        whole, apart = rig.ways()
        assert whole.stall_s == pytest.approx(1.0, abs=0.01) and apart.stall_s == 0
        assert apart.chosen and apart.reason == "" and "more than apart" in whole.reason
        assert apart.transfer_s == pytest.approx(0.12, abs=0.001)
        for way in (whole, apart):
            parts = way.queue_s + way.prefill_s + way.transfer_s + way.decode_queue_s + way.stall_s
            assert way.total_s == pytest.approx(parts)

    def test_the_weight_of_a_stall(self) -> None:
        rig = Pools(apart=replace(CONFIG.apart, stall_weight=0.01))
        rig.decodes("d0", 8)
        assert rig.pair() == ("", "d0")
        rig = Pools(apart=replace(CONFIG.apart, stall_weight=0))
        rig.decodes("d0", 8)
        assert rig.ways()[0].stall_s == 0

    def test_a_queue_at_the_prefill_worker_makes_it_not_pay(self) -> None:
        rig = Pools()
        rig.decodes("d0", 2)
        rig.prefills("p0", 4000)
        assert rig.pair() == ("p0", "d0"), "a second there is less than two here"
        rig.prefills("p0", 8000)
        assert rig.pair() == ("", "d0")

    def test_decodes_that_run_at_a_prefill_worker_are_held_up_as_well(self) -> None:
        """It had another role a moment ago."""
        rig = Pools()
        rig.decodes("d0", 2)
        rig.decodes("p0", 3)
        assert rig.pair() == ("", "d0")

    def test_a_queue_where_it_is_decoded_counts(self) -> None:
        rig = Pools(decode=2)
        for id in ("d0", "d1"):
            rig.decodes(id, 4)
        rig.prefills("d1", 4000)
        assert {rig.pair() for _ in range(20)} == {("p0", "d0")}
        assert rig.ways(pinned="d1")[1].decode_queue_s == 0, "it is over by then"
        rig.prefills("d1", 8000)
        _, apart = rig.ways(pinned="d1")
        assert apart.decode_queue_s == pytest.approx(3.0 - 1.12, abs=0.01)

    def test_a_burst_at_an_idle_cluster_is_shared(self) -> None:
        """Nobody decodes yet, so nobody is held up: it pays since two prefill sooner than one."""
        rig = Pools()
        placed = [rig.place([1000 * i + k for k in range(125)]) for i in range(6)]
        assert [p.prefill is not None for p in placed].count(True) == 3
        assert {p.holder.id for p in placed} == {"d0"}

    def test_what_the_decode_worker_has_does_not_travel(self) -> None:
        rig = Pools(decode=2)
        for id in ("d0", "d1"):
            rig.decodes(id, 8)
        rig.say("d1", BlocksStored(Tier.G1, LONG[:60]))
        p = rig.long()
        assert p.prefill is not None and p.holder.id == "d1"
        assert p.prefill.transfer_tokens == 4001 - 60 * SIZE
        assert p.predicted_cached_tokens == 60 * SIZE
        assert p.prefill.predicted_cached_tokens == 0

    def test_the_prefill_worker_is_chosen_by_its_cache(self) -> None:
        rig = Pools(prefill=3)
        rig.decodes("d0", 8)
        rig.say("p2", BlocksStored(Tier.G1, LONG[:100]))
        p = rig.long()
        assert p.prefill is not None and p.prefill.holder.id == "p2"
        assert p.prefill.predicted_cached_tokens == 100 * SIZE
        assert p.prefill.transfer_tokens == 4001

    def test_what_is_mostly_cached_stays_whole(self) -> None:
        rig = Pools()
        rig.decodes("d0", 50)
        rig.say("d0", BlocksStored(Tier.G1, LONG[:120]))
        assert rig.pair() == ("", "d0")
        assert rig.ways()[1].reason == "the prompt is mostly cached"

    @pytest.mark.parametrize(("tokens", "apart"), [(255, False), (256, True)])
    def test_there_is_a_floor(self, tokens: int, apart: bool) -> None:
        rig = Pools()
        rig.decodes("d0", 50)
        assert bool(rig.place(LONG[: tokens // SIZE], tokens).prefill) is apart
        if not apart:
            assert rig.ways(LONG[:4], tokens)[1].reason == "the prompt is short"

    def test_it_may_be_asked_to_stay_whole(self) -> None:
        rig = Pools()
        rig.decodes("d0", 8)
        assert rig.pair(whole=True) == ("", "d0")
        whole, apart = rig.ways(whole=True)
        assert whole.chosen and apart == PathScore(reason="the request asks for one worker")

    def test_tiers_where_it_decodes_make_whole_cheap_and_the_others_are_used(self) -> None:
        rig = Pools(prefill=2)
        for id, node in (("d0", "n0"), ("p1", "n1")):
            rig.core.nodes.record(NodeInfo(node, 1, f"{node}:1"), rig.now)
            rig.core.nodes.reset(Snapshot(node, 1, 0), rig.now)
            rig.change(id, PREFILL if id[0] == "p" else DECODE, kvbm=node)
        rig.decodes("d0", 4)

        def store(node: str, tier: Tier, keys: Sequence[BlockKey]) -> None:
            event = BlocksStored(tier, tuple(keys), namespace=SPACE)
            rig.core.nodes.apply(Batch(node, 1, 1, 0, (event,)), rig.now)

        store("n1", Tier.G3, LONG[:100])
        p = rig.long()
        assert p.prefill is not None and p.prefill.holder.id == "p1"
        assert p.prefill.predicted_cached_tokens == 100 * SIZE
        assert p.predicted_cached_tokens == 0, "a transfer is not combined with tiers"
        assert p.prefetch is not None and p.prefetch.node == "n1"
        assert list(p.prefetch.keys) == list(LONG[:100])
        for attempt_id in p.attempt_ids:
            rig.core.release(attempt_id)
        store("n0", Tier.G3, LONG[:125])
        p = rig.long()
        assert p.prefill is None and p.prefetch is not None and p.prefetch.node == "n0"

    @pytest.mark.parametrize("policy", [p for p in PolicyName if p is not PolicyName.KV])
    def test_other_policies_say_who_decodes(self, policy: PolicyName) -> None:
        rig, plain = Pools(2, 3, policy=policy), Pools(0, 3, policy=policy)
        for one in (rig, plain):
            for i in range(3):
                one.decodes(f"d{i}", 8)
        rig.say("p1", BlocksStored(Tier.G1, LONG))
        for i in range(12):
            rig.count = plain.count = 1000 + i
            keys = [*LONG[:100], *(9000 + 100 * i + k for k in range(25))]
            p, q = rig.place(keys), plain.place(keys)
            assert p.holder.id == q.holder.id
            assert p.prefill is not None and q.prefill is None
            assert p.policy is policy and p.predicted_ttft_s > 0
            rig.core.release(p.prefill.attempt_id)

    def test_a_session_decodes_where_it_was(self) -> None:
        rig = Pools(prefill=1, decode=4)
        for i in range(4):
            rig.decodes(f"d{i}", 4)
        homes = set()
        for turn in range(6):
            keys = [*range(7000 + 1000 * turn, 7000 + 1000 * turn + 40)]
            p = rig.place(keys, session="s")
            assert p.prefill is not None
            homes.add(p.holder.id)
            for attempt_id in p.attempt_ids:
                rig.core.release(attempt_id)
        assert len(homes) == 1


class TestTransferRates:
    def came(self, rig: Pools, seconds: float, tokens: int = 4000, times: int = 10) -> None:
        for _ in range(times):
            rig.count += 1
            rig.say("d0", TransferEnded(AttemptId(f"t{rig.count}"), "p0", tokens, 1, seconds))

    def test_slow_transfers_make_it_not_pay(self) -> None:
        rig = Pools()
        rig.decodes("d0", 1)
        assert rig.pair() == ("p0", "d0")
        self.came(rig, 4.0)
        assert rig.pair() == ("", "d0")
        self.came(rig, 0.01, times=200)
        assert rig.pair() == ("p0", "d0")
        assert rig.ways()[1].transfer_s < 0.05

    def test_fast_ones_make_it_pay(self) -> None:
        slow = replace(CONFIG.transfers, tokens_per_s=2000)
        rig = Pools(transfers=slow)
        rig.decodes("d0", 1)
        assert rig.pair() == ("", "d0")
        self.came(rig, 0.1)
        assert rig.pair() == ("p0", "d0")

    def test_after_a_failure_it_is_left_for_a_while_and_tried_again(self) -> None:
        rig = Pools()
        rig.decodes("d0", 2)
        self.came(rig, 5.0, tokens=0, times=1)
        assert rig.pair() == ("", "d0")
        assert rig.ways()[1].transfer_s > 9
        for _ in range(60):
            rig.now += 1
            rig.beat()
            rig.core.tick(rig.now)
        assert rig.pair() == ("p0", "d0")
        self.came(rig, 5.0, tokens=0, times=1)
        rig.join("p0", 2, **rig.fields(PREFILL))
        rig.join("d0", 2, **rig.fields(DECODE))
        rig.decodes("d0", 2)
        assert rig.pair() == ("p0", "d0"), "both live anew"

    def test_others_are_taken_instead_of_those_that_failed(self) -> None:
        rig = Pools(prefill=2, decode=2)
        for id in ("d0", "d1"):
            rig.decodes(id, 4)
        self.came(rig, 5.0, tokens=0, times=1)
        assert {rig.pair() for _ in range(20)} == {("p1", "d1")}


class TestLegs:
    def ready(self, **config: Any) -> Pools:
        rig = Pools(**config)
        rig.decodes("d0", 4)
        return rig

    def prefilled(self, rig: Pools, p: Placement) -> tuple[Any, ...]:
        assert p.prefill is not None
        first = p.prefill.attempt_id
        return rig.say(
            p.prefill.holder.id,
            RequestAdmitted(first, 4001, 1, LONG, prefill_only=True),
            BlocksStored(Tier.G1, LONG),
            RequestFirstToken(first, 0),
            RequestFinished(first, 0, 1),
        )

    def test_a_life(self) -> None:
        rig = self.ready()
        p = rig.long()
        assert p.prefill is not None
        assert (rig.view("p0").booked, rig.view("d0").booked) == (1, 1)
        assert rig.view("p0").queued_tokens == 4001 and rig.view("d0").queued_tokens == 0
        assert rig.core.bookings == 2
        (outcome,) = self.prefilled(rig, p)
        assert outcome == Outcome(p.prefill.holder, p.prefill.attempt_id, 4001, 0, 0)
        assert rig.view("p0").active == 0 and rig.view("d0").booked == 1
        rig.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG, transfer_tokens=4001))
        (transfer,) = rig.say("d0", TransferEnded(p.attempt_id, "p0", 4001, 99, 0.3))
        assert transfer == Transfer(
            TransferResult.CAME, "p0", p.holder, 4001, 99, 0.3, p.prefill.transfer_s
        )
        rig.say("d0", BlocksStored(Tier.G1, LONG), RequestFirstToken(p.attempt_id, 4001, 0, 4001))
        assert rig.view("d0").decoding == 5
        (outcome,) = rig.say("d0", RequestFinished(p.attempt_id, 4001, 9))
        assert outcome == Outcome(p.holder, p.attempt_id, 0, 0, 0)
        rig.core.check_invariants()
        views = {w.info.id: w for w in rig.core.workers(rig.now)}
        assert (views["p0"].placements, views["d0"].placements) == (1, 1)
        assert (views["d0"].prompt_tokens, views["d0"].cached_tokens) == (0, 0)
        assert rig.core.bookings == rig.core.expired_bookings == 0
        assert rig.place([*LONG, 1]).predicted_cached_tokens == 4000, "it has them now"

    def test_predictions_of_both_are_compared_with_what_they_did(self) -> None:
        rig = self.ready()
        rig.say("p0", BlocksStored(Tier.G1, LONG[:50]))
        rig.say("d0", BlocksStored(Tier.G1, LONG[:20]))
        p = rig.long()
        assert p.prefill is not None
        first = p.prefill.attempt_id
        rig.say("p0", RequestAdmitted(first, 4001, 1, LONG, prefill_only=True))
        (one,) = rig.say("p0", RequestFinished(first, 1600, 1))
        assert (one.predicted_cached_tokens, one.cached_tokens) == (1600, 1600)
        rig.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG, transfer_tokens=3361))
        rig.say("d0", RequestFirstToken(p.attempt_id, 4000, 0, 3360))
        (two,) = rig.say("d0", RequestFinished(p.attempt_id, 4000, 9))
        assert (two.prompt_tokens, two.predicted_cached_tokens, two.cached_tokens) == (
            641,
            640,
            640,
        )

    def test_each_leg_is_released_by_itself(self) -> None:
        rig = self.ready()
        p = rig.long()
        assert p.prefill is not None
        assert rig.core.release(p.prefill.attempt_id)
        assert not rig.core.release(p.prefill.attempt_id)
        assert rig.view("p0").active == 0 and rig.view("d0").booked == 1
        assert rig.core.release(p.attempt_id)
        assert rig.core.bookings == 0
        rig.core.check_invariants()

    def test_both_expire(self) -> None:
        rig = self.ready()
        rig.long()
        rig.now += 10
        rig.beat()
        rig.core.tick(rig.now)
        assert rig.core.bookings == 0 and rig.core.expired_bookings == 2
        rig.core.check_invariants()

    def test_the_second_does_not_while_the_first_is_under_way(self) -> None:
        rig = self.ready()
        p = rig.long()
        assert p.prefill is not None
        rig.say("p0", RequestAdmitted(p.prefill.attempt_id, 4001, 1, LONG, prefill_only=True))
        for _ in range(50):
            rig.now += 1
            rig.beat()
            rig.core.tick(rig.now)
        assert rig.view("d0").booked == 1
        rig.say("p0", RequestFinished(p.prefill.attempt_id, 0, 1))
        rig.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG, transfer_tokens=4001))
        assert rig.view("d0").booked == 0 and rig.core.expired_bookings == 0

    def test_the_prefill_worker_dies(self) -> None:
        rig = self.ready()
        p = rig.long()
        rig.join("p0", 2, **rig.fields(PREFILL))
        rig.core.check_invariants()
        assert rig.view("p0").active == 0 and rig.view("d0").booked == 1
        reports = rig.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG))
        assert reports == (Transfer(TransferResult.MISSED, "p0", p.holder),)
        assert rig.view("d0").queued_tokens == 4001, "it is computed there now"
        rig.core.check_invariants()

    def test_the_decode_worker_dies(self) -> None:
        rig = self.ready()
        p = rig.long()
        rig.join("d0", 2, **rig.fields(DECODE))
        assert rig.view("d0").active == 0 and rig.view("p0").booked == 1
        self.prefilled(rig, p)
        rig.core.check_invariants()
        assert rig.core.bookings == 0

    def test_a_failed_transfer_is_computed_and_told(self) -> None:
        rig = self.ready()
        p = rig.long()
        self.prefilled(rig, p)
        rig.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG, transfer_tokens=4001))
        assert rig.view("d0").queued_tokens == 0
        (failed,) = rig.say("d0", TransferEnded(p.attempt_id, "p0", 0, 0, 5.0))
        assert isinstance(failed, Transfer) and failed.result is TransferResult.FAILED
        assert rig.view("d0").queued_tokens == 4001
        rig.say("d0", RequestFirstToken(p.attempt_id, 0, 0, 0))
        rig.say("d0", RequestFinished(p.attempt_id, 0, 9))
        rig.core.check_invariants()
        assert rig.view("d0").active == 4

    def test_twins_see_legs(self) -> None:
        rig, twin = self.ready(), self.ready()
        twin.count = 100
        p = rig.long()
        assert p.prefill is not None
        first = p.prefill.attempt_id
        twin.say("p0", RequestAdmitted(first, 4001, 1, LONG, prefill_only=True))
        assert twin.view("p0").queued_tokens == 4001
        q = twin.long()
        assert q.prefill is not None and q.prefill.predicted_cached_tokens == 4000, "it comes there"
        twin.say("p0", RequestFirstToken(first, 0))
        assert twin.view("p0").decoding == 0
        assert twin.say("p0", RequestFinished(first, 0, 1)) == ()
        twin.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG, transfer_tokens=4001))
        assert (twin.view("d0").queued, twin.view("d0").queued_tokens) == (1, 0)
        (transfer,) = twin.say("d0", TransferEnded(p.attempt_id, "p0", 4001, 9, 0.2))
        assert isinstance(transfer, Transfer) and transfer.predicted_s is None
        twin.core.check_invariants()

    def test_a_twins_leg_does_not_load_from_tiers(self) -> None:
        rig = self.ready()
        rig.core.nodes.record(NodeInfo("n0", 1, "n0:1"), rig.now)
        rig.core.nodes.reset(Snapshot("n0", 1, 0), rig.now)
        rig.change("d0", DECODE, kvbm="n0")
        event = BlocksStored(Tier.G2, LONG[:100], namespace=SPACE)
        rig.core.nodes.apply(Batch("n0", 1, 1, 0, (event,)), rig.now)
        name = AttemptId("twins")
        rig.say("d0", RequestAdmitted(name, 4001, 9, LONG, transfer_tokens=4001))
        rig.say("d0", TransferEnded(name, "p0", 0, 0, 1.0))
        assert rig.view("d0").queued_tokens == 4001

    def test_a_snapshot_tells_of_legs(self) -> None:
        rig = Pools()
        leg = RequestAdmitted(AttemptId("x"), 4001, 9, LONG, transfer_tokens=4001)
        rig.snapshot("d0", (), (RunningRequest(leg, False),))
        assert rig.view("d0").queued_tokens == 0
        first = RequestAdmitted(AttemptId("x-p"), 4001, 1, LONG, prefill_only=True)
        rig.snapshot("p0", (), (RunningRequest(first, False),))
        assert rig.view("p0").queued_tokens == 4001
        rig.say("p0", RequestFirstToken(AttemptId("x-p"), 0))
        assert (rig.view("p0").queued, rig.view("p0").decoding) == (0, 0)

    def test_first_tokens_after_a_transfer_teach_no_rates(self) -> None:
        rig = self.ready(rates=RateDefaults(4000, 1e12))
        before = {w.info.id: w.prefill_rate for w in rig.core.workers(rig.now)}
        for i in range(30):
            leg = RequestAdmitted(AttemptId(f"t{i}"), 4001, 9, LONG, transfer_tokens=4001)
            rig.say("d0", leg)
            rig.now += 0.9
            rig.say("d0", RequestFirstToken(leg.attempt_id, 4000, 0, 4000))
            rig.say("d0", RequestFinished(leg.attempt_id, 4000, 1))
        after = {w.info.id: w.prefill_rate for w in rig.core.workers(rig.now)}
        assert after == before


class TestRoleFlips:
    def test_they_take_effect_at_once_and_forget_nothing(self) -> None:
        rig = Pools(prefill=0, decode=0)
        rig.add("w0", BOTH, keys=LONG[:100])
        rig.add("w1", BOTH)
        rig.decodes("w0", 4)
        rig.decodes("w1", 5)
        before = {w.info.id: (w.indexed_blocks, w.load) for w in rig.core.workers(rig.now)}
        assert rig.pair() == ("", "w0")
        rig.change("w0", PREFILL)
        assert rig.pair()[1] == "w1"
        after = {w.info.id: (w.indexed_blocks, w.load) for w in rig.core.workers(rig.now)}
        assert after == before and after["w0"][0] == 100
        rig.change("w0", DECODE)
        rig.change("w1", PREFILL)
        assert rig.pair()[1] == "w0"
        rig.core.check_invariants()

    def test_bookings_survive_them(self) -> None:
        rig = Pools()
        rig.decodes("d0", 4)
        p = rig.long()
        assert p.prefill is not None
        rig.change("p0", DECODE)
        rig.change("d0", PREFILL)
        assert rig.core.bookings == 2
        rig.say("p0", RequestAdmitted(p.prefill.attempt_id, 4001, 1, LONG, prefill_only=True))
        rig.say("p0", RequestFinished(p.prefill.attempt_id, 0, 1))
        rig.say("d0", RequestAdmitted(p.attempt_id, 4001, 9, LONG, transfer_tokens=4001))
        rig.say("d0", RequestFirstToken(p.attempt_id, 4000, 0, 4000))
        assert rig.core.bookings == 0 and rig.view("d0").decoding == 5
        rig.core.check_invariants()

    def test_a_flip_under_load_loses_nobody(self) -> None:
        rig, rng = Pools(prefill=2, decode=2), random.Random(5)
        roles = {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
        running: list[Placement] = []
        for i in range(300):
            rig.now += 0.05
            rig.beat()
            if i % 5 == 0:
                id = rng.choice(sorted(roles))
                roles[id] = rng.choice([PREFILL, DECODE, BOTH])
                rig.change(id, roles[id])
            keys = [rng.randrange(6) * 1000 + k for k in range(rng.choice([2, 40]))]
            p = rig.place(keys)
            able = {id for id, role in roles.items() if role is not PREFILL}
            assert p.holder.id in able or not able
            if p.prefill is not None:
                assert roles[p.prefill.holder.id] is PREFILL
            running.append(p)
            if len(running) > 8:
                end = running.pop(0)
                keys_ = rig.query(keys).keys
                transfer = end.prefill.transfer_tokens if end.prefill else 0
                if end.prefill is not None:
                    first = end.prefill.attempt_id
                    rig.say(
                        end.prefill.holder.id,
                        RequestAdmitted(first, 1281, 1, keys_, prefill_only=True),
                        RequestFirstToken(first, 0),
                        RequestFinished(first, 0, 1),
                    )
                rig.say(
                    end.holder.id,
                    RequestAdmitted(end.attempt_id, 1281, 5, keys_, transfer_tokens=transfer),
                    RequestFirstToken(end.attempt_id, transfer, 0, transfer),
                    RequestFinished(end.attempt_id, transfer, 5),
                )
                rig.core.check_invariants()
        for p in running:
            for attempt_id in p.attempt_ids:
                rig.core.release(attempt_id)
        assert rig.core.bookings == 0
        assert all(w.load.active == 0 for w in rig.core.workers(rig.now))


def test_explained_as_it_is_decided() -> None:
    rig = Pools(prefill=2, decode=2)
    rig.decodes("d0", 4)
    rig.decodes("d1", 4)
    for i in range(20):
        keys = [1000 * i + k for k in range(100)]
        card = rig.card(keys)
        assert card == rig.card(keys)
        p = rig.place(keys)
        assert card.workers[0].holder == p.holder and card.workers[0].chosen
        assert card.apart is not None and card.whole is not None
        assert card.apart.chosen == (p.prefill is not None) != card.whole.chosen
        roles = {row.holder.id: row.role for row in card.workers}
        assert roles == {"p0": PREFILL, "p1": PREFILL, "d0": DECODE, "d1": DECODE}
        if p.prefill is not None:
            assert card.apart.prefill == p.prefill.holder
            reasons = {row.holder: row.reason for row in card.workers}
            assert reasons[p.prefill.holder] == "prefills this one"
            assert all(reason for holder, reason in reasons.items() if holder != p.holder)


def test_a_burst_is_spread_over_both_pools() -> None:
    rig = Pools(prefill=3, decode=3)
    for i in range(3):
        rig.decodes(f"d{i}", 8)
    first: Counter[str] = Counter()
    then: Counter[str] = Counter()
    for i in range(60):
        p = rig.place([1000 * i + k for k in range(60)])
        then[p.holder.id] += 1
        if p.prefill is not None:
            first[p.prefill.holder.id] += 1
    assert len(first) == len(then) == 3
    assert max(first.values()) <= 2 * min(first.values())
    assert max(then.values()) <= 2 * min(then.values())
