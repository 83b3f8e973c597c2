"""Placements that are told what no router knows: each worker's true queue and rate, at once.

The grid that placements are measured against: Dynamo's formula and LMetric at several weights, and
seconds to first token with two prices. They run on the `simple` model alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.common.events.model import Event
from services.common.ids import AttemptId
from services.router.replay.simple import SimpleWorker, uncached_tokens
from services.router.replay.trace import BLOCK_TOKENS, TraceRequest

ASSUMED_TPS = 16000.0
"""Rate by which placements that count tokens take seconds for tokens."""

Cost = Callable[[float, TraceRequest, SimpleWorker], float]


class OraclePlacer:
    """Least cost; of level ones that which has served the fewest."""

    def __init__(self, models: Sequence[SimpleWorker], cost: Cost) -> None:
        self._models = models
        self._cost = cost
        self.decision_s = 0.0

    def place(self, request: TraceRequest, attempt_id: AttemptId, now: float) -> int:
        """Looks into all workers."""
        costs = [(self._cost(now, request, m), m.served) for m in self._models]
        return min(range(len(costs)), key=costs.__getitem__)

    def tell(self, worker: int, events: Sequence[Event], now: float) -> None:
        """It needs no telling."""

    def next_time(self) -> float:
        """Never."""
        return float("inf")

    def advance(self, now: float) -> None:
        """Nothing is due."""


def _dynamo(weight: float) -> Cost:
    def cost(now: float, request: TraceRequest, w: SimpleWorker) -> float:
        prefill = uncached_tokens(w.cache, request) + w.wait_s(now) * ASSUMED_TPS
        return weight * prefill / BLOCK_TOKENS + w.active_blocks

    return cost


def _least_loaded(now: float, request: TraceRequest, w: SimpleWorker) -> float:
    return w.wait_s(now) * ASSUMED_TPS / BLOCK_TOKENS + w.active_blocks


def _lmetric(now: float, request: TraceRequest, w: SimpleWorker) -> float:
    prefill = uncached_tokens(w.cache, request) + w.wait_s(now) * ASSUMED_TPS
    return prefill * (w.running + 1)


def _seconds(own: float, active: float) -> Cost:
    def cost(now: float, request: TraceRequest, w: SimpleWorker) -> float:
        prefill = uncached_tokens(w.cache, request) / w.settings.prefill_tps
        return w.wait_s(now) + (1 + own) * prefill + active * w.active_blocks

    return cost


def reference_grid() -> dict[str, Cost]:
    """All of them, by name."""
    grid: dict[str, Cost] = {"ref least-loaded": _least_loaded, "ref lmetric": _lmetric}
    grid |= {f"ref dynamo w={w}": _dynamo(w) for w in (1, 2, 4, 8, 16, 32)}
    for own in (0, 0.5, 1, 2):
        for active in (0.0, 0.0005, 0.001, 0.002, 0.004):
            grid[f"ref seconds own={own} active={active}"] = _seconds(own, active)
    return grid
