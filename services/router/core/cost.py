"""The score in seconds: what a placement costs the request and those around it. Lower is better.

    score = queue + prefill x (1 + own_weight) + onboard + imposed

queue    prompt tokens ahead / prefill rate
prefill  uncached tokens / prefill rate x (1 + mean context / context_tokens), as attention grows
onboard  bringing up blocks of lower tiers (onboard.py), never more than computing them
imposed  decodes x decode delay                       the running decodes that this prefill holds up
         + space_weight x active tokens / rate        the worth of what must leave the cache
         + crowd_weight x mates x prompt / rate       the crowd on one copy of a prefix

own_weight: recomputing costs the cluster, not only this request. Without a price on space, popular
prefixes concentrate. The crowd price makes further copies of a hot prefix: `mates` requests in
flight that share the prompt would share the cost of a copy, too.
"""

from __future__ import annotations

from dataclasses import dataclass

# Candidates and scores are made for each worker in each decision, and treated as values. Freezing
# them would cost as much as the rest of a decision.


@dataclass(slots=True)
class Candidate:
    """What is known of one worker for one request. Tokens throughout; rates in tokens a second."""

    slot: int
    prompt_tokens: int
    g1_tokens: int
    """Usable from G1, with what requests ahead of this one bring there."""
    g2_tokens: int
    g3_tokens: int
    g4_tokens: int
    mates: float
    """Requests in flight there that share the prompt (half of it counts half)."""
    active_requests: int
    decoding: int
    queued_tokens: int
    active_tokens: int
    prefill_rate: float
    decode_delay_s: float
    onboard_s: float = 0.0
    """Seconds to bring up what is usable from lower tiers."""

    @property
    def lower_tokens(self) -> int:
        """Usable from tiers below G1."""
        return self.g2_tokens + self.g3_tokens + self.g4_tokens

    @property
    def uncached_tokens(self) -> int:
        """Tokens that the engine would have to compute."""
        return self.prompt_tokens - self.g1_tokens - self.lower_tokens


@dataclass(slots=True)
class Score:
    """A score and its parts, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    onboard_s: float = 0.0
    imposed_s: float = 0.0
    total_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.prefill_s + self.onboard_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """The weights; pure numbers unless said otherwise, so that they fit any hardware."""

    own_weight: float = 1.0
    """How much more than once a request's own recompute counts."""
    context_tokens: float = 65536.0
    """Context at which attention costs as much as everything else of a prefill, in tokens."""
    space_weight: float = 0.03
    """Price of a token of space in use, as a share of computing it."""
    crowd_weight: float = 0.25
    """Price of each mate, as a share of computing the prompt."""

    def score(self, c: Candidate) -> Score:
        """The score of one candidate."""
        rate = c.prefill_rate
        uncached = c.uncached_tokens
        queue = c.queued_tokens / rate
        context = c.prompt_tokens - uncached / 2
        prefill = uncached * (1 + context / self.context_tokens) / rate
        onboard = min(c.onboard_s, c.lower_tokens / rate)
        imposed = (
            c.decoding * c.decode_delay_s
            + self.space_weight * c.active_tokens / rate
            + self.crowd_weight * c.mates * c.prompt_tokens / rate
        )
        total = queue + prefill * (1 + self.own_weight) + onboard + imposed
        return Score(queue, prefill, onboard, imposed, total)
