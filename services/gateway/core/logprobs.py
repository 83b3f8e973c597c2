"""Log probabilities: what a worker sends, and the two JSON shapes of OpenAI's APIs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position as the worker sent it: the chosen token and the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One position, ready to be shown.

    `text_offset` is where the token's text begins in the choice's text, in characters.
    """

    position: TokenLogprobs
    text_offset: int


class TokenTexts(Protocol):
    """What is needed to show a token."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes; None for an id that does not exist."""


def chat_logprobs(
    entries: Sequence[LogprobEntry], tokens: TokenTexts, top_logprobs: int
) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`, as chat has it.

    A token whose bytes are no whole characters is shown as OpenAI does, "\\xf0\\x9f" escaped;
    `bytes` are exact always.
    """

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokens.token_bytes(token_id) or b""
        return {
            "token": _text(raw, ""),
            "logprob": finite_logprob(logprob),
            "bytes": list(raw),
        }

    return {
        "content": [
            {
                **shown(entry.position.token_id, entry.position.logprob),
                "top_logprobs": [shown(*top) for top in entry.position.top[:top_logprobs]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[LogprobEntry], tokens: TokenTexts, logprobs: int
) -> dict[str, Any]:
    """`{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`, as completions have it.

    The chosen token is always among its position's top_logprobs, so they may hold logprobs + 1.
    Tokens whose bytes are no whole characters are shown as "bytes:\\xf0\\x9f".
    """
    texts = [_text(tokens.token_bytes(e.position.token_id) or b"", "bytes:") for e in entries]
    top: list[dict[str, float]] = []
    for entry, text in zip(entries, texts, strict=True):
        ranked = {
            _text(tokens.token_bytes(token_id) or b"", "bytes:"): finite_logprob(logprob)
            for token_id, logprob in entry.position.top[:logprobs]
        }
        ranked.setdefault(text, finite_logprob(entry.position.logprob))
        top.append(ranked)
    return {
        "tokens": texts,
        "token_logprobs": [finite_logprob(e.position.logprob) for e in entries],
        "top_logprobs": top if logprobs else None,
        "text_offset": [e.text_offset for e in entries],
    }


def finite_logprob(logprob: float) -> float:
    """The number itself, or LEAST_LOGPROB for minus infinity and NaN."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def _text(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
