"""Seconds that blocks take to come up from a tier into an engine. Knows no blocks, only numbers.

What a daemon has measured holds; until then a tier is so many times as fast as computing, which
fits any hardware better than seconds would. G3 and G4 come up through G2. A tier that takes longer
than computing is not worth it: the daemon's gate refuses it, so its blocks are as good as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.events.model import Tier, TierRate
from services.router.core.tiers import LOWER_TIERS, Overlap, tier_set


@dataclass(frozen=True, slots=True)
class OnboardDefaults:
    """How many times as fast as computing it a tier brings a block up, before it is measured."""

    g2_speedup: float = 10.0
    g3_speedup: float = 3.0
    g4_speedup: float = 1.5


@dataclass(frozen=True, slots=True)
class TierCosts:
    """Seconds for one worker: the first block's delay, and each block, of G2, G3 and G4."""

    latency_s: tuple[float, ...]
    block_s: tuple[float, ...]
    worth: int
    """Tiers that beat computing, as bits."""

    def seconds(self, overlap: Overlap) -> float:
        """Seconds to bring up the lower blocks of an overlap."""
        total = 0.0
        for blocks, latency, block in zip(
            (overlap.g2, overlap.g3, overlap.g4), self.latency_s, self.block_s, strict=True
        ):
            if blocks:
                total += latency + blocks * block
        return total


def tier_costs(
    defaults: OnboardDefaults, measured: Mapping[Tier, TierRate], recompute_block_s: float
) -> TierCosts:
    """Costs at a worker that computes a block in `recompute_block_s` seconds."""

    def measured_s(tier: Tier) -> tuple[float, float] | None:
        rate = measured.get(tier)
        return (rate.latency_s, rate.block_s) if rate is not None and rate.block_s > 0 else None

    g2 = measured_s(Tier.G2) or (0.0, recompute_block_s / defaults.g2_speedup)
    costs = [g2]
    for tier, speedup in ((Tier.G3, defaults.g3_speedup), (Tier.G4, defaults.g4_speedup)):
        known = measured_s(tier)
        costs.append(
            (0.0, recompute_block_s / speedup)
            if known is None
            else (known[0] + g2[0], known[1] + g2[1])
        )
    return TierCosts(
        tuple(latency for latency, _ in costs),
        tuple(block for _, block in costs),
        tier_set(
            t for t, (_, block) in zip(LOWER_TIERS, costs, strict=True) if block < recompute_block_s
        ),
    )
