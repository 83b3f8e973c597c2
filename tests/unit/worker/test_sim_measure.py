"""The measurement of timing profiles, on an engine whose profile is known."""

from __future__ import annotations

import pytest

from benchmarks.simulator.fit import FIGURES, Sample, fit
from benchmarks.simulator.probe import measure
from services.common.blocks import block_hashes
from services.common.cards import HashVector
from services.worker.engines.port import EngineProfile
from services.worker.engines.sim.core.model import SimConfig
from services.worker.engines.sim.core.timing import TimingProfile
from services.worker.engines.sim.core.tokens import Vocabulary
from services.worker.engines.sim.engine import SimEngine

SPEEDUP = 10_000
KNOWN = TimingProfile(
    "known",
    "made up",
    token_s=1e-3,
    weights_s=0.03,
    pair_s=2e-7,
    sequence_s=2e-3,
    kv_token_s=3e-6,
    overhead_s=4e-3,
)


async def test_a_known_engine_is_measured_right(tmp_path) -> None:
    example = tuple(range(32))
    hashes = tuple(block_hashes(example, 16))
    profile = EngineProfile(
        "simulator", tmp_path, 16, 1024, 16384, 5000, (), 20, HashVector(example, "", hashes), {}
    )
    config = SimConfig(KNOWN, 1024, max_batched_tokens=256)
    engine = SimEngine(profile, config, Vocabulary(5000), speedup=SPEEDUP)
    try:
        samples = await measure(
            engine,
            prompts=(16, 64, 256, 1000, 2000),
            batches=((1, 32), (4, 400), (16, 100), (2, 20_000)),
            rounds=1,
        )
    finally:
        engine.close()
    assert {s.sequences for s in samples} == {1, 4, 16}
    found = fit("known", "measured", samples).profile.scaled(SPEEDUP)
    for figure in FIGURES:
        assert getattr(found, figure) == pytest.approx(getattr(KNOWN, figure), rel=0.02)


def test_no_figure_is_negative_whatever_was_measured() -> None:
    odd = [Sample(t, 0, 1, t, 0.1 - t * 1e-4) for t in range(1, 200, 7)]
    found = fit("odd", "made up", odd)
    assert all(v >= 0 for v in found.profile.figures().values())


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit("a", "b", [Sample(1, 0, 1, 0, 1.0)] * 5)
