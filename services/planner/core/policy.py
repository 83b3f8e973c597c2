"""Which worker changes its role now, if any: one decision for a group at each interval.

For both sides, prefill and decode, the policy keeps one figure: the *pressure*, a latency over its
target or a use over its limit, whichever is worst, as measured and as predicted. A side above
`high` is pressed, and after `hold` intervals may get a worker from the other side, if that one's
pressure would then still be at most `low`, or at most `gain` times that of the pressed side: so a
move makes the worse side better than it was, and can't be wanted back under the same load. It must
never exceed `most`, or the move would only shift the misses. Between the thresholds nothing moves,
and for `gap_s` after roles have changed, by whomever.

Workers that do both count as decode-capable. One of them may become the first prefill worker of its
group when prefills wait while decodes have room, or when decodes miss their target only because of
prefills beside them. Neither side is ever emptied, so a group that has a prefill worker keeps one;
who leaves the prefill side becomes `decode`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf, isfinite

from services.common.cards import Role
from services.planner.core import predict
from services.planner.core.measures import GroupKey, GroupMeasures, WorkerView
from services.planner.core.targets import Targets

_REFUSALS_KEPT = 1024
_SHOWN = 100.0
"""Higher pressures are told as this."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """When to move. Pressures are ratios: 1 is the target, or the limit."""

    high: float = 0.85
    """Above it a side is pressed."""
    low: float = 0.5
    """A side whose pressure stays at most this without a worker may always give it."""
    gain: float = 0.9
    """It may also go so far, as a share of the pressed side's pressure, ..."""
    most: float = 0.95
    """... but never beyond this."""
    hold: int = 2
    """Intervals for which one side must be pressed."""
    gap_s: float = 5.0
    """Least seconds between two changes of roles in a group."""
    fewest: int = 5
    """Requests measured since the last change, below which only predictions count."""
    prefill_use: float = 0.85
    """Share of the prefill rate that may be in use."""
    kv_use: float = 0.9
    """Share of the decode side's KV blocks that may be in use by requests."""
    refused_s: float = 60.0
    """A worker that did not take its new role is left alone for so long."""

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1 or not 0 < self.gain < 1:
            raise ValueError(f"0 < low < high <= 1 and 0 < gain < 1: {self}")
        if self.hold < 1 or self.gap_s < 0 or self.fewest < 1 or not 0 < self.most <= 1:
            raise ValueError(f"hold >= 1, gap >= 0, fewest >= 1, 0 < most <= 1: {self}")
        if not 0 < self.prefill_use <= 1 or not 0 < self.kv_use <= 1 or self.refused_s < 0:
            raise ValueError(f"uses are shares, and times aren't negative: {self}")


class Verdict(StrEnum):
    """What was decided, in a word."""

    STEADY = "steady"
    """No side is pressed."""
    BUILDING = "building"
    """One is, but not for long enough."""
    RESTING = "resting"
    """One is, but roles changed a moment ago."""
    HELPLESS = "helpless"
    """One is, and the other has nothing to give."""
    UNABLE = "unable"
    """One is, and nobody can be moved."""
    MOVE = "move"


@dataclass(frozen=True, slots=True)
class Move:
    """One worker takes another role."""

    worker: WorkerView
    to: Role


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided about a group, why, and on which figures."""

    key: GroupKey
    verdict: Verdict
    reason: str
    move: Move | None = None
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Side:
    """How far a side is from its target, and the figure that says so."""

    ratio: float
    words: str

    def or_worse(self, ratio: float, words: str) -> _Side:
        """The worse one."""
        return _Side(ratio, words) if ratio > self.ratio else self


@dataclass(frozen=True, slots=True)
class _Pressure:
    prefill: _Side
    decode: _Side


class Policy:
    """Decides for all groups; remembers for how long pressure has held, and who refused."""

    def __init__(self, config: PolicyConfig, targets: Targets) -> None:
        self.config = config
        self.targets = targets
        self._streaks: dict[GroupKey, tuple[Role, int]] = {}
        self._refused: dict[str, float] = {}

    def refused(self, worker_id: str, now: float) -> None:
        """A worker did not take the role that it was to take."""
        for id in [i for i, until in self._refused.items() if until <= now]:
            del self._refused[id]
        while len(self._refused) >= _REFUSALS_KEPT:
            del self._refused[next(iter(self._refused))]
        self._refused[worker_id] = now + self.config.refused_s

    def forget_streaks(self) -> None:
        """What was seen so far was not meant for decisions: pressure has to build up anew."""
        self._streaks.clear()

    def decide(self, group: GroupMeasures, now: float) -> Decision:
        """To be called once an interval."""
        pressure = self._pressure(group)
        figures = self._figures(group, pressure)

        def decision(verdict: Verdict, reason: str, move: Move | None = None) -> Decision:
            if verdict not in (Verdict.BUILDING, Verdict.RESTING, Verdict.UNABLE):
                self._streaks.pop(group.key, None)
            return Decision(group.key, verdict, reason, move, figures)

        role = self._wanted(group, pressure)
        if role is None:
            return decision(Verdict.STEADY, f"{pressure.prefill.words}; {pressure.decode.words}")
        pressed = max(pressure.prefill, pressure.decode, key=lambda side: side.ratio)
        after = self._giver(group, role)
        allowed = self._allowed(pressed.ratio)
        if isinstance(after, str):
            return decision(Verdict.HELPLESS, f"{pressed.words}, but {after}")
        gets = self._getter(group, role)
        if gets > self.config.gain * pressed.ratio:
            return decision(
                Verdict.HELPLESS, f"{pressed.words}, and one more worker would not help"
            )
        if after.ratio > allowed:
            rest = "decode" if role is Role.PREFILL else "prefill"
            return decision(
                Verdict.HELPLESS,
                f"{pressed.words}, but with one less to {rest} {after.words}: "
                f"{_times(after.ratio)} of what it may be, and {allowed:.2f} is allowed",
            )
        before, count = self._streaks.get(group.key, (role, 0))
        count = min(self.config.hold, count + 1 if before is role else 1)
        self._streaks[group.key] = (role, count)
        if group.changed_at is not None and now - group.changed_at < self.config.gap_s:
            ago = now - group.changed_at
            return decision(Verdict.RESTING, f"{pressed.words}; roles changed {ago:.1f} s ago")
        if count < self.config.hold:
            held = f"{count} of {self.config.hold} intervals"
            return decision(Verdict.BUILDING, f"{pressed.words}, for {held}")
        move = self._choose(group, role, now)
        if move is None:
            return decision(Verdict.UNABLE, f"{pressed.words}, but nobody can be moved")
        return decision(
            Verdict.MOVE,
            f"{pressed.words}; {move.worker.info.id} goes from {move.worker.info.role} to {role}: "
            f"without it {after.words}",
            move,
        )

    # How hard each side is pressed.

    def _pressure(self, g: GroupMeasures) -> _Pressure:
        """Both sides as they are: by prediction, or as measured when that is worse."""
        t, c = self.targets, self.config
        prefillers, decoders = _sizes(g)
        prefill = self._prefill(g, prefillers or decoders)
        if g.fresh_ttft >= c.fewest and g.prefill_high_s is not None:
            seen = g.prefill_high_s + g.handover_s
            prefill = prefill.or_worse(seen / t.ttft_s, f"first tokens take {_seconds(seen)}")
        decode = self._decode(g, decoders)
        if g.fresh_itl >= c.fewest and g.itl_high_s is not None:
            decode = decode.or_worse(
                g.itl_high_s / t.itl_s, f"a token takes {_millis(g.itl_high_s)}"
            )
        return _Pressure(prefill, decode)

    def _prefill(self, g: GroupMeasures, workers: int) -> _Side:
        """The prefill side with so many workers, by prediction."""
        t = self.targets
        waits = predict.drain_s(g.prefill, workers) + g.handover_s
        side = _Side(waits / t.ttft_s, f"prefills wait {_seconds(waits)}")
        ttft = predict.ttft_s(g.prefill, workers, t.quantile)
        if ttft is not None:
            ttft += g.handover_s
            side = side.or_worse(ttft / t.ttft_s, f"first tokens would take {_seconds(ttft)}")
        use = predict.prefill_use(g.prefill, workers)
        return side.or_worse(
            use / self.config.prefill_use, f"{_times(use)} of the prefill rate is in use"
        )

    def _decode(self, g: GroupMeasures, workers: int, *, alone: bool = False) -> _Side:
        """The decode side with so many workers, by prediction; `alone`: nothing beside decodes."""
        load = replace(g.decode, spread=1.0) if alone else g.decode
        target = self.targets.itl_s
        itl = predict.itl_s(load, workers)
        side = _Side(0.0, "nothing decodes")
        if itl is not None and load.batch:
            side = _Side(itl / target, f"a token would take {_millis(itl)}")
            use = predict.decode_use(load, workers, target)
            side = side.or_worse(use, f"{_times(use)} of the batch that keeps the target is there")
        kv = predict.kv_use(load, workers)
        return side.or_worse(kv / self.config.kv_use, f"{_times(kv)} of the KV is in use")

    def _wanted(self, g: GroupMeasures, pressure: _Pressure) -> Role | None:
        """The role that a worker should take, if one side is pressed."""
        prefill, decode = pressure.prefill.ratio, pressure.decode.ratio
        if max(prefill, decode) <= self.config.high:
            return None
        prefillers, _ = _sizes(g)
        if prefill >= decode or not prefillers:
            # Without a prefill side there is nobody to get, only prefills to get out of the way.
            return Role.PREFILL
        return Role.DECODE

    # Whether a move would do any good.

    def _giver(self, g: GroupMeasures, role: Role) -> _Side | str:
        """The giving side after a move to `role`; words when it can't give one."""
        prefillers, decoders = _sizes(g)
        if role is Role.PREFILL:
            if decoders < 2:
                return "only one worker is left to decode"
            if g.decode.step is None and g.decode.batch:
                return "how long decodes take is not measured yet"
            return self._decode(g, decoders - 1, alone=not prefillers)
        if prefillers < 2:
            return "only one worker is left to prefill"
        step = g.decode.step
        if step is not None and step.base_s >= self.targets.itl_s:
            return f"even a step with nothing in it takes {_millis(step.base_s)}"
        return self._prefill(g, prefillers - 1)

    def _getter(self, g: GroupMeasures, role: Role) -> float:
        """The ratio of the side that gets one, by prediction."""
        prefillers, decoders = _sizes(g)
        if role is Role.DECODE:
            return self._decode(g, decoders + 1).ratio
        return self._prefill(g, prefillers + 1).ratio if prefillers else 0.0

    def _allowed(self, pressed: float) -> float:
        """How far the giving side may go so that the pressed one gets a worker."""
        c = self.config
        return min(c.most, max(c.low, c.gain * pressed))

    # Who goes.

    def _choose(self, g: GroupMeasures, role: Role, now: float) -> Move | None:
        """The one with the least to do and the least worth in its cache; tokens count alike."""
        pool = g.pool(*((Role.DECODE, Role.BOTH) if role is Role.PREFILL else (Role.PREFILL,)))
        able = [w for w in pool if w.movable and self._refused.get(w.info.id, -inf) <= now]
        if len(pool) < 2 or not able:
            return None
        return Move(min(able, key=lambda w: (w.active_tokens + w.hit_tokens, w.info.id)), role)

    def _figures(self, g: GroupMeasures, pressure: _Pressure) -> dict[str, float]:
        prefillers, decoders = _sizes(g)
        quantile = self.targets.quantile
        figures = {
            "prefill_workers": prefillers,
            "decode_workers": decoders,
            "prefill_pressure": min(_SHOWN, pressure.prefill.ratio),
            "decode_pressure": min(_SHOWN, pressure.decode.ratio),
            "ttft_kept": g.ttft.share,
            "itl_kept": g.itl.share,
            "pending_tokens": g.prefill.pending,
            "prefill_rate": g.prefill.rate,
            "demand_tokens_s": g.prefill.demand,
            "predicted_wait_s": predict.drain_s(g.prefill, prefillers or decoders),
            "predicted_ttft_s": predict.ttft_s(g.prefill, prefillers or decoders, quantile),
            "decoding": g.decode.batch,
            "predicted_itl_s": predict.itl_s(g.decode, decoders),
        }
        return {k: float(v) for k, v in figures.items() if v is not None and isfinite(v)}

    def check_invariants(self) -> None:
        """Raises AssertionError when what is remembered can't be."""
        assert all(1 <= count <= self.config.hold for _, count in self._streaks.values())
        assert len(self._refused) <= _REFUSALS_KEPT


def _sizes(g: GroupMeasures) -> tuple[int, int]:
    """Living workers that prefill, and that can decode."""
    return len(g.pool(Role.PREFILL)), len(g.pool(Role.DECODE, Role.BOTH))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if isfinite(value) else "for ever"


def _millis(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if isfinite(value) else "for ever"


def _times(value: float) -> str:
    return f"{value:.2f}" if isfinite(value) else "far more than all"
