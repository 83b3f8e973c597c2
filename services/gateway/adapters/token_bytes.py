"""The bytes of a token, read from the form in which a tokenizer.json stores it.

Known are the two families of today's models: byte-level BPE, which writes each byte as a printable
character, and SentencePiece, which writes a blank as U+2581 and a lone byte as "<0xE2>". Others
have no bytes of their own (WordPiece joins with rules), and plan_token_bytes says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """How a token's stored form becomes bytes."""

    of: Callable[[str], bytes]
    strips_first_space: bool = False
    """Whether the text's first blank is dropped (it was added when encoding)."""


def plan_token_bytes(decoder: object) -> TokenBytes | None:
    """The way for a tokenizer.json's "decoder"; None when text is not the tokens' own bytes."""
    steps = list(_steps(decoder))
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_byte_level)
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _BLANK:
        return TokenBytes(_plain_blank, steps[0].get("prepend_scheme", "always") != "never")
    if kinds and kinds[0] == "Replace" and _replaces_blank(steps[0]):
        rest = kinds[1:]
        strips = False
        if rest and rest[-1] == "Strip":
            last = steps[-1]
            if last.get("content") != " " or last.get("start") != 1 or last.get("stop"):
                return None
            strips = True
            rest = rest[:-1]
        if rest == ["ByteFallback", "Fuse"]:
            return TokenBytes(_byte_fallback, strips)
    return None


def _steps(decoder: object) -> Iterator[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _steps(step)
    else:
        yield decoder


def _replaces_blank(step: dict[str, Any]) -> bool:
    return step.get("pattern") == {"String": _BLANK} and step.get("content") == " "


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 is itself, the rest lies from U+0100 on."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in itself}
    others = [byte for byte in range(256) if byte not in set(itself)]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_alphabet()
"""Character to the byte that it stands for in byte-level vocabularies."""


def _byte_level(token: str) -> bytes:
    try:
        return bytes(BYTE_CHARACTERS[character] for character in token)
    except KeyError:
        # An added token, stored as plain text.
        return token.encode()


def _plain_blank(token: str) -> bytes:
    return token.replace(_BLANK, " ").encode()


def _byte_fallback(token: str) -> bytes:
    # Unlike the library, which spoils a whole run of byte tokens for one that is no UTF-8: a
    # stream can't wait for the end of a run.
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else _plain_blank(token)
