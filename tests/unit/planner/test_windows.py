"""Windows forget what is old, and busy time adds up only inside them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.core.windows import BusyTime, Window, quantile_of


def test_a_window_keeps_what_is_young_enough() -> None:
    window = Window(10.0)
    for now in range(20):
        window.add(float(now), float(now))
    window.prune(19.0)
    assert window.values() == [float(v) for v in range(10, 20)]
    window.prune(25.0)
    assert window.values() == [16.0, 17.0, 18.0, 19.0]
    assert window.total() == 70.0


def test_values_since_go_by_when_they_began() -> None:
    window = Window(100.0)
    window.add(10.0, 1.0, began=2.0)
    window.add(11.0, 2.0, began=9.0)
    assert window.values(5.0) == [2.0]
    assert window.values() == [1.0, 2.0]


def test_a_quantile_is_a_value_that_was_seen() -> None:
    assert quantile_of([], 0.9) is None
    assert quantile_of([3.0], 0.9) == 3.0
    assert quantile_of([float(v) for v in range(1, 11)], 0.9) == 9.0
    assert quantile_of([float(v) for v in range(1, 11)], 0.5) == 5.0


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0.01, 0.99))
def test_a_quantile_is_kept_by_its_share(values: list[float], q: float) -> None:
    found = quantile_of(values, q)
    assert found is not None
    assert sum(v <= found for v in values) >= q * len(values) - 1e-9
    assert sum(v < found for v in values) < q * len(values) + 1e-9


@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.0, 3.0)), max_size=50),
    st.floats(0.5, 20.0),
)
def test_busy_time_equals_the_sum_over_small_pieces(
    changes: list[tuple[bool, float]], length_s: float
) -> None:
    busy_time, spans, now = BusyTime(length_s), list[tuple[float, float]](), 0.0
    state = False
    for busy, pause in changes:
        busy_time.set(busy, now)
        if busy or state:
            spans.append((now, now + pause)) if busy else None
        state = busy
        now += pause
    want = sum(max(0.0, end - max(begin, now - length_s)) for begin, end in spans)
    assert busy_time.seconds(now) == pytest.approx(want, abs=1e-6)
