"""How long a decode step takes, by the size of its batch: a straight line that forgets."""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.995
"""What a sample leaves of the weight of those before it."""
_LEAST_SPREAD = 0.02
"""Variance of batch sizes, as a share of their mean squared, from which on a slope is believed."""
_ASSUMED_SHARE = 0.5
"""Share of a step's time that is taken to grow with the batch while the slope isn't known."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: `base_s` and `sequence_s` for each sequence in the batch."""

    base_s: float
    sequence_s: float

    def at(self, batch: float) -> float:
        """Seconds of a step with that many sequences."""
        return self.base_s + self.sequence_s * batch


class StepFit:
    """Learns StepTime from samples of steps that decoded and did nothing else."""

    def __init__(self) -> None:
        self._n = self._b = self._bb = self._s = self._bs = 0.0

    def add(self, batch: float, step_s: float) -> None:
        """A step with so many sequences took that long."""
        for name, value in (
            ("_n", 1.0),
            ("_b", batch),
            ("_bb", batch * batch),
            ("_s", step_s),
            ("_bs", batch * step_s),
        ):
            setattr(self, name, getattr(self, name) * _DECAY + value)

    def value(self) -> StepTime | None:
        """The line; None before the first sample. Neither part is below 0."""
        if not self._n:
            return None
        batch, step_s = self._b / self._n, self._s / self._n
        variance = self._bb / self._n - batch * batch
        if variance > _LEAST_SPREAD * batch * batch:
            slope = (self._bs / self._n - batch * step_s) / variance
        else:
            slope = _ASSUMED_SHARE * step_s / batch
        slope = min(max(slope, 0.0), step_s / batch)
        return StepTime(max(0.0, step_s - slope * batch), slope)
