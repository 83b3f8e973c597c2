"""The transfer book: speeds are learned, failures are remembered for a while and tried again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.core.transfers import TransferBook, TransferDefaults

DEFAULTS = TransferDefaults(latency_s=0.02, tokens_per_s=40_000)


def test_defaults_hold_before_anything_is_measured() -> None:
    book = TransferBook(DEFAULTS)
    assert book.seconds("m", 4000) == pytest.approx(0.12)
    assert book.doubt_s("w", 0.0) == 0


@pytest.mark.parametrize(("latency_s", "token_s"), [(0.005, 2e-6), (0.2, 1e-3), (0.0, 1e-4)])
def test_speeds_are_learned_by_model(latency_s: float, token_s: float) -> None:
    book = TransferBook(DEFAULTS)
    for i in range(60):
        tokens = (200, 1000, 3000, 9000)[i % 4]
        book.arrived("m", "p", "d", tokens, latency_s + token_s * tokens)
    for tokens in (200, 3000, 9000):
        assert book.seconds("m", tokens) == pytest.approx(latency_s + token_s * tokens, rel=0.15)
    assert book.seconds("other", 4000) == pytest.approx(0.12)
    book.check_invariants()


def test_one_that_was_held_up_moves_little() -> None:
    book = TransferBook(DEFAULTS)
    for _ in range(20):
        book.arrived("m", "p", "d", 2000, 0.07)
    book.arrived("m", "p", "d", 2000, 50.0)
    assert book.seconds("m", 2000) < 0.2


def test_nothing_is_learned_if_that_is_not_wanted() -> None:
    book = TransferBook(TransferDefaults(0.02, 40_000, learn=False))
    book.arrived("m", "p", "d", 4000, 3.0)
    assert book.seconds("m", 4000) == pytest.approx(0.12)


def test_a_failure_makes_both_ends_doubtful_for_a_while() -> None:
    book = TransferBook(DEFAULTS)
    book.failed("p", "d", 5.0, now=100)
    assert book.doubt_s("p", 100) == book.doubt_s("d", 100) == 5
    assert book.doubt_s("p", 110) == pytest.approx(2.5)
    assert book.doubt_s("other", 100) == 0
    assert book.seconds("m", 4000) == pytest.approx(0.12), "it says nothing of the speed"
    book.expire(100 + 10 * math.log2(5000) + 1)
    assert not book._doubts


def test_failures_in_a_row_count_ever_more_and_one_success_clears_them() -> None:
    book = TransferBook(DEFAULTS)
    for i in range(4):
        book.failed("p", "d", 5.0, now=100 + 20 * i)
    assert book.doubt_s("p", 160) == 40
    for i in range(4, 100):
        book.failed("p", "d", 5.0, now=100 + 20 * i)
    assert book.doubt_s("p", 100 + 20 * 99) == 320, "there is a bound"
    book.arrived("m", "p", "d", 100, 0.1)
    assert book.doubt_s("p", 2080) == book.doubt_s("d", 2080) == 0


def test_those_that_fail_together_are_one_failure() -> None:
    book = TransferBook(DEFAULTS)
    for i in range(10):
        book.failed("p", "d", 5.0, now=100 + 0.1 * i)
    assert book.doubt_s("d", 100) == 5


def test_a_new_life_is_not_doubted() -> None:
    book = TransferBook(DEFAULTS)
    book.failed("p", "d", 5.0, now=0)
    book.forget("p")
    assert book.doubt_s("p", 0) == 0 and book.doubt_s("d", 0) == 5


odd = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300]))


@given(st.lists(st.tuples(st.sampled_from("mn"), st.integers(0, 1 << 32), odd), max_size=30))
def test_whatever_workers_say_it_stays_a_speed(said: list[tuple[str, int, float]]) -> None:
    book = TransferBook(DEFAULTS)
    for i, (model, tokens, seconds) in enumerate(said):
        if tokens:
            book.arrived(model, "p", "d", tokens, seconds)
        else:
            book.failed("p", "d", seconds, now=float(i))
        book.check_invariants()
        assert 0 <= book.seconds(model, 1000) < math.inf
        assert 0 <= book.doubt_s("p", float(i)) < math.inf


def test_what_is_remembered_is_bounded() -> None:
    book = TransferBook(DEFAULTS)
    for i in range(5000):
        book.arrived(f"m{i}", "p", "d", 10, 0.1)
        book.failed(f"p{i}", f"d{i}", 1.0, now=0)
    book.check_invariants()
