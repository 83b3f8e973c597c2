"""What the simulated engine says: tokens that depend on all tokens before them, and nothing else.

Each next token is drawn from a digest of the whole text so far (and of the adapter), so a token
that is lost, doubled or changed changes everything after it, and a continued request goes on as it
would have. It is no language. Ids that the model's tokenizer marks as special never come by chance;
an answer ends by itself at any token with the same small chance, also drawn from the digest.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.core.model import PositionLogprobs, Sampling

NEAR = 7
"""Candidates that one digest gives, 4 bytes each; 4 more bytes decide whether the answer ends."""
FAR = 32
"""Further candidates, for those who want to see many."""
_WORD = 1 << 32


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids of a model's tokens: 0 to `size` - 1."""

    size: int
    eos: tuple[int, ...] = ()
    special: frozenset[int] = frozenset()
    """Never drawn."""
    mean_output_tokens: int = 0
    """Mean length of an answer that nothing else ends; 0: it does not end by itself."""

    def drawable(self, word: int) -> int:
        """The ordinary id that a number from 0 to 2^32 - 1 draws."""
        id = word % self.size
        for _ in range(len(self.special)):
            if id not in self.special:
                break
            id = (id + 1) % self.size
        return id


class TokenStream:
    """One request's tokens. `draw` varies what is sampled without a seed."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        adapter: str = "",
        draw: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._sampling = sampling
        self._draw = draw if sampling.seed is None else sampling.seed
        self._text = hashlib.blake2b(adapter.encode() + b"\0", digest_size=32)
        self._text.update(array("I", token_ids).tobytes())
        self._produced = 0
        self._plain = not (
            sampling.logit_bias or sampling.allowed_token_ids or sampling.logprobs is not None
        )
        self._greedy = sampling.temperature == 0

    def next(self) -> int:
        """The next token, when nobody asks for more than its id."""
        if not self._plain:
            return self.next_position().token_id
        digest = self._text.digest()
        if self._ends(digest):
            token = self._vocabulary.eos[0]
        else:
            place = 0 if self._greedy else self._chance(NEAR)
            token = self._vocabulary.drawable(_word(digest, place))
            if token in self._too_early():
                return self.next_position().token_id
        self._take(token)
        return token

    def next_position(self) -> PositionLogprobs:
        """The next token with its likelihood, and the likeliest ones."""
        s, digest = self._sampling, self._text.digest()
        ranked = self._ranked(digest)
        # Bias is meant to decide, so it does.
        place = 0 if self._greedy or s.logit_bias else self._chance(len(ranked))
        token = ranked[place]
        self._take(token)
        return _position(ranked, token, s.logprobs or 0)

    def ends(self, token: int) -> bool:
        """Whether `token`, the last one, ends the request by being what it is."""
        s = self._sampling
        return token in s.stop_token_ids or (token in self._vocabulary.eos and not s.ignore_eos)

    def _take(self, token: int) -> None:
        self._produced += 1
        self._text.update(array("I", (token,)).tobytes())

    def _too_early(self) -> Iterable[int]:
        s = self._sampling
        return (*self._vocabulary.eos, *s.stop_token_ids) if self._produced < s.min_tokens else ()

    def _ends(self, digest: bytes) -> bool:
        v, s = self._vocabulary, self._sampling
        if not v.mean_output_tokens or not v.eos or s.ignore_eos or self._produced < s.min_tokens:
            return False
        return _word(digest, NEAR) % v.mean_output_tokens == 0

    def _chance(self, sides: int) -> int:
        mixed = self._draw * 0x9E3779B97F4A7C15 + self._produced * 0xBF58476D1CE4E5B9 + 0x94D0
        return ((mixed ^ (mixed >> 29)) * 0x94D049BB133111EB >> 33) % sides

    def _ranked(self, digest: bytes) -> list[int]:
        s, v = self._sampling, self._vocabulary
        order: Iterable[int] = _order(v, digest)
        if s.allowed_token_ids:
            # All that are allowed, in an order that the text decides.
            shift = _word(digest, 0)
            order = sorted(s.allowed_token_ids, key=lambda t: (t * 7919 + shift) % _WORD)
        elif self._ends(digest):
            order = (v.eos[0], *order)
        banned = {t for t, bias in s.logit_bias.items() if bias <= -50}
        banned.update(self._too_early())
        pushed = [t for t, bias in s.logit_bias.items() if bias >= 50]
        ranked = [t for t in dict.fromkeys((*pushed, *order)) if t not in banned]
        return ranked or [0]


def prompt_positions(
    vocabulary: Vocabulary, token_ids: Sequence[int], wanted: int, adapter: str = ""
) -> tuple[PositionLogprobs, ...]:
    """Likelihoods of all tokens of a prompt but the first, with the `wanted` likeliest at each."""
    text = hashlib.blake2b(adapter.encode() + b"\0", digest_size=32)
    positions = []
    for before, token in itertools.pairwise(token_ids):
        text.update(array("I", (before,)).tobytes())
        positions.append(_position(_order(vocabulary, text.digest()), token, wanted))
    return tuple(positions)


def _word(digest: bytes, place: int) -> int:
    return int.from_bytes(digest[4 * place : 4 * place + 4], "big")


def _order(vocabulary: Vocabulary, digest: bytes) -> list[int]:
    """Candidates, likeliest first: those of the digest, then as many as anyone may ask for."""
    raw = digest[: 4 * NEAR] + hashlib.shake_128(digest).digest(4 * FAR)
    words = (_word(raw, place) for place in range(NEAR + FAR))
    return list(dict.fromkeys(vocabulary.drawable(word) for word in words))


def _position(ranked: Sequence[int], token: int, wanted: int) -> PositionLogprobs:
    """Likelihoods that fall with the rank; what is not among the candidates comes behind them."""
    rank = ranked.index(token) + 1 if token in ranked else len(ranked) + 1
    return PositionLogprobs(
        token_id=token,
        logprob=-0.5 * rank,
        rank=rank,
        top_token_ids=tuple(ranked[:wanted]),
        top_logprobs=tuple(-0.5 * (i + 1) for i in range(min(wanted, len(ranked)))),
    )
