"""Repeat book: what prompts that part at one block had computed lately, and where.

Requests that share a system prompt all part from one another behind its last block, so that block
turns up as the fork again and again; the turns of a conversation part each at another one. What a
worker computes behind one fork beyond its share of all work is a reason for a further copy of what
lies before the fork: copies then never cost more than what was computed anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW = 4096
"""Placements that are remembered."""
NOTHING: Mapping[int, int] = {}


class RepeatBook:
    """Computed prompt tokens by fork and slot, of the last `window` placements of one model.

    A fork is the key of the last block that any worker had of a prompt; None: nobody had any.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._last: deque[tuple[int | None, int, int]] = deque()
        self._at: dict[int, dict[int, int]] = {}
        self.tokens = 0
        """Of all placements remembered."""

    def placed(self, fork: int | None, slot: int, tokens: int) -> None:
        """A request was placed on `slot` that has `tokens` computed."""
        if len(self._last) >= self._window:
            self._forget(*self._last.popleft())
        self._last.append((fork, slot, tokens))
        self.tokens += tokens
        if fork is not None:
            at = self._at.get(fork)
            if at is None:
                self._at[fork] = {slot: tokens}
            else:
                at[slot] = at.get(slot, 0) + tokens

    def at(self, fork: int) -> Mapping[int, int]:
        """What requests with this fork had computed, by slot; read only."""
        return self._at.get(fork, NOTHING)

    def check_invariants(self) -> None:
        """Raises AssertionError when sums differ from what they sum up."""
        assert len(self._last) <= self._window
        assert self.tokens == sum(tokens for _, _, tokens in self._last)
        sums: dict[tuple[int, int], int] = {}
        for fork, slot, tokens in self._last:
            if fork is not None:
                sums[fork, slot] = sums.get((fork, slot), 0) + tokens
        mine = {(fork, slot): n for fork, at in self._at.items() for slot, n in at.items()}
        assert {k: n for k, n in sums.items() if n} == mine

    def _forget(self, fork: int | None, slot: int, tokens: int) -> None:
        self.tokens -= tokens
        if fork is None:
            return
        at = self._at[fork]
        left = at[slot] - tokens
        if left:
            at[slot] = left
        else:
            del at[slot]
            if not at:
                del self._at[fork]
