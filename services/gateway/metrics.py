"""The gateway's figures. Label values are bounded: known paths, served models, worker ids, fixed
words.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 5.0)
_BLOCK_TOKENS = (0.0, 1.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0, 4096.0, 16384.0)


class GatewayMetrics:
    """All metrics of one gateway, in its registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"forebay_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"forebay_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"forebay_gateway_{name}", text, labels, buckets=buckets, registry=registry
            )

        self.requests = counter(
            "requests", "Answered requests; status 499: the client left.", "path", "model", "status"
        )
        self.in_flight = gauge("requests_in_flight", "Requests being served.")
        self.sequences = gauge("sequences_in_flight", "Sequences that run on workers for us.")
        self.streams = gauge("sse_clients", "Clients reading a stream.")
        self.ttft = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _SECONDS, "model"
        )
        self.inter_token = histogram(
            "inter_token_seconds",
            "Between the tokens of a streamed choice.",
            _TOKEN_SECONDS,
            "model",
        )
        self.duration = histogram(
            "request_seconds", "From arrival to the last byte.", _SECONDS, "path", "model"
        )
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of answered requests.", "model"
        )
        self.cached_tokens = counter(
            "cached_tokens", "Prompt tokens that were served from a cache.", "model"
        )
        self.output_tokens = counter("output_tokens", "Tokens produced.", "model")
        self.predicted_cached_tokens = counter(
            "predicted_cached_tokens", "Prompt tokens that routers expected in a cache.", "model"
        )
        self.overpredicted = histogram(
            "cached_tokens_overpredicted",
            "Cached tokens that a router predicted and the engine did not have, of each request.",
            _BLOCK_TOKENS,
            "model",
        )
        self.underpredicted = histogram(
            "cached_tokens_underpredicted",
            "Cached tokens that the engine had and no router predicted, of each request.",
            _BLOCK_TOKENS,
            "model",
        )
        self.migrations = counter(
            "migrations",
            "Sequences that lost their worker: resumed, restarted, unsupported, exhausted.",
            "result",
        )
        self.prefill_legs = counter(
            "prefill_legs",
            "Prompts sent to a worker of their own to be prefilled, by end: done, or why the"
            " decode worker had to compute (unreachable, lost, refused, failed, aborted,"
            " no_handle); invalid: the client's mistake; left: nobody waits for it any more.",
            "result",
        )
        self.prefill_seconds = histogram(
            "prefill_leg_seconds", "From sending a prefill leg to its end.", _SECONDS, "model"
        )
        self.handover_seconds = histogram(
            "handover_seconds",
            "From the end of a prefill leg to the first token of the decode leg.",
            _SECONDS,
            "model",
        )
        self.transfers = counter(
            "transfers",
            "KV of prefill legs that decode workers were told of: used; unused (they computed);"
            " failed (the decode leg ended before its first token).",
            "result",
        )
        self.transferred_tokens = counter(
            "transferred_tokens", "Prompt tokens whose KV came from a prefill worker.", "model"
        )
        self.aborts = counter(
            "aborts", "Requests ended early: client, deadline, shutdown.", "reason"
        )
        self.router_fallback = counter(
            "router_fallback", "Placements made without a router.", "reason"
        )
        self.router_up = gauge("router_connected", "1 while a router's stream is up.")
        self.cards_refused = counter(
            "model_cards_refused", "Workers that must not be used: card, disagree, files.", "reason"
        )
        self.workers_up = gauge("workers_connected", "Workers whose session is up.")
        self.models = gauge("models", "Names that can be served.")
        self.connections = gauge("client_connections", "Open HTTP connections.")
