"""Transfer book: seconds for a prompt's KV to get from one worker to another, and whom to doubt.

    seconds = latency + seconds a token x tokens

Learned for each model from what those say that received it, by least squares that forget (fit.py);
published defaults hold before. A transfer that failed says nothing of the speed: for a while it
makes both ends look as much later as it cost, twice as much for each further one in a row. That
halves every ten seconds, so both are tried again; a transfer that comes through clears both. Knows
no requests and no blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.router.core.fit import Fit

_WIDEST = 8.0
"""A sample counts as within this factor of what was expected: one that was held up by something
else must not count for a hundred."""
_POINTS = ((1.0, 64.0, 0.0), (1.0, 1024.0, 0.0), (1.0, 8192.0, 0.0))
"""Transfers that the defaults count as: a short one, one of middle size, a long one."""
_MOST_MODELS = 256
_MOST_DOUBTS = 4096
_LEAST_LOST_S = 1.0
"""Seconds that a failure costs at least, ..."""
_MOST_LOST_S = 60.0
"""... and at most."""
_MOST_DOUBLINGS = 6
_HALF_S = 10.0
"""Seconds in which a doubt halves."""
_FORGOTTEN_S = 1e-3
"""Doubts below this are over."""


@dataclass(frozen=True, slots=True)
class TransferDefaults:
    """What holds before anything is measured."""

    latency_s: float = 0.02
    """Seconds before the first token's KV arrives."""
    tokens_per_s: float = 40_000.0
    """Prompt tokens whose KV arrives in a second."""
    learn: bool = True
    """Whether events correct that."""


@dataclass(slots=True)
class _Doubt:
    lost_s: float
    since: float
    failures: int = 1

    def seconds(self, now: float) -> float:
        doublings = min(self.failures - 1, _MOST_DOUBLINGS)
        return self.lost_s * math.pow(2.0, doublings - max(0.0, now - self.since) / _HALF_S)


class TransferBook:
    """Speeds by model, doubts by worker id. Times are seconds on the core's clock."""

    def __init__(self, defaults: TransferDefaults = TransferDefaults()) -> None:
        self._defaults = defaults
        self._fits: dict[str, Fit] = {}
        self._doubts: dict[str, _Doubt] = {}

    # What happens.

    def arrived(self, model: str, source: str, receiver: str, tokens: int, seconds: float) -> None:
        """The KV of so many tokens came from `source`, and was found right."""
        self._doubts.pop(source, None)
        self._doubts.pop(receiver, None)
        if not self._defaults.learn or tokens <= 0 or not 0 < seconds < float("inf"):
            return
        fit = self._fits.get(model)
        if fit is None:
            if len(self._fits) >= _MOST_MODELS:
                del self._fits[next(iter(self._fits))]
            fit = self._fits[model] = Fit(self._prior, _POINTS)
        x = 1.0, float(tokens), 0.0
        expected = fit.value(x)
        fit.add(x, min(max(seconds, expected / _WIDEST), expected * _WIDEST))

    def failed(self, source: str, receiver: str, lost_s: float, now: float) -> None:
        """Nothing came from `source`; finding that out took `lost_s`."""
        lost_s = min(_MOST_LOST_S, max(_LEAST_LOST_S, lost_s))
        for worker_id in (source, receiver):
            doubt = self._doubts.get(worker_id)
            if doubt is not None and now - doubt.since <= doubt.lost_s:
                # Those that were under way together fail together: that is one failure.
                continue
            self._doubts.pop(worker_id, None)
            if doubt is None or doubt.seconds(now) < _FORGOTTEN_S:
                doubt = _Doubt(lost_s, now)
            else:
                doubt = _Doubt(lost_s, now, min(doubt.failures + 1, _MOST_DOUBLINGS + 1))
            if len(self._doubts) >= _MOST_DOUBTS:
                del self._doubts[next(iter(self._doubts))]
            self._doubts[worker_id] = doubt

    def forget(self, worker_id: str) -> None:
        """That worker is gone, or lives anew: what failed says nothing of it any more."""
        self._doubts.pop(worker_id, None)

    def expire(self, now: float) -> None:
        """Drops doubts that are over."""
        over = [id for id, doubt in self._doubts.items() if doubt.seconds(now) < _FORGOTTEN_S]
        for worker_id in over:
            del self._doubts[worker_id]

    # Questions.

    def speed(self, model: str) -> tuple[float, float]:
        """Predicted seconds before the first of a model's KV arrives, and for each token."""
        fit = self._fits.get(model)
        latency_s, token_s, _ = self._prior if fit is None else fit.coefficients
        return latency_s, token_s

    def seconds(self, model: str, tokens: int) -> float:
        """Predicted seconds for the KV of so many tokens of a model; doubts aside."""
        latency_s, token_s = self.speed(model)
        return latency_s + token_s * tokens

    def doubt_s(self, worker_id: str, now: float) -> float:
        """By how much later a transfer with that worker is to be thought."""
        doubt = self._doubts.get(worker_id) if self._doubts else None
        return 0.0 if doubt is None else doubt.seconds(now)

    def check_invariants(self) -> None:
        """Raises AssertionError when a speed can't be one, or too much is remembered."""
        assert len(self._fits) <= _MOST_MODELS and len(self._doubts) <= _MOST_DOUBTS
        for fit in self._fits.values():
            assert min(fit.coefficients) >= 0 and fit.value((1.0, 1.0, 0.0)) < float("inf")
        assert all(doubt.failures > 0 for doubt in self._doubts.values())

    @property
    def _prior(self) -> tuple[float, float, float]:
        return self._defaults.latency_s, 1 / self._defaults.tokens_per_s, 0.0
