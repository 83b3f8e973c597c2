"""What is known of one sequence: its text so far, where it runs, and its prefill leg, if any."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from services.common.errors import ForebayError
from services.gateway.core.choice import Choice
from services.gateway.core.sampling import Sampling
from services.gateway.ports import Ended, News, Placement, Transfer, WorkerLost
from services.gateway.prepare import Prompt
from services.gateway.upstream import is_clients_mistake, not_begun


class LegEnd(StrEnum):
    """How a prefill leg ended; the metric's label."""

    DONE = "done"
    UNREACHABLE = "unreachable"  # it could not be sent
    LOST = "lost"  # the worker's session broke
    REFUSED = "refused"  # the worker did not take it
    FAILED = "failed"  # the worker took it and failed
    ABORTED = "aborted"  # the worker gave it up
    NO_HANDLE = "no_handle"  # it is done, and nothing says where the KV is
    INVALID = "invalid"  # the client's mistake
    LEFT = "left"  # nobody waits for it any more


@dataclass(slots=True)
class PrefillLeg:
    """A prompt on a prefill worker, and then its KV on the way to another. Times on the loop's
    clock.
    """

    request_id: str
    placement: Placement
    began: float
    ended: float | None = None
    cached_tokens: int = 0
    transfer: Transfer | None = None
    answered: bool = False
    """True from the decode leg's first tokens on."""

    def take(self, news: News, now: float) -> LegEnd | None:
        """Adds news; how it ended, None while it runs."""
        if news.cached_tokens is not None:
            self.cached_tokens = news.cached_tokens
        if news.ended is None and news.error is None:
            return None
        self.ended = now
        match news:
            case News(error=WorkerLost()):
                return LegEnd.LOST
            case News(error=ForebayError() as error) if is_clients_mistake(error):
                return LegEnd.INVALID
            case News(error=ForebayError() as error):
                return LegEnd.REFUSED if not_begun(error) else LegEnd.FAILED
            case News(ended=Ended.ABORT):
                return LegEnd.ABORTED
        self.transfer = news.transfer
        return LegEnd.DONE if self.transfer is not None else LegEnd.NO_HANDLE


@dataclass(frozen=True, slots=True)
class Answered:
    """Who gave a choice its first tokens, and what was cached of its prompt."""

    by: Placement
    cached_tokens: int
    """Prompt tokens that neither leg computed."""
    predicted_cached_tokens: int
    prefilled_by: str = ""
    """The worker whose KV it began with; empty: none."""


@dataclass(slots=True)
class SequenceState:
    """One choice, over all attempts to produce it."""

    index: int
    prompt: Prompt
    sampling: Sampling
    choice: Choice
    request_id: str = ""
    """Of the leg that runs; empty, or that of the last one, when none does."""
    placement: Placement | None = None
    booked: bool = False
    """Whether that placement is still to be used, or given back."""
    migrations: int = 0
    excluded: set[str] = field(default_factory=set)
    leg: PrefillLeg | None = None
    """Of the present attempt, until that is over."""
    prefills: int = 0
    answered: Answered | None = None
    """The attempt that gave the first tokens: later ones recompute what was already answered."""

    @property
    def prefilling(self) -> bool:
        """Whether its news are those of a prefill leg."""
        return self.leg is not None and self.leg.ended is None

    @property
    def predicted_cached_tokens(self) -> int:
        """What the router expected, of the leg that computes (or computed) the prompt."""
        if self.answered is not None:
            return self.answered.predicted_cached_tokens
        if self.leg is not None:
            return self.leg.placement.predicted_cached_tokens
        return self.placement.predicted_cached_tokens if self.placement is not None else 0
