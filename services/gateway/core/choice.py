"""One choice of a response: tokens in, text, log probabilities and one finish reason out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.gateway.core.detokenize import TokenDecoder
from services.gateway.core.logprobs import LogprobEntry, TokenLogprobs
from services.gateway.core.sampling import Sampling

EndOfSequence = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a choice gained.

    `want_abort` is True exactly once, when a stop string ended a sequence that the worker still runs.
    """

    text: str
    logprobs: tuple[LogprobEntry, ...] = ()
    finish_reason: EndOfSequence | None = None
    want_abort: bool = False


class Choice:
    """One sequence. It outlives attempts: after a migration the new attempt's tokens are fed to it too."""

    output_ids: list[int]
    """All output so far, also what is not shown: the prior output of a next attempt."""
    finish_reason: EndOfSequence | None
    """Set once, with the delta that ends the choice."""

    def __init__(
        self, tokenizer: TokenDecoder, sampling: Sampling, prompt_ids: Sequence[int]
    ) -> None: ...

    @property
    def finished(self) -> bool:
        """Whether the choice has its finish reason; what is fed after that is ignored."""
        raise NotImplementedError

    @property
    def completion_tokens(self) -> int:
        """Tokens to be counted in usage: up to and including the one that ended the choice."""
        raise NotImplementedError

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: EndOfSequence | None = None,
        stop_token_id: int | None = None,
    ) -> ChoiceDelta:
        """Takes a worker's delta. `logprobs` is empty or has one entry for each token."""
        raise NotImplementedError
