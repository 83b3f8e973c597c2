"""The `engine` model of the replay, with and without host memory below its workers."""

from functools import reduce
from operator import xor
from pathlib import Path

import pytest

from services.cli.bench.engine import EngineWorker
from services.cli.bench.run import BenchOptions, ModelKind, run_bench
from services.cli.errors import UsageError
from services.common.events.model import Tier
from services.router.core.index import Digest
from services.router.core.placement import CoreConfig
from services.router.replay.measure import Row
from services.router.replay.run import CorePlacer, Replay, StreamFaults
from services.worker.engines.sim.core.lower import LowerTier
from services.worker.engines.sim.core.published import host_block_s, published
from tests.support.traces import made_trace, write_trace

PROFILE = "a100/llama-3.1-8b"
BLOCKS = 60


def rows(path: Path, host_blocks: int, *policies: str) -> dict[str, Row]:
    options = BenchOptions(
        (path,),
        policies,
        workers=4,
        capacity_blocks=BLOCKS,
        model=ModelKind.ENGINE,
        profile=PROFILE,
        host_blocks=host_blocks,
    )
    return {row.policy: row for row in run_bench(options, lambda title, share: None)}


def test_host_memory_brings_hits_that_are_worth_their_load(tmp_path: Path) -> None:
    path = write_trace(made_trace(3), tmp_path / "trace.jsonl")
    without, beside = rows(path, 0, "kv"), rows(path, 400, "kv", "round-robin")
    assert beside["kv"].hit_ratio > 1.2 * without["kv"].hit_ratio
    assert beside["kv"].ttft_s.mean < without["kv"].ttft_s.mean
    assert beside["kv"].hit_ratio > beside["round-robin"].hit_ratio


def test_the_simple_model_has_none(tmp_path: Path) -> None:
    path = write_trace(made_trace(3), tmp_path / "trace.jsonl")
    options = BenchOptions((path,), ("kv",), host_blocks=10)
    with pytest.raises(UsageError, match="host-blocks"):
        list(run_bench(options, lambda title, share: None))


@pytest.mark.parametrize("faults", [StreamFaults(), StreamFaults(lag_s=0.5, drop=0.05)])
def test_routers_know_what_lies_below(faults: StreamFaults) -> None:
    """At the end, whatever was late or lost: index = truth for both kinds of streams."""
    tiers = [
        LowerTier(200, latency_s=0.002, block_s=host_block_s(PROFILE, EngineWorker.block_tokens))
        for _ in range(3)
    ]
    models = [EngineWorker(published(PROFILE), BLOCKS, host=tier) for tier in tiers]
    placer = CorePlacer(models, CoreConfig(), capacity_blocks=BLOCKS, replicas=2, faults=faults)
    served = Replay(made_trace(5), models, placer).run()
    placer.settle(served[-1].arrival_s + 1000.0)
    assert all(len(tier) == 200 for tier in tiers), "the trace must fill them"
    for core in placer.cores:
        core.check_invariants()
        known = {
            node.id: view.digest
            for node in core.nodes.nodes(0.0)
            for view in node.tiers
            if view.tier is Tier.G2
        }
        truth = {
            f"kvbm-{i:04d}": Digest(len(tier), reduce(xor, tier.keys(), 0))
            for i, tier in enumerate(tiers)
        }
        assert known == truth
