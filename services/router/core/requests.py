"""Requests at workers, in the load book's words: what is kept of each, what is summed up of a
worker's, and what their news say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.common.events.model import LoadReport
from services.common.ids import AttemptId


@dataclass(frozen=True, slots=True)
class LoadView:
    """A worker's load at one moment."""

    booked: int = 0
    """Sequences of placements that no event has confirmed."""
    queued: int = 0
    """Admitted requests without a first token."""
    decoding: int = 0
    """Requests that produce tokens; prefill legs never do."""
    queued_tokens: int = 0
    """Prompt tokens ahead of a new request, still to be computed; bookings included."""
    active_tokens: int = 0
    """Prompt tokens of all requests booked or in the engine: what they keep of its space."""
    report: LoadReport | None = None
    """Last report of the engine itself."""

    @property
    def active(self) -> int:
        """Requests booked or in the engine."""
        return self.booked + self.queued + self.decoding


@dataclass(frozen=True, slots=True)
class Decoded:
    """How fast a request's tokens after its first came, and beside what."""

    tokens: int
    seconds: float
    batch: float
    """Mean number of decodes meanwhile, itself included."""
    kv_tokens: float
    """Mean prompt tokens of these."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left an engine; `predicted` is None unless this router placed it.

    Tokens are those that its worker had to get by itself: what another one handed over is neither
    cached nor computed there.
    """

    slot: int
    attempt_id: AttemptId
    prompt_tokens: int
    cached_tokens: int
    predicted: int | None
    aborted: bool
    decoded: Decoded | None = None


@dataclass(frozen=True, slots=True)
class Incoming:
    """KV that another worker is to hand over to one that decodes, as this router decided."""

    tokens: int
    source: str
    """Id of the worker that prefills."""
    seconds: float
    """Predicted, of the transfer alone."""
    first: AttemptId
    """The leg that prefills."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What an admission brings to its worker."""

    filled_tokens: int
    """Prompt tokens that are new to its cache: computed there, or handed over."""
    missed: str | None = None
    """The worker whose KV should have come with it, and doesn't."""


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A request whose first token is out."""

    slot: int
    computed_tokens: int
    pairs: float
    """The sum over these of the tokens that each attends to."""
    admitted_at: float | None
    """None when that is not known, or says nothing of the engine's rate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an engine is thought not to compute of a request."""

    cached_tokens: int = 0
    onboards: bool = False
    """Whether some of that comes from tiers below G1."""


@dataclass(slots=True)
class Request:
    """One booked, or in an engine."""

    slot: int
    prompt_tokens: int
    uncached: int
    keys: Sequence[int]
    sequences: int = 1
    booked_until: float | None = None
    decoding: bool = False
    """Whether its first token is out."""
    predicted: int | None = None
    admitted_at: float | None = None
    after_report: bool = True
    onboards: bool = False
    began: tuple[float, float, float] | None = None
    """When its first token came, and the slot's decode sums then; None: not seen."""
    prefill_only: bool = False
    """It ends with its first token."""
    transfer: int = 0
    """Prompt tokens whose KV another worker hands over."""
    failed: bool = False
    """Whether that is known to have failed: it computes them."""
    incoming: Incoming | None = None
    """What this router knows of that, if it decided it."""
    then: AttemptId | None = None
    """Of a leg that prefills, placed by this router: the one that decodes."""
    shared: bool = True
    """Whether what it brings will be there for those behind it."""

    @property
    def pairs(self) -> float:
        """See `pairs_of`."""
        return pairs_of(self.prompt_tokens, self.uncached)

    @property
    def awaits(self) -> bool:
        """Whether it waits for KV instead of a turn of its engine."""
        return self.transfer > 0 and not self.failed and not self.decoding

    @property
    def decodes(self) -> bool:
        """Whether it produces token after token."""
        return self.decoding and not self.prefill_only


@dataclass(slots=True)
class Sums:
    """Of all requests of a slot."""

    booked: int = 0
    queued: int = 0
    awaiting: int = 0
    """Of these two, those that wait for KV from another worker."""
    decoding: int = 0
    booked_tokens: int = 0
    queued_tokens: int = 0
    fresh_tokens: int = 0
    pairs: float = 0.0
    active_tokens: int = 0
    active_blocks: int = 0


@dataclass(slots=True)
class Clock:
    """What a slot's engine does over time."""

    head_since: float = 0.0
    told_at: float = 0.0
    decoding_s: float = 0.0
    """The number of decodes, summed over time."""
    kv_s: float = 0.0
    """Their prompt tokens, summed over time."""
    kv_tokens: int = 0
    summed_at: float = 0.0
    queue: dict[AttemptId, None] = field(default_factory=dict)
    """Admitted requests without a first token, in order, but those that wait for KV."""


def pairs_of(prompt_tokens: int, uncached: int) -> float:
    """Uncached tokens x their mean context: the last tokens of a prompt are the uncached ones."""
    return uncached * (prompt_tokens - uncached / 2)
