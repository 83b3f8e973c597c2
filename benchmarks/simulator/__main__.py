"""Measures an engine's steps and writes a timing profile for the simulator.

    python -m benchmarks.simulator --model DIR --output FILE.toml

It starts vLLM with the worker's settings, runs fresh prompts and batches of several sizes, fits the
figures of a timing profile to the lengths of the steps, and says how far the fit is off. On a
machine that does other things too, the figures are those of a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.simulator.fit import FIGURES, Fit, fit
from benchmarks.simulator.probe import measure
from services.worker.config import WorkerSettings
from services.worker.engines.port import Engine

PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
BATCHES = ((1, 32), (1, 1024), (2, 256), (4, 64), (4, 1024), (8, 256), (16, 32), (16, 256))


@asynccontextmanager
async def open_engine(settings: WorkerSettings) -> AsyncIterator[Engine]:
    """The engine that the settings name."""
    if settings.engine == "sim":
        from services.worker.engines.sim.engine import SimEngine
        from services.worker.engines.sim.folder import simulated_model

        model = simulated_model(settings)
        simulated = SimEngine(
            model.profile, model.config, model.vocabulary, speedup=settings.sim_speedup
        )
        try:
            yield simulated
        finally:
            simulated.close()
    else:
        from services.worker.engines.vllm import open_vllm

        async with open_vllm(settings) as engine:
            yield engine


def toml(found: Fit, capacity_tokens: int) -> str:
    """The file's text."""
    p = found.profile
    lines = [f"name = {json.dumps(p.name)}", f"source = {json.dumps(p.source)}"]
    lines += [f"{figure} = {getattr(p, figure):.4g}" for figure in FIGURES]
    return "\n".join([*lines, f"capacity_tokens = {capacity_tokens}", ""])


async def run(settings: WorkerSettings, name: str, rounds: int) -> tuple[Fit, str]:
    """Measures one engine; the fit, and the text of the profile's file."""
    async with open_engine(settings) as engine:
        # The first requests pay for what engines do once.
        await measure(engine, prompts=PROMPTS[:2], batches=BATCHES[:1], rounds=1)
        samples = await measure(engine, prompts=PROMPTS, batches=BATCHES, rounds=rounds)
        profile = engine.profile
        source = (
            f"python -m benchmarks.simulator, {len(samples)} steps of {profile.engine}, "
            f"{os.cpu_count()} x {platform.machine()}, {datetime.date.today().isoformat()}"
        )
        found = fit(name, source, samples)
        return found, toml(found, profile.total_blocks * profile.block_size)


def main() -> int:
    """Runs the measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the model's folder")
    parser.add_argument("--name", default="", help="the profile's name; default: the folder's")
    parser.add_argument("--output", type=Path, help="file to write; default: printed")
    parser.add_argument("--rounds", type=int, default=3, help="how often each size is run")
    parser.add_argument("--engine", choices=("vllm", "sim"), default="vllm", help="sim: a check")
    parser.add_argument("--engine-args", default="{}", help="as the worker's setting, JSON")
    arguments = parser.parse_args()
    settings = WorkerSettings(
        model=arguments.model,
        engine=arguments.engine,
        engine_args=json.loads(arguments.engine_args),
    )
    name = arguments.name or settings.name
    found, text = asyncio.run(run(settings, name, arguments.rounds))
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text)
    print(
        f"the fit is off by {found.mean_error:.1%} on average, {found.worst_error:.0%} at worst",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
