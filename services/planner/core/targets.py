"""What is to be held: time to first token, inter-token latency, and for which share of requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Targets:
    """Both are kept when at least `quantile` of a model's requests keep each of them."""

    ttft_s: float = 2.0
    """Seconds from a worker's admission of the prompt to the first token."""
    itl_s: float = 0.05
    """Mean seconds between a request's tokens."""
    quantile: float = 0.9
    """Share of requests that shall keep a target, above 0 and below 1."""

    def __post_init__(self) -> None:
        if self.ttft_s <= 0 or self.itl_s <= 0 or not 0 < self.quantile < 1:
            raise ValueError(f"these can't be targets: {self}")
