"""Asking remote storage stops where it never answers yes, and begins again where it does."""

from services.kvbm.core.odds import Odds


def test_a_cold_store_is_soon_not_waited_for() -> None:
    odds = Odds()
    assert odds.worth(1.0)
    for _ in range(60):
        odds.heard(False, 0.02)
    assert not odds.worth(1.0)
    assert odds.worth(60.0), "a very long prompt may still be worth the wait"


def test_it_is_asked_off_the_path_now_and_then_and_can_come_back() -> None:
    odds = Odds(chance=0.0)
    assert sum(odds.try_anyway() for _ in range(160)) == 10
    for _ in range(30):
        odds.heard(True, 0.02)
    assert odds.worth(0.1)


def test_a_slow_store_is_worth_only_long_prompts() -> None:
    odds = Odds()
    for _ in range(60):
        odds.heard(True, 2.0)
    assert not odds.worth(1.0) and odds.worth(5.0)
