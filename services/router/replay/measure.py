"""Figures of a replay: one row for each policy and trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.replay.model import WorkerModel
from services.router.replay.run import Served


@dataclass(frozen=True, slots=True)
class Times:
    """A spread of seconds. The percentile p is the sorted value number n x p // 100."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Times:
        """Of at least one value."""
        ordered = sorted(values)
        n = len(ordered)
        p50, p90, p99 = (ordered[n * p // 100] for p in (50, 90, 99))
        return Times(sum(ordered) / n, p50, p90, p99)


@dataclass(frozen=True, slots=True)
class Row:
    """How one policy did on one trace."""

    policy: str
    trace: str
    hit_ratio: float
    """Cached share of all prompt tokens."""
    pooled_hit_ratio: float
    """The same with one cache of all workers' capacity: the ceiling."""
    ttft_s: Times
    """Time to first token."""
    itl_p99_s: float
    """Of each request's mean time between its tokens."""
    imbalance: float
    """Most uncached tokens of a worker / their mean."""
    decisions: int
    decision_us: float
    """Mean time of a decision in this process."""


def measured(
    served: Sequence[Served],
    models: Sequence[WorkerModel],
    *,
    policy: str,
    trace: str,
    pooled_hit_ratio: float,
    decision_s: float,
) -> Row:
    """The row of a run. Raises ValueError when a request never got its first token."""
    ttft = []
    itl = []
    cached = total = 0
    for one in served:
        if one.first_token_s is None:
            raise ValueError(f"request {one.request.number} got no first token")
        ttft.append(one.first_token_s - one.arrival_s)
        cached += one.cached_tokens
        total += one.request.input_tokens
        gaps = one.request.output_tokens - models[one.worker].first_gap
        if one.finished_s is not None and gaps > 0:
            itl.append((one.finished_s - one.first_token_s) / gaps)
    work = [model.computed_tokens for model in models]
    itl.sort()
    return Row(
        policy=policy,
        trace=trace,
        hit_ratio=cached / total,
        pooled_hit_ratio=pooled_hit_ratio,
        ttft_s=Times.of(ttft),
        itl_p99_s=itl[len(itl) * 99 // 100] if itl else 0.0,
        imbalance=max(work) * len(work) / max(1, sum(work)),
        decisions=len(served),
        decision_us=decision_s / len(served) * 1e6,
    )
