"""Finds the prefill leg that a decode leg goes on from: the two run under two attempt ids.

Nothing on the wire ties them, but both are told with the same prompt: its length and its last full
block, whose hash names the whole chain. So a decode leg takes the oldest leg of that prompt that
has ended. Of several alike at once the wrong one may be taken; then so is its twin, and the sum is
right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from services.common.events.model import RequestAdmitted

MOST_LEGS = 4096
"""Ended prefill legs that are remembered; of more the oldest are forgotten."""
_TTL_S = 60.0
"""No decode leg comes later than this."""

Prompt = tuple[int, int]


def prompt_of(event: RequestAdmitted) -> Prompt:
    """What both legs of a request have in common."""
    return event.prompt_tokens, event.keys[-1] if event.keys else 0


@dataclass(frozen=True, slots=True)
class Leg:
    """A prefill leg that has ended."""

    admitted_at: float
    ended_at: float


class Legs:
    """Ended prefill legs that no decode leg has been seen for."""

    def __init__(self) -> None:
        self._legs: dict[Prompt, deque[Leg]] = {}
        # In order of their ends; a leg that was taken is still in here, and then skipped.
        self._order: deque[tuple[Prompt, Leg]] = deque()

    def ended(self, prompt: Prompt, leg: Leg) -> None:
        """A prefill leg has ended."""
        self._legs.setdefault(prompt, deque()).append(leg)
        self._order.append((prompt, leg))
        if len(self._order) > MOST_LEGS:
            self._forget_oldest()

    def take(self, prompt: Prompt) -> Leg | None:
        """The leg that a decode leg of this prompt goes on from, if one is known."""
        legs = self._legs.get(prompt)
        if not legs:
            return None
        leg = legs.popleft()
        if not legs:
            del self._legs[prompt]
        return leg

    def prune(self, now: float) -> None:
        """Forgets legs that nothing followed."""
        while self._order and self._order[0][1].ended_at <= now - _TTL_S:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        prompt, leg = self._order.popleft()
        legs = self._legs.get(prompt)
        if legs and legs[0] is leg:
            legs.popleft()
            if not legs:
                del self._legs[prompt]

    def check_invariants(self) -> None:
        """Raises AssertionError when the two views differ."""
        assert len(self._order) <= MOST_LEGS
        known = {id(leg) for _, leg in self._order}
        for legs in self._legs.values():
            assert legs
            assert all(id(leg) in known for leg in legs)
            assert [x.ended_at for x in legs] == sorted(x.ended_at for x in legs)
