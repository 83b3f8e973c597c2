"""Seconds that blocks of lower tiers take to come up."""

from collections.abc import Mapping

import pytest

from services.common.events.model import Tier, TierRate
from services.router.core.onboard import OnboardDefaults, OnboardModel
from services.router.core.tiers import tier_set
from services.router.core.walk import Run

MODEL = OnboardModel(OnboardDefaults())


def seconds(run: Run, measured: Mapping[Tier, TierRate], recompute_block_s: float) -> float:
    fixed_s, blocks = MODEL.paces(measured).load(run)
    return fixed_s + blocks * recompute_block_s


def test_defaults_are_shares_of_computing_slower_by_tier() -> None:
    alone = [seconds(run, {}, 0.03) for run in (Run(g2=1), Run(g3=1), Run(g4=1))]
    assert alone == pytest.approx([0.003, 0.01, 0.02])
    assert seconds(Run(1, 1, 1), {}, 0.03) == pytest.approx(0.033)
    assert MODEL.paces({}).worth(0.03) == tier_set(Tier(t) for t in (2, 3, 4))


def test_what_was_measured_holds_and_lower_tiers_come_up_through_g2() -> None:
    measured = {
        Tier.G2: TierRate(Tier.G2, 0.001, 0.002),
        Tier.G3: TierRate(Tier.G3, 0.005, 0.01),
        Tier.G4: TierRate(Tier.G4, 0.0, 0.0),
    }
    assert seconds(Run(g2=4), measured, 0.03) == pytest.approx(0.001 + 4 * 0.002)
    assert seconds(Run(g3=2), measured, 0.03) == pytest.approx(0.006 + 2 * 0.012)
    assert seconds(Run(g4=2), measured, 0.03) == pytest.approx(0.04), "G4 isn't known yet"
    assert seconds(Run(), measured, 0.03) == 0


def test_a_tier_measured_before_g2_comes_up_through_what_g2_is_thought_to_be() -> None:
    measured = {Tier.G3: TierRate(Tier.G3, 0.005, 0.01)}
    assert seconds(Run(g3=2), measured, 0.03) == pytest.approx(0.005 + 2 * (0.01 + 0.003))


def test_new_measurements_take_the_place_of_old_ones() -> None:
    model = OnboardModel(OnboardDefaults())
    for number in range(5000):
        # Each mapping may get the address of one that is gone.
        measured = {Tier.G2: TierRate(Tier.G2, 0.0, 1.0 + number)}
        assert model.paces(measured).g2.block_s == 1.0 + number
        assert model.paces(measured) is model.paces(measured)


def test_tiers_slower_than_computing_are_not_worth_it() -> None:
    """P1: a disk that is slower than computing is no hit."""
    slow = MODEL.paces({Tier.G3: TierRate(Tier.G3, 0.0, 0.05)})
    assert slow.worth(0.03) == tier_set([Tier.G2, Tier.G4])
    assert slow.worth(0.3) == tier_set([Tier.G2, Tier.G3, Tier.G4])
    useless = OnboardModel(OnboardDefaults(0.5, 1.0, 0.1))
    assert useless.paces({}).worth(0.03) == 0
