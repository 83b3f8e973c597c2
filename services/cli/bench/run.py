"""Runs of `forebay bench router`: traces and policies in, a row for each pair out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from services.cli.bench.engine import EngineWorker
from services.cli.errors import CliError, UsageError
from services.router.core.placement import CoreConfig
from services.router.core.policies import PolicyName
from services.router.core.rates import RateDefaults
from services.router.replay.measure import Row, measured
from services.router.replay.model import WorkerModel
from services.router.replay.reference import OraclePlacer, reference_grid
from services.router.replay.run import CorePlacer, Placer, Replay, ReplayError, StreamFaults
from services.router.replay.simple import SimpleSettings, SimpleWorker, pooled_hit_ratio
from services.router.replay.trace import (
    TraceError,
    TraceRequest,
    jittered,
    read_trace,
    sped_up,
    with_think_time,
)
from services.worker.engines.sim.core.lower import LowerTier
from services.worker.engines.sim.core.published import host_block_s, published

_HOST_LATENCY_S = 0.002
"""Before the first block of a load."""

OnProgress = Callable[[str, float], None]
"""Told what runs (policy and trace) and which share of it is done."""


class ModelKind(StrEnum):
    """Worker models."""

    SIMPLE = "simple"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What `forebay bench router` was asked for; units as in its options."""

    traces: tuple[Path, ...]
    policies: tuple[str, ...]
    workers: int = 8
    capacity_blocks: int = 2000
    replicas: int = 1
    event_lag_s: float = 0.0
    drop: float = 0.0
    slow_worker: float = 1.0
    speedup: float = 1.0
    think_time: bool = False
    jitter_s: float = 0.0
    model: ModelKind = ModelKind.SIMPLE
    profile: str = ""
    host_blocks: int = 0
    seed: int = 0
    limit: int = 0


def parse_policies(text: str) -> tuple[str, ...]:
    """Names from a list with commas: policies, `dynamo:WEIGHT`, or `grid`. Raises UsageError."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if name == "grid":
            names += reference_grid()
        elif name:
            names.append(name)
            if name not in reference_grid():
                _policy_of(name)
    if not names:
        raise UsageError("--policy names no policy", hint=_known())
    return tuple(dict.fromkeys(names))


def run_bench(options: BenchOptions, on_progress: OnProgress) -> Iterator[Row]:
    """Rows in the order of traces and policies, each as soon as it is there. Raises CliError."""
    for path in options.traces:
        requests = _requests(path, options)
        settings = SimpleSettings(options.capacity_blocks)
        ceiling = pooled_hit_ratio(requests, options.workers, settings)
        for name in options.policies:
            title = f"{name} on {path.name}"
            on_progress(title, 0.0)
            models = _models(options)
            placer = _placer(name, models, options)
            done = partial(_done, on_progress, title, len(requests))
            replay = Replay(requests, models, placer, on_progress=done)
            try:
                served = replay.run()
                yield measured(
                    served,
                    models,
                    policy=name,
                    trace=path.name,
                    pooled_hit_ratio=ceiling,
                    decision_s=placer.decision_s,
                )
            except (ReplayError, ValueError) as exc:
                raise CliError(f"{title}: {exc}") from exc


def _done(on_progress: OnProgress, title: str, total: int, placed: int) -> None:
    on_progress(title, placed / total)


def _requests(path: Path, options: BenchOptions) -> list[TraceRequest]:
    try:
        requests = read_trace(path)
    except TraceError as exc:
        raise UsageError(str(exc)) from exc
    if options.limit:
        requests = requests[: options.limit]
    if options.jitter_s:
        requests = jittered(requests, options.jitter_s, options.seed)
    if options.think_time:
        settings = SimpleSettings()
        requests = with_think_time(requests, settings.prefill_tps, settings.tpot_s)
    return sped_up(requests, options.speedup)


def _models(options: BenchOptions) -> Sequence[WorkerModel]:
    if options.model is ModelKind.ENGINE:
        try:
            profile = published(options.profile)
        except ValueError as exc:
            raise UsageError(f"--profile: {exc}") from exc
        return [
            EngineWorker(
                profile,
                options.capacity_blocks,
                options.slow_worker if i == 0 else 1.0,
                _host(options),
            )
            for i in range(options.workers)
        ]
    if options.host_blocks:
        raise UsageError("--host-blocks goes with --model engine")
    base = SimpleSettings(options.capacity_blocks)
    slow = SimpleSettings(options.capacity_blocks, base.prefill_tps * options.slow_worker)
    return [SimpleWorker(slow if i == 0 else base) for i in range(options.workers)]


def _host(options: BenchOptions) -> LowerTier | None:
    if not options.host_blocks:
        return None
    block_s = host_block_s(options.profile, EngineWorker.block_tokens)
    return LowerTier(options.host_blocks, latency_s=_HOST_LATENCY_S, block_s=block_s)


def _placer(name: str, models: Sequence[WorkerModel], options: BenchOptions) -> Placer:
    if (cost := reference_grid().get(name)) is not None:
        if options.model is not ModelKind.SIMPLE:
            raise UsageError(f"{name!r} runs on the model `simple` alone")
        return OraclePlacer([m for m in models if isinstance(m, SimpleWorker)], cost)
    policy, weight = _policy_of(name)
    if options.model is ModelKind.SIMPLE:
        # What the model publishes; that a worker is slower, routers must find out.
        rates = RateDefaults(SimpleSettings().prefill_tps, context_tokens=1e12)
    else:
        rates = RateDefaults()
    return CorePlacer(
        models,
        CoreConfig(policy=policy, dynamo_weight=weight, rates=rates),
        capacity_blocks=options.capacity_blocks,
        replicas=options.replicas,
        faults=StreamFaults(options.event_lag_s, options.drop),
        seed=options.seed,
        clock=time.perf_counter,
    )


def _policy_of(name: str) -> tuple[PolicyName, float]:
    base, _, weight = name.partition(":")
    try:
        policy = PolicyName(base)
        value = float(weight) if weight else 1.0
    except ValueError:
        raise UsageError(f"there is no policy {name!r}", hint=_known()) from None
    if weight and (policy is not PolicyName.DYNAMO or value < 0):
        raise UsageError(f"{name!r}: only `dynamo` takes a weight, and from 0 on", hint=_known())
    return policy, value


def _known() -> str:
    return f"Known are {', '.join(PolicyName)}, dynamo:WEIGHT, and grid for all reference ones."
