"""Gate: is a load faster than computing the blocks again?

It learns what each tier takes from the loads that were done, and says for a run of blocks how many
of the leading ones are worth loading: as many as leave the request with its first token soonest.
What the request waits in the engine's queue anyway hides promotions into host memory, not the copy
into the engine. Tiers that are refused are probed off the request's path, so that the verdict can
change. Not for writes, and not for whether a tier works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from services.common.events.model import Tier
from services.kvbm.core.peers import PeerId

SLOWER = "slower-than-recompute"
LATE = "promotion-limit"
Mode = Literal["measured", "always", "never"]
Source = Tier | PeerId
"""Where a block comes from: a tier, or a peer. `Tier.PEER`: some peer, whichever has it."""


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


_MARGIN = 1.15
"""A tier that was refused must beat computing by this much to be taken again."""
_PROBE_BLOCKS = 8
_PROBE_S = 5.0
"""Seconds without a measurement after which a refused tier is probed; they double with each probe
that leaves it refused, up to:"""
_LONGEST_PROBE_S = 60.0

DEFAULTS: Mapping[Tier, TierRate] = {
    Tier.G2: TierRate(0.001, 0.0005),
    Tier.G3: TierRate(0.002, 0.002),
    Tier.G4: TierRate(0.050, 0.010),
    Tier.PEER: TierRate(0.005, 0.004),
}
"""Before anything is measured, for blocks of about a MiB: memory copied and verified at 2 GB/s, a
disk that reads 500 MB/s, an object store that delivers 100 MB/s, a peer that does 250 MB/s."""
_MOST_PEERS = 1024
"""Peers that are told apart; beyond that the one measured longest ago is forgotten."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Blocks to promote off the path, only to measure: `count` of them from number `first` of the
    run on, all in `tier`."""

    tier: Source
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
    """Why not all of them: "", "slower-than-recompute", or "promotion-limit": it would be worth it,
    but could not come up in time."""
    load_s: float
    """Predicted seconds that the request waits for them beyond its queue."""
    recompute_s: float
    """Seconds that computing them takes."""
    tiers: Mapping[Source, TierVerdict] = field(default_factory=dict)
    probe: Probe | None = None


_OUTLIER = 3.0
"""A measurement that is this many times off the prediction, either way, is cut back to it."""
_MEMORY = 0.85
"""What a measurement leaves of the weight of those before."""
_INERTIA = 0.1
"""Weight of the estimates as they are: they stay where measurements say nothing."""
_LEAST_LATENCY_S, _LEAST_BLOCK_S = 1e-7, 1e-9


class _Estimate:
    """Latency and seconds a block of one tier, from loads of different sizes.

    Least squares of the relative error, with forgetting. A lone outlier moves it little; a second
    one in a row on the same side is a change, and what was measured before it is forgotten.
    """

    def __init__(self, rate: TierRate) -> None:
        self.latency_s = max(rate.latency_s, _LEAST_LATENCY_S)
        self.block_s = max(rate.block_s, _LEAST_BLOCK_S)
        self.samples = rate.samples
        self._streak = 0
        """Outliers in a row; below zero when they are faster than predicted."""
        # Sums of weights, and of weights times blocks, blocks squared, seconds, blocks x seconds.
        self._sums = [0.0] * 5

    def observe(self, blocks: int, seconds: float) -> None:
        predicted_s = self.latency_s + blocks * self.block_s
        side = (seconds > _OUTLIER * predicted_s) - (seconds * _OUTLIER < predicted_s)
        self._streak = self._streak + side if side * self._streak > 0 else side
        limit = _OUTLIER ** max(1, min(abs(self._streak), 20))
        seconds = min(max(seconds, predicted_s / limit), predicted_s * limit)
        weight = 1 / (seconds * predicted_s)
        new = (1.0, blocks, blocks**2, seconds, blocks * seconds)
        kept = _MEMORY if abs(self._streak) < 2 else 0.0
        self._sums = [kept * old + weight * n for old, n in zip(self._sums, new, strict=True)]
        self._fit(*self._sums)
        self.samples += 1

    def _fit(self, w: float, wn: float, wnn: float, ws: float, wns: float) -> None:
        w, ws = w + _INERTIA / self.latency_s**2, ws + _INERTIA / self.latency_s
        wnn, wns = wnn + _INERTIA / self.block_s**2, wns + _INERTIA / self.block_s
        latency_s = (ws * wnn - wns * wn) / (w * wnn - wn * wn)
        self.latency_s = max(latency_s, _LEAST_LATENCY_S)
        self.block_s = max((wns - wn * self.latency_s) / wnn, _LEAST_BLOCK_S)
        if self.block_s == _LEAST_BLOCK_S:
            self.latency_s = max((ws - wn * self.block_s) / w, _LEAST_LATENCY_S)

    def rate(self) -> TierRate:
        return TierRate(self.latency_s, self.block_s, self.samples)


@dataclass(slots=True)
class _Standing:
    """How a tier stands at present."""

    refused: bool = False
    measured_s: float = float("-inf")
    """When it was last measured or probed."""
    patience_s: float = _PROBE_S


class Gate:
    """Learns and decides. Loop's thread; time is an argument, in seconds of any steady clock.

    `mode`: "always" and "never" decide without figures, for comparisons.
    """

    def __init__(
        self, defaults: Mapping[Tier, TierRate] | None = None, mode: Mode = "measured"
    ) -> None:
        self.mode = mode
        rates = {**DEFAULTS, **(defaults or {})}
        self._estimates: dict[Source, _Estimate] = {t: _Estimate(r) for t, r in rates.items()}
        self._standings: dict[Source, _Standing] = {tier: _Standing() for tier in rates}

    def observe(self, tier: Source, blocks: int, seconds: float, now_s: float) -> None:
        """A load of `blocks` took `seconds`: from below into G2, or from G2 into the engine.

        What a peer takes also counts for all peers together.
        """
        if tier is Tier.G1 or blocks < 1 or not 0 <= seconds < float("inf"):
            return
        for one in (tier,) if isinstance(tier, Tier) else (Tier.PEER, tier):
            self._estimate(one).observe(blocks, seconds)
            self._standings[one].measured_s = now_s

    def _estimate(self, source: Source) -> _Estimate:
        """A source's; of a peer that is new, as of all peers."""
        found = self._estimates.get(source)
        if found is None:
            peers = [s for s in self._estimates if not isinstance(s, Tier)]
            if len(peers) >= _MOST_PEERS:
                self.forget(min(peers, key=lambda peer: self._standings[peer].measured_s))
            found = _Estimate(self._as_all_peers())
            self._estimates[source], self._standings[source] = found, _Standing()
        return found

    def forget(self, peer: Source) -> None:
        """Nothing that was measured of a peer holds any more: it lives anew, or elsewhere."""
        if not isinstance(peer, Tier):
            self._estimates.pop(peer, None)
            self._standings.pop(peer, None)

    def given_up(self, tier: Source, blocks: int, seconds: float, now_s: float) -> None:
        """A load of `blocks` was not there after `seconds`: failed, or waited for no longer.

        It takes that long at least. Less than predicted says nothing: a store that is known to be
        away refuses at once.
        """
        if tier is not Tier.G1 and seconds > self._seconds(tier, blocks):
            self.observe(tier, blocks, 2 * seconds, now_s)

    def rates(self) -> Mapping[Tier, TierRate]:
        """What is assumed of each tier now, and of all peers together."""
        return {t: e.rate() for t, e in self._estimates.items() if isinstance(t, Tier)}

    def rate(self, source: Source) -> TierRate:
        """What is assumed of one source now."""
        known = self._estimates.get(source)
        return known.rate() if known is not None else self._as_all_peers()

    def _as_all_peers(self) -> TierRate:
        rate = self._estimates[Tier.PEER].rate()
        return TierRate(rate.latency_s, rate.block_s)

    def decide(
        self,
        run: Sequence[Source],
        recompute_block_s: float,
        wait_s: float,
        now_s: float,
        *,
        limit_s: float = math.inf,
        dry_run: bool = False,
    ) -> Verdict:
        """How many of the leading blocks of `run` (the best source of each) to load.

        `recompute_block_s`: seconds in which the engine computes one block. `wait_s`: seconds that
        the request waits in the engine's queue anyway. `limit_s`: seconds after which it waits for
        promotions no longer: what would come later is waited for in vain. `dry_run`: only look, as
        for an explanation; takes no probe and changes nothing.
        """
        late = False
        for source in set(run):
            self._estimate(source)
        if self.mode == "measured":
            margins = {t: _MARGIN if s.refused else 1.0 for t, s in self._standings.items()}
            blocks, best_s = 0, 0.0
            for count, parts in self._cuts(run, wait_s, limit_s):
                gain_s = count * recompute_block_s - self._load_s(count, parts, wait_s, margins)
                if gain_s <= best_s:
                    continue
                late = self._lower_s(parts, {}) > limit_s
                if not late:
                    blocks, best_s = count, gain_s
        else:
            blocks = len(run) if self.mode == "always" else 0
        probe = None
        if self.mode == "measured" and not dry_run:
            probe = self._stand(run, blocks, now_s)
        if probe is not None and probe.tier is Tier.G2:
            # Nothing but a load into the engine measures this tier: a small one is let through.
            blocks, probe = probe.count, None
        wanted, taken = _parts(run), _parts(run[:blocks])
        return Verdict(
            blocks,
            "" if blocks == len(run) else LATE if late else SLOWER,
            self._load_s(blocks, taken, wait_s, {}),
            blocks * recompute_block_s,
            {
                tier: TierVerdict(
                    count,
                    taken.get(tier, 0),
                    self._seconds(tier, len(run) if tier is Tier.G2 else count),
                )
                for tier, count in wanted.items()
            },
            probe,
        )

    def _seconds(self, tier: Source, blocks: int) -> float:
        estimate = self._estimates.get(tier) or self._estimates[Tier.PEER]
        return estimate.latency_s + blocks * estimate.block_s if blocks else 0.0

    def _load_s(
        self,
        count: int,
        parts: Mapping[Source, int],
        wait_s: float,
        margins: Mapping[Source, float],
    ) -> float:
        """Seconds by which loading delays the request: promotions beyond its wait, and the copy."""
        copy_s = self._seconds(Tier.G2, count) * margins.get(Tier.G2, 1.0)
        return max(0.0, self._lower_s(parts, margins) - wait_s) + copy_s

    def _lower_s(self, parts: Mapping[Source, int], margins: Mapping[Source, float]) -> float:
        """Seconds that promotions of so many blocks take."""
        return sum(
            self._seconds(source, count) * margins.get(source, 1.0)
            for source, count in parts.items()
            if source is not Tier.G2
        )

    def _cuts(
        self, run: Sequence[Source], wait_s: float, limit_s: float
    ) -> Iterator[tuple[int, dict[Source, int]]]:
        """Where the best end of the load can be: leading blocks, and how many of them in each tier.

        Gain is straight but where the tier changes and where promotions outlast the wait; it ends
        where they outlast the limit.
        """
        count = 0
        parts: dict[Source, int] = dict.fromkeys(run, 0)
        for tier, group in groupby(run):
            length = sum(1 for _ in group)
            if tier is not Tier.G2:
                estimate = self._estimates[tier]
                began_s = self._lower_s(parts, {}) + (0.0 if parts[tier] else estimate.latency_s)
                for end_s in sorted((wait_s, limit_s)):
                    arrived = min((end_s - began_s) / estimate.block_s, length)
                    # Between two whole blocks: either may be the better.
                    for part in (int(arrived), int(arrived) + 1):
                        if 0 < part < length:
                            yield count + part, {**parts, tier: parts[tier] + part}
            count += length
            parts[tier] += length
            yield count, parts

    def _stand(self, run: Sequence[Source], blocks: int, now_s: float) -> Probe | None:
        """Notes who is taken, and who is refused: the tier at the cut. Is it time to probe it?"""
        for tier in set(run[:blocks]):
            self._standings[tier].refused = False
            self._standings[tier].patience_s = _PROBE_S
        if blocks == len(run):
            return None
        tier = run[blocks]
        standing = self._standings[tier]
        standing.refused = True
        if now_s - standing.measured_s < standing.patience_s or (tier is Tier.G2 and blocks):
            return None
        standing.measured_s = now_s
        standing.patience_s = min(2 * standing.patience_s, _LONGEST_PROBE_S)
        count = 0
        while count < min(_PROBE_BLOCKS, len(run) - blocks) and run[blocks + count] is tier:
            count += 1
        return Probe(tier, blocks, count)


def _parts(run: Sequence[Source]) -> dict[Source, int]:
    parts: dict[Source, int] = {}
    for source in run:
        parts[source] = parts.get(source, 0) + 1
    return parts
