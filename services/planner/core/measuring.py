"""What a group's log and its living workers come to: the figures that a decision rests on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from services.common.cards import Role
from services.planner.core.group import GroupLog, attained
from services.planner.core.measures import (
    DecodeLoad,
    GroupKey,
    GroupMeasures,
    PrefillLoad,
    WorkerView,
)
from services.planner.core.runs import Worker
from services.planner.core.targets import Targets
from services.planner.core.windows import Window, quantile_of

_LEAST_BUSY_S = 0.05
"""Busy seconds from which on a rate is taken from them."""
_WIDEST = 3.0
"""Most that a latency may lie above what steps that only decode would make it."""
_SIGMAS = 2.0
"""Standard deviations from which on a change is not chance."""


def measured(
    key: GroupKey, group: GroupLog, living: Sequence[Worker], targets: Targets, now: float
) -> GroupMeasures:
    """All of it; log and workers hold nothing older than the window."""
    q, since = targets.quantile, group.since
    late = sum(
        r.at is not None and now - r.at + (r.lead_s or 0.0) > targets.ttft_s
        for w in living
        for r in w.runs.waiting()
    )
    # Who still waits has waited for so long at least.
    fresh = group.prefill.values(since) + [
        now - r.at
        for w in living
        for r in w.runs.waiting()
        if r.at is not None and r.at >= since and r.to_compute and now - r.at > targets.ttft_s
    ]
    # What a worker that now prefills still decodes is slow, and says nothing of the others.
    decoders = [w for w in living if w.info.role is not Role.PREFILL]
    itl = group.itl.values(since) + _running_itl(decoders, since)
    return GroupMeasures(
        key=key,
        workers=tuple(_view(w) for w in living),
        ttft=attained(group.ttft.values(), targets.ttft_s, q, late=late),
        itl=attained(group.itl.values() + _running_itl(living, -inf), targets.itl_s, q),
        fresh_ttft=len(fresh),
        prefill_high_s=quantile_of(fresh, q),
        handover_s=quantile_of(group.handover.values(since), 0.5) or 0.0,
        fresh_itl=len(itl),
        itl_high_s=quantile_of(itl, q),
        prefill=_prefill_load(group, living, targets, now),
        decode=_decode_load(group, living, quantile_of(itl, q), now),
        changed_at=group.changed_at,
    )


def _prefill_load(
    group: GroupLog, living: Sequence[Worker], targets: Targets, now: float
) -> PrefillLoad:
    pool = [w for w in living if w.info.role is Role.PREFILL] or living
    busy = sum(w.runs.prefill_s(now) for w in pool)
    tokens = sum(w.runs.computed.total() for w in pool)
    if busy >= _LEAST_BUSY_S and tokens:
        group.rate = tokens / busy
    sizes = [v for w in pool for v in w.runs.computed.values() if v > 1]
    mean = sum(sizes) / len(sizes) if sizes else 0.0
    squares = sum(v * v for v in sizes) / len(sizes) if sizes else 0.0
    return PrefillLoad(
        rate=group.rate,
        demand=_demand(group.arrivals, now, group.began) * group.uncached,
        pending=sum(w.runs.queued_tokens(group.uncached) for w in pool),
        mean_tokens=mean,
        high_tokens=quantile_of(sizes, targets.quantile) or 0.0,
        variation=squares / mean**2 - 1 if mean else 1.0,
    )


def _decode_load(
    group: GroupLog, living: Sequence[Worker], itl_high_s: float | None, now: float
) -> DecodeLoad:
    pool = [w for w in living if w.info.role is not Role.PREFILL]
    batch = sum(1 for w in pool for _ in w.runs.decoding())
    before = [v for v in group.batches.values(now - group.window_s / 2)]
    grown = batch - int(before[0]) if before else 0
    if grown < _SIGMAS * max(1.0, batch) ** 0.5:
        grown = 0
    used = [w.runs.kv_blocks() for w in pool]
    step = group.fit.value()
    spread = 1.0
    if step is not None and itl_high_s is not None and pool:
        usual = max(batch, sum(w.runs.batch_mean() for w in pool)) / len(pool)
        spread = min(_WIDEST, max(1.0, itl_high_s / max(1e-9, step.at(usual))))
    return DecodeLoad(
        step=step,
        batch=batch + grown,
        tokens_s=sum(w.runs.tokens.total() for w in pool) / _seen_s(group, now),
        spread=spread,
        kv_used=sum(u for u, _ in used),
        kv_worker=sum(t for _, t in used) / len(used) if used else 0.0,
    )


def _seen_s(group: GroupLog, now: float) -> float:
    return max(1.0, min(group.window_s, now - group.began))


def _view(worker: Worker) -> WorkerView:
    runs, info = worker.runs, worker.info
    return WorkerView(
        info=info,
        movable=worker.recorded and bool(info.group.way) and worker.incarnation == info.incarnation,
        active_tokens=sum(r.admitted.prompt_tokens for r in runs.requests.values()),
        hit_tokens=runs.hits.total(),
    )


def _running_itl(living: Iterable[Worker], since: float) -> list[float]:
    """Estimates for requests that have not ended: the mean step of their worker, by its steps."""
    found: list[float] = []
    for worker in living:
        step_s = worker.runs.step_mean_s(since)
        if step_s is not None:
            found += [step_s] * sum(1 for _ in worker.runs.decoding())
    return found


def _demand(arrivals: Window, now: float, began: float) -> float:
    """Tokens a second; what they rose by within the window is expected to come once more.

    Only a rise that chance does not explain: beyond two standard deviations of random arrivals.
    """
    half = arrivals.length_s / 2
    if now - began < arrivals.length_s:
        return arrivals.total() / max(1.0, now - began)
    late = arrivals.total(now - half)
    early = arrivals.total() - late
    noise = sum(v * v for v in arrivals.values()) ** 0.5
    if abs(late - early) > _SIGMAS * noise:
        # It changes: only the last half tells of now.
        return (late + max(0.0, late - early)) / half
    return (late + early) / arrivals.length_s
