"""The read model: what requests' events become, over one leg and over two."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.cards import Role
from services.common.events.model import (
    Batch,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
)
from services.common.ids import AttemptId, BlockKey
from services.planner.core.measures import GroupKey, GroupMeasures, WorkerInfo
from services.planner.core.targets import Targets
from services.planner.core.watch import Watch, WatchConfig

KEY = GroupKey("m", b"n", "nixl")
TARGETS = Targets(1.0, 0.05, 0.9)


class Bench:
    """A watch, and workers that tell it things."""

    def __init__(self, **roles: Role) -> None:
        self.watch = Watch(WatchConfig(window_s=20.0))
        self.sequence = 0
        for name, role in roles.items():
            self.watch.record(info(name, role), 0.0)

    def tell(self, worker: str, now: float, *events: Event, incarnation: int = 1) -> None:
        self.sequence += 1
        self.watch.apply(Batch(worker, incarnation, self.sequence, 0, events), now)
        self.watch.check_invariants()

    def admit(
        self, worker: str, now: float, attempt: str, tokens: int = 1000, **more: object
    ) -> None:
        event = RequestAdmitted(AttemptId(attempt), tokens, 100, (BlockKey(tokens),))
        self.tell(worker, now, replace(event, **more))

    def first(self, worker: str, now: float, attempt: str, cached: int = 0, moved: int = 0) -> None:
        self.tell(worker, now, RequestFirstToken(AttemptId(attempt), cached, 0, moved))

    def finish(self, worker: str, now: float, attempt: str, tokens: int) -> None:
        self.tell(worker, now, RequestFinished(AttemptId(attempt), 0, tokens))

    def measure(self, now: float) -> GroupMeasures:
        for name, worker in self.watch._workers.items():
            self.watch.heard(name, worker.incarnation, now)
        return self.watch.measure(KEY, TARGETS, now)


def info(
    name: str, role: Role = Role.BOTH, group: GroupKey = KEY, incarnation: int = 1
) -> WorkerInfo:
    return WorkerInfo(name, incarnation, f"{name}:1", group, role)


def test_a_whole_request_has_its_own_times() -> None:
    b = Bench(w=Role.BOTH)
    b.admit("w", 1.0, "a")
    b.first("w", 1.5, "a")
    b.finish("w", 3.5, "a", 101)
    seen = b.measure(4.0)
    assert seen.ttft.share == 1.0 and seen.ttft.quantile == pytest.approx(0.5)
    assert seen.itl.share == 1.0 and seen.itl.quantile == pytest.approx(0.02)
    assert seen.prefill.rate == pytest.approx(2000.0)


def test_two_legs_are_one_request() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    b.admit("p", 1.0, "a1", prefill_only=True)
    b.first("p", 1.6, "a1")
    b.finish("p", 1.6, "a1", 1)
    assert b.measure(1.6).ttft.count == 0  # nobody has seen a token yet
    b.admit("d", 1.7, "a2", transfer_tokens=1000)
    b.first("d", 2.2, "a2", 1000, 1000)
    seen = b.measure(2.2)
    assert seen.ttft.count == 1
    assert seen.ttft.quantile == pytest.approx(1.2)
    assert seen.ttft.share == 0.0
    assert seen.prefill_high_s == pytest.approx(0.6)
    assert seen.handover_s == pytest.approx(0.6)
    assert seen.prefill.demand == pytest.approx(1000 / 2.2)  # the second leg computes nothing


def test_legs_of_other_prompts_are_not_mixed_up() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    for attempt, tokens, ends in (("a1", 1000, 1.2), ("b1", 2000, 1.4)):
        b.admit("p", 1.0, attempt, tokens, prefill_only=True)
        b.first("p", ends, attempt)
        b.finish("p", ends, attempt, 1)
    b.admit("d", 1.5, "b2", 2000, transfer_tokens=2000)
    b.first("d", 1.5, "b2", 2000, 2000)
    assert b.measure(1.5).prefill_high_s == pytest.approx(0.4)


def test_a_decode_leg_without_its_first_is_not_taken_for_quick() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    b.admit("p", 1.0, "a1", prefill_only=True)
    b.first("p", 1.8, "a1")
    b.admit("d", 1.8, "a2", transfer_tokens=1000)
    b.first("d", 1.9, "a2", 1000, 1000)
    b.admit("d", 5.0, "b2", 3000, transfer_tokens=3000)
    b.first("d", 5.1, "b2", 3000, 3000)
    assert b.watch._groups[KEY].ttft.values() == pytest.approx([0.9, 0.9])


def test_a_request_that_waits_past_the_target_has_missed_it() -> None:
    b = Bench(w=Role.BOTH)
    b.admit("w", 1.0, "a")
    assert b.measure(1.9).ttft.count == 0
    late = b.measure(2.5).ttft
    assert (late.share, late.count) == (0.0, 1)
    assert late.quantile is not None and late.quantile > TARGETS.ttft_s


def test_prompts_that_wait_past_the_target_are_measured_as_they_wait() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    for i in range(6):
        b.admit("p", 1.0, f"a{i}", prefill_only=True)
    b.admit("d", 1.0, "x", transfer_tokens=1000)  # waits for no prefill
    assert b.measure(1.5).fresh_ttft == 0
    seen = b.measure(4.0)
    assert seen.fresh_ttft == 6 and seen.prefill_high_s == pytest.approx(3.0)


def test_running_requests_count_by_their_workers_steps() -> None:
    b = Bench(w=Role.BOTH)
    for attempt in ("a", "b"):
        b.admit("w", 0.0, attempt)
        b.first("w", 1.0, attempt)
    b.tell("w", 1.0, LoadReport(2, 0, 0, 10, 100, 50))
    b.tell("w", 2.0, LoadReport(2, 0, 0, 10, 100, 60))
    seen = b.measure(2.0)
    assert seen.itl.count == 2 and seen.itl.quantile == pytest.approx(0.1)
    assert seen.itl.share == 0.0
    assert seen.decode.tokens_s == pytest.approx(20 / 2.0)
    assert seen.decode.step is not None and seen.decode.step.at(2) == pytest.approx(0.1)


def test_steps_with_prefills_say_nothing_of_decoding() -> None:
    b = Bench(w=Role.BOTH)
    b.admit("w", 0.0, "a")
    b.first("w", 1.0, "a")
    b.tell("w", 1.0, LoadReport(1, 0, 0, 10, 100, 50))
    b.admit("w", 1.0, "b", 5000)
    b.tell("w", 2.0, LoadReport(1, 1, 3000, 10, 100, 55))
    b.first("w", 3.0, "b")
    b.tell("w", 3.0, LoadReport(2, 0, 0, 10, 100, 60))
    assert b.measure(3.0).decode.step is None
    b.tell("w", 4.0, LoadReport(2, 0, 0, 10, 100, 160))
    step = b.measure(4.0).decode.step
    assert step is not None and step.at(2) == pytest.approx(0.01)


def test_a_queue_is_no_longer_than_the_engine_says() -> None:
    b = Bench(p=Role.PREFILL)
    for attempt in ("a", "b", "c"):
        b.admit("p", 0.0, attempt, 4000, prefill_only=True)
    assert b.measure(0.0).prefill.pending == 12_000
    b.tell("p", 0.1, LoadReport(1, 2, 9_000, 0, 100, 1))
    assert b.measure(0.1).prefill.pending == 9_000
    b.admit("p", 0.2, "d", 1000, prefill_only=True)
    assert b.measure(0.2).prefill.pending == 10_000


def test_a_rate_counts_only_the_time_of_what_was_computed() -> None:
    b = Bench(p=Role.PREFILL)
    b.admit("p", 1.0, "a", 4000, prefill_only=True)
    b.admit("p", 1.0, "b", 90_000, prefill_only=True)
    b.first("p", 2.0, "a")
    assert b.measure(2.0).prefill.rate == pytest.approx(4000.0)
    assert b.measure(9.0).prefill.rate == pytest.approx(4000.0)  # the long one runs on


def test_who_drains_counts_nowhere() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    b.watch.record(replace(info("p", Role.PREFILL), draining=True), 1.0)
    assert [w.info.id for w in b.measure(2.0).workers] == ["d"]


def test_who_is_silent_counts_nowhere() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    b.watch.heard("p", 1, 10.0)
    assert [w.info.id for w in b.watch.measure(KEY, TARGETS, 10.0).workers] == ["p"]


def test_what_was_measured_before_a_change_says_nothing_of_the_pools_now() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    b.admit("p", 1.0, "a")
    b.first("p", 4.0, "a")
    b.watch.record(info("d", Role.PREFILL), 5.0)
    seen = b.measure(6.0)
    assert seen.changed_at == 5.0
    assert seen.fresh_ttft == 0 and seen.prefill_high_s is None
    assert seen.ttft.count == 1  # for people


def test_a_record_that_says_the_same_is_no_change() -> None:
    b = Bench(p=Role.PREFILL)
    b.watch.record(info("p", Role.PREFILL), 5.0)
    assert b.measure(6.0).changed_at is None


def test_a_move_is_seen_once_when_its_record_follows() -> None:
    b = Bench(p=Role.PREFILL, d=Role.DECODE)
    b.watch.moved("d", 1, Role.PREFILL, 5.0)
    b.watch.record(info("d", Role.PREFILL), 7.0)
    seen = b.measure(8.0)
    assert seen.changed_at == 5.0
    assert len(seen.pool(Role.PREFILL)) == 2


def test_a_move_of_a_former_life_is_none() -> None:
    b = Bench(d=Role.DECODE)
    b.watch.moved("d", 99, Role.PREFILL, 5.0)
    assert b.measure(6.0).pool(Role.PREFILL) == ()


def test_a_new_life_has_no_requests() -> None:
    b = Bench(w=Role.BOTH)
    b.admit("w", 1.0, "a")
    b.watch.reset(Snapshot("w", 2, 0), 2.0)
    b.watch.check_invariants()
    (view,) = b.watch.measure(KEY, TARGETS, 2.0).workers
    assert view.active_tokens == 0 and not view.movable  # until its record says the same
    b.watch.record(info("w", incarnation=2), 2.5)
    (view,) = b.watch.measure(KEY, TARGETS, 2.5).workers
    assert view.movable


def test_a_snapshot_brings_and_takes_requests_but_no_times() -> None:
    b = Bench(w=Role.BOTH)
    b.admit("w", 1.0, "gone")
    b.admit("w", 1.0, "stays")
    running = tuple(
        RunningRequest(RequestAdmitted(AttemptId(a), 1000, 10), decoding)
        for a, decoding in (("stays", False), ("new", False), ("decodes", True))
    )
    b.watch.reset(Snapshot("w", 1, 7, requests=running), 3.0)
    b.watch.check_invariants()
    b.first("w", 3.5, "stays")
    b.first("w", 3.5, "new")
    seen = b.measure(3.5)
    assert seen.ttft.count == 1 and seen.ttft.quantile == pytest.approx(2.5)
    (view,) = seen.workers
    assert view.active_tokens == 3000 and seen.decode.batch == 3 and seen.prefill.pending == 0


def test_who_cannot_hand_on_is_never_movable() -> None:
    b = Bench()
    alone = GroupKey("m", b"n", "")
    b.watch.record(info("w", group=alone), 0.0)
    b.watch.heard("w", 1, 0.0)
    (view,) = b.watch.measure(alone, TARGETS, 0.0).workers
    assert not view.movable


def test_a_vanished_record_ends_moves_and_long_silence_the_worker() -> None:
    b = Bench(w=Role.BOTH)
    b.watch.record_vanished("w", 1)
    (view,) = b.measure(1.0).workers
    assert not view.movable
    assert b.watch.tick(20.0) == ()
    assert b.watch.tick(100.0) == ("w",)
    assert b.watch.groups() == ()


def test_events_of_unknown_requests_are_counted() -> None:
    b = Bench(w=Role.BOTH)
    b.first("w", 1.0, "nobody")
    b.finish("w", 1.0, "nobody", 3)
    b.tell("other", 1.0, LoadReport())
    assert b.watch.orphans == 3


def test_what_chance_explains_is_not_taken_for_a_rise() -> None:
    b = Bench(p=Role.PREFILL)
    for i in range(40):
        # 18 in the first half of the window, 22 in the second.
        now = 10.0 * i / 18 if i < 18 else 10.0 + 10.0 * (i - 17) / 22
        b.admit("p", now, f"a{i}", 1000, prefill_only=True)
    assert b.measure(20.0).prefill.demand == pytest.approx(2000, rel=0.06)


def test_a_load_that_doubles_is_expected_to_go_on() -> None:
    b = Bench(p=Role.PREFILL)
    for i in range(20):
        b.admit("p", 10 + i * 0.5, f"a{i}", 1000, prefill_only=True)
    for i in range(200):
        b.admit("p", 20 + i * 0.05, f"b{i}", 1000, prefill_only=True)
    demand = b.measure(30.0).prefill.demand
    assert demand == pytest.approx(20_000 + 18_000, rel=0.02)


STEP = st.tuples(
    st.sampled_from(("admit", "first", "finish", "report", "reset", "role", "tick", "gone")),
    st.integers(0, 2),
    st.integers(0, 5),
    st.floats(0, 3),
)


@given(st.lists(STEP, max_size=80))
def test_whatever_is_told_the_figures_agree(steps: list[tuple[str, int, int, float]]) -> None:
    b = Bench(w0=Role.PREFILL, w1=Role.DECODE, w2=Role.BOTH)
    now = 0.0
    for what, w, r, pause in steps:
        now += pause
        worker, attempt = f"w{w}", f"a{r}"
        match what:
            case "admit":
                b.admit(
                    worker, now, attempt, 100 * (r + 1), prefill_only=w == 0, transfer_tokens=w % 2
                )
            case "first":
                b.first(worker, now, attempt, r)
            case "finish":
                b.finish(worker, now, attempt, r)
            case "report":
                b.tell(worker, now, LoadReport(r, r, 100 * r, r, 10, int(now * 10)))
            case "reset":
                b.watch.reset(Snapshot(worker, 1 + r % 2, 0), now)
            case "role":
                b.watch.record(info(worker, list(Role)[r % 3]), now)
            case "tick":
                b.watch.tick(now)
            case "gone":
                b.watch.record_vanished(worker, 1)
        b.watch.check_invariants()
        seen = b.measure(now)
        assert seen.prefill.pending >= 0
        assert seen.ttft.share is None or 0 <= seen.ttft.share <= 1
