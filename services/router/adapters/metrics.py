"""The router's Prometheus metrics. Labels are policies, results, states and verdicts only."""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.events.model import Tier
from services.common.events.subscriber import FollowStats
from services.router.core.answers import (
    IndexStats,
    NodeSnapshot,
    Outcome,
    Report,
    Transfer,
    TransferResult,
)
from services.router.core.lives import Status

_DECISION_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
_WAIT_S = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_TRANSFER_S = (0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_DIFFERENCE_TOKENS = (0, 1, 16, 32, 64, 128, 256, 512, 1024, 4096)
_ALARM_WINDOW = 200
"""Last outcomes that the alarm looks at."""
_ALARM_SHARE = 0.05
"""The alarm goes off when predictions are wrong by more than this share of the prompt tokens."""
_ALARM_FEWEST = 20


class RouterMetrics:
    """All figures of one router. Updated in the loop's thread; scraped from another."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"forebay_router_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"forebay_router_{name}", text, labels, registry=registry)

        self._decisions = counter("decisions", "Placements asked for.", "policy", "result")
        self._decision_s = Histogram(
            "forebay_router_decision_seconds",
            "Time one decision took.",
            buckets=_DECISION_S,
            registry=registry,
        )
        self._blocks = gauge("index_blocks", "Different block keys in the index.")
        self._entries = gauge("index_entries", "Blocks times holders in the index.")
        self._capacity = gauge("index_capacity_entries", "Most G1 entries that holders may have.")
        self._refused = counter("index_refused_entries", "Entries beyond their holder's capacity.")
        self._events = counter("events", "Events applied.")
        self._unknown = counter("unknown_events", "Events of unknown kind, tier or rank.")
        self._gaps = counter("event_gaps", "Holes in event streams.")
        self._epochs = counter("event_epochs", "New lives of publishers seen on their streams.")
        self._snapshots = counter("snapshots", "Snapshots taken.")
        self._failed = counter("failed_snapshots", "Snapshots that could not be had.")
        self._overflows = counter("event_overflows", "Buffers overrun while waiting.")
        self._duplicates = counter("duplicate_batches", "Batches that were known already.")
        self._drifts = counter(
            "index_drifts", "Publishers' digests that differed from the index; then a snapshot."
        )
        self._lies = counter("event_lies", "Streams that contradicted their publisher's snapshot.")
        self._workers = gauge("workers", "Workers by state.", "state")
        self._nodes = gauge("kvbm_daemons", "Known kvbm daemons by state.", "state")
        self._tier_blocks = gauge("tier_blocks", "Blocks of all daemons by tier.", "tier")
        self._tier_entries = gauge("tier_entries", "Blocks times daemons, below G1.")
        self._tier_capacity = gauge("tier_capacity_entries", "Most entries daemons may have.")
        self._tier_refused = counter("tier_refused_entries", "Entries beyond that.")
        self._prefetches = counter("prefetch_hints", "Hints to kvbm daemons.", "result")
        self._waiting = gauge("waiting_requests", "Requests that wait at the router for room.")
        self._waiting_tokens = gauge("waiting_tokens", "Their prompt tokens.")
        self._waits = Histogram(
            "forebay_router_wait_seconds",
            "Waits at the router that were answered: placed, refused, expired, displaced.",
            ("result",),
            buckets=_WAIT_S,
            registry=registry,
        )
        self._cancelled = counter("cancelled_waits", "Waits that their client gave up.")
        self._overloads = counter(
            "overload_refusals",
            "Refused because of the wait, by class of tenant: none, light, heavy (it has more than "
            "its share of what waits).",
            "tenant_class",
        )
        self._streams = gauge("gateway_streams", "RouteStreams that are open.")
        self._bookings = gauge("bookings", "Placements that no event has confirmed; 0 at idle.")
        self._expired = counter("expired_bookings", "Placements that nothing confirmed in time.")
        self._discovery = gauge("discovery_connected", "1 while etcd answers.")
        self._predicted = counter("predicted_cached_tokens", "Of finished own placements.")
        self._actual = counter("actual_cached_tokens", "Of finished own placements.")
        self._prompt = counter("placed_prompt_tokens", "Of finished own placements.")
        self._difference = Histogram(
            "forebay_router_cached_tokens_difference",
            "Predicted against actual cached tokens of a placement, absolute.",
            buckets=_DIFFERENCE_TOKENS,
            registry=registry,
        )
        self._alarm = gauge(
            "prediction_alarm",
            f"1 when predictions for the last {_ALARM_WINDOW} placements were wrong by more than "
            f"{_ALARM_SHARE:.0%} of their prompt tokens.",
        )
        self._paths = counter(
            "placements",
            "By path: whole on one worker, or prefill and decode apart.",
            "path",
        )
        self._transfers = counter(
            "transfers",
            "Of KV between workers, told by those that were to get it, whoever decided them: came, "
            "failed, missed (planned here, but the request came without).",
            "result",
        )
        self._transfer_tokens = counter("transfer_tokens", "Prompt tokens whose KV came.")
        self._transfer_bytes = counter("transfer_bytes", "Bytes of KV that came.")
        self._transfer_s = Histogram(
            "forebay_router_transfer_seconds",
            "Transfers that came, from the first read to the last check.",
            buckets=_TRANSFER_S,
            registry=registry,
        )
        self._planned_tokens = counter(
            "planned_transfer_tokens",
            "Prompt tokens whose KV placements of this router let travel.",
        )
        self._predicted_s = counter(
            "predicted_transfer_seconds", "Of those of this router's transfers that came."
        )
        self._actual_s = counter(
            "actual_transfer_seconds", "Of those of this router's transfers that came."
        )
        for path in ("whole", "apart"):
            self._paths.labels(path)
        for result in TransferResult:
            self._transfers.labels(result.value)
        for status in Status:
            self._workers.labels(status.value).set(0)
            self._nodes.labels(status.value).set(0)
        self._last: dict[str, float] = {}
        self._results: dict[tuple[str, str], Counter] = {}
        self._window: deque[tuple[int, int]] = deque(maxlen=_ALARM_WINDOW)

    def decided(self, policy: str, result: str, seconds: float) -> None:
        """A placement was asked for; `result` is "placed" or the reason why not."""
        counter = self._results.get((policy, result))
        if counter is None:
            # Looking up a child by its labels costs more than counting.
            counter = self._results[policy, result] = self._decisions.labels(policy, result)
        counter.inc()
        self._decision_s.observe(seconds)

    def placed(self, transfer_tokens: int | None) -> None:
        """A request was placed, apart if KV is to travel."""
        self._paths.labels("whole" if transfer_tokens is None else "apart").inc()
        self._planned_tokens.inc(transfer_tokens or 0)

    def waited(self, result: str, seconds: float) -> None:
        """A request's wait ended: placed, refused, expired, displaced."""
        self._waits.labels(result).observe(seconds)

    def cancelled(self) -> None:
        """Nobody waits for a request any more."""
        self._cancelled.inc()

    def overloaded(self, tenant: str, heavy: bool) -> None:
        """A request was refused because of the wait."""
        self._overloads.labels(("heavy" if heavy else "light") if tenant else "none").inc()

    def waiting(self, requests: int, tokens: int) -> None:
        """So many wait now."""
        self._waiting.set(requests)
        self._waiting_tokens.set(tokens)

    def stream(self, change: int) -> None:
        """A gateway's stream opened (1) or ended (-1)."""
        self._streams.inc(change)

    def prefetched(self, result: str) -> None:
        """A hint to a kvbm daemon was "sent", "failed" or "dropped"."""
        self._prefetches.labels(result).inc()

    def report(self, report: Report) -> None:
        """Something that was decided before, here or elsewhere, came to its end."""
        match report:
            case Outcome():
                self.outcome(report)
            case Transfer():
                self.transfer(report)

    def transfer(self, transfer: Transfer) -> None:
        """KV went from one worker to another, or did not."""
        self._transfers.labels(transfer.result.value).inc()
        if transfer.result is not TransferResult.CAME:
            return
        self._transfer_tokens.inc(transfer.tokens)
        self._transfer_bytes.inc(transfer.bytes)
        self._transfer_s.observe(transfer.seconds)
        if transfer.predicted_s is not None:
            self._predicted_s.inc(transfer.predicted_s)
            self._actual_s.inc(max(0.0, transfer.seconds))

    def outcome(self, outcome: Outcome) -> None:
        """A placement of ours finished."""
        difference = abs(outcome.predicted_cached_tokens - outcome.cached_tokens)
        self._predicted.inc(outcome.predicted_cached_tokens)
        self._actual.inc(outcome.cached_tokens)
        self._prompt.inc(outcome.prompt_tokens)
        self._difference.observe(difference)
        self._window.append((difference, outcome.prompt_tokens))
        wrong = sum(d for d, _ in self._window)
        asked = sum(p for _, p in self._window)
        off = len(self._window) >= _ALARM_FEWEST and wrong > asked * _ALARM_SHARE
        self._alarm.set(1 if off else 0)

    def observe(
        self,
        index: IndexStats,
        streams: FollowStats,
        workers: Iterable[Status],
        nodes: Sequence[NodeSnapshot],
        bookings: int,
        expired: int,
        connected: bool,
    ) -> None:
        """Takes over figures that are kept elsewhere."""
        self._blocks.set(index.blocks)
        self._entries.set(index.entries)
        self._capacity.set(index.capacity_entries)
        self._bookings.set(bookings)
        self._tier_entries.set(index.tier_entries)
        self._tier_capacity.set(index.tier_capacity_entries)
        self._discovery.set(1 if connected else 0)
        for name, metric, value in (
            ("refused", self._refused, index.refused_entries),
            ("tier refused", self._tier_refused, index.tier_refused_entries),
            ("events", self._events, index.events),
            ("unknown", self._unknown, index.unknown_events),
            ("gaps", self._gaps, streams.gaps),
            ("epochs", self._epochs, streams.epochs),
            ("snapshots", self._snapshots, streams.snapshots),
            ("failed", self._failed, streams.failed_snapshots),
            ("overflows", self._overflows, streams.overflows),
            ("duplicates", self._duplicates, streams.duplicates),
            ("expired", self._expired, expired),
            ("drifts", self._drifts, index.drifts),
            ("lies", self._lies, streams.lies),
        ):
            metric.inc(value - self._last.get(name, 0))
            self._last[name] = value
        for gauge, counts in (
            (self._workers, Tally(workers)),
            (self._nodes, Tally(node.status for node in nodes)),
        ):
            for status in Status:
                gauge.labels(status.value).set(counts[status])
        blocks: Tally[Tier] = Tally()
        for node in nodes:
            for view in node.tiers:
                blocks[view.tier] += view.digest.blocks
        for tier in (Tier.G2, Tier.G3, Tier.G4):
            self._tier_blocks.labels(tier.name).set(blocks[tier])
