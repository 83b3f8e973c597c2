"""How long a step of the simulated engine takes. Seconds; pure numbers from a profile.

    step = overhead + max(weights, tokens x token) + pairs x pair
         + sequences x sequence + kv_tokens x kv_token

A step reads all weights once or computes its tokens, whichever takes longer: the roofline of a
matrix product. To that comes attention: of prompt chunks by pairs (each new token with each token
before it), of decodes by the KV that they read. What is left is a constant, and a price for each
sequence (sampling, scheduling).

KV that comes from another engine takes no step's time, but its own: latency + tokens x token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

TRANSFER_BYTES_PER_S = 12.5e9
"""Of a network of 100 Gbit/s, all of which NIXL reaches: an assumption."""
TRANSFER_LATENCY_S = 0.002
"""Asking for a transfer and hearing of its end: an assumption."""
_TOKEN_BYTES = 131_072
"""KV of a token when a profile doesn't say: that of Llama 3.1 8B in 16 bits."""


@dataclass(frozen=True, slots=True)
class TimingProfile:
    """What a step costs on one kind of machine with one model. All figures in seconds."""

    name: str
    """Short, for people: it shows in the model card."""
    source: str
    """Where the figures come from: measured how, or computed from what."""
    token_s: float
    """A token through the network, when there are many."""
    weights_s: float = 0.0
    """Reading all weights once."""
    pair_s: float = 0.0
    """Attention of one prompt token to one token before it."""
    sequence_s: float = 0.0
    """A sequence in a step, beside its tokens."""
    kv_token_s: float = 0.0
    """Reading one token's KV, for a decode."""
    overhead_s: float = 0.0
    """A step, whatever is in it."""
    transfer_token_s: float = _TOKEN_BYTES / TRANSFER_BYTES_PER_S
    """Bringing a token's KV from another engine."""
    transfer_latency_s: float = TRANSFER_LATENCY_S
    """A transfer, however short."""

    def __post_init__(self) -> None:
        for name, value in self.figures().items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a number of seconds from 0 on")
        if self.token_s + self.weights_s + self.overhead_s <= 0:
            raise ValueError(
                "token_s, weights_s and overhead_s are all 0: steps would take no time"
            )

    def figures(self) -> dict[str, float]:
        """The figures by name."""
        return {k: v for k, v in asdict(self).items() if k.endswith("_s")}

    def step_s(self, tokens: int, pairs: float, sequences: int, kv_tokens: float) -> float:
        """Length of a step.

        tokens     all that go through the network, decodes included
        pairs      of prompt chunks: the sum over new tokens of tokens before each
        sequences  requests in the step
        kv_tokens  of decodes: the sum of their contexts
        """
        return (
            self.overhead_s
            + max(self.weights_s, tokens * self.token_s)
            + pairs * self.pair_s
            + sequences * self.sequence_s
            + kv_tokens * self.kv_token_s
        )

    def prefill_s(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Time of a prompt alone, computed in one step."""
        new = max(1, prompt_tokens - cached_tokens)
        return self.step_s(new, new * (prompt_tokens - new / 2), 1, 0)

    def scaled(self, factor: float) -> TimingProfile:
        """The profile of a machine that takes `factor` times as long for everything."""
        scaled = {k: v * factor for k, v in self.figures().items()}
        return TimingProfile(self.name, self.source, **scaled)


def profile_from(table: Mapping[str, object]) -> TimingProfile:
    """A profile from a table of its fields, as read from a file.

    Raises ValueError, naming the field, for one that is missing, unknown or no number.
    """
    known = {f.name for f in fields(TimingProfile)}
    if unknown := sorted(set(table) - known):
        raise ValueError(f"unknown: {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if missing := sorted({"name", "source", "token_s"} - set(table)):
        raise ValueError(f"missing: {', '.join(missing)}")
    numbers: dict[str, float] = {}
    for name, value in table.items():
        if name in ("name", "source"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}; it must be a number of seconds")
        numbers[name] = float(value)
    return TimingProfile(str(table["name"]), str(table["source"]), **numbers)
