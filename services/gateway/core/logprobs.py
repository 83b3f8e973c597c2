"""Log probabilities: what a worker sends, and the two JSON shapes in which OpenAI's APIs give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position as the worker sent it: the chosen token and the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One position, ready to be shown. `text_offset` is where the token's text begins, in characters."""

    position: TokenLogprobs
    text_offset: int


class TokenTexts(Protocol):
    """What is needed to show a token."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes; None when it has none (an id out of the vocabulary)."""


def chat_logprobs(
    entries: Sequence[LogprobEntry], tokens: TokenTexts, top_logprobs: int
) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}` of /v1/chat/completions."""
    raise NotImplementedError


def completion_logprobs(
    entries: Sequence[LogprobEntry], tokens: TokenTexts, logprobs: int
) -> dict[str, Any]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}` of /v1/completions."""
    raise NotImplementedError
