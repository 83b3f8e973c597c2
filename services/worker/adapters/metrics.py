"""The worker's Prometheus figures."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.events.model import LoadReport
from services.worker.core.model import FinishReason
from services.worker.engines.port import TierNews

_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_LOOKUP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class WorkerMetrics:
    """All figures of one worker. Labels are bounded words."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"forebay_worker_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"forebay_worker_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"forebay_worker_{name}", text, buckets=buckets, registry=registry)

        rank = ("dp_rank",)
        self._running = gauge("running_requests", "Requests in the engine's batch.", rank)
        self._waiting = gauge("waiting_requests", "Requests that wait for the batch.", rank)
        self._pending = gauge("pending_prefill_tokens", "Prompt tokens to be computed.", rank)
        self._usage = gauge("kv_usage_ratio", "Share of KV blocks that requests use.", rank)
        self.requests = gauge("requests", "Requests admitted and not finished.")
        self.sessions = gauge("sessions", "Open sessions of gateways.")
        self.blocks = gauge("cached_blocks", "KV blocks that a prefix can hit.")
        self.serving = gauge("serving", "1 when new requests are taken.")
        self.stuck = gauge("engine_stuck", "1 when the watchdog sees no progress.")
        self.admitted = counter("admitted_total", "Requests that the engine took.")
        self.refused = counter("refused_total", "Requests refused, by reason.", ("reason",))
        self.finished = counter("finished_total", "Requests that ended, by reason.", ("reason",))
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of first outputs.")
        self.cached_tokens = counter("cached_tokens_total", "... of them not computed.")
        self.output_tokens = counter("output_tokens_total", "Tokens produced.")
        self.unknown_drops = gauge("unknown_block_drops", "Block removals that made no sense.")
        self.steps = histogram("step_seconds", "Duration of engine steps.", _STEP_BUCKETS)
        self.queue = histogram("queue_seconds", "Wait until first scheduled.", _WAIT_BUCKETS)
        self.first_token = histogram(
            "first_token_seconds", "From receipt to first token.", _WAIT_BUCKETS
        )
        self.kvbm_lookups = counter("kvbm_lookups_total", "Look-ups in kvbm.", ("outcome",))
        self.kvbm_lookup = histogram(
            "kvbm_lookup_seconds", "Answers of kvbm to look-ups.", _LOOKUP_BUCKETS
        )
        self.kvbm_breaker = gauge("kvbm_breaker_open", "1 while kvbm is not asked any more.")
        self.kvbm_attached = gauge(
            "kvbm_attached", "1 while the engine may save into kvbm's arena."
        )
        self.transfers = counter(
            "transfers_total", "KV of other workers' prefills, by result.", ("result",)
        )
        self.transfer_seconds = histogram(
            "transfer_seconds", "Transfers of KV that were taken.", _LOOKUP_BUCKETS
        )
        self.transfer_bytes = counter("transfer_bytes_total", "Bytes of them.")
        self._held = gauge(
            "held_transfers", "Finished prefills whose KV waits to be taken.", ("dp_rank",)
        )
        self._kvbm_blocks = counter("kvbm_blocks_total", "Blocks of the connector.", ("event",))
        self._kvbm_seconds = counter("kvbm_copy_seconds_total", "Seconds copying.", ("direction",))
        self._kvbm_events = counter("kvbm_events_total", "What else it met.", ("event",))
        # Known words show as 0 from the start.
        for reason in FinishReason:
            self.finished.labels(reason)
        for outcome in ("hit", "miss", "unknown", "needless", "timeout", "failed", "breaker"):
            self.kvbm_lookups.labels(outcome)
        for result in ("taken", "failed", "refused"):
            self.transfers.labels(result)
        for event in ("saved", "unsaved", "skipped", "loaded", "failed", "bad"):
            self._kvbm_blocks.labels(event)
        for direction in ("load", "save"):
            self._kvbm_seconds.labels(direction)

    def tiers(self, news: TierNews) -> None:
        """Shows what the connector did."""
        if news.node is not None:
            self.kvbm_attached.set(bool(news.node))
        for name, value in news.counts.items():
            what, _, unit = name.rpartition("_")
            if unit == "blocks":
                self._kvbm_blocks.labels(what).inc(value)
            elif unit == "seconds":
                self._kvbm_seconds.labels(what).inc(value)
            elif name != "prefill_tokens":
                self._kvbm_events.labels(name).inc(value)

    def load(self, report: LoadReport) -> None:
        """Shows a load report."""
        rank = str(report.dp_rank)
        self._running.labels(rank).set(report.running_requests)
        self._waiting.labels(rank).set(report.waiting_requests)
        self._pending.labels(rank).set(report.pending_prefill_tokens)
        self._held.labels(rank).set(report.held_transfers)
        total = report.total_blocks
        self._usage.labels(rank).set(report.used_blocks / total if total else 0.0)
