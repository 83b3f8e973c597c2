"""Token ids to text, bit by bit, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """What a detokenizer needs of a tokenizer (adapters/tokenizer.py has it)."""


class Detokenizer:
    """Text of one sequence. The concatenation of all it gives equals decoding all tokens at once."""

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None: ...

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each new token added; "" where it ends inside a character."""
        raise NotImplementedError

    def flush(self) -> str:
        """What is left at the end: "\ufffd" for a half character, else ""."""
        raise NotImplementedError
