"""A circuit breaker: whoever fails repeatedly is left alone for a while. Time is an argument."""

from __future__ import annotations

FAILURES = 3
"""Failures in a row that open it."""
PAUSE_S = (1.0, 10.0)
"""First and longest time for which it stays open; doubled with each trial that fails."""


class Breaker:
    """Closed: calls go through. Open: none does. After a pause one trial decides."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = 0.0
        self._closed_at_s = 0.0
        self._trial = False

    @property
    def open(self) -> bool:
        """Whether the last calls failed, and the next ones are spared."""
        return self._pause_s > 0

    def allow(self, now_s: float) -> bool:
        """Whether a call may go out at `now_s`; its end must be told."""
        if not self.open:
            return True
        if now_s < self._closed_at_s or self._trial:
            return False
        self._trial = True
        return True

    def succeeded(self) -> None:
        """A call came back."""
        self._failures, self._pause_s, self._trial = 0, 0.0, False

    def cancelled(self) -> None:
        """A call's end is of no interest any more; another may be the trial."""
        self._trial = False

    def failed(self, now_s: float) -> None:
        """A call did not come back, or too late."""
        self._trial = False
        self._failures += 1
        if self._failures >= FAILURES:
            self._pause_s = min(PAUSE_S[1], self._pause_s * 2 or PAUSE_S[0])
            self._closed_at_s = now_s + self._pause_s
