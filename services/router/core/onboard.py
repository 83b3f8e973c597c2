"""Seconds that blocks take to come up from a tier into an engine. Knows no blocks, only numbers.

What a daemon has measured holds; until then a tier is so many times as fast as computing, which
fits any hardware better than seconds would. G3, G4 and what peers have come up through G2. A tier
that takes longer than computing is not worth it: the daemon's gate refuses it, so its blocks are as
good as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.events.model import Tier, TierRate
from services.router.core.tiers import LOWER_TIERS, Overlap, tier_set

_NO_DELAY = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class OnboardDefaults:
    """How many times as fast as computing it a tier brings a block up, before it is measured."""

    g2_speedup: float = 10.0
    g3_speedup: float = 3.0
    g4_speedup: float = 1.5
    peer_speedup: float = 2.0


@dataclass(slots=True)
class TierCosts:
    """Seconds for one worker: the first block's delay, and each block, of G2, G3 and G4."""

    latency_s: tuple[float, float, float]
    block_s: tuple[float, float, float]
    worth: int
    """Tiers that beat computing, as bits."""
    peer: tuple[float, float] = (0.0, 0.0)
    """The same of blocks from peers: the first one's delay, and each block."""
    fetch: bool = False
    """Whether peers beat computing."""

    def seconds(self, overlap: Overlap) -> float:
        """Seconds to bring up the lower blocks of an overlap."""
        a, b, c = self.block_s
        total = overlap.g2 * a + overlap.g3 * b + overlap.g4 * c
        if self.latency_s is not _NO_DELAY:
            blocks = overlap.g2, overlap.g3, overlap.g4
            total += sum(s for n, s in zip(blocks, self.latency_s, strict=True) if n)
        if overlap.peer:
            total += self.peer[0] + overlap.peer * self.peer[1]
        return total


class OnboardModel:
    """The defaults, with what follows from them worked out: asked for each worker and decision."""

    def __init__(self, defaults: OnboardDefaults) -> None:
        speedups = (defaults.g2_speedup, defaults.g3_speedup, defaults.g4_speedup)
        self._shares = tuple(1 / speedup for speedup in speedups)
        self._worth = tier_set(t for t, s in zip(LOWER_TIERS, speedups, strict=True) if s > 1)
        self._peer_share = 1 / defaults.peer_speedup

    def costs(self, measured: Mapping[Tier, TierRate], recompute_block_s: float) -> TierCosts:
        """Costs at a worker that computes a block in `recompute_block_s` seconds."""
        a, b, c = self._shares
        g2 = 0.0, a * recompute_block_s
        g3 = 0.0, b * recompute_block_s
        g4 = 0.0, c * recompute_block_s
        peer = 0.0, self._peer_share * recompute_block_s
        if not measured:
            fetch = self._peer_share < 1
            return TierCosts(_NO_DELAY, (g2[1], g3[1], g4[1]), self._worth, peer, fetch)
        g2 = _measured(measured.get(Tier.G2), (0.0, 0.0)) or g2
        g3 = _measured(measured.get(Tier.G3), g2) or g3
        g4 = _measured(measured.get(Tier.G4), g2) or g4
        peer = _measured(measured.get(Tier.PEER), g2) or peer
        costs = g2, g3, g4
        worth = tier_set(
            tier
            for tier, (_, block) in zip(LOWER_TIERS, costs, strict=True)
            if block < recompute_block_s
        )
        fetch = peer[1] < recompute_block_s
        return TierCosts((g2[0], g3[0], g4[0]), (g2[1], g3[1], g4[1]), worth, peer, fetch)


def _measured(rate: TierRate | None, after: tuple[float, float]) -> tuple[float, float] | None:
    """Delay and seconds a block of a tier whose blocks go on through another; None: not known."""
    if rate is None or rate.block_s <= 0:
        return None
    return rate.latency_s + after[0], rate.block_s + after[1]
