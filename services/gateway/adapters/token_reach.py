"""How much text one token covers at most, read from a tokenizer.json: so how many a text has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken

from services.gateway.adapters.token_bytes import BYTE_CHARACTERS


@dataclass(frozen=True, slots=True)
class TokenReach:
    """`longest` is the most characters (bytes, with `of_bytes`) of a text that one token covers.

    `lost` are bytes that the vocabulary does not have: they get no token at all.
    """

    longest: int
    of_bytes: bool
    lost: bytes = b""

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        size = len(text.encode().translate(None, self.lost)) if self.of_bytes else len(text)
        return -(-size // self.longest)


def measure_reach(stored: Mapping[str, Any], added: Sequence[AddedToken]) -> TokenReach | None:
    """The reach of a tokenizer.json's tokens and the added ones, or None where nothing bounds it.

    Unknown tokens may cover any run, normalizers may drop text, added tokens may swallow blanks.
    """
    model = stored["model"]
    normalizer = stored.get("normalizer")
    if model.get("type") != "BPE" or (normalizer and not _keeps_length(normalizer)):
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocab = model["vocab"]
    longest = max(len(text) for text in (*vocab, *(token.content for token in added)))
    if _is_byte_level(stored.get("pre_tokenizer")):
        # An added token's characters may have up to four bytes each.
        longest = max([longest, *(len(token.content.encode()) for token in added)])
        lost = bytes(byte for text, byte in BYTE_CHARACTERS.items() if text not in vocab)
        return TokenReach(longest, True, lost) if model.get("unk_token") is None else None
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        return TokenReach(longest, False)
    return None


def _is_byte_level(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return False
    if pre_tokenizer.get("type") == "Sequence":
        return any(_is_byte_level(step) for step in pre_tokenizer["pretokenizers"])
    return pre_tokenizer.get("type") == "ByteLevel"


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer.get("type") == "Sequence":
        return all(_keeps_length(step) for step in normalizer["normalizers"])
    if normalizer.get("type") == "Replace":
        return normalizer.get("pattern") == {"String": " "} and bool(normalizer.get("content"))
    return normalizer.get("type") == "Prepend"
