"""Seconds that blocks of lower tiers take to come up."""

import pytest

from services.common.events.model import Tier, TierRate
from services.router.core.onboard import OnboardDefaults, OnboardModel
from services.router.core.tiers import Overlap, tier_set

MODEL = OnboardModel(OnboardDefaults())
EACH = Overlap(5, 1, 1, 1)


def test_defaults_are_shares_of_computing_slower_by_tier() -> None:
    costs = MODEL.costs({}, 0.03)
    assert costs.block_s == pytest.approx((0.003, 0.01, 0.02))
    assert costs.seconds(EACH) == pytest.approx(0.033)
    assert costs.worth == tier_set(Tier(t) for t in (2, 3, 4))


def test_what_was_measured_holds_and_lower_tiers_come_up_through_g2() -> None:
    measured = {
        Tier.G2: TierRate(Tier.G2, 0.001, 0.002),
        Tier.G3: TierRate(Tier.G3, 0.005, 0.01),
        Tier.G4: TierRate(Tier.G4, 0.0, 0.0),
    }
    costs = MODEL.costs(measured, 0.03)
    assert costs.block_s == pytest.approx((0.002, 0.012, 0.02)), "G4 isn't known yet"
    assert costs.seconds(Overlap(9, 4)) == pytest.approx(0.001 + 4 * 0.002)
    assert costs.seconds(Overlap(9, 0, 2)) == pytest.approx(0.006 + 2 * 0.012)
    assert costs.seconds(Overlap(9)) == 0


def test_tiers_slower_than_computing_are_not_worth_it() -> None:
    """P1: a disk that is slower than computing is no hit."""
    slow = {Tier.G3: TierRate(Tier.G3, 0.0, 0.05)}
    assert MODEL.costs(slow, 0.03).worth == tier_set([Tier.G2, Tier.G4])
    assert MODEL.costs(slow, 0.3).worth == tier_set([Tier.G2, Tier.G3, Tier.G4])
    useless = OnboardModel(OnboardDefaults(0.5, 1.0, 0.1))
    assert useless.costs({}, 0.03).worth == 0
