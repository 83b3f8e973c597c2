"""The planner in simulated time: better than any split that stays, and the same each time."""

from __future__ import annotations

import pytest

from benchmarks.planner.loads import Kind, alternating, swinging
from benchmarks.planner.measure import kept
from benchmarks.planner.model import Hardware, Job, Life, Worker
from benchmarks.planner.run import Cluster, Planning, split
from services.common.cards import Role
from services.common.events.model import RequestFinished, RequestFirstToken
from services.common.ids import AttemptId
from services.planner.core.targets import Targets
from services.router.replay.trace import TraceRequest

TARGETS = Targets(1.5, 0.025, 0.9)
KINDS = Kind(6000, 60, 3.9), Kind(400, 600, 9.1)
"""What four workers can just serve, when they are split as each kind asks for."""
WORKERS = 4
HARDWARE = Hardware()


def job(tokens: int = 10_000, output: int = 11, **kind: bool) -> Job:
    request = TraceRequest(0, 0.0, tokens, output, ())
    flags = {"prefill_only": False, "transfer": False} | kind
    return Job(AttemptId("a"), Life(request, 0.0), **flags)


def run_out(worker: Worker) -> tuple[float, list[object]]:
    """Lets it end all it has; the time, and what it told."""
    now, events = 0.0, list[object]()
    while (when := worker.next_time()) < float("inf"):
        now = when
        events += worker.advance(now)
    return now, events


def test_a_prompt_takes_its_tokens_at_the_rate() -> None:
    worker = Worker(HARDWARE, Role.PREFILL)
    one = job(prefill_only=True)
    worker.submit(one, 0.0)
    ended, events = run_out(worker)
    assert ended == pytest.approx(1.01)
    assert [type(e) for e in events] == [RequestFirstToken, RequestFinished]
    assert worker.prefilled == [one]


def test_decodes_take_a_step_for_each_token() -> None:
    worker = Worker(HARDWARE, Role.DECODE)
    worker.submit(job(transfer=True), 0.0)
    ended, _ = run_out(worker)
    step = HARDWARE.step_s + HARDWARE.sequence_s + HARDWARE.context_s * 10_011
    assert ended == pytest.approx(11 * step)
    assert worker.steps == 11 and worker.kv == worker.promised == 0


def test_a_flipped_worker_goes_on_decoding_beside_prefills() -> None:
    worker = Worker(HARDWARE, Role.DECODE)
    running = job(output=1000, transfer=True)
    worker.submit(running, 0.0)
    worker.advance(worker.next_time())
    worker.role = Role.PREFILL
    alone = Worker(HARDWARE, Role.PREFILL)
    for w in (worker, alone):
        w.submit(job(prefill_only=True), 0.0)
    while not worker.prefilled:
        worker.advance(worker.next_time())
    assert running.tokens < 999  # it went on
    assert worker.steps >= 10_000 // HARDWARE.chunk_tokens
    run_out(worker)
    assert running.life.finished_s is not None


def test_all_requests_end_and_time_is_not_lost() -> None:
    requests = swinging(60, 30, kinds=KINDS)
    cluster = Cluster(split(WORKERS, 2), HARDWARE)
    outcome = cluster.run(requests)
    assert all(w.kv == w.promised == w.pending_tokens == 0 for w in cluster.workers)
    assert len(outcome.lives) == len(requests)
    for life in outcome.lives:
        assert life.first_token_s is not None and life.finished_s is not None
        alone = life.request.input_tokens / HARDWARE.prefill_tokens_s
        assert life.ttft_s >= alone
        assert life.itl_s >= HARDWARE.step_s or life.request.output_tokens == 1


def test_turns_of_two_loads_alternate() -> None:
    first = [TraceRequest(i, float(i), 10, 1, (0,)) for i in range(20)]
    second = [TraceRequest(i, float(i), 20, 1, (0,)) for i in range(20)]
    both = alternating(first, second, 10.0)
    assert [r.input_tokens for r in both] == [10] * 10 + [20] * 10 + [10] * 10 + [20] * 10
    assert {b for r in both for b in r.blocks} == {0, 1}  # no prefix is shared


def test_the_planner_beats_every_split_that_stays() -> None:
    requests = swinging(360, 180, seed=1, kinds=KINDS)
    fixed = {
        k: kept(Cluster(split(WORKERS, k), HARDWARE).run(requests).lives, TARGETS, 10.0).windows
        for k in range(WORKERS)
    }
    cluster = Cluster(split(WORKERS, 2), HARDWARE, Planning(TARGETS))
    outcome = cluster.run(requests)
    planned = kept(outcome.lives, TARGETS, 10.0).windows
    cluster.watch.check_invariants()
    assert planned > max(fixed.values()) + 0.1, (planned, fixed)
    assert 2 <= outcome.moves <= 24
    sizes = {size for _, size in outcome.prefillers}
    assert min(sizes) >= 1 and max(sizes) < WORKERS


def test_a_load_that_stays_is_left_alone() -> None:
    kinds = Kind(1000, 100, 4.0), Kind(1000, 100, 4.0)
    requests = swinging(120, 60, kinds=kinds)
    outcome = Cluster(split(WORKERS, 2), HARDWARE, Planning(TARGETS)).run(requests)
    assert outcome.moves == 0
    assert kept(outcome.lives, TARGETS, 10.0).windows == 1.0


def test_a_run_can_be_repeated() -> None:
    requests = swinging(60, 60, kinds=KINDS)
    runs = [Cluster(split(WORKERS, 2), HARDWARE, Planning(TARGETS)).run(requests) for _ in range(2)]
    assert runs[0].prefillers == runs[1].prefillers
    assert [x.finished_s for x in runs[0].lives] == [x.finished_s for x in runs[1].lives]
