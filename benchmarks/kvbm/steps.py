"""What the connector takes of the engine's thread, step by step, with 32 requests that run.

`python -m benchmarks.kvbm.steps [--json]`. A real engine with the small model decodes; timers stand
around every call of vLLM into the connector, of both its sides, since here one thread runs both.
"without copies": steps that neither order a load or a save nor hear of one's end. The median says
what they take; in the tail another process had the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter

from benchmarks import report
from benchmarks.kvbm.engine import CALLS
from benchmarks.kvbm.rig import daemon, folders, prompt, small_model, worker
from benchmarks.report import Report, percentile

REQUESTS = 32
GOAL_US = 100.0


async def measure(arguments: argparse.Namespace) -> Report:
    """All steps of a short run."""
    told = Report(f"The connector's time a step, {REQUESTS} running requests")
    with folders() as place:
        timings = place.disk / "steps.json"
        async with (
            daemon(place, cpu_cache_gb=0.5) as kvbm,
            worker(
                "worker",
                place,
                small_model(),
                module="benchmarks.kvbm.engine",
                flags={
                    "steps": timings,
                    "kvbm": kvbm.address,
                    "kv_cache_gb": 0.5,
                    "max_model_len": 2048,
                },
            ) as engine,
        ):
            await kvbm.attached(1)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(REQUESTS):
                    tasks.create_task(engine.ask(prompt(arguments.prompt), arguments.output))
        read = json.loads(await asyncio.to_thread(timings.read_text))
    # What came before the first step has no requests.
    rows = [r for r in read if "requests" in r]
    full = [r for r in rows if r["requests"] == REQUESTS and r["tokens"] == REQUESTS]
    still = [r for r in full if not r["copies"]]
    busy = [r for r in rows if r["requests"] and r["copies"]]
    told.raw = {"without_copies": still, "with_copies": busy}
    if not still:
        raise RuntimeError(f"no steps of {REQUESTS} requests without copies, of {len(rows)}")
    calls: Counter[str] = Counter()
    for row in still:
        calls.update({name: row[name] for name in CALLS if name in row})
    dearest = ", ".join(f"{name} {us / len(still):.0f}" for name, us in calls.most_common(3))
    us = [r["us"] for r in still]
    note = f"{len(still)} steps; dearest calls, mean us: {dearest}"
    told.add("without copies, p50", percentile(us, 50), unit=" us", goal=GOAL_US, note=note)
    told.add("without copies, p90", percentile(us, 90), unit=" us")
    if busy:
        note = f"{len(busy)} steps: saves ordered, or heard of"
        told.add("with copies, p50", percentile([r["us"] for r in busy], 50), unit=" us", note=note)
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, default=65, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=80, help="tokens of each answer")


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
