"""Gate: is a load faster than computing the blocks again?

It learns what each tier takes from the loads that were done, and says for a run of blocks how many
of the leading ones are worth loading. Tiers that are refused are probed off the request's path, so
that the verdict can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from services.common.events.model import Tier

SLOWER = "slower-than-recompute"
Mode = Literal["measured", "always", "never"]


@dataclass(frozen=True, slots=True)
class TierRate:
    """What a load from a tier takes: `latency_s` + blocks x `block_s`."""

    latency_s: float
    """Seconds before the first block."""
    block_s: float
    """Seconds for each block."""
    samples: int = 0
    """Loads that were measured; 0: a published default."""

    def seconds(self, blocks: int) -> float:
        """Predicted seconds for so many blocks; 0 for none."""
        return self.latency_s + blocks * self.block_s if blocks else 0.0


DEFAULTS: Mapping[Tier, TierRate] = {
    Tier.G2: TierRate(0.001, 0.0005),
    Tier.G3: TierRate(0.002, 0.002),
    Tier.G4: TierRate(0.050, 0.010),
}
"""Before anything is measured, for blocks of about a MiB: memory copied and verified at 2 GB/s, a
disk that reads 500 MB/s, an object store that delivers 100 MB/s."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Blocks to promote off the path, only to measure: `count` of them from number `first` of the
    run on, all in `tier`."""

    tier: Tier
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class TierVerdict:
    """One tier's part in a verdict."""

    blocks: int
    """Blocks of the run that lie there."""
    taken: int
    """Those of them that are to be loaded."""
    predicted_s: float
    """Seconds to bring all of them: into G2, or for G2 itself into G1 with all that comes up."""

    @property
    def refused(self) -> bool:
        """Whether some of its blocks are not taken."""
        return self.taken < self.blocks


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a run of blocks."""

    blocks: int
    """Leading blocks to load."""
    reason: str
    """Why not all of them: "" or "slower-than-recompute"."""
    load_s: float
    """Predicted seconds that the request waits for them beyond its queue."""
    recompute_s: float
    """Seconds that computing them takes."""
    tiers: Mapping[Tier, TierVerdict] = field(default_factory=dict)
    probe: Probe | None = None


class Gate:
    """Learns and decides. Loop's thread; time is an argument."""

    def __init__(
        self, defaults: Mapping[Tier, TierRate] | None = None, mode: Mode = "measured"
    ) -> None:
        self.mode = mode
        self._rates = dict(DEFAULTS) | dict(defaults or {})

    def observe(self, tier: Tier, blocks: int, seconds: float, now_s: float) -> None:
        """A load of `blocks` took `seconds`: from G3 or G4 into G2, or from G2 into the engine."""

    def rates(self) -> Mapping[Tier, TierRate]:
        """What is assumed of each tier."""
        return dict(self._rates)

    def decide(
        self,
        run: Sequence[Tier],
        recompute_block_s: float,
        wait_s: float,
        now_s: float,
        *,
        dry_run: bool = False,
    ) -> Verdict:
        """How many of the leading blocks of `run` (best tier of each) to load.

        `wait_s`: what the request waits in the engine's queue anyway; promotions overlap it.
        `dry_run`: only look, as for an explanation; takes no probe and moves no verdict.
        """
        cuts = [0]
        for _, group in groupby(run):
            cuts.append(cuts[-1] + sum(1 for _ in group))
        if self.mode != "measured":
            blocks = len(run) if self.mode == "always" else 0
        else:
            blocks = max(cuts, key=lambda k: self._gain_s(run[:k], recompute_block_s, wait_s))
        return Verdict(
            blocks,
            "" if blocks == len(run) else SLOWER,
            self._load_s(run[:blocks], wait_s),
            blocks * recompute_block_s,
            {
                tier: TierVerdict(
                    run.count(tier),
                    run[:blocks].count(tier),
                    self._rates[tier].seconds(len(run) if tier is Tier.G2 else run.count(tier)),
                )
                for tier in set(run)
            },
        )

    def _load_s(self, run: Sequence[Tier], wait_s: float) -> float:
        lower = sum(self._rates[t].seconds(run.count(t)) for t in (Tier.G3, Tier.G4))
        return max(0.0, lower - wait_s) + self._rates[Tier.G2].seconds(len(run))

    def _gain_s(self, run: Sequence[Tier], recompute_block_s: float, wait_s: float) -> float:
        return len(run) * recompute_block_s - self._load_s(run, wait_s)
