"""The planner's Prometheus metrics. Labels are models, roles, targets, sides and verdicts only."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.common.cards import Role
from services.common.events.subscriber import FollowStats
from services.planner.core.measures import GroupMeasures
from services.planner.core.policy import Decision

_PRESSURES = {"prefill": "prefill_pressure", "decode": "decode_pressure"}
_PREDICTIONS = {"prefill": "predicted_wait_s", "ttft": "predicted_ttft_s", "itl": "predicted_itl_s"}


class PlannerMetrics:
    """All figures of one planner. Updated in the loop's thread; scraped from another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"forebay_planner_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"forebay_planner_{name}", text, labels, registry=registry)

        self._active = gauge("active", "1 at the one planner that moves workers.")
        self._moves = counter("moves", "Workers moved.", "model", "from", "to")
        self._decisions = counter(
            "decisions",
            "Decisions of the active planner; of those to move: moved, dry_run, failed, lost.",
            "model",
            "verdict",
        )
        self._kept = gauge(
            "target_kept_share",
            "Share of the window's requests that kept a target.",
            "model",
            "target",
        )
        self._latency = gauge(
            "latency_seconds", "Latency that the wanted share did not exceed.", "model", "target"
        )
        self._predicted = gauge(
            "predicted_seconds",
            "Predicted at the present load: wait for prefill, first token, between tokens.",
            "model",
            "of",
        )
        self._pressure = gauge(
            "pressure", "How far a side is from its target; 1: there.", "model", "side"
        )
        self._workers = gauge("workers", "Living workers by role.", "model", "role")
        self._discovery = gauge("discovery_connected", "1 while etcd answers.")
        self._gaps = counter("event_gaps", "Holes in event streams.")
        self._snapshots = counter("snapshots", "Snapshots taken.")
        self._failed = counter("failed_snapshots", "Snapshots that could not be had.")
        self._orphans = counter("orphan_events", "Events about workers or requests not known.")
        self._last: dict[str, float] = {}

    def decided(self, model: str, verdict: str) -> None:
        """A decision was made, and became this."""
        self._decisions.labels(model, verdict).inc()

    def moved(self, model: str, before: Role, after: Role) -> None:
        """A worker took another role."""
        self._moves.labels(model, before.value, after.value).inc()

    def observe(self, active: bool, connected: bool, streams: FollowStats, orphans: int) -> None:
        """Takes over figures that are kept elsewhere."""
        self._active.set(1 if active else 0)
        self._discovery.set(1 if connected else 0)
        for name, metric, value in (
            ("gaps", self._gaps, streams.gaps),
            ("snapshots", self._snapshots, streams.snapshots),
            ("failed", self._failed, streams.failed_snapshots),
            ("orphans", self._orphans, orphans),
        ):
            metric.inc(value - self._last.get(name, 0))
            self._last[name] = value

    def groups(self, seen: Sequence[tuple[GroupMeasures, Decision]]) -> None:
        """What was measured. Of several groups of one model the worst counts, workers add up."""
        kept: dict[tuple[str, str], float] = {}
        worst: dict[Gauge, dict[tuple[str, str], float]] = {
            self._latency: {},
            self._predicted: {},
            self._pressure: {},
        }
        workers: dict[tuple[str, str], float] = {}

        def raise_to(gauge: Gauge, model: str, label: str, value: float | None) -> None:
            if value is not None:
                found = worst[gauge]
                found[model, label] = max(value, found.get((model, label), value))

        for group, decision in seen:
            model = group.key.model
            for target, attained in (("ttft", group.ttft), ("itl", group.itl)):
                if attained.share is not None:
                    before = kept.get((model, target), 1.0)
                    kept[model, target] = min(before, attained.share)
                raise_to(self._latency, model, target, attained.quantile)
            for of, name in _PREDICTIONS.items():
                raise_to(self._predicted, model, of, decision.figures.get(name))
            for side, name in _PRESSURES.items():
                raise_to(self._pressure, model, side, decision.figures.get(name))
            for role in Role:
                key = model, role.value
                workers[key] = workers.get(key, 0) + len(group.pool(role))
        for gauge, values in (
            (self._kept, kept),
            (self._workers, workers),
            *worst.items(),
        ):
            # What isn't measured any more isn't shown any more.
            gauge.clear()
            for labels, value in values.items():
                gauge.labels(*labels).set(value)
