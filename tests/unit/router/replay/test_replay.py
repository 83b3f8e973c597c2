"""The replay: it computes what the reference computes, and routers under it lose nothing."""

import pytest

from services.common.events.model import BlocksRemoved, BlocksStored, RequestAdmitted
from services.common.ids import AttemptId
from services.router.core.index import Digest
from services.router.core.placement import CoreConfig
from services.router.core.policies import PolicyName
from services.router.core.rates import RateDefaults
from services.router.replay.measure import Row, Times, measured
from services.router.replay.reference import OraclePlacer, reference_grid
from services.router.replay.run import CorePlacer, Placer, Replay, Served, StreamFaults
from services.router.replay.simple import (
    LruBlocks,
    SimpleSettings,
    SimpleWorker,
    pooled_hit_ratio,
)
from services.router.replay.trace import TraceRequest, sped_up, with_think_time
from tests.support.traces import made_trace

SETTINGS = SimpleSettings(capacity_blocks=150)
TRACE = made_trace(1)
NO_FAULTS = StreamFaults()
PUBLISHED = RateDefaults(prefill_tokens_per_s=SETTINGS.prefill_tps, context_tokens=1e12)

# What the reference replay says of this trace: hits, mean and p90 TTFT, imbalance.
REFERENCE = {
    "round-robin": (0.379908, 0.2204, 0.506562, 1.153609),
    "least-loaded": (0.380339, 0.2262, 0.5125, 1.061416),
    "dynamo": (0.498494, 0.183826, 0.404625, 1.053973),
    "dynamo:8": (0.645541, 0.128698, 0.274062, 1.122498),
    "lmetric": (0.624843, 0.137372, 0.306312, 1.059632),
    "ref least-loaded": (0.380339, 0.2262, 0.5125, 1.061416),
    "ref dynamo w=8": (0.645541, 0.128698, 0.274062, 1.122498),
    "ref lmetric": (0.624843, 0.137372, 0.306312, 1.059632),
    "ref seconds own=1 active=0.001": (0.677883, 0.119175, 0.25175, 1.218964),
}
REFERENCE_POOLED = 0.677667
REFERENCE_SLOW = (0.625921, 0.141239, 0.312652, 1.417123)
"""Of `seconds own=1 active=0.001` with worker 0 at half speed."""


def fleet(count: int = 4, slow: float = 1.0) -> list[SimpleWorker]:
    half = SimpleSettings(SETTINGS.capacity_blocks, SETTINGS.prefill_tps * slow)
    return [SimpleWorker(half if i == 0 else SETTINGS) for i in range(count)]


def core_placer(
    models: list[SimpleWorker],
    policy: str = "kv",
    *,
    replicas: int = 1,
    faults: StreamFaults = NO_FAULTS,
    rates: RateDefaults = PUBLISHED,
    seed: int = 0,
) -> CorePlacer:
    name, _, weight = policy.partition(":")
    config = CoreConfig(PolicyName(name), rates=rates, dynamo_weight=float(weight or 1))
    return CorePlacer(
        models,
        config,
        capacity_blocks=SETTINGS.capacity_blocks,
        replicas=replicas,
        faults=faults,
        seed=seed,
    )


def run(
    models: list[SimpleWorker], placer: Placer, trace: list[TraceRequest] = TRACE
) -> tuple[Row, list[Served]]:
    served = Replay(trace, models, placer).run()
    row = measured(
        served, models, policy="p", trace="t", pooled_hit_ratio=1.0, decision_s=placer.decision_s
    )
    return row, served


@pytest.mark.parametrize("policy", list(REFERENCE))
def test_placements_that_the_reference_has_too_come_out_the_same(policy: str) -> None:
    models = fleet()
    placer: Placer
    if policy.startswith("ref "):
        placer = OraclePlacer(models, reference_grid()[policy])
    else:
        placer = core_placer(models, policy)
    row, _ = run(models, placer)
    figures = (row.hit_ratio, row.ttft_s.mean, row.ttft_s.p90, row.imbalance)
    assert figures == pytest.approx(REFERENCE[policy], abs=1e-5)


def test_ceiling_and_slow_worker_come_out_the_same() -> None:
    assert pooled_hit_ratio(TRACE, 4, SETTINGS) == pytest.approx(REFERENCE_POOLED, abs=1e-5)
    models = fleet(slow=0.5)
    grid = reference_grid()
    row, _ = run(models, OraclePlacer(models, grid["ref seconds own=1 active=0.001"]))
    figures = (row.hit_ratio, row.ttft_s.mean, row.ttft_s.p90, row.imbalance)
    assert figures == pytest.approx(REFERENCE_SLOW, abs=1e-5)


class TestKv:
    """At its own defaults; rates are not told either."""

    def row(self, **how: object) -> Row:
        models = fleet(slow=float(str(how.pop("slow", 1.0))))
        return run(models, core_placer(models, rates=RateDefaults(), **how))[0]  # type: ignore[arg-type]

    def test_it_gets_most_of_the_hits_there_are_and_is_no_later_for_it(self) -> None:
        row = self.row()
        floor, best = REFERENCE["round-robin"], REFERENCE["ref seconds own=1 active=0.001"]
        assert (row.hit_ratio - floor[0]) / (REFERENCE_POOLED - floor[0]) > 0.9
        assert row.ttft_s.mean < 0.85 * REFERENCE["dynamo"][1]
        assert row.ttft_s.p90 < 1.15 * best[2]
        assert row.imbalance < best[3] + 0.1

    def test_replicas_that_never_talk_lose_little(self) -> None:
        alone = self.row().hit_ratio
        assert self.row(replicas=2).hit_ratio > 0.95 * alone
        assert self.row(replicas=4).hit_ratio > 0.95 * alone

    def test_late_and_lost_events_lose_little(self) -> None:
        faults = StreamFaults(lag_s=1.0, drop=0.01)
        assert self.row(faults=faults).hit_ratio > 0.97 * self.row().hit_ratio

    def test_a_slow_worker_is_found_out(self) -> None:
        models = fleet(slow=0.5)
        placer = core_placer(models, rates=RateDefaults())
        row, served = run(models, placer)
        rates = [w.prefill_rate for w in placer.cores[0].workers(1e9)]
        assert rates[1] / rates[0] == pytest.approx(2, rel=0.2)
        told, _ = run(blind := fleet(slow=0.5), core_placer(blind, "dynamo:8"))
        assert row.ttft_s.p90 < told.ttft_s.p90
        assert sum(s.worker == 0 for s in served) < len(served) / 4


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "faults", [StreamFaults(), StreamFaults(lag_s=0.7), StreamFaults(drop=0.3)], ids=str
)
def test_routers_know_in_the_end_what_is_true(replicas: int, faults: StreamFaults) -> None:
    models = fleet()
    placer = core_placer(models, replicas=replicas, faults=faults)
    trace = made_trace(2, sessions=40)
    _, served = run(models, placer, trace)
    assert [s.request for s in served] == trace
    assert all(s.finished_s is not None for s in served)
    placer.settle(1e6)
    for core in placer.cores:
        core.check_invariants()
        digests = {h.id: d for h, _, d in core.index_stats().digests}
        for i, model in enumerate(models):
            xor = 0
            for block in model.cache.ids:
                xor ^= block
            assert digests[f"worker-{i:04d}"] == Digest(len(model.cache.ids), xor)
        assert core.bookings == 0
        assert all(w.load.active == 0 for w in core.workers(1e6))


def test_equal_seeds_make_equal_runs() -> None:
    def workers(seed: int) -> list[int]:
        models = fleet()
        placer = core_placer(models, "random", replicas=2, seed=seed)
        return [s.worker for s in run(models, placer, TRACE[:100])[1]]

    assert workers(1) == workers(1) != workers(2)


def test_turns_wait_for_the_answer() -> None:
    trace = sped_up(with_think_time(TRACE, SETTINGS.prefill_tps, SETTINGS.tpot_s), 1.0)
    models = fleet(1)
    _, served = run(models, core_placer(models), trace)
    waited = [s for s in served if s.request.parent is not None]
    assert len(waited) > 50
    for one in waited:
        before = served[one.request.parent or 0]
        assert before.finished_s is not None
        assert one.arrival_s == pytest.approx(before.finished_s + one.request.think_s)


class TestSimpleWorker:
    def request(self, tokens: int, *blocks: int) -> TraceRequest:
        return TraceRequest(0, 0.0, tokens, 10, blocks)

    def test_prefills_queue_and_hits_count_from_placement_on(self) -> None:
        worker = SimpleWorker(SimpleSettings(4, prefill_tps=1000, tpot_s=0.1))
        told = worker.submit(self.request(1024, 1, 2), AttemptId("a"), 0)
        assert [type(e) for e in told[:2]] == [RequestAdmitted, BlocksStored]
        worker.submit(self.request(1536, 1, 2, 3), AttemptId("b"), 0)
        assert worker.computed_tokens == 1024 + 512
        assert worker.next_time() == pytest.approx(1.024)
        worker.advance(1.024)
        assert worker.next_time() == pytest.approx(1.536)
        assert worker.wait_s(1.1) == pytest.approx(0.436)

    def test_a_prompt_that_is_held_costs_one_token(self) -> None:
        worker = SimpleWorker(SimpleSettings(4))
        worker.submit(self.request(1024, 1, 2), AttemptId("a"), 0)
        worker.submit(self.request(1024, 1, 2), AttemptId("b"), 0)
        assert worker.computed_tokens == 1025

    def test_tails_leave_before_roots(self) -> None:
        cache = LruBlocks(4)
        assert cache.touch((1, 2, 3)) == ([1, 2, 3], [])
        assert cache.touch((7, 8)) == ([7, 8], [3])
        assert cache.overlap((1, 2, 3)) == 2
        assert cache.touch((20, 21, 22, 23, 24, 25)) == ([20, 21, 22, 23], [2, 1, 8, 7])

    def test_what_leaves_is_told(self) -> None:
        worker = SimpleWorker(SimpleSettings(2))
        worker.submit(self.request(1024, 1, 2), AttemptId("a"), 0)
        told = worker.submit(self.request(512, 9), AttemptId("b"), 0)
        assert [e.keys for e in told if isinstance(e, BlocksRemoved)] == [[2]]


def test_percentiles_are_those_of_the_sorted_values() -> None:
    assert Times.of([float(i) for i in range(100)]) == Times(49.5, 50, 90, 99)
    assert Times.of([3.0]) == Times(3, 3, 3, 3)
