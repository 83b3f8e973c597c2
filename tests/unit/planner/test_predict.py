"""Predictions: what formulas say at their edges, and which way they go."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core import predict
from services.planner.core.measures import DecodeLoad, PrefillLoad
from services.planner.core.steps import StepFit, StepTime


def prefill(demand: float = 5_000.0, pending: float = 0.0) -> PrefillLoad:
    return PrefillLoad(10_000.0, demand, pending, 2_000.0, 4_000.0, 0.3)


def decode(batch: int = 40, tokens_s: float = 2_000.0, spread: float = 1.0) -> DecodeLoad:
    return DecodeLoad(StepTime(0.01, 0.0002), batch, tokens_s, spread)


def test_an_idle_pool_needs_the_time_of_the_prompt_alone() -> None:
    assert predict.ttft_s(prefill(demand=0.001), 4, 0.9) == pytest.approx(0.4, abs=1e-3)


def test_what_arrives_faster_than_it_is_computed_waits_for_ever() -> None:
    assert predict.ttft_s(prefill(demand=20_001.0), 2, 0.9) == inf
    assert predict.prefill_use(prefill(demand=20_000.0), 2) == 1.0


def test_what_waits_already_is_waited_for() -> None:
    assert predict.drain_s(prefill(pending=30_000.0), 2) == 1.5
    first = predict.ttft_s(prefill(pending=30_000.0), 2, 0.9)
    assert first == pytest.approx(1.9)


def test_one_server_waits_as_the_formula_of_queues_says() -> None:
    # M/M/1: P(wait > t) = use * exp(-(1 - use) * t / service); services of 0.2 s, half in use.
    load = PrefillLoad(10_000.0, 5_000.0, 0.0, 2_000.0, 2_000.0, 1.0)
    tail = 0.2 / (1 - 0.5) * 1.6094379  # ln(0.5 / 0.1)
    assert predict.ttft_s(load, 1, 0.9) == pytest.approx(tail + 0.2, rel=1e-6)


def test_without_a_rate_nothing_is_predicted() -> None:
    load = PrefillLoad(None, 5_000.0, 5_000.0)
    assert predict.ttft_s(load, 2, 0.9) is None
    assert predict.drain_s(load, 2) == 0.0
    assert predict.itl_s(DecodeLoad(None, 3), 2) is None
    assert predict.itl_s(DecodeLoad(None, 0), 2) == 0.0


def test_a_batch_settles_where_it_produces_what_it_did() -> None:
    # 2,000 tokens a second of one worker: a batch b with b / (0.01 + 0.0002 b) = 2,000.
    assert predict.itl_s(decode(batch=0), 1) == pytest.approx(0.01 / 0.6)
    # And at least as long as the batch that is there takes.
    assert predict.itl_s(decode(batch=100), 1) == pytest.approx(0.03)
    assert predict.itl_s(decode(batch=100, spread=2.0), 1) == pytest.approx(0.06)
    assert predict.itl_s(decode(tokens_s=5_000.0), 1) == inf


def test_kv_of_a_pool_that_shrinks() -> None:
    load = DecodeLoad(kv_used=300, kv_worker=200)
    assert predict.kv_use(load, 3) == 0.5
    assert predict.kv_use(load, 1) == 1.5
    assert predict.kv_use(load, 0) == inf


@given(
    st.floats(10, 60_000),
    st.floats(0, 100_000),
    st.floats(100, 8_000),
    st.floats(0, 3),
    st.integers(1, 20),
)
def test_more_workers_are_never_slower(
    demand: float, pending: float, mean: float, variation: float, workers: int
) -> None:
    load = PrefillLoad(10_000.0, demand, pending, mean, mean * 2, variation)
    fewer, more = predict.ttft_s(load, workers, 0.9), predict.ttft_s(load, workers + 1, 0.9)
    assert fewer is not None and more is not None
    assert more <= fewer * (1 + 1e-9)
    tokens = DecodeLoad(StepTime(0.01, 0.0002), int(pending // 100), demand / 10)
    fewer, more = predict.itl_s(tokens, workers), predict.itl_s(tokens, workers + 1)
    assert fewer is not None and more is not None
    assert more <= fewer * (1 + 1e-9)


@given(st.floats(0.001, 0.1), st.floats(0, 0.001), st.lists(st.integers(1, 200), min_size=3))
def test_a_line_is_found_again(base_s: float, sequence_s: float, batches: list[int]) -> None:
    fit = StepFit()
    for batch in (*batches, 1, 200):
        fit.add(batch, base_s + sequence_s * batch)
    found = fit.value()
    assert found is not None
    assert found.at(100) == pytest.approx(base_s + sequence_s * 100, rel=1e-3)


def test_one_batch_size_tells_no_slope() -> None:
    fit = StepFit()
    assert fit.value() is None
    for _ in range(5):
        fit.add(50, 0.02)
    found = fit.value()
    assert found is not None
    assert found.at(50) == pytest.approx(0.02)
    assert found.at(100) == pytest.approx(0.03)  # half of it is taken to grow
