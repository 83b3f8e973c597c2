"""Seconds that blocks take to come up from a tier into an engine. Knows no blocks, only numbers.

What a daemon has measured holds; until then a tier is so many times as fast as computing, which
fits any hardware better than seconds would. G3, G4 and what peers have come up through G2. A tier
that takes longer than computing is not worth it: the daemon's gate refuses it, so its blocks are as
good as missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from services.common.events.model import Tier, TierRate
from services.router.core.tiers import LOWER_TIERS, TIER_BITS
from services.router.core.walk import Run

_MOST_KNOWN = 4096
"""Daemons whose paces are remembered."""


@dataclass(frozen=True, slots=True)
class OnboardDefaults:
    """How many times as fast as computing it a tier brings a block up, before it is measured."""

    g2_speedup: float = 10.0
    g3_speedup: float = 3.0
    g4_speedup: float = 1.5
    peer_speedup: float = 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a tier's blocks come up: seconds, and shares of the time to compute a block."""

    latency_s: float
    """The first block's delay."""
    block_s: float
    share: float

    def beats(self, recompute_block_s: float) -> bool:
        """Whether a block comes up sooner than a worker computes it."""
        return self.block_s + self.share * recompute_block_s < recompute_block_s

    def after(self, other: Pace) -> Pace:
        """The pace of blocks that come up through another tier."""
        return Pace(
            self.latency_s + other.latency_s,
            self.block_s + other.block_s,
            self.share + other.share,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Paces:
    """Those of one daemon; compared by identity, so that they can be looked up by."""

    g2: Pace
    g3: Pace
    g4: Pace
    peer: Pace

    def worth(self, recompute_block_s: float) -> int:
        """Tiers that beat computing, as bits."""
        bits = 0
        for tier, pace in zip(LOWER_TIERS, (self.g2, self.g3, self.g4), strict=True):
            if pace.beats(recompute_block_s):
                bits |= TIER_BITS[tier]
        return bits

    def load(self, run: Run) -> tuple[float, float]:
        """What it takes to bring up a run: seconds, and blocks that could be computed meanwhile."""
        seconds = blocks = 0.0
        counts = (run.g2, self.g2), (run.g3, self.g3), (run.g4, self.g4), (run.peer, self.peer)
        for count, pace in counts:
            if count:
                seconds += pace.latency_s + count * pace.block_s
                blocks += count * pace.share
        return seconds, blocks


class OnboardModel:
    """The defaults, and what follows from them and from what a daemon has measured."""

    def __init__(self, defaults: OnboardDefaults) -> None:
        self._defaults = Paces(
            Pace(0.0, 0.0, 1 / defaults.g2_speedup),
            Pace(0.0, 0.0, 1 / defaults.g3_speedup),
            Pace(0.0, 0.0, 1 / defaults.g4_speedup),
            Pace(0.0, 0.0, 1 / defaults.peer_speedup),
        )
        self._known: dict[int, tuple[Mapping[Tier, TierRate], Paces]] = {}

    def paces(self, measured: Mapping[Tier, TierRate]) -> Paces:
        """Those of a daemon that has measured this. Asked for each daemon in each decision, so the
        mapping must not change: a new measurement makes a new one.
        """
        if not measured:
            return self._defaults
        known = self._known.get(id(measured))
        if known is not None:
            return known[1]
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        paces = self._paces(measured)
        # With the mapping itself: else another one might get its id.
        self._known[id(measured)] = measured, paces
        return paces

    def _paces(self, measured: Mapping[Tier, TierRate]) -> Paces:
        default = self._defaults
        g2 = _measured(measured.get(Tier.G2)) or default.g2
        slower = [
            pace.after(g2) if (pace := _measured(measured.get(tier))) else untold
            for tier, untold in (
                (Tier.G3, default.g3),
                (Tier.G4, default.g4),
                (Tier.PEER, default.peer),
            )
        ]
        return Paces(g2, *slower)


def _measured(rate: TierRate | None) -> Pace | None:
    """None: not known, or not to be believed."""
    if rate is None or not (0 < rate.block_s < inf and 0 <= rate.latency_s < inf):
        return None
    return Pace(rate.latency_s, rate.block_s, 0.0)
