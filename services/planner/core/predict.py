"""What latencies a pool of another size would have under the load that was measured. Formulas only.

Wait for prefill: a queue with several servers. Mean wait by Sakasegawa's approximation (1977), its
tail exponential, as usual for such queues (Kimura). What waits already counts as well. Decode: the
line of `steps` at the batch that the pool would have.
"""

from __future__ import annotations

from math import inf, log, sqrt

from services.planner.core.measures import DecodeLoad, PrefillLoad

_FULL = 0.97
"""Utilization from which on a queue is taken to grow without end."""


def drain_s(load: PrefillLoad, workers: int) -> float:
    """Seconds in which `workers` compute what waits; 0 while no rate is known."""
    if load.rate is None or not load.pending:
        return 0.0
    return load.pending / (load.rate * workers) if workers else inf


def ttft_s(load: PrefillLoad, workers: int, quantile: float) -> float | None:
    """End of the prefill after admission, at `quantile`, with so many workers; None: not known.

    Infinite when they can't do what arrives.
    """
    if load.rate is None or not load.mean_tokens:
        return None
    if workers < 1:
        return inf
    use = load.demand / (workers * load.rate)
    if use >= _FULL:
        return inf
    service = load.mean_tokens / load.rate
    busy: float = use ** (sqrt(2 * (workers + 1)) - 1)
    """Probability that an arrival finds all of them busy."""
    mean_wait = busy * service * (1 + load.variation) / (2 * workers * (1 - use))
    late = 1 - quantile
    # Exponential among those that wait at all.
    tail = mean_wait / busy * log(busy / late) if busy > late else 0.0
    wait = max(tail, drain_s(load, workers))
    return max(
        wait + service, max(mean_wait, drain_s(load, workers)) + load.high_tokens / load.rate
    )


def itl_s(load: DecodeLoad, workers: int) -> float | None:
    """Inter-token latency with so many workers, at the spread that was measured; None: not known.

    The larger of two: what decodes now, spread over them, and the batch that settles when tokens
    are produced as fast as now (a batch b with b / step(b) = tokens a second of one worker).
    """
    if load.step is None:
        return None if load.batch else 0.0
    if workers < 1:
        return inf if load.batch else 0.0
    now = load.step.at(load.batch / workers)
    share = load.tokens_s / workers * load.step.sequence_s
    settled = load.step.base_s / (1 - share) if share < 1 else inf
    return max(now, settled) * load.spread


def kv_use(load: DecodeLoad, workers: int) -> float:
    """Share of the blocks of so many workers that requests would use."""
    if not load.kv_worker:
        return 0.0
    return load.kv_used / (load.kv_worker * workers) if workers else inf


def prefill_use(load: PrefillLoad, workers: int) -> float:
    """Share of what so many workers can compute that arrives; 0 while no rate is known."""
    if load.rate is None or not load.demand:
        return 0.0
    return load.demand / (load.rate * workers) if workers else inf


def decode_use(load: DecodeLoad, workers: int, target_s: float) -> float:
    """The batch of so many workers as a share of that which just keeps the target."""
    if load.step is None or not load.batch:
        return 0.0
    if not workers:
        return inf
    room = target_s / load.spread - load.step.base_s
    if room <= 0:
        return inf
    return load.batch / workers * load.step.sequence_s / room
