"""Stop strings over a stream of text: found wherever they fall, never shown in part.

Each stop string has a Knuth-Morris-Pratt automaton; its state is how much of the stop the text now
ends with, which is just what must be held back. So the result does not depend on how the text is
cut into pieces, and each character costs one step a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Cuts a stream of text at the first stop string that is complete (of several, the longest)."""

    def __init__(self, stops: Sequence[str], include_stop_str: bool = False) -> None:
        """No stop is an empty text; with `include_stop_str` the text ends with the stop."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._include = include_stop_str
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed. Nothing is given out after that."""
        return self._stopped

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now; what may be a stop's beginning is held.

        Not `armed` (min_tokens is not reached): a stop that is completed in this text does not
        count.
        """
        if self._stopped or not text:
            return ""
        if not self._stops:
            return text
        for at, character in enumerate(text):
            matched = 0
            for stop in self._stops:
                if stop.step(character):
                    matched = max(matched, len(stop.text))
            if matched and armed:
                self._stopped = True
                whole = self._held + text[: at + 1]
                self._held = ""
                return whole if self._include else whole[: len(whole) - matched]
        whole = self._held + text
        hold = max(stop.state for stop in self._stops)
        self._held = whole[len(whole) - hold :]
        return whole[: len(whole) - hold]

    def flush(self) -> str:
        """What was held back, when the stream ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def check_invariants(self) -> None:
        """What is held is the longest beginning of a stop string that the text ends with."""
        assert len(self._held) == (
            0 if self._stopped else max((s.state for s in self._stops), default=0)
        )
        assert not self._held or any(s.text.startswith(self._held) for s in self._stops)


class _Automaton:
    """`state` is the length of the longest proper beginning of `text` that the input ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._back = _borders(text)

    def step(self, character: str) -> bool:
        """Takes one character; True when the text is complete with it."""
        k = self.state
        while k and character != self.text[k]:
            k = self._back[k]
        if character == self.text[k]:
            k += 1
        complete = k == len(self.text)
        self.state = self._back[k] if complete else k
        return complete


@lru_cache(maxsize=256)
def _borders(text: str) -> tuple[int, ...]:
    """At k: the longest proper beginning of text[:k] that is also its end.

    Remembered, since all choices of a request (and most requests of a client) have the same stops.
    """
    back = [0] * (len(text) + 1)
    k = 0
    for i in range(1, len(text)):
        while k and text[i] != text[k]:
            k = back[k]
        if text[i] == text[k]:
            k += 1
        back[i + 1] = k
    return tuple(back)
