"""The breaker and the measured rate of prompts."""

from __future__ import annotations

import pytest

from services.common.ids import BlockKey
from services.worker.core.blocks import AllDropped, BlockMirror, CopiesAdded, CopiesDropped
from services.worker.core.breaker import FAILURES, PAUSE_S, Breaker
from services.worker.core.rates import PrefillRate


def opened(now_s: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES):
        assert breaker.allow(now_s)
        breaker.failed(now_s)
    return breaker


def test_a_few_failures_open_it_and_one_trial_closes_it() -> None:
    """H5"""
    breaker = opened()
    assert breaker.open
    assert not breaker.allow(100.0 + PAUSE_S[0] - 0.01)
    assert breaker.allow(100.0 + PAUSE_S[0])
    assert not breaker.allow(100.0 + PAUSE_S[0]), "one trial at a time"
    breaker.succeeded()
    assert not breaker.open
    assert breaker.allow(101.0) and breaker.allow(101.0)


def test_failures_that_are_not_in_a_row_do_not_open_it() -> None:
    breaker = Breaker()
    for _ in range(10):
        breaker.failed(1.0)
        breaker.succeeded()
    assert not breaker.open


def test_each_failed_trial_doubles_the_pause_up_to_a_bound() -> None:
    breaker = opened(0.0)
    now_s, pauses = 0.0, []
    for _ in range(6):
        began = now_s
        while not breaker.allow(now_s):
            now_s += 0.25
        pauses.append(now_s - began)
        breaker.failed(now_s)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_the_rate_follows_the_batch() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s is None
    assert rate.seconds(100) == 0.0
    rate.observe(256, 0.5)
    assert rate.tokens_per_s == pytest.approx(512)
    assert rate.seconds(32) == pytest.approx(0.0625)
    rate.observe(3, 1.0)
    rate.observe(0, 1.0)
    assert rate.tokens_per_s == pytest.approx(512), "steps that decode say nothing"
    for _ in range(200):
        rate.observe(256, 1.0)
    assert rate.tokens_per_s == pytest.approx(256, rel=0.01)


def test_the_mirror_tells_how_much_of_a_prompt_is_held() -> None:
    mirror = BlockMirror()
    keys = [BlockKey(i) for i in range(1, 6)]
    assert mirror.run(keys) == 0
    mirror.apply([CopiesAdded(keys[:4]), CopiesAdded(keys[:1], 1)])
    assert mirror.run(keys) == 4
    assert mirror.run(keys, 1) == 1
    mirror.apply([CopiesDropped([keys[1]])])
    assert mirror.run(keys) == 1, "what lies behind a hole does not count"
    mirror.apply([AllDropped()])
    assert mirror.run(keys) == 0
