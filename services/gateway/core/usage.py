"""Token counts as OpenAI's `usage` object has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one response.

    `prompt_tokens` counts each prompt once, however many choices were made of it;
    `completion_tokens` is the sum over choices; `cached_tokens` are prompt tokens that the engine
    did not compute, as the first choice of each prompt tells (the later ones find what it computed,
    and would only flatter).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        """The usage of several prompts in one request."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": min(self.cached_tokens, self.prompt_tokens)},
        }
