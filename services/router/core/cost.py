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
    """When all that the engine's report left is done."""
    fresh_s: float = 0.0
    """What came after the report."""

    # What a cost model makes of all that, for a prompt that is cold here (CostModel.totals).
    warm: bool = True
    """Whether anything of the prompt is here; false spares looking."""
    stale: bool = True
    base_s: float = 0.0
    line_s: float = 0.0
    square_s: float = 0.0

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
        self.stale = True
        total = self.rest_s = self.queued_s = (
            self.request_s * self.queued_requests
            + self.token_s * self.queued_tokens
            + self.pair_s * self.queued_pairs
        )
        self.free_at = 0.0
        if self.head_tokens:
            head = self.request_s + self.token_s * self.head_tokens + self.pair_s * self.head_pairs
            self.rest_s = total - head
            self.free_at = self.head_since + total
        self.told_free_at = self.told_at + total * self.told_share
        self.fresh_s = total * self.fresh_share

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
        told = (told if told > 0 else 0.0) + self.fresh_s
        if told < left:
            left = told
        return left if left > 0 else 0.0

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

    own_weight: float = 1.75
    """How much more than once a request's own recompute counts."""
    churn_weight: float = 3.0
    """Price of computing where the cache is refilled twice as fast as others, as a share of it."""
    most_churn: float = 0.3
    """Churn counts up to this much more or less than others'."""
    space_weight: float = 0.006
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
        """`score(c, now).total_s` of each candidate, without its parts; runs in each decision.

        Where a prompt is cold its cost is a polynomial in its length, worked out when load or rates
        have changed.
        """
        totals = []
        for c in candidates:
            if c.stale:
                self._prepare(c)
            left = c.queue_s(now) if c.queued_s else 0.0
            if c.warm:
                totals.append(left + self._warm(c))
            else:
                prompt = c.prompt_tokens
                totals.append(left + c.base_s + prompt * (c.line_s + prompt * c.square_s))
        return totals

    def decode_s(self, c: Candidate) -> float:
        """What it costs to decode a prompt there that comes computed: of the score, all that has
        nothing to do with prefill.
        """
        return (
            self.decode_tokens * c.decoding * (c.sequence_s + c.kv_s * c.prompt_tokens)
            + self.decode_tokens * (c.decoding * c.sequence_s + c.active_tokens * c.kv_s)
            + self.space_weight * c.active_tokens * c.token_s
        )

    def _prepare(self, c: Candidate) -> None:
        weight = 1 + self.own_weight + self.churn_weight * c.churn
        decodes = self.decode_tokens * c.decoding
        space = self.space_weight * c.active_tokens * c.token_s
        slower = self.decode_tokens * (c.decoding * c.sequence_s + c.active_tokens * c.kv_s)
        c.base_s = weight * c.request_s + decodes * c.sequence_s + slower + space
        c.line_s = weight * c.token_s + decodes * c.kv_s
        c.square_s = weight * c.pair_s / 2
        c.stale = False

    def _warm(self, c: Candidate) -> float:
        """Without the queue. Like a cold prompt, less the blocks that are here; and the crowd."""
        prompt = c.prompt_tokens
        lower = c.g2_tokens + c.g3_tokens + c.g4_tokens + c.peer_tokens
        cached = c.g1_tokens + lower
        weight = 1 + self.own_weight + self.churn_weight * c.churn
        total = c.base_s + prompt * (c.line_s + prompt * c.square_s)
        # Each token attends to those before it: among the cached ones, to half of them on average.
        worth = weight * cached * (c.token_s + c.pair_s * cached / 2)
        total -= worth
        if c.repeats:
            total += min(self.repeat_weight * c.repeats * c.token_s, worth)
        if c.mates > self.free_mates:
            total += c.token_s * self.crowd_weight * (c.mates - self.free_mates) * prompt
        if lower:
            total += min(c.onboard_s, lower * c.token_s)
        return total

    def score(self, c: Candidate, now: float) -> Score:
        """The score of one candidate."""
        prefill, token_s = c.prefill_s, c.token_s
        queue = c.queue_s(now)
        onboard = min(c.onboard_s, c.lower_tokens * token_s)
        cached = c.g1_tokens + c.lower_tokens
        weight = 1 + self.own_weight + self.churn_weight * c.churn
        worth = weight * cached * (token_s + c.pair_s * cached / 2)
        imposed = (
            prefill * (self.own_weight + self.churn_weight * c.churn)
            + self.decode_tokens * c.decoding * (c.sequence_s + c.kv_s * c.prompt_tokens)
            + self.decode_tokens * (c.decoding * c.sequence_s + c.active_tokens * c.kv_s)
            + self.space_weight * c.active_tokens * token_s
            + self.crowd_weight * max(0.0, c.mates - self.free_mates) * c.prompt_tokens * token_s
            + min(self.repeat_weight * c.repeats * token_s, worth)
        )
        return Score(queue, prefill, onboard, imposed, queue + prefill + onboard + imposed)
