"""The daemon's Prometheus metrics: the names that KVBM dashboards know, and our fuller ones.

Labels are tiers, directions, results and causes only; never tenants, namespaces or keys.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from services.common.events.model import Tier
from services.kvbm.core.gate import Source, TierRate

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_TIER_WORDS = {Tier.G2: "host", Tier.G3: "disk", Tier.G4: "object"}


_FAMILIAR = {
    "offload_blocks_d2h": "Blocks saved from engines into host memory.",
    "offload_blocks_h2d": "Blocks written from host memory to disk.",
    "offload_blocks_d2d": "Blocks written from engines to disk directly: none.",
    "offload_blocks_d2o": "Blocks written to remote storage.",
    "onboard_blocks_h2d": "Blocks loaded from host memory into engines.",
    "onboard_blocks_d2d": "Blocks brought from disk for an engine.",
    "onboard_blocks_o2d": "Blocks brought from remote storage for an engine.",
    "matched_tokens": "Tokens of prompts that look-ups found and leased.",
}


class _Familiar(Collector):
    """Counters under the bare names that dashboards ask for; a Counter would add `_total`."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """All of them, from the start on."""
        for name, text in _FAMILIAR.items():
            metric = Metric(f"kvbm_{name}", text, "unknown")
            metric.add_sample(f"kvbm_{name}", {}, self._counts[name])
            yield metric


class KvbmMetrics:
    """All figures of one daemon. Updated in the loop's thread; scraped from another.

    `counts` mirrors the counters by name, for `Stats`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.counts: Tally[str] = Tally()
        self._looked: Tally[Tier] = Tally()
        self._found: Tally[Tier] = Tally()

        def counter(name: str, text: str, *labels: str, prefix: str = "forebay_kvbm_") -> Counter:
            return Counter(f"{prefix}{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str, prefix: str = "forebay_kvbm_") -> Gauge:
            return Gauge(f"{prefix}{name}", text, labels, registry=registry)

        registry.register(_Familiar(self.counts))
        familiar = "kvbm_"
        self._rate = {
            tier: gauge(f"{word}_cache_hit_rate", "Share of looked-up blocks.", prefix=familiar)
            for tier, word in _TIER_WORDS.items()
        }
        self._bytes = counter("moved_bytes", "Bytes moved.", "source", "target")
        self._seconds = Histogram(
            "forebay_kvbm_move_seconds",
            "Time of one batch.",
            ("source", "target"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._failures = counter("failures", "Blocks that could not be moved.", "tier", "cause")
        self._corrupt = counter("corrupt_blocks", "Blocks whose bytes were bad.", "tier")
        self._commits = counter("commits", "Committed slots.", "result")
        self._lookups = counter("lookups", "Look-ups.", "reason")
        self._lookup_s = Histogram(
            "forebay_kvbm_lookup_seconds",
            "Time of one look-up.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._gate = counter("gate_decisions", "Verdicts on look-ups.", "tier", "verdict")
        self._leases_ended = counter("ended_leases", "Leases that ended.", "how")
        self._scrubbed = counter("scrubbed_blocks", "Blocks verified in the background.", "tier")
        self._evicted = counter("evicted_blocks", "Blocks that left a tier.", "tier")
        self._blocks = gauge("blocks", "Blocks stored.", "tier")
        self._used = gauge("used_bytes", "Bytes stored.", "tier")
        self._capacity = gauge("capacity_bytes", "Bytes it may store.", "tier")
        self._quarantined = gauge(
            "quarantined_slots", "Slots whose last operation's end is unknown."
        )
        self._leases = gauge("leases", "Leases held; 0 at rest.")
        self._pins = gauge("pins", "Pins held.")
        self._granted = gauge("granted_slots", "Slots that engines may fill.")
        self._engines = gauge("engines", "Engines attached.")
        self._healthy = gauge("tier_healthy", "1 while a tier stores.", "tier")
        self._budget = gauge("write_budget_bytes", "Bytes that may be written now.", "tier")
        self._peer_fetches = counter("peer_fetches", "Fetches from peers.", "result")
        self._peer_asks = counter("peer_asks", "Questions to peers.", "result")
        self._peer_blocks = counter("peer_blocks", "Blocks from peers and to them.", "way")
        self._peer_bytes = counter("peer_bytes", "Bytes from peers and to them.", "way")
        self._peer_fetch_s = Histogram(
            "forebay_kvbm_peer_fetch_seconds",
            "Time of one fetch.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._peer_fence_s = Histogram(
            "forebay_kvbm_peer_fence_seconds",
            "Time until an agent that was ended was dead.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._peer_fetching = gauge("peer_fetching", "Fetches under way; 0 at rest.")
        self._peer_exports = gauge("peer_exports", "Exports that haven't ended; 0 at rest.")
        self._peer_window = gauge("peer_window_used_bytes", "Bytes that exports take; 0 at rest.")
        self._peer_quarantined = gauge(
            "peer_quarantined_slots", "Slots that a read may still write into; 0 at rest."
        )
        self._peer_agents = gauge("peer_agents", "Agents that read from peers.")
        self._peers = gauge("peers", "Other daemons known.")
        self._block_s = gauge("gate_block_seconds", "Measured time of a block.", "tier")
        self._latency_s = gauge("gate_latency_seconds", "Measured time to the first block.", "tier")

    def count(self, name: str, blocks: int = 1) -> None:
        """One of the familiar counters."""
        self.counts[name] += blocks

    def moved(self, source: Tier, target: Tier, size: int, seconds: float) -> None:
        """A batch of bytes was moved."""
        self._bytes.labels(source.name, target.name).inc(size)
        self._seconds.labels(source.name, target.name).observe(seconds)
        self.counts[f"moved_bytes_{source.name}_{target.name}".lower()] += size

    def failed(self, tier: Tier, cause: str, blocks: int = 1) -> None:
        """Blocks could not be moved to or from a tier."""
        word = cause.split(":")[0][:40]
        self._failures.labels(tier.name, word).inc(blocks)
        self.counts[f"failures_{tier.name}".lower()] += blocks

    def corrupt(self, tier: Tier, blocks: int = 1) -> None:
        """Bad bytes were found, and not served."""
        self._corrupt.labels(tier.name).inc(blocks)
        self.counts["corrupt_blocks"] += blocks
        self.counts[f"corrupt_blocks_{tier.name}".lower()] += blocks

    def committed(self, result: str) -> None:
        """A slot was committed."""
        self._commits.labels(result).inc()
        self.counts[f"commits_{result}"] += 1

    def looked_up(
        self, asked: int, found: Mapping[Source, int], reason: str, seconds: float
    ) -> None:
        """A look-up for `asked` blocks was answered; `found` counts them by what they
        would come from."""
        self._lookups.labels(reason or "all").inc()
        self._lookup_s.observe(seconds)
        self.counts["lookups"] += 1
        left = asked
        for tier in _TIER_WORDS:
            self._looked[tier] += left
            self._found[tier] += found.get(tier, 0)
            left -= found.get(tier, 0)
            if self._looked[tier]:
                self._rate[tier].set(self._found[tier] / self._looked[tier])

    def gate(self, tier: Tier, taken: bool) -> None:
        """The gate's verdict on a tier in one look-up."""
        verdict = "taken" if taken else "refused"
        self._gate.labels(tier.name, verdict).inc()
        self.counts[f"gate_{verdict}"] += 1

    def lease_ended(self, how: str, leases: int = 1) -> None:
        """Leases were released, or expired."""
        if leases:
            self._leases_ended.labels(how).inc(leases)
            self.counts[f"leases_{how}"] += leases

    def scrubbed(self, tier: Tier, blocks: int) -> None:
        """Blocks were verified in the background."""
        self._scrubbed.labels(tier.name).inc(blocks)
        self.counts["scrubbed_blocks"] += blocks

    def evicted(self, tier: Tier, blocks: int) -> None:
        """Blocks left a tier."""
        self._evicted.labels(tier.name).inc(blocks)
        self.counts[f"removed_blocks_{tier.name}".lower()] += blocks

    def occupancy(self, tier: Tier, blocks: int, used: int, capacity: int, healthy: bool) -> None:
        """What a tier holds now."""
        self._blocks.labels(tier.name).set(blocks)
        self._used.labels(tier.name).set(used)
        self._capacity.labels(tier.name).set(capacity)
        self._healthy.labels(tier.name).set(healthy)

    def peer_fetched(self, result: str) -> None:
        """A fetch from a peer is over."""
        self._peer_fetches.labels(result[:40]).inc()
        self.counts["peer_fetches"] += 1
        self.counts[f"peer_fetches_{result[:40]}".replace("-", "_")] += 1

    def peer_asked(self, result: str) -> None:
        """Peers were asked for blocks."""
        self._peer_asks.labels(result).inc()
        self.counts[f"peer_asks_{result}"] += 1

    def peer_moved(self, way: str, blocks: int, size: int, seconds: float | None = None) -> None:
        """Blocks came "in" from a peer, by a fetch of so many seconds; or went "out"."""
        self._peer_blocks.labels(way).inc(blocks)
        self._peer_bytes.labels(way).inc(size)
        self.counts[f"peer_blocks_{way}"] += blocks
        if seconds is not None:
            self._peer_fetch_s.observe(seconds)

    def peer_fenced(self, seconds: float) -> None:
        """An agent was ended."""
        self._peer_fence_s.observe(seconds)
        self.counts["peer_fences"] += 1

    def peer_holdings(
        self, fetching: int, exports: int, window: int, quarantined: int, agents: int, peers: int
    ) -> None:
        """What is held now of peers, and for them."""
        self._peer_fetching.set(fetching)
        self._peer_exports.set(exports)
        self._peer_window.set(window)
        self._peer_quarantined.set(quarantined)
        self._peer_agents.set(agents)
        self._peers.set(peers)

    def holdings(
        self, leases: int, pins: int, granted: int, quarantined: int, engines: int
    ) -> None:
        """What is held now, over all namespaces."""
        self._leases.set(leases)
        self._pins.set(pins)
        self._granted.set(granted)
        self._quarantined.set(quarantined)
        self._engines.set(engines)

    def budget(self, tier: Tier, left: float) -> None:
        """What may be written to a tier now."""
        self._budget.labels(tier.name).set(left)

    def rates(self, rates: Mapping[Tier, TierRate]) -> None:
        """What the gate has learned."""
        for tier, rate in rates.items():
            self._block_s.labels(tier.name).set(rate.block_s)
            self._latency_s.labels(tier.name).set(rate.latency_s)
