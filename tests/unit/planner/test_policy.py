"""The decision: when a worker moves, which one, and when none does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.cards import Role
from services.planner.core.measures import DecodeLoad, GroupMeasures, WorkerView
from services.planner.core.policy import Decision, Move, Policy, PolicyConfig, Verdict
from services.planner.core.steps import StepTime
from services.planner.core.targets import Targets
from tests.unit.planner.groups import group, worker, workers

TARGETS = Targets(1.0, 0.03, 0.9)
"""A batch of 100 at one worker just keeps the second one."""


def policy(**changes: float) -> Policy:
    return Policy(replace(PolicyConfig(), **changes), TARGETS)


def decide(p: Policy, g: GroupMeasures, times: int = 1, start: float = 100.0) -> Decision:
    for i in range(times):
        last = p.decide(g, start + i)
        p.check_invariants()
    return last


def test_nothing_moves_while_both_targets_are_kept() -> None:
    p = policy()
    assert decide(p, group(workers(2, 2), demand=5_000, batch=40), 10).verdict is Verdict.STEADY


def test_waiting_prefills_get_a_worker_when_decodes_can_spare_one() -> None:
    p = policy(hold=2)
    g = group(workers(1, 3), pending=20_000, batch=60)
    assert decide(p, g).verdict is Verdict.BUILDING
    done = decide(p, g)
    assert done.verdict is Verdict.MOVE
    assert done.move == Move(worker("d0", Role.DECODE), Role.PREFILL)
    assert "first tokens would take 2.40 s" in done.reason
    assert "d0 goes from decode to prefill" in done.reason
    assert done.figures["prefill_pressure"] == pytest.approx(done.figures["predicted_ttft_s"])


def test_crowded_decodes_get_a_worker_when_prefills_can_spare_one() -> None:
    done = decide(policy(), group(workers(3, 1), demand=3_000, batch=90), 2)
    assert done.verdict is Verdict.MOVE
    assert done.move is not None and done.move.to is Role.DECODE
    assert done.move.worker.info.id == "p0"


def test_a_pool_that_would_miss_its_own_target_gives_nobody() -> None:
    g = group(workers(1, 2), pending=20_000, batch=95)
    done = decide(policy(), g, 5)
    assert done.verdict is Verdict.HELPLESS and done.move is None
    assert "with one less to decode" in done.reason
    # With fewer decodes it would.
    assert decide(policy(), group(workers(1, 2), pending=20_000, batch=40), 2).move is not None


def test_pressure_on_both_sides_moves_nobody() -> None:
    done = decide(policy(), group(workers(2, 2), pending=30_000, batch=210), 5)
    assert done.verdict is Verdict.HELPLESS


def test_a_worker_that_changes_nothing_is_not_moved() -> None:
    # A prompt alone takes 0.95 s: no queue, nothing to gain.
    g = group(workers(3, 3), demand=1_000)
    g = replace(g, prefill=replace(g.prefill, mean_tokens=9_400.0, high_tokens=9_500.0))
    done = decide(policy(), g, 5)
    assert done.verdict is Verdict.HELPLESS and "would not help" in done.reason


def test_steps_that_are_too_slow_when_empty_move_nobody() -> None:
    g = group(workers(3, 1), batch=10)
    g = replace(g, decode=DecodeLoad(StepTime(0.031, 0.0002), 10))
    assert "nothing in it" in decide(policy(), g, 5).reason


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 3), (3, 1)])
def test_the_last_of_a_side_stays(prefill: int, decode: int) -> None:
    if decode == 1:
        pressed = group(workers(prefill, decode), pending=1e6)
        assert "only one worker is left to decode" in decide(policy(), pressed, 5).reason
    if prefill == 1:
        pressed = group(workers(prefill, decode), batch=1000)
        assert "only one worker is left to prefill" in decide(policy(), pressed, 5).reason


def test_pressure_must_hold() -> None:
    p = policy(hold=3)
    pressed, calm = group(workers(1, 3), pending=20_000), group(workers(1, 3))
    for _ in range(5):
        assert decide(p, pressed, 2).verdict is Verdict.BUILDING
        assert decide(p, calm).verdict is Verdict.STEADY
    assert decide(p, pressed, 3).verdict is Verdict.MOVE


def test_pressure_on_the_other_side_starts_from_the_beginning() -> None:
    p = policy(hold=2)
    decide(p, group(workers(3, 3), pending=50_000))
    assert decide(p, group(workers(3, 3), batch=280)).verdict is Verdict.BUILDING


def test_a_new_active_planner_starts_from_the_beginning() -> None:
    p = policy(hold=2)
    g = group(workers(1, 3), pending=20_000)
    decide(p, g)
    p.forget_streaks()
    assert decide(p, g).verdict is Verdict.BUILDING


def test_roles_rest_after_a_change() -> None:
    p = policy(hold=1, gap_s=10)
    g = group(workers(1, 3), pending=20_000, changed_at=100.0)
    assert p.decide(g, 109.9).verdict is Verdict.RESTING
    assert p.decide(g, 110.0).verdict is Verdict.MOVE


def test_between_the_thresholds_nothing_moves() -> None:
    p = policy(high=0.8)
    for batch in range(0, 290, 5):
        # What is 0.8 of the target or less for three workers.
        if batch / 3 * 0.0002 <= 0.8 * 0.02 and 0.01 + batch / 3 * 0.0002 <= 0.8 * 0.03:
            assert decide(p, group(workers(3, 3), batch=batch), 4).verdict is Verdict.STEADY


def test_the_idle_one_with_the_cheapest_cache_goes() -> None:
    views = (
        worker("p", Role.PREFILL),
        worker("busy", Role.DECODE, tokens=5000),
        worker("warm", Role.DECODE, hits=8000),
        worker("cold", Role.BOTH, tokens=300, hits=10),
        worker("fixed", Role.DECODE, movable=False),
    )
    done = decide(policy(), group(views, pending=20_000), 2)
    assert done.move is not None and done.move.worker.info.id == "cold"


def test_nobody_movable_is_said() -> None:
    views = tuple(worker(f"d{i}", Role.DECODE, movable=False) for i in range(3))
    done = decide(policy(), group((worker("p", Role.PREFILL), *views), pending=20_000), 5)
    assert done.verdict is Verdict.UNABLE


def test_who_refused_is_left_alone_for_a_while() -> None:
    p = policy(hold=1, refused_s=60)
    g = group(workers(1, 2), pending=20_000)
    p.refused("d0", 100.0)
    first = p.decide(g, 101.0).move
    assert first is not None and first.worker.info.id == "d1"
    p.refused("d1", 101.0)
    assert p.decide(g, 102.0).verdict is Verdict.UNABLE
    again = p.decide(g, 160.0).move
    assert again is not None and again.worker.info.id == "d0"


def test_refusals_are_bounded() -> None:
    p = policy()
    for i in range(3000):
        p.refused(f"w{i}", 100.0)
    p.check_invariants()


def test_without_a_prefill_side_waiting_prefills_make_one() -> None:
    done = decide(policy(), group(workers(0, 0, 3), pending=40_000, batch=30), 2)
    assert done.move is not None
    assert (done.move.worker.info.role, done.move.to) == (Role.BOTH, Role.PREFILL)


def test_without_a_prefill_side_prefills_leave_decodes_that_they_slow() -> None:
    # Tokens come at 2.5 times what decoding alone would take.
    slow = group(workers(0, 0, 3), batch=60, spread=2.5)
    done = decide(policy(), slow, 2)
    assert done.move is not None and done.move.to is Role.PREFILL
    # Where decoding alone takes as long, it would not help.
    crowded = group(workers(0, 0, 3), batch=300)
    assert decide(policy(), crowded, 5).move is None


def test_steps_that_were_never_measured_give_nobody() -> None:
    g = group(workers(1, 3), pending=20_000)
    g = replace(g, decode=DecodeLoad(None, 5))
    assert "not measured" in decide(policy(), g, 5).reason


def test_kv_that_is_full_gives_nobody_and_gets_one() -> None:
    full = DecodeLoad(StepTime(0.001, 0.00001), 20, kv_used=290, kv_worker=100)
    g = replace(group(workers(3, 3), demand=1000), decode=full)
    done = decide(policy(), g, 2)
    assert done.move is not None and done.move.to is Role.DECODE
    assert "0.97 of the KV is in use" in done.reason
    waiting = replace(group(workers(1, 3), pending=20_000), decode=replace(full, kv_used=190))
    assert "KV" in decide(policy(), waiting, 5).reason


def play(p: Policy, views: tuple[WorkerView, ...], rounds: int, **load: float) -> list[Move]:
    """Lets the policy move workers under a load that stays as it is."""
    moves, changed = list[Move](), None
    for now in range(rounds):
        g = group(views, changed_at=changed, **load)  # type: ignore[arg-type]
        done = p.decide(g, float(now))
        p.check_invariants()
        if done.move is not None:
            moves.append(done.move)
            changed = float(now)
            views = tuple(
                replace(v, info=replace(v.info, role=done.move.to))
                if v.info.id == done.move.worker.info.id
                else v
                for v in views
            )
    return moves


LOADS = st.fixed_dictionaries(
    {
        "demand": st.floats(0, 100_000),
        "pending": st.floats(0, 100_000),
        "batch": st.integers(0, 1000),
        "spread": st.floats(1, 3),
    }
)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), LOADS)
def test_under_a_steady_load_nobody_goes_back_and_forth(
    prefill: int, decode: int, both: int, load: dict[str, float]
) -> None:
    moves = play(policy(gap_s=0, hold=1), workers(prefill, decode, both), 60, **load)
    assert len({m.to for m in moves}) <= 1
    assert len(moves) <= prefill + decode + both


@given(
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(0, 3),
    st.lists(LOADS, min_size=1, max_size=30),
)
def test_no_side_is_ever_emptied_and_one_moves_at_a_time(
    prefill: int, decode: int, both: int, loads: list[dict[str, float]]
) -> None:
    p = policy(gap_s=0, hold=1)
    views = workers(prefill, decode, both)
    for now, load in enumerate(loads):
        g = group(views, **load)  # type: ignore[arg-type]
        had = bool(g.pool(Role.PREFILL)), bool(g.pool(Role.DECODE, Role.BOTH))
        done = p.decide(g, float(now))
        p.check_invariants()
        assert (done.move is not None) == (done.verdict is Verdict.MOVE)
        if done.move is None:
            continue
        gone = done.move.worker.info
        assert gone.role is not done.move.to
        views = tuple(
            replace(v, info=replace(v.info, role=done.move.to)) if v.info.id == gone.id else v
            for v in views
        )
        after = group(views)
        assert bool(after.pool(Role.PREFILL)) >= had[0]
        assert bool(after.pool(Role.DECODE, Role.BOTH)) >= had[1]


@pytest.mark.parametrize("ratio", [0.99, 1.0, 1.01])
def test_a_load_that_wavers_at_the_threshold_does_not_flap(ratio: float) -> None:
    # Pressure on the prefill side changes between just below and just above the threshold.
    p, views, moves = policy(gap_s=0), workers(2, 2), list[Move]()
    for now in range(200):
        waits = p.config.high * ratio * (1.02 if now % 2 else 0.98)
        g = group(views, pending=waits * 20_000 - 8_000)
        done = p.decide(g, float(now))
        if done.move is not None:
            moves.append(done.move)
            views = tuple(
                replace(v, info=replace(v.info, role=done.move.to))
                if v.info.id == done.move.worker.info.id
                else v
                for v in views
            )
    assert len(moves) <= 1


@pytest.mark.parametrize(
    "wrong", [{"low": 0.9}, {"hold": 0}, {"gain": 1.0}, {"most": 1.5}, {"gap_s": -1}, {"kv_use": 0}]
)
def test_settings_that_contradict_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        policy(**wrong)
