"""The score in seconds: what a placement costs the request and those around it. Lower is better.

    score = queue + prefill + onboard                    the time to first token
          + own_weight x prefill                         computing costs the cluster, too
          + churn_weight x churn x prefill               the worth of what must be evicted
          + decode_tokens x decodes x imposed            the running decodes that it slows down
          + decode_tokens x slower                       its own, which those slow down
          + space_weight x active tokens                 the room that requests there need
          + crowd_weight x mates beyond some x prompt    the crowd on one copy of a prefix
          + repeat_weight x repeats                      what that copy has drawn here lately

queue    what waits ahead, in the worker's own time (rates.py), less what must be done of it by now
prefill  a + b x uncached + c x uncached x context
onboard  bringing up blocks of lower tiers (onboard.py), never more than computing them
churn    by what share the cache is refilled faster than others (churn.py)

Recomputing what another worker holds costs the cluster, not only this request, so it counts more
than once: a request stays with its blocks as long as waiting costs less than that. Blocks evict
others: where caches turn over faster, what leaves would have been of more use. With that price all
caches together forget nearly as one would, and the work spreads evenly by itself. A prefix that
many requests in flight share is worth a further copy: `mates` counts them, each by how much of the
prompt it shares. A few cost nothing: nearly all prompts share a little with somebody. One that
requests share again and again, though never many at once, is worth one as well: `repeats` counts
what they had computed here beyond the worker's share of all work (repeats.py). That never costs
more than the blocks here are worth, so without them it is no reason to go elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_NEVER = float("inf")


@dataclass(slots=True)
class Candidate:
    """What is known of one worker for one request. Tokens and seconds throughout.

    The core keeps one for each slot and writes into it what has changed: making them anew would
    cost more than the rest of a decision. Policies read only.
    """

    slot: int
    prompt_tokens: int = 0
    g1_tokens: int = 0
    """Usable from G1, with what requests ahead of this one bring there."""
    g2_tokens: int = 0
    g3_tokens: int = 0
    g4_tokens: int = 0
    peer_tokens: int = 0
    """Usable from the memory of other nodes."""
    mates: float = 0.0
    """Requests in flight there that share the prompt (half of it counts half)."""
    repeats: float = 0.0
    """Tokens computed here for prompts that share the same prefix, beyond its share of all."""
    onboard_s: float = 0.0
    """Seconds to bring up what is usable from lower tiers."""

    # Load (load.py).
    active_requests: int = 0
    decoding: int = 0
    active_tokens: int = 0
    active_blocks: int = 0
    """Full prompt blocks of all requests booked or in the engine, one at least for each."""
    placements: int = 0
    """So far, by this router."""
    queued_tokens: int = 0
    """Prompt tokens ahead, when events last told."""
    queued_requests: int = 0
    """Whose they are."""
    queued_pairs: float = 0.0
    """Sum of these tokens x the mean context that they attend to."""
    head_tokens: int = 0
    """Those of the first request in the queue, which is under work."""
    head_pairs: float = 0.0
    head_since: float = 0.0
    """Since when it is."""
    told_share: float = 0.0
    """What share of the queue the engine's own report left."""
    fresh_share: float = 0.0
    """What share came after that."""
    told_at: float = _NEVER
    """When that came; infinity: there is none."""

    # Rates (rates.py).
    request_s: float = 0.0
    token_s: float = 1.0
    pair_s: float = 0.0
    sequence_s: float = 0.0
    """A token of all other decodes, by one decode more."""
    kv_s: float = 0.0
    """The same, for each token of its context."""
    churn: float = 0.0
    """By what share its cache is refilled faster than others (negative: slower), within bounds."""

    # What follows from load and rates; `settle` works it out.
    queued_s: float = 0.0
    rest_s: float = 0.0
    """Without the head."""
    free_at: float = 0.0
    """When the queue is done, if the head takes as long as expected."""
    told_free_at: float = _NEVER
    """When all that the engine's report left, and what came after it, is done."""
    fresh_s: float = 0.0
    """What came after the report."""
    line: tuple[float, float, float] | None = None
    """What a cost model makes of load and rates (CostModel.line), until they change."""

    @property
    def lower_tokens(self) -> int:
        """Usable from tiers below G1."""
        return self.g2_tokens + self.g3_tokens + self.g4_tokens + self.peer_tokens

    @property
    def uncached_tokens(self) -> int:
        """Tokens that the engine would have to compute."""
        return self.prompt_tokens - self.g1_tokens - self.lower_tokens

    @property
    def prefill_rate(self) -> float:
        """Tokens a second, without context."""
        return 1 / self.token_s

    @property
    def prefill_s(self) -> float:
        """Seconds to compute the uncached tokens."""
        uncached = self.uncached_tokens
        context = self.prompt_tokens - uncached / 2
        return self.request_s + uncached * (self.token_s + self.pair_s * context)

    def settle(self) -> None:
        """Works out the queue's seconds anew; to be called when load or rates have changed."""
        self.line = None
        total = self.rest_s = self.queued_s = (
            self.request_s * self.queued_requests
            + self.token_s * self.queued_tokens
            + self.pair_s * self.queued_pairs
        )
        self.free_at = 0.0
        if self.head_tokens:
            head = self.request_s + self.token_s * self.head_tokens + self.pair_s * self.head_pairs
            self.rest_s = max(0.0, total - head)
            self.free_at = self.head_since + total
        self.fresh_s = total * self.fresh_share
        self.told_free_at = self.told_at + total * self.told_share + self.fresh_s

    def load_s(self) -> float:
        """Seconds to bring up what is usable from lower tiers, never more than computing it."""
        return min(self.onboard_s, self.lower_tokens * self.token_s)

    def queue_s(self, now: float) -> float:
        """Seconds until a new request's turn comes.

        Two counts hold, and the lesser is nearer: that of the requests known to be there, of which
        the first may be late, but not over; and what the engine's own report left.
        """
        left = self.free_at - now
        if left < self.rest_s:
            left = self.rest_s
        told = self.told_free_at - now
        if told < self.fresh_s:
            told = self.fresh_s
        return told if told < left else left

    def ahead_tokens(self, now: float) -> float:
        """Tokens that are still to be computed before a new request's."""
        if self.queued_s <= 0:
            return 0.0
        return self.queued_tokens * min(1.0, self.queue_s(now) / self.queued_s)


@dataclass(slots=True)
class Score:
    """A score and its parts, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    onboard_s: float = 0.0
    imposed_s: float = 0.0
    """All that it costs others, and its own decode."""
    total_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Predicted time to the first token."""
        return self.queue_s + self.prefill_s + self.onboard_s


@dataclass(frozen=True, slots=True)
class CostModel:
    """The weights; pure numbers unless said otherwise, so that they fit any hardware."""

    own_weight: float = 2.0
    """How much more than once a request's own recompute counts."""
    churn_weight: float = 3.0
    """Price of computing where the cache is refilled twice as fast as others, as a share of it."""
    most_churn: float = 0.3
    """Churn counts up to this much more or less than others'."""
    space_weight: float = 0.009
    """Price of a token of space in use, as a share of computing it."""
    crowd_weight: float = 1.0
    """Price of each mate beyond `free_mates`, as a share of computing the prompt."""
    free_mates: float = 6.0
    """So many requests in flight may share a copy of the prompt for nothing."""
    repeat_weight: float = 2.0
    """Price of a token of `repeats`, as a share of computing it."""
    decode_tokens: float = 16.0
    """Tokens for which decodes count that slow each other down."""

    def totals(self, candidates: Sequence[Candidate], now: float) -> list[float]:
        """`total` of each candidate."""
        return [self.total(c, now) for c in candidates]

    def decode_s(self, c: Candidate) -> float:
        """What it costs to decode a prompt there that comes computed: of the score, all that has
        nothing to do with prefill.
        """
        return (
            self.decode_tokens * c.decoding * (c.sequence_s + c.kv_s * c.prompt_tokens)
            + self.decode_tokens * (c.decoding * c.sequence_s + c.active_tokens * c.kv_s)
            + self.space_weight * c.active_tokens * c.token_s
        )

    def weight(self, c: Candidate) -> float:
        """How much a second of computing counts there."""
        return 1 + self.own_weight + self.churn_weight * c.churn

    def line(self, c: Candidate) -> tuple[float, float, float]:
        """What a prompt of which nothing is there costs without the queue: a polynomial in its
        length. Its coefficients, the constant first.
        """
        if c.line is not None:
            return c.line
        weight = self.weight(c)
        decodes = self.decode_tokens * c.decoding
        space = self.space_weight * c.active_tokens * c.token_s
        slower = self.decode_tokens * (c.decoding * c.sequence_s + c.active_tokens * c.kv_s)
        c.line = (
            weight * c.request_s + decodes * c.sequence_s + slower + space,
            weight * c.token_s + decodes * c.kv_s,
            weight * c.pair_s / 2,
        )
        return c.line

    def worth(self, c: Candidate, cached: int) -> float:
        """What it costs to compute so many tokens at the beginning of a prompt. Each attends to
        those before it: to half of them on average.
        """
        return self.weight(c) * cached * (c.token_s + c.pair_s * cached / 2)

    def total(self, c: Candidate, now: float) -> float:
        """`score(c, now).total_s`, without its parts."""
        prompt = c.prompt_tokens
        base, line, square = self.line(c)
        return c.queue_s(now) + base + prompt * (line + prompt * square) + self.warmth(c)

    def warmth(self, c: Candidate) -> float:
        """What the blocks that are there add to that of a prompt of which nothing is: less to
        compute, and the crowd on them.
        """
        lower = c.g2_tokens + c.g3_tokens + c.g4_tokens + c.peer_tokens
        cached = c.g1_tokens + lower
        token_s = c.token_s
        worth = self.worth(c, cached)
        total = -worth
        if c.repeats:
            total += min(self.repeat_weight * c.repeats * token_s, worth)
        if c.mates > self.free_mates:
            crowd = self.crowd_weight * (c.mates - self.free_mates)
            total += token_s * crowd * c.prompt_tokens
        if lower:
            total += min(c.onboard_s, lower * token_s)
        return total

    def score(self, c: Candidate, now: float) -> Score:
        """The score of one candidate."""
        token_s, prompt = c.token_s, c.prompt_tokens
        queue = c.queue_s(now)
        lower = c.g2_tokens + c.g3_tokens + c.g4_tokens + c.peer_tokens
        cached = c.g1_tokens + lower
        uncached = prompt - cached
        prefill = c.request_s + uncached * (token_s + c.pair_s * (prompt - uncached / 2))
        onboard = min(c.onboard_s, lower * token_s)
        worth = self.worth(c, cached)
        imposed = (
            prefill * (self.own_weight + self.churn_weight * c.churn)
            + self.decode_tokens * c.decoding * (c.sequence_s + c.kv_s * prompt)
            + self.decode_tokens * (c.decoding * c.sequence_s + c.active_tokens * c.kv_s)
            + self.space_weight * c.active_tokens * token_s
            + self.crowd_weight * max(0.0, c.mates - self.free_mates) * prompt * token_s
            + min(self.repeat_weight * c.repeats * token_s, worth)
        )
        return Score(queue, prefill, onboard, imposed, queue + prefill + onboard + imposed)
