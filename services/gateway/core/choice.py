"""One choice of a response: tokens in, text, log probabilities and one finish reason out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from services.gateway.core.detokenize import Detokenizer, TokenDecoder
from services.gateway.core.logprobs import LogprobEntry, TokenLogprobs
from services.gateway.core.sampling import Sampling
from services.gateway.core.stops import StopMatcher

EndOfSequence = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What a choice gained.

    `logprobs` are of the tokens whose text is in `text` (or in this delta's share of it).
    """

    text: str
    logprobs: tuple[LogprobEntry, ...] = ()
    finish_reason: EndOfSequence | None = None


NOTHING = ChoiceDelta("")
"""The delta of what comes after the end."""


class Choice:
    """One sequence. It outlives attempts: after a migration the next attempt's tokens follow."""

    output_ids: list[int]
    """All output so far, also what is not shown: the prior output of a next attempt."""
    finish_reason: EndOfSequence | None
    """Set once, with the delta that ends the choice."""

    def __init__(
        self, tokenizer: TokenDecoder, sampling: Sampling, prompt_ids: Sequence[int]
    ) -> None:
        """`sampling` is the whole choice's, not that of one attempt (whose limits are smaller)."""
        self.output_ids = []
        self.finish_reason = None
        self._sampling = sampling
        self._text = Detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            prompt_ids=prompt_ids,
        )
        self._stops = StopMatcher(sampling.stop, sampling.include_stop_str)
        self._seen_chars = 0
        self._shown_chars = 0
        self._waiting: deque[_Waiting] = deque()

    @property
    def finished(self) -> bool:
        """Whether the choice has its finish reason; what is fed after that is ignored."""
        return self.finish_reason is not None

    @property
    def completion_tokens(self) -> int:
        """Tokens to be counted in usage: up to and including the one that ended the choice."""
        return len(self.output_ids)

    @property
    def at_limit(self) -> bool:
        """Whether max_tokens are out. An attempt that broke just then is not to be resumed."""
        return len(self.output_ids) >= self._sampling.max_tokens

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: EndOfSequence | None = None,
        stop_token_id: int | None = None,
    ) -> ChoiceDelta:
        """Takes a worker's delta. `logprobs` is empty or has one entry for each token.

        With "stop" the last token is an end or stop token (`stop_token_id` names it, if it is not
        the model's own end); its text is not shown, unless the client wants stops included.
        """
        if self.finished:
            return NOTHING
        positions: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        hidden = len(token_ids) - 1 if finish_reason == "stop" and not self._shows_end() else None
        text = ""
        for at, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
            self.output_ids.append(token_id)
            if at == hidden:
                break
            text += self._token(token_id, position)
            if self._stops.stopped:
                self.finish_reason = "stop"
                return self._delta(text)
        if finish_reason is None:
            return self._delta(text)
        text += self._end()
        self.finish_reason = "stop" if self._stops.stopped else finish_reason
        return self._delta(text)

    def end(self, finish_reason: EndOfSequence = "length") -> ChoiceDelta:
        """Ends the choice without a word of the worker's: what is held comes out."""
        return self.feed((), (), finish_reason)

    def _shows_end(self) -> bool:
        return self._sampling.include_stop_str

    def _token(self, token_id: int, position: TokenLogprobs | None) -> str:
        piece = self._text.push_one(token_id)
        if position is not None:
            self._waiting.append(_Waiting(LogprobEntry(position, self._seen_chars)))
        shown = self._pass(piece)
        if self._waiting and not self._text.inside_character:
            for waiting in self._waiting:
                if waiting.end is None:
                    waiting.end = self._seen_chars
        return shown

    def _pass(self, piece: str) -> str:
        self._seen_chars += len(piece)
        armed = len(self.output_ids) > self._sampling.min_tokens
        shown = self._stops.push(piece, armed=armed)
        self._shown_chars += len(shown)
        return shown

    def _end(self) -> str:
        text = self._pass(self._text.flush())
        held = self._stops.flush()
        self._shown_chars += len(held)
        for waiting in self._waiting:
            waiting.end = self._shown_chars if waiting.end is None else waiting.end
        return text + held

    def _delta(self, text: str) -> ChoiceDelta:
        ready: list[LogprobEntry] = []
        while self._waiting and self._is_shown(self._waiting[0]):
            ready.append(self._waiting.popleft().entry)
        return ChoiceDelta(text, tuple(ready), self.finish_reason)

    def _is_shown(self, waiting: _Waiting) -> bool:
        """While text may come: when all of the token's is out. At the end: when any of it is."""
        if not self.finished:
            return waiting.end is not None and waiting.end <= self._shown_chars
        begin = waiting.entry.text_offset
        return begin < self._shown_chars or (
            not self._stops.stopped and waiting.end is not None and waiting.end <= self._shown_chars
        )


@dataclass(slots=True)
class _Waiting:
    """Log probabilities of a token whose text is not all out; `end` is None inside a character."""

    entry: LogprobEntry
    end: int | None = None
