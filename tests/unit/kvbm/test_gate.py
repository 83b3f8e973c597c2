"""The gate: estimates that outliers don't move, and decisions against a plain search."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.events.model import Tier
from services.kvbm.core.gate import DEFAULTS, LATE, SLOWER, Gate, TierRate
from services.kvbm.core.peers import PeerId

G2, G3, G4 = Tier.G2, Tier.G3, Tier.G4
FAST = {G2: TierRate(0.001, 0.0001), G3: TierRate(0.002, 0.001), G4: TierRate(0.05, 0.01)}


def load_s(run: list[Tier], wait_s: float, rates: dict[Tier, TierRate]) -> float:
    lower = sum(rates[t].seconds(run.count(t)) for t in (G3, G4))
    return max(0.0, lower - wait_s) + rates[G2].seconds(len(run))


def test_published_defaults_hold_before_anything_is_measured() -> None:
    assert dict(Gate().rates()) == DEFAULTS
    assert all(rate.samples == 0 for rate in DEFAULTS.values())


@pytest.mark.parametrize("factor", [0.05, 0.3, 1.0, 4.0, 30.0])
def test_the_estimate_finds_latency_and_rate_from_far_off(factor: float) -> None:
    dice = random.Random(1)
    gate = Gate(FAST)
    latency_s, block_s = 0.008 * factor, 0.001 * factor
    for _ in range(60):
        blocks = dice.randint(1, 64)
        noise = dice.uniform(0.8, 1.25)
        gate.observe(G3, blocks, (latency_s + blocks * block_s) * noise, 0)
    rate = gate.rates()[G3]
    assert rate.samples == 60
    for blocks in (1, 8, 64):
        truth = latency_s + blocks * block_s
        assert 0.7 * truth < rate.seconds(blocks) < 1.4 * truth


def test_ten_samples_are_enough_for_a_verdict() -> None:
    gate = Gate(FAST)
    for _ in range(10):
        gate.observe(G3, 16, 16 * 0.02, 0)  # twenty times the default
    assert 0.7 * 0.32 < gate.rates()[G3].seconds(16) < 1.3 * 0.32


def test_one_stall_moves_little_and_a_lasting_change_much() -> None:
    gate = Gate(FAST)
    for _ in range(20):
        gate.observe(G3, 16, 0.018, 0)
    before = gate.rates()[G3].seconds(16)
    gate.observe(G3, 16, 2.0, 0)
    assert gate.rates()[G3].seconds(16) < 1.4 * before
    for _ in range(20):
        gate.observe(G3, 16, 0.018, 0)
    assert gate.rates()[G3].seconds(16) == pytest.approx(0.018, rel=0.1)
    for _ in range(5):
        gate.observe(G3, 16, 2.0, 0)
    assert gate.rates()[G3].seconds(16) > 1.0


def test_stalls_now_and_then_are_never_taken_for_a_change() -> None:
    gate = Gate(FAST)
    for number in range(200):
        gate.observe(G3, 16, 2.0 if number % 10 == 0 else 0.018, 0)
    assert gate.rates()[G3].seconds(16) < 0.018 * 2


def test_what_was_given_up_took_that_long_at_least() -> None:
    gate = Gate(FAST)
    for _ in range(4):
        gate.given_up(G3, 16, 2.0, 0)
    assert gate.rates()[G3].seconds(16) > 2.0
    before = gate.rates()
    for _ in range(10):
        gate.given_up(G3, 16, 0.001, 0)  # refused at once: nobody has tried
    assert gate.rates() == before


def test_nonsense_is_not_learned() -> None:
    gate = Gate(FAST)
    for blocks, seconds in ((0, 1.0), (-1, 1.0), (4, -1.0), (4, float("nan")), (4, float("inf"))):
        gate.observe(G3, blocks, seconds, 0)
    gate.observe(Tier.G1, 4, 1.0, 0)
    assert {t: r for t, r in gate.rates().items() if t in FAST} == FAST
    assert gate.rates()[Tier.PEER] == Gate().rates()[Tier.PEER]


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(0, 1e4)), max_size=60),
    st.sampled_from([G2, G3, G4]),
)
def test_rates_stay_above_zero_and_finite(samples: list[tuple[int, float]], tier: Tier) -> None:
    gate = Gate()
    for blocks, seconds in samples:
        gate.observe(tier, blocks, seconds, 0)
        rate = gate.rates()[tier]
        assert 0 < rate.latency_s < 1e9 and 0 < rate.block_s < 1e9


@given(
    st.lists(st.sampled_from([G2, G3, G4]), max_size=40),
    st.floats(1e-5, 0.1),
    st.floats(0, 1),
    st.tuples(*[st.tuples(st.floats(1e-5, 0.1), st.floats(1e-5, 0.1)) for _ in range(3)]),
)
def test_no_other_leading_part_is_better(
    run: list[Tier], recompute_s: float, wait_s: float, figures: tuple[tuple[float, float], ...]
) -> None:
    rates = {
        tier: TierRate(latency, block)
        for tier, (latency, block) in zip((G2, G3, G4), figures, strict=True)
    }
    verdict = Gate(rates).decide(run, recompute_s, wait_s, 0, dry_run=True)

    def gain(count: int) -> float:
        return count * recompute_s - (load_s(run[:count], wait_s, rates) if count else 0.0)

    best = max(gain(count) for count in range(len(run) + 1))
    assert gain(verdict.blocks) == pytest.approx(best, rel=1e-6, abs=1e-9)
    # Never slower than recompute, by the gate's own figures.
    assert verdict.load_s <= verdict.recompute_s + 1e-9
    assert sum(t.blocks for t in verdict.tiers.values()) == len(run)
    assert sum(t.taken for t in verdict.tiers.values()) == verdict.blocks
    assert (verdict.reason == "") == (verdict.blocks == len(run))


def test_head_in_memory_and_tail_on_disk_are_one_load() -> None:
    verdict = Gate(FAST).decide([G2] * 10 + [G3] * 20, 0.008, 0.0, 0)
    assert verdict.blocks == 30
    assert verdict.reason == ""
    assert verdict.load_s == pytest.approx(0.001 + 30 * 0.0001 + 0.002 + 20 * 0.001)


def test_a_slow_tier_is_cut_off_and_the_head_before_it_taken() -> None:
    slow = FAST | {G3: TierRate(0.5, 0.1)}
    verdict = Gate(slow).decide([G2] * 10 + [G3] * 20, 0.008, 0.0, 0)
    assert verdict.blocks == 10
    assert verdict.reason == SLOWER
    assert not verdict.tiers[G2].refused
    assert verdict.tiers[G3].refused
    assert verdict.tiers[G3].predicted_s == pytest.approx(2.5)


def test_a_wait_that_ends_within_a_block_may_pay_for_it() -> None:
    gate = Gate({G2: TierRate(0.0625, 0.03125), G3: TierRate(0.03125, 0.0625)})
    assert gate.decide([G3] * 3, 0.078125, 0.140625, 0, dry_run=True).blocks == 2


def test_what_would_not_be_up_in_time_is_not_waited_for() -> None:
    """Faster than computing and yet in vain: the wait for promotions has an end."""
    gate = Gate({G2: TierRate(0.001, 0.0001), G4: TierRate(0.1, 0.1)})
    assert gate.decide([G4] * 48, 0.18, 0.0, 0, limit_s=10.0, dry_run=True).blocks == 48
    part = gate.decide([G4] * 48, 0.18, 0.0, 0, limit_s=2.05, dry_run=True)
    assert (part.blocks, part.reason) == (19, LATE)
    none = gate.decide([G4] * 48, 0.18, 5.0, 0, limit_s=0.15, dry_run=True)
    assert (none.blocks, none.reason) == (0, LATE)
    assert gate.decide([G4] * 48, 0.08, 0.0, 0, limit_s=2.0, dry_run=True).reason == SLOWER
    # What lies in memory needs no promotion.
    mixed = gate.decide([G2] * 10 + [G4] * 20, 0.18, 0.0, 0, limit_s=0.15, dry_run=True)
    assert (mixed.blocks, mixed.reason) == (10, LATE)


def test_the_wait_in_the_queue_hides_promotions_but_not_the_copy() -> None:
    gate = Gate({G2: TierRate(0.001, 0.001), G3: TierRate(0.002, 0.012)})
    assert gate.decide([G3] * 10, 0.008, 0.0, 0, dry_run=True).blocks == 0
    assert gate.decide([G3] * 10, 0.008, 0.2, 0, dry_run=True).blocks == 10
    # Half hidden: as many as arrive within the wait.
    assert gate.decide([G3] * 10, 0.008, 0.0621, 0, dry_run=True).blocks == 5
    slow_copy = Gate({G2: TierRate(0.001, 0.02)})
    assert slow_copy.decide([G2] * 10, 0.008, 60.0, 0, dry_run=True).blocks == 0


@pytest.mark.parametrize(("mode", "blocks"), [("always", 3), ("never", 0)])
def test_modes_decide_without_figures(mode: str, blocks: int) -> None:
    gate = Gate({G3: TierRate(100.0, 100.0)}, mode=mode)  # type: ignore[arg-type]
    verdict = gate.decide([G2, G3, G4], 1e-6 if blocks else 1e6, 0.0, 0)
    assert verdict.blocks == blocks
    assert verdict.probe is None


def test_a_refused_tier_is_probed_ever_more_seldom_until_it_recovers() -> None:
    """P1: a disk that is slower than computing is refused, and taken again once it is not."""
    gate = Gate(FAST)
    run, now = [G2] * 4 + [G3] * 20, 0.0
    for _ in range(12):
        gate.observe(G3, 16, 3.0, now)
    probes = []
    for now in range(1, 301):
        verdict = gate.decide(run, 0.008, 0.0, now)
        assert verdict.blocks == 4
        if verdict.probe is not None:
            assert (verdict.probe.tier, verdict.probe.first, verdict.probe.count) == (G3, 4, 8)
            probes.append(now)
            gate.observe(G3, 8, 1.5, now)
    gaps = [b - a for a, b in pairwise(probes)]
    assert probes[0] == 5
    assert gaps == sorted(gaps) and gaps[-1] == 60
    for now in range(301, 601):
        verdict = gate.decide(run, 0.008, 0.0, now)
        if verdict.blocks == len(run):
            break
        if verdict.probe is not None:
            gate.observe(G3, 8, 0.010, now)
    else:
        pytest.fail("the disk has recovered and is still refused")


def test_memory_itself_is_probed_by_a_small_load() -> None:
    gate = Gate(FAST)
    for _ in range(12):
        gate.observe(G2, 16, 3.0, 0)
    run = [G2] * 30
    assert gate.decide(run, 0.008, 0.0, 1).blocks == 0
    verdict = gate.decide(run, 0.008, 0.0, 6)
    assert (verdict.blocks, verdict.reason, verdict.probe) == (8, SLOWER, None)
    assert gate.decide(run, 0.008, 0.0, 7).blocks == 0


def test_a_tier_never_measured_and_refused_is_probed_at_once() -> None:
    gate = Gate(FAST | {G4: TierRate(10.0, 10.0)})
    verdict = gate.decide([G3, G4, G4], 0.008, 0.0, 0)
    assert verdict.blocks == 1
    assert verdict.probe is not None and verdict.probe.tier is G4


def test_looking_takes_no_probe_and_changes_nothing() -> None:
    gate = Gate(FAST | {G3: TierRate(10.0, 10.0)})
    for _ in range(3):
        assert gate.decide([G3] * 4, 0.008, 0.0, 0, dry_run=True).probe is None
    assert gate.decide([G3] * 4, 0.008, 0.0, 0).probe is not None


def test_the_verdict_does_not_flap_at_the_border() -> None:
    """Measurements that wobble by a tenth around the cost of computing don't turn it each time."""
    dice = random.Random(3)
    gate = Gate({G2: TierRate(1e-4, 1e-5), G3: TierRate(1e-4, 0.0078)})
    turns, last = 0, None
    for now in range(400):
        verdict = gate.decide([G3] * 16, 0.008, 0.0, now)
        turns += last is not None and last != verdict.blocks
        last = verdict.blocks
        gate.observe(G3, 16, 16 * 0.0079 * dice.uniform(0.9, 1.1), now)
    assert turns <= 2


def test_blocks_that_only_hang_on_a_refused_tier_are_not_held_against_theirs() -> None:
    rates = {G2: TierRate(1e-4, 0.0075), G3: TierRate(10.0, 10.0)}
    gate = Gate(rates)
    assert gate.decide([G3, G2, G2], 0.008, 0.0, 0).blocks == 0
    assert gate.decide([G2] * 8, 0.008, 0.0, 0).blocks == 8


# Peers.

A, B = PeerId("a"), PeerId("b")


def test_a_new_peer_is_thought_to_be_as_the_others_are() -> None:
    gate = Gate(FAST)
    for number in range(20):
        gate.observe(A, 8 + number % 2, 0.1 + (8 + number % 2) * 0.02, number)
    assert gate.rate(A).seconds(8) == pytest.approx(0.26, rel=0.05)
    assert gate.rate(B).seconds(8) == pytest.approx(gate.rates()[Tier.PEER].seconds(8))
    assert gate.rate(B).samples == 0 and gate.rate(A).samples == 20
    assert set(gate.rates()) == {*FAST, Tier.PEER}, "peers are not told apart to routers"


def test_each_peer_is_priced_by_itself() -> None:
    gate = Gate(FAST)
    for number in range(5):
        gate.observe(A, 8, 0.008, number)
        gate.observe(B, 8, 8.0, number)
    run = [G2, A, A, A, A, B, B]
    verdict = gate.decide(run, 0.1, 0.0, 10, dry_run=True)
    assert verdict.blocks == 5 and verdict.reason == "slower-than-recompute"
    assert not verdict.tiers[A].refused and verdict.tiers[B].refused
    assert gate.decide([B, B, A, A], 0.1, 0.0, 10, dry_run=True).blocks == 0
    assert gate.decide([B] * 8, 0.1, 60.0, 10, dry_run=True).blocks == 8, "the queue hides it"
    late = gate.decide([B] * 8, 2.0, 0.0, 10, limit_s=0.3, dry_run=True)
    assert (late.blocks, late.reason) == (0, "promotion-limit")


def test_a_refused_peer_is_probed_and_one_that_lives_anew_starts_anew() -> None:
    gate = Gate(FAST)
    gate.observe(A, 8, 8.0, 0)
    gate.observe(A, 8, 8.0, 0)
    assert gate.decide([A] * 20, 0.01, 0.0, 1).probe is None
    probe = gate.decide([A] * 20, 0.01, 0.0, 6).probe
    assert probe is not None and (probe.tier, probe.first, probe.count) == (A, 0, 8)
    assert gate.decide([A] * 20, 0.01, 0.0, 7).probe is None
    gate.forget(A)
    assert gate.rate(A).samples == 0
    gate.forget(G3)
    assert gate.rates()[G3] == FAST[G3]


def test_peers_told_apart_are_bounded() -> None:
    gate = Gate(FAST)
    for number in range(3000):
        gate.observe(PeerId(f"n{number}"), 4, 0.01, number)
    assert gate.rate(PeerId("n2999")).samples == 1
    assert gate.rate(PeerId("n0")).samples == 0
    assert len(gate._estimates) <= 1024 + 4 + 1
