"""Token ids to text, bit by bit, without ever showing half a character.

Two ways. Where a token's text is its own bytes (byte-level BPE; SentencePiece with byte fallback),
the bytes run through an incremental UTF-8 decoder: exact, and cheap. For other tokenizers the text
of a growing window is decoded again and its new end taken.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 6
"""Tokens before the new ones that the windowed way decodes along, since text depends on them."""
_LONGEST_HALF = 12
"""Tokens after which a replacement character is taken for real and no longer waited on."""


class TokenDecoder(Protocol):
    """What a detokenizer needs of a tokenizer (adapters/tokenizer.py has it)."""

    @property
    def byte_exact(self) -> bool:
        """Whether text is the concatenation of the tokens' own bytes, read as UTF-8."""

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the blank of a first token. Only with byte_exact."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The token's own bytes; None for an id that does not exist."""

    def is_special(self, token_id: int) -> bool:
        """Whether skip_special_tokens leaves it out."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all the ids at once."""


class Detokenizer:
    """Text of one sequence.

    The concatenation of all that it gives is the text that `prompt_ids` and the tokens have
    together, less that of `prompt_ids`; without a prompt it equals decoding all tokens at once.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._way: _Bytes | _Window = (_Bytes if tokenizer.byte_exact else _Window)(
            tokenizer, skip_special_tokens, prompt_ids
        )

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each new token added; "" where it ends inside a character."""
        return [self._way.push(token_id) for token_id in token_ids]

    def push_one(self, token_id: int) -> str:
        """As push, for one token."""
        return self._way.push(token_id)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for half a character, else nothing."""
        return self._way.flush()

    @property
    def inside_character(self) -> bool:
        """Whether the text ends in half a character, not given out yet."""
        return self._way.inside_character


class _Bytes:
    def __init__(
        self, tokenizer: TokenDecoder, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space and all(
            skip_special_tokens and tokenizer.is_special(i) for i in prompt_ids
        )

    def push(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        if not raw or (self._skip and self._tokenizer.is_special(token_id)):
            return ""
        if self._strip:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._utf8.decode(raw)

    def flush(self) -> str:
        return self._utf8.decode(b"", True)

    @property
    def inside_character(self) -> bool:
        return bool(self._utf8.getstate()[0])


class _Window:
    def __init__(
        self, tokenizer: TokenDecoder, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._given = len(self._ids)
        self._prefix = ""
        if self._ids:
            self._prefix = self._decode()

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._given < _LONGEST_HALF:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        # Should what stood before read differently now: what was given can't be called back.
        new = text[len(self._prefix) :] if text.startswith(self._prefix) else ""
        # The tokens just given are the next window's context.
        if new:
            self._ids = self._ids[self._given :][-_CONTEXT_TOKENS:]
            self._prefix = self._decode()
        self._given = len(self._ids)
        return new

    def flush(self) -> str:
        return self._take(self._decode()) if self.inside_character else ""

    @property
    def inside_character(self) -> bool:
        return self._given < len(self._ids)
