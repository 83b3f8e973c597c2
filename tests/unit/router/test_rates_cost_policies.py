"""Rates, the score, and the order that policies make of it."""

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.core.churn import ChurnBook
from services.router.core.cost import Candidate, CostModel
from services.router.core.fit import Fit, solve_nonnegative
from services.router.core.policies import Ask, Policy, PolicyName, make_policy
from services.router.core.rates import RateBook, RateDefaults
from services.router.core.requests import pairs_of

ASK = Ask()


def candidate(slot: int = 0, **changes: float) -> Candidate:
    """A thousand tokens to compute, at a millisecond each."""
    c = Candidate(slot, prompt_tokens=1000, token_s=0.001)
    for name, value in changes.items():
        setattr(c, name, value)
    c.queued_requests = c.queued_requests or (c.queued_tokens > 0)
    c.settle()
    return c


def learned(rates: RateBook, slot: int, seconds_of: Callable[[int, int], float], n: int) -> None:
    """`n` prompts of many lengths, each alone: (uncached, prompt) -> seconds."""
    dice = random.Random(slot)
    now = 1000.0 * slot
    for _ in range(n):
        prompt = dice.randrange(200, 20_000)
        uncached = dice.randrange(130, prompt + 1) if prompt > 130 else prompt
        took = seconds_of(uncached, prompt)
        rates.prefills_done(slot, 1, uncached, pairs_of(prompt, uncached), now, now + took)
        now += took + 1


class TestFit:
    def test_it_finds_what_the_samples_follow(self) -> None:
        fit = Fit((0.0, 0.001, 0.0), ((1, 1000, 1e6),))
        dice = random.Random(1)
        for _ in range(500):
            x = 1.0, dice.uniform(1, 5000), dice.uniform(1, 1e7)
            fit.add(x, 0.02 + 0.0001 * x[1] + 3e-9 * x[2])
        assert fit.coefficients == pytest.approx((0.02, 0.0001, 3e-9), rel=0.02)

    @given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1, 1e9), st.floats(1e-6, 1e3))))
    def test_coefficients_are_never_negative(self, samples: list[tuple[float, ...]]) -> None:
        fit = Fit((0.0, 0.001, 1e-8), ((1, 1000, 1e6), (1, 10, 10)))
        for a, b, y in samples:
            fit.add((1, a, b), y)
            assert min(fit.coefficients) >= 0
            assert 0 < fit.value((1.0, 500.0, 1e5)) < math.inf

    def test_a_coefficient_that_would_be_negative_is_left_out(self) -> None:
        assert solve_nonnegative((1, 0, 0, 1, 0, 1), (2, -1, 3)) == (2, 0, 3)
        assert solve_nonnegative((1, 0, 0, 1, 0, 1), (-2, -1, -3)) == (0, 0, 0)


class TestRates:
    @pytest.mark.parametrize("true_s", [1 / 40_000, 1 / 400])
    @pytest.mark.parametrize("samples", [1, 3, 40])
    def test_unmeasured_workers_are_as_those_measured(self, true_s: float, samples: int) -> None:
        """The first one that is measured must not look faster, or slower, than all others."""
        rates = RateBook(RateDefaults(prefill_tokens_per_s=4000))
        for slot in range(3):
            rates.add_slot(slot, "m")
        learned(rates, 0, lambda uncached, prompt: uncached * true_s, samples)
        assert rates.prefill(1) == rates.prefill(2)
        assert rates.prefill(0).seconds(1, 1000, 1e6) == pytest.approx(
            rates.prefill(1).seconds(1, 1000, 1e6), rel=0.35
        )

    def test_defaults_hold_before_anything_is_measured(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=4000, context_tokens=1e12))
        rates.add_slot(0, "m")
        assert rates.prefill(0).tokens_per_s == 4000
        assert rates.prefill_rate(0) == pytest.approx(4000)
        assert rates.decode(0).base_s == rates.defaults.decode_s

    def test_overhead_rate_and_context_are_told_apart(self) -> None:
        rates = RateBook()
        rates.add_slot(0, "m")
        learned(rates, 0, lambda u, p: 0.03 + u / 12000 + pairs_of(p, u) * 2e-9, 400)
        times = rates.prefill(0)
        assert times.tokens_per_s == pytest.approx(12000, rel=0.1)
        assert times.pair_s == pytest.approx(2e-9, rel=0.1)
        for u, p in ((200, 200), (1000, 1000), (4000, 16000), (16000, 16000)):
            want = 0.03 + u / 12000 + pairs_of(p, u) * 2e-9
            assert times.seconds(1, u, pairs_of(p, u)) == pytest.approx(want, rel=0.2)

    def test_a_rate_far_from_the_default_is_believed_soon(self) -> None:
        for real in (300.0, 100_000.0):
            rates = RateBook()
            rates.add_slot(0, "m")
            learned(rates, 0, lambda u, p, real=real: u / real, 12)  # type: ignore[misc]
            assert rates.prefill_rate(0) == pytest.approx(real, rel=0.25)

    def test_newcomers_inherit_and_other_models_do_not(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=4000))
        rates.add_slot(0, "m")
        rates.add_slot(1, "other")
        learned(rates, 0, lambda u, p: u / 1000, 60)
        rates.add_slot(2, "m")
        assert rates.prefill_rate(2) == pytest.approx(1000, rel=0.1)
        assert rates.prefill(1).tokens_per_s == 4000
        rates.check_invariants()

    def test_a_slow_worker_shows_among_others_after_a_few_requests(self) -> None:
        rates = RateBook()
        for slot in range(4):
            rates.add_slot(slot, "m")
        for _ in range(3):
            for slot in range(4):
                learned(rates, slot, lambda u, p, s=slot: u / (500 if s == 0 else 1000), 4)  # type: ignore[misc]
        assert rates.prefill_rate(1) / rates.prefill_rate(0) == pytest.approx(2, rel=0.15)

    def test_a_queue_is_timed_from_the_first_token_before(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=1000, context_tokens=1e12))
        rates.add_slot(0, "m")
        for i in range(50):
            rates.prefills_done(0, 1, 1000, pairs_of(1000, 1000), 0.0, i + 1.0)
        assert rates.prefill_rate(0) == pytest.approx(1000, rel=0.01)

    def test_small_or_impossible_samples_teach_nothing(self) -> None:
        rates = RateBook()
        rates.add_slot(0, "m")
        rates.prefills_done(0, 1, 12, 72, 0.0, 5.0)
        rates.prefills_done(0, 1, 5000, 1e7, 5.0, 5.0)
        rates.prefills_done(0, 1, 5000, 1e7, 9.0, 5.0)
        assert rates.prefill(0).tokens_per_s == 4000
        rates.remove_slot(0)
        rates.check_invariants()

    def test_one_odd_sample_moves_little(self) -> None:
        rates = RateBook()
        rates.add_slot(0, "m")
        learned(rates, 0, lambda u, p: u / 1000, 50)
        rates.prefills_done(0, 1, 1000, pairs_of(1000, 1000), 9e4, 9e4 + 3600)
        assert rates.prefill_rate(0) > 600

    def test_learning_can_be_off(self) -> None:
        rates = RateBook(RateDefaults(learn=False))
        rates.add_slot(0, "m")
        rates.prefills_done(0, 1, 5000, 1e7, 0.0, 100.0)
        rates.decoded(0, 100, 100.0, 1, 100)
        assert rates.prefill(0).tokens_per_s == 4000
        assert rates.decode(0).base_s == rates.defaults.decode_s

    def test_one_worker_stays_near_its_model(self) -> None:
        rates = RateBook()
        for slot in range(8):
            rates.add_slot(slot, "m")
        for i in range(100):
            for slot in range(8):
                now = i * 1000.0
                took = 500 if slot == 0 else 1
                rates.prefills_done(slot, 1, 4000, 8e6, now, now + took)
        assert rates.prefill_rate(0) > rates.prefill_rate(1) / 64

    def test_decodes_are_told_apart_by_batch(self) -> None:
        rates = RateBook()
        rates.add_slot(0, "m")
        dice = random.Random(3)
        for _ in range(400):
            batch, kv = dice.uniform(1, 60), dice.uniform(100, 200_000)
            pace = 0.012 + 0.0003 * batch + 2e-8 * kv
            rates.decoded(0, 100, pace * 100, batch, kv)
        times = rates.decode(0)
        assert (times.base_s, times.sequence_s, times.kv_s) == pytest.approx(
            (0.012, 0.0003, 2e-8), rel=0.1
        )
        assert times.imposed_s(10_000) == pytest.approx(0.0005, rel=0.1)

    def test_where_a_decode_more_costs_nothing_it_counts_as_a_token(self) -> None:
        rates = RateBook(RateDefaults(prefill_tokens_per_s=20_000))
        rates.add_slot(0, "m")
        for i in range(200):
            rates.decoded(0, 100, 2.0, 1 + i % 30, 1000.0 * (i % 30 + 1))
        assert rates.decode(0).imposed_s(1000) == pytest.approx(1 / 20_000, rel=0.1)
        assert rates.decode(0).base_s == pytest.approx(0.02, rel=0.05)

    def test_first_samples_speak_for_all_of_the_model_later_ones_for_their_worker(self) -> None:
        rates = RateBook()
        for slot, model in enumerate("mmo"):
            rates.add_slot(slot, model)
        assert set(rates.prefills_done(0, 1, 1000, 5e5, 0.0, 0.1)) == {0, 1}
        assert set(rates.decoded(1, 100, 1.0, 1, 1000)) == {0, 1}
        learned(rates, 0, lambda u, p: u / 1000, 60)
        assert set(rates.prefills_done(0, 1, 1000, 5e5, 1e6, 1e6 + 1)) == {0}
        assert set(rates.prefills_done(0, 1, 1, 1, 2e6, 2e6 + 1)) == set()


class TestChurn:
    def filled(self, *blocks: int, capacity: int = 100) -> ChurnBook:
        book = ChurnBook()
        for slot in range(len(blocks)):
            book.add_slot(slot, "m", capacity)
        for _ in range(50):
            for slot, count in enumerate(blocks):
                book.stored(slot, count)
        book.check_invariants()
        return book

    def test_whoever_is_refilled_faster_stands_out(self) -> None:
        book = self.filled(1, 1, 3)
        assert max(book.excess(0), book.excess(1)) < 0 < book.excess(2)
        assert book.excess(2) == pytest.approx(3 / (5 / 3) - 1, rel=0.2)

    def test_it_is_the_share_of_the_cache_that_counts(self) -> None:
        book = ChurnBook()
        book.add_slot(0, "m", 100)
        book.add_slot(1, "m", 1000)
        for _ in range(100):
            book.stored(0, 1)
            book.stored(1, 10)
        assert abs(book.excess(0)) < 0.01 > abs(book.excess(1))

    def test_old_times_are_forgotten(self) -> None:
        book = self.filled(10, 20)
        assert book.excess(1) > 0.2
        for _ in range(500):
            book.stored(0, 10)
            book.stored(1, 10)
        assert abs(book.excess(1)) < 0.05
        book.check_invariants()

    def test_newcomers_stand_where_the_others_do(self) -> None:
        book = self.filled(10, 10)
        book.add_slot(2, "m", 100)
        assert abs(book.excess(2)) < 1e-9
        book.add_slot(9, "other", 100)
        assert book.excess(9) == 0
        book.remove_slot(0)
        book.check_invariants()

    def test_a_cache_of_unknown_size_tells_nothing(self) -> None:
        book = ChurnBook()
        book.add_slot(0, "m", 0)
        book.stored(0, 10)
        assert book.excess(0) == 0


class TestCost:
    def test_parts_add_up(self) -> None:
        c = candidate(
            g1_tokens=600,
            queued_tokens=500,
            decoding=2,
            active_tokens=300,
            mates=1.5,
            repeats=40,
            churn=0.1,
            sequence_s=0.01,
            kv_s=1e-6,
        )
        model = CostModel(
            own_weight=1,
            churn_weight=2,
            space_weight=0.03,
            crowd_weight=0.25,
            free_mates=0.5,
            repeat_weight=3,
            decode_tokens=10,
        )
        s = model.score(c, 0)
        assert s.queue_s == 0.5
        assert s.prefill_s == pytest.approx(0.4)
        assert s.onboard_s == 0
        assert s.imposed_s == pytest.approx(
            0.4 * (1 + 2 * 0.1)
            + 10 * (2 * (0.01 + 0.001) + 2 * 0.01 + 300 * 1e-6)
            + 0.03 * 0.3
            + 0.25 * (1.5 - 0.5)
            + 3 * 0.04
        )
        assert s.total_s == pytest.approx(0.5 + 0.4 + s.imposed_s)
        assert s.ttft_s == pytest.approx(0.9)

    def test_repeats_cost_no_more_than_the_blocks_are_worth(self) -> None:
        model = CostModel()
        none, some, many, cold = (
            model.score(candidate(**c), 0).total_s
            for c in (
                {"g1_tokens": 600},
                {"g1_tokens": 600, "repeats": 100},
                {"g1_tokens": 600, "repeats": 1e9},
                {},
            )
        )
        assert none < some < many
        assert many == pytest.approx(cold)

    def test_long_contexts_cost_more_than_their_length(self) -> None:
        assert candidate(pair_s=1e-6, request_s=0.1).prefill_s == pytest.approx(1.6)
        # The same 500 tokens at the end of a context attend to more.
        assert candidate(g1_tokens=500, pair_s=1e-6).prefill_s == pytest.approx(0.5 + 0.375)

    def test_the_queue_counts_requests_tokens_and_context(self) -> None:
        c = candidate(
            queued_tokens=2000, queued_requests=2, queued_pairs=2e6, request_s=0.1, pair_s=1e-6
        )
        assert c.queue_s(0) == pytest.approx(0.2 + 2 + 2)

    def test_lower_tiers_are_better_than_computing_and_worse_than_g1(self) -> None:
        model = CostModel()
        fast, slow = {"g2_tokens": 960, "onboard_s": 0.096}, {"g2_tokens": 960, "onboard_s": 99}
        g1, g2, none = (
            model.score(c, 0).total_s
            for c in (candidate(g1_tokens=960), candidate(**fast), candidate())
        )
        assert g1 < g2 < none
        assert model.score(candidate(**fast), 0).onboard_s == 0.096
        assert model.score(candidate(**slow), 0).onboard_s <= 0.96, "never more than recomputing"


def pick(policy: Policy, candidates: list[Candidate]) -> int:
    costs = policy.costs(ASK, candidates)
    chosen = candidates[costs.index(min(costs))].slot
    policy.chosen(chosen)
    return chosen


class TestPolicies:
    @pytest.mark.parametrize("name", list(PolicyName))
    def test_each_can_be_made(self, name: PolicyName) -> None:
        policy = make_policy(name, CostModel())
        assert policy.name is name
        assert len(policy.costs(ASK, [candidate(0), candidate(1)])) == 2
        policy.forget(0)

    def test_kv_takes_the_cheapest(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        assert pick(policy, [candidate(0), candidate(1, g1_tokens=320)]) == 1
        assert pick(policy, [candidate(0), candidate(1, g1_tokens=320, queued_tokens=5000)]) == 0

    def test_kv_stays_while_waiting_is_cheaper_than_computing_elsewhere(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        warm = {"g1_tokens": 960}
        assert pick(policy, [candidate(0), candidate(1, queued_tokens=2500, **warm)]) == 1
        assert pick(policy, [candidate(0), candidate(1, queued_tokens=3500, **warm)]) == 0

    def test_round_robin_takes_turns_whoever_is_missing(self) -> None:
        policy = make_policy(PolicyName.ROUND_ROBIN, CostModel())
        three = [candidate(i) for i in range(3)]
        assert Counter(pick(policy, three) for _ in range(9)) == {0: 3, 1: 3, 2: 3}
        assert [pick(policy, three[:2]) for _ in range(4)] == [0, 1, 0, 1]
        assert pick(policy, three) == 2

    def test_kv_makes_copies_of_what_many_want_at_once(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        warm = {"g1_tokens": 960}
        assert pick(policy, [candidate(0), candidate(1, mates=4, **warm)]) == 1
        assert pick(policy, [candidate(0), candidate(1, mates=20, **warm)]) == 0

    def test_kv_puts_new_prompts_where_caches_turn_over_slower(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        assert pick(policy, [candidate(0, churn=0.02), candidate(1, churn=-0.01)]) == 1

    def test_least_loaded_counts_blocks_queued_and_in_use(self) -> None:
        policy = make_policy(PolicyName.LEAST_LOADED, CostModel())
        assert pick(policy, [candidate(0, active_blocks=2), candidate(1, active_blocks=1)]) == 1
        assert pick(policy, [candidate(0, queued_tokens=9), candidate(1, queued_tokens=8)]) == 1
        assert pick(policy, [candidate(0, placements=2), candidate(1, placements=1)]) == 1

    def test_lmetric_multiplies_new_tokens_by_the_batch(self) -> None:
        policy = make_policy(PolicyName.LMETRIC, CostModel())
        few = candidate(0, active_requests=1)
        assert pick(policy, [few, candidate(1, active_requests=4, g1_tokens=500)]) == 0
        assert pick(policy, [few, candidate(1, active_requests=4, g1_tokens=700)]) == 1

    def test_dynamo_weighs_prefill_blocks_against_active_ones(self) -> None:
        some = [candidate(0, active_blocks=30), candidate(1, active_blocks=60, g1_tokens=512)]
        for weight, slot in ((0.5, 0), (2.0, 1)):
            policy = make_policy(PolicyName.DYNAMO, CostModel(), weight)
            costs = policy.costs(Ask(block_tokens=16), some)
            assert costs.index(min(costs)) == slot

    def test_two_choices_take_the_better_of_two(self) -> None:
        policy = make_policy(PolicyName.P2C, CostModel())
        some = [candidate(i, active_requests=i) for i in range(5)]
        taken: Counter[int] = Counter()
        for lot in range(20):
            costs = policy.costs(Ask(lot=lot), some)
            taken[costs.index(min(costs))] += 1
        # Of all pairs, i is the better one in 4 - i; the busiest never is.
        assert taken == {0: 8, 1: 6, 2: 4, 3: 2}

    def test_sticky_sends_beginnings_home_and_moves_only_those_of_who_left(self) -> None:
        policy = make_policy(PolicyName.STICKY, CostModel())
        some = [candidate(i) for i in range(5)]

        def homes(candidates: list[Candidate]) -> list[int]:
            found = []
            for key in range(200):
                costs = policy.costs(Ask(keys=(7, key, 99 + key)), candidates)
                found.append(candidates[costs.index(min(costs))].slot)
            return found

        before, after = homes(some), homes(some[:4])
        assert min(Counter(before).values()) > 20
        assert all(a == b for a, b in zip(after, before, strict=True) if b != 4)
        assert set(policy.costs(Ask(keys=()), some)) == {0.0}

    def test_random_leaves_all_to_the_lot(self) -> None:
        policy = make_policy(PolicyName.RANDOM, CostModel())
        costs = policy.costs(ASK, [candidate(0), candidate(1, queued_tokens=99)])
        assert costs[0] == costs[1]

    def test_kv_costs_are_the_totals_of_its_scores(self) -> None:
        policy = make_policy(PolicyName.KV, CostModel())
        busy = {"queued_tokens": 700, "decoding": 3, "active_tokens": 5000, "mates": 7.5}
        tiered = {"g1_tokens": 96, "g2_tokens": 64, "g4_tokens": 32, "onboard_s": 0.02}
        drawn = {"g1_tokens": 96, "repeats": 20}
        some = [
            candidate(0),
            candidate(1, **busy),
            candidate(2, **busy, **tiered),
            candidate(3, **drawn),
            candidate(4, **drawn | {"repeats": 5000, "pair_s": 1e-6}),
        ]
        assert policy.costs(ASK, some) == pytest.approx(
            [policy.score(ASK, c).total_s for c in some]
        )
