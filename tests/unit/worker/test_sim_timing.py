"""Timing profiles: what they refuse, and that published ones are of the right order."""

from __future__ import annotations

import pytest

from services.worker.engines.sim.core.published import (
    DEFAULT,
    capacity_tokens,
    names,
    published,
)
from services.worker.engines.sim.core.timing import TimingProfile, profile_from

TABLE: dict[str, object] = {"name": "cpu", "source": "measured", "token_s": 0.001, "weights_s": 1}


def test_a_step_is_bounded_by_weights_or_by_tokens() -> None:
    profile = TimingProfile("a", "b", token_s=0.001, weights_s=0.1)
    assert profile.step_s(1, 0, 1, 0) == 0.1
    assert profile.step_s(500, 0, 1, 0) == 0.5


def test_a_profile_comes_from_a_table() -> None:
    profile = profile_from(TABLE)
    assert profile == TimingProfile("cpu", "measured", 0.001, weights_s=1.0)
    assert profile.scaled(2).step_s(1, 0, 1, 0) == 2 * profile.step_s(1, 0, 1, 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speed": 1}, "speed"),
        ({"token_s": "fast"}, "token_s"),
        ({"token_s": True}, "token_s"),
        ({"token_s": -1}, "token_s"),
        ({"pair_s": float("nan")}, "pair_s"),
        ({"token_s": 0, "weights_s": 0}, "weights_s"),
    ],
)
def test_a_wrong_table_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        profile_from({**TABLE, **change})


def test_a_table_without_a_source_is_refused() -> None:
    with pytest.raises(ValueError, match="missing: source"):
        profile_from({"name": "cpu", "token_s": 1.0})


def test_published_profiles_are_of_the_right_order() -> None:
    assert DEFAULT in names()
    for name in names():
        profile = published(name)
        assert "not measured" in profile.source
        # A model of this size decodes alone in some milliseconds to some tenths of a second.
        assert 0.002 < profile.step_s(1, 0, 1, 1000) < 0.5
        assert 500 < 8192 / profile.prefill_s(8192) < 100_000
        assert capacity_tokens(name) > 0
    one, two = published("a100/llama-3.1-8b"), published("h100/llama-3.1-8b")
    assert two.prefill_s(8192) < one.prefill_s(8192)


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    for function in (published, capacity_tokens):
        with pytest.raises(ValueError, match="h100/llama"):
            function("h100/nothing")
    assert "l4/qwen2.5-32b" not in names(), "its weights leave no room"
