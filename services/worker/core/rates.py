"""How fast the engine computes prompts at its present batch, from its steps."""

from __future__ import annotations

HALF_LIFE_TOKENS = 4096.0
"""After so many tokens an old measurement counts half."""
LEAST_TOKENS = 16
"""Steps with fewer prompt tokens say more about decoding."""


class PrefillRate:
    """Prompt tokens a second, measured over steps that hold some; young steps count more."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Takes a step: its prompt tokens and its length."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        keep = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds

    @property
    def tokens_per_s(self) -> float | None:
        """The rate; None before the first measurement."""
        return self._tokens / self._seconds if self._seconds else None

    def seconds(self, tokens: int) -> float:
        """Seconds that `tokens` of prompt take; 0 before the first measurement."""
        rate = self.tokens_per_s
        return tokens / rate if rate else 0.0
