from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.stops import StopMatcher


def naive(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The text cut at the first stop string that is complete; of several, the longest."""
    for end in range(1, len(text) + 1):
        matched = max((len(s) for s in stops if text[:end].endswith(s)), default=0)
        if matched:
            return text[: end if include else end - matched], True
    return text, False


letters = st.text(alphabet="ab\u00e9", max_size=30)


@given(
    text=letters,
    stops=st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_case_38_equals_a_naive_search_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    expected, stopped = naive(text, stops, include)
    shown = ""
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    for start, end in pairwise(edges):
        shown += matcher.push(text[start:end])
        matcher.check_invariants()
        # Nothing that is part of a stop is ever shown.
        assert expected.startswith(shown)
        if not matcher.stopped:
            # And nothing is held that can't become one.
            held = text[len(shown) : end]
            assert not held or any(s.startswith(held) for s in stops)
    assert matcher.stopped == stopped
    shown += matcher.flush()
    assert shown == expected
    if stopped:
        assert matcher.push("more") == ""


@given(
    early=letters,
    late=letters,
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_completed_while_not_armed_does_not_count(
    early: str, late: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(early, armed=False)
    matcher.check_invariants()
    assert not matcher.stopped
    shown += matcher.push(late)
    shown += matcher.flush()
    whole = early + late
    ends = [
        end
        for end in range(len(early) + 1, len(whole) + 1)
        if any(whole[:end].endswith(s) for s in stops)
    ]
    if not ends:
        assert shown == whole
    else:
        matched = max(len(s) for s in stops if whole[: ends[0]].endswith(s))
        assert shown == whole[: ends[0] - matched]


def test_no_stops_hold_nothing() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


def test_a_long_stop_costs_one_step_a_character() -> None:
    matcher = StopMatcher(["a" * 20_000 + "b"])
    shown = "".join(matcher.push("a" * 100) for _ in range(300))
    assert len(shown) == 10_000
    assert matcher.push("b") == ""
    assert matcher.stopped


def test_an_empty_stop_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
