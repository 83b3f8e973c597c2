"""Rates, the score, and the order that policies make of it."""

from collections import Counter

import pytest

from services.router.core.cost import Candidate, CostModel
from services.router.core.policies import Policy, PolicyName, make_policy
from services.router.core.rates import RateBook, RateDefaults


def candidate(slot: int = 0, **changes: float) -> Candidate:
    fields: dict[str, float] = {
        "prompt_tokens": 1000,
        "g1_tokens": 0,
        "g2_tokens": 0,
        "g3_tokens": 0,
        "g4_tokens": 0,
        "mates": 0.0,
        "active_requests": 0,
        "decoding": 0,
        "queued_tokens": 0,
        "active_tokens": 0,
        "prefill_rate": 1000.0,
        "decode_delay_s": 0.01,
    }
    return Candidate(slot=slot, **(fields | changes))  # type: ignore[arg-type]


class TestRates:
    def test_defaults_hold_before_anything_is_measured(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=4000, decode_tokens=16))
        rates.add_slot(0, "m")
        assert rates.prefill_rate(0) == 4000
        assert rates.decode_delay_s(rates.prefill_rate(0)) == pytest.approx(0.004)

    def test_samples_move_it_and_newcomers_inherit(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=4000))
        rates.add_slot(0, "m")
        rates.add_slot(1, "other")
        for i in range(30):
            rates.prefills_done(0, 1000, i * 10.0, i * 10.0 + 1)
        assert rates.prefill_rate(0) == pytest.approx(1000, rel=0.2)
        rates.add_slot(2, "m")
        assert rates.prefill_rate(2) == pytest.approx(1100, rel=0.1)
        assert rates.prefill_rate(1) == 4000
        rates.check_invariants()

    def test_a_slow_worker_shows_among_others(self) -> None:
        rates = RateBook()
        for slot in range(4):
            rates.add_slot(slot, "m")
        for i in range(40):
            for slot in range(4):
                rates.prefills_done(slot, 1000, i * 10.0, i * 10.0 + (2 if slot == 0 else 1))
        assert rates.prefill_rate(1) / rates.prefill_rate(0) == pytest.approx(2, rel=0.15)

    def test_a_queue_is_timed_from_the_first_token_before(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=1000))
        rates.add_slot(0, "m")
        for i in range(50):
            rates.prefills_done(0, 1000, 0.0, i + 1.0)
        assert rates.prefill_rate(0) == pytest.approx(1000, rel=0.01)

    def test_small_or_impossible_samples_teach_nothing(self) -> None:
        rates = RateBook()
        rates.add_slot(0, "m")
        rates.prefills_done(0, 12, 0.0, 5.0)
        rates.prefills_done(0, 5000, 5.0, 5.0)
        rates.prefills_done(0, 5000, 9.0, 5.0)
        assert rates.prefill_rate(0) == 4000
        rates.remove_slot(0)
        rates.check_invariants()

    def test_learning_can_be_off(self) -> None:
        rates = RateBook(RateDefaults(learn=False))
        rates.add_slot(0, "m")
        rates.prefills_done(0, 5000, 0.0, 100.0)
        assert rates.prefill_rate(0) == 4000

    def test_one_worker_stays_near_its_model(self) -> None:
        rates = RateBook()
        for slot in range(8):
            rates.add_slot(slot, "m")
        for i in range(100):
            for slot in range(8):
                rates.prefills_done(slot, 4000, i * 1000.0, i * 1000.0 + (500 if slot == 0 else 1))
        assert rates.prefill_rate(0) > 8


class TestCost:
    def test_parts_add_up(self) -> None:
        c = candidate(g1_tokens=600, queued_tokens=500, decoding=2, active_tokens=300, mates=1.5)
        s = CostModel(context_tokens=1e12).score(c)
        assert s.queue_s == 0.5
        assert s.prefill_s == pytest.approx(0.4)
        assert s.onboard_s == 0
        assert s.imposed_s == pytest.approx(2 * 0.01 + 0.03 * 0.3 + 0.25 * 1.5)
        assert s.total_s == pytest.approx(0.5 + 0.4 * 2 + s.imposed_s)
        assert s.ttft_s == pytest.approx(0.9)

    def test_long_contexts_cost_more_than_their_length(self) -> None:
        model = CostModel(context_tokens=1000)
        assert model.score(candidate()).prefill_s == pytest.approx(1.5)
        # The same 500 tokens at the end of a context attend to more.
        assert model.score(candidate(g1_tokens=500)).prefill_s == pytest.approx(0.5 * 1.75)

    def test_lower_tiers_are_better_than_computing_and_worse_than_g1(self) -> None:
        model = CostModel()
        fast, slow = {"g2_tokens": 960, "onboard_s": 0.096}, {"g2_tokens": 960, "onboard_s": 99}
        g1, g2, none = (
            model.score(c).total_s
            for c in (candidate(g1_tokens=960), candidate(**fast), candidate())
        )
        assert g1 < g2 < none
        assert model.score(candidate(**fast)).onboard_s == 0.096
        assert model.score(candidate(**slow)).onboard_s <= 0.96, "never more than recomputing"


def pick(policy: Policy, candidates: list[Candidate]) -> int:
    keys = [key for key, _ in policy.rank(candidates)]
    chosen = candidates[keys.index(min(keys))].slot
    policy.chosen(chosen)
    return chosen


class TestPolicies:
    @pytest.mark.parametrize("name", list(PolicyName))
    def test_each_can_be_made(self, name: PolicyName) -> None:
        policy = make_policy(name, CostModel())
        assert policy.name is name
        assert len(policy.rank([candidate(0), candidate(1)])) == 2
        policy.forget(0)

    def test_kv_takes_the_cheapest(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        assert pick(policy, [candidate(0), candidate(1, g1_tokens=320)]) == 1
        assert pick(policy, [candidate(0), candidate(1, g1_tokens=320, queued_tokens=5000)]) == 0

    def test_kv_stays_while_waiting_is_cheaper_than_computing_elsewhere(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        warm = {"g1_tokens": 960}
        assert pick(policy, [candidate(0), candidate(1, queued_tokens=1500, **warm)]) == 1
        assert pick(policy, [candidate(0), candidate(1, queued_tokens=2500, **warm)]) == 0

    def test_round_robin_takes_turns_whoever_is_missing(self) -> None:
        policy = make_policy(PolicyName.ROUND_ROBIN, CostModel())
        three = [candidate(i) for i in range(3)]
        assert Counter(pick(policy, three) for _ in range(9)) == {0: 3, 1: 3, 2: 3}
        assert [pick(policy, three[:2]) for _ in range(4)] == [0, 1, 0, 1]
        assert pick(policy, three) == 2

    def test_least_loaded_counts_requests_then_tokens(self) -> None:
        policy = make_policy(PolicyName.LEAST_LOADED, CostModel())
        busy, idle = candidate(0, active_requests=2), candidate(1, active_requests=1)
        assert pick(policy, [busy, idle]) == 1
        assert pick(policy, [candidate(0, queued_tokens=9), candidate(1, queued_tokens=8)]) == 1

    def test_random_leaves_all_to_the_lot(self) -> None:
        policy = make_policy(PolicyName.RANDOM, CostModel())
        keys = [k for k, _ in policy.rank([candidate(0), candidate(1, queued_tokens=99)])]
        assert keys[0] == keys[1]
