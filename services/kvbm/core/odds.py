"""Odds: is it worth asking remote storage for blocks that nobody here has seen?

The question costs the request a round trip, and most prompts are new. So it is asked while the time
that a find would save, times its measured chance, is more than the round trip; and now and then
anyway, off the path, so that the chance can change.
"""

from __future__ import annotations

_WEIGHT = 0.1
"""Part that the newest answer has in the averages."""
_ASK_EVERY = 16
"""Of the questions that don't seem worth it, every so many is asked off the path."""


class Odds:
    """Learns from answers. Pure."""

    def __init__(self, chance: float = 0.5, round_trip_s: float = 0.02) -> None:
        self.chance = chance
        """Share of questions whose answer is yes."""
        self.round_trip_s = round_trip_s
        """Seconds that an answer takes."""
        self._passed_over = 0

    def heard(self, found: bool, seconds: float) -> None:
        """Books an answer."""
        self.chance += _WEIGHT * (found - self.chance)
        self.round_trip_s += _WEIGHT * (seconds - self.round_trip_s)

    def worth(self, gain_s: float) -> bool:
        """Whether to let a request wait for an answer that would save it `gain_s`."""
        return self.chance * gain_s > self.round_trip_s

    def try_anyway(self) -> bool:
        """Whether to ask off the path, where it isn't worth it."""
        self._passed_over = (self._passed_over + 1) % _ASK_EVERY
        return self._passed_over == 0
