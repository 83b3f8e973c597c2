"""Sliding windows over what was heard: samples with the time, and time spent busy. Bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

MOST_SAMPLES = 4096
"""Samples that a window keeps; of more it forgets the oldest."""


def quantile_of(values: Sequence[float], q: float) -> float | None:
    """The smallest value that at least a share `q` of the values don't exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, ceil(q * len(ordered)) - 1))]


@dataclass(frozen=True, slots=True)
class Sample:
    """Something measured, heard at `at`; what it measures began at `began`."""

    at: float
    began: float
    value: float


class Window:
    """The samples of the last `length_s` seconds."""

    def __init__(self, length_s: float) -> None:
        self.length_s = length_s
        self._samples: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, now: float, value: float, began: float | None = None) -> None:
        """One more; times don't go back."""
        self._samples.append(Sample(now, now if began is None else began, value))

    def prune(self, now: float) -> None:
        """Forgets what is too old."""
        while self._samples and self._samples[0].at <= now - self.length_s:
            self._samples.popleft()

    def values(self, since: float = -inf) -> list[float]:
        """What was measured of things that began at `since` or later."""
        return [s.value for s in self._samples if s.began >= since]

    def total(self, since: float = -inf) -> float:
        """The sum of `values`."""
        return sum(s.value for s in self._samples if s.began >= since)

    def check_invariants(self) -> None:
        """Raises AssertionError when samples are out of order."""
        times = [s.at for s in self._samples]
        assert times == sorted(times)
        assert all(s.began <= s.at for s in self._samples)


class BusyTime:
    """For how long something was busy within the last `length_s` seconds."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._spans: deque[tuple[float, float]] = deque(maxlen=MOST_SAMPLES)
        self._since: float | None = None

    def set(self, busy: bool, now: float) -> None:
        """From now on it is busy, or isn't."""
        if busy and self._since is None:
            self._since = now
        elif not busy and self._since is not None:
            if now > self._since:
                self._spans.append((self._since, now))
            self._since = None

    def seconds(self, now: float, until: float | None = None) -> float:
        """Busy seconds of the window that ends now; only those before `until` when that is told."""
        start = now - self._length_s
        end = now if until is None else until
        while self._spans and self._spans[0][1] <= start:
            self._spans.popleft()
        spans = [*self._spans, *([] if self._since is None else [(self._since, now)])]
        return sum(max(0.0, min(stop, end) - max(begin, start)) for begin, stop in spans)
