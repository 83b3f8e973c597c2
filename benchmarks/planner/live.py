"""The planner beside fixed splits, live: `python -m benchmarks.planner.live [--json]`.

Real processes (etcd, router, gateway, planner) over workers that are simulated, since real engines
would share this machine's cores, whatever their roles. The workers have the modelled hardware of
`benchmarks.planner`, the load is its swing, and all goes at `--pace` times its speed: the load, the
workers, the planner's own times, and the targets. Clients stream from the gateway and take their
times there. One run after the other: each fixed split, then the planner, which starts in the
middle and is told nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import httpx
import uvloop
from rich.console import Console

from benchmarks.planner.loads import LONG_ANSWERS, Kind, swinging
from benchmarks.planner.measure import kept
from benchmarks.planner.model import Hardware, Life
from benchmarks.planner.run import split
from benchmarks.planner.show import PLANNER, show
from services.planner.config import PlannerSettings
from services.planner.core.targets import Targets
from services.router.replay.trace import TraceRequest
from tests.models import default_cache_dir, tiny_model
from tests.support.client import completion_body, http_client, metric
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.polling import until

MODEL = "simulated"
TTFT_S, ITL_S = 1.5, 0.025
PERIOD_S = 240.0
LONG_PROMPTS = Kind(5000, 60, 9.36)
"""As many tokens a second as the model's, in prompts that the simulator's tokenizer takes."""
SIZED_FOR = 8
"""Workers that the load at its full rate is for."""
PATIENCE_S = 60.0


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=PERIOD_S, help="of the load, in its time")
    parser.add_argument("--pace", type=float, default=0.5, help="its seconds in one of ours")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", action="append", help="a number of prefill workers (0: all do both), or planner"
    )
    options = parser.parse_args(argv)
    if options.workers < 2 or min(options.seconds, options.pace, options.window) <= 0:
        parser.error("there must be two workers at least, and times and pace above 0")
    return options


def write_profile(path: Path) -> None:
    """The modelled hardware, as the simulator takes it."""
    h = Hardware()
    figures = {
        "token_s": 1 / h.prefill_tokens_s,
        "weights_s": h.step_s,
        "sequence_s": h.sequence_s,
        "kv_token_s": h.context_s,
        "transfer_token_s": 1 / h.transfer_tokens_s,
        "transfer_latency_s": h.transfer_s,
    }
    path.parent.mkdir()
    lines = ['name = "modelled"', 'source = "benchmarks/planner/model.py"']
    path.write_text("\n".join([*lines, *(f"{k} = {v}" for k, v in figures.items())]) + "\n")


@asynccontextmanager
async def cluster(
    folder: Path, etcd: Etcd, prefill: int, options: argparse.Namespace, planner: bool
) -> AsyncIterator[Cluster]:
    """Router, gateway and workers that serve, and a planner if one is wanted."""
    profile = folder / "profile.toml"
    write_profile(profile)
    h = Hardware()
    engine = {
        "num_gpu_blocks_override": h.kv_tokens // 16,
        "max_num_seqs": 512,
        "max_num_batched_tokens": h.chunk_tokens,
    }
    running = Cluster(folder, etcd, tiny_model(default_cache_dir()))
    space = {"cluster": folder.name}
    try:
        for number, role in enumerate(split(options.workers, prefill)):
            running.start(
                "services.worker",
                f"worker-{number}",
                engine="sim",
                model=running.model,
                served_model_name=MODEL,
                role=role,
                sim_profile=profile,
                sim_speedup=options.pace,
                events_port=0,
                engine_args=json.dumps(engine),
                **space,
            )
        running.start_router(**space)
        running.start_gateway(**space)
        if planner:
            own = PlannerSettings()
            slow = {
                name: getattr(own, name) / options.pace
                for name in ("interval_s", "window_s", "gap_s", "refused_s")
            }
            targets = {"ttft_s": TTFT_S / options.pace, "itl_ms": ITL_S * 1e3 / options.pace}
            running.start("services.planner", "planner-0", **slow, **targets, **space)
        for process in running.processes.values():
            await process.until_ready(PATIENCE_S)
        gateway = running.ready("gateway-0").metrics_address
        await until(
            lambda: metric(gateway, "forebay_gateway_workers_connected"),
            lambda n: n == options.workers,
            within_s=PATIENCE_S,
            what="sessions with all workers",
        )
        yield running
    finally:
        running.close()


async def ask(client: httpx.AsyncClient, life: Life, began: float, pace: float) -> bool:
    """Streams one request, and books its times in the load's seconds; whether it was answered."""
    request = life.request
    dice = Random(request.number)
    prompt = dice.choices(range(3, 2000), k=request.input_tokens)
    body = completion_body(
        MODEL, prompt, max_tokens=request.output_tokens, ignore_eos=True, stream=True
    )
    done = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return False
        async for data in response.aiter_raw():
            now = (time.monotonic() - began) * pace
            if life.first_token_s is None and b"data: {" in data:
                life.first_token_s = now
            if b"data: [DONE]" in data:
                done, life.finished_s = True, now
    return done


async def serve(
    running: Cluster, requests: list[TraceRequest], pace: float
) -> tuple[list[Life], int, float]:
    """All requests at their times: what became of each, failures, and the latest start."""
    lives = [Life(request, request.arrival_s) for request in requests]
    failed, late_s = 0, 0.0
    began = time.monotonic()

    async def one(client: httpx.AsyncClient, life: Life) -> None:
        nonlocal failed
        try:
            failed += not await ask(client, life, began, pace)
        except httpx.HTTPError:
            failed += 1

    async with http_client(running.url()) as client, asyncio.TaskGroup() as tasks:
        client.timeout = httpx.Timeout(600)
        for life in lives:
            due = began + life.arrival_s / pace
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            late_s = max(late_s, time.monotonic() - due)
            tasks.create_task(one(client, life))
    return lives, failed, late_s


async def measure(folder: Path, etcd: Etcd, name: str, o: argparse.Namespace) -> dict[str, Any]:
    """One run, as a row of the table."""
    planner = name == PLANNER
    prefill = o.workers // 2 if planner else int(name)
    kinds = (LONG_PROMPTS, LONG_ANSWERS)
    requests = swinging(o.seconds, PERIOD_S, o.seed, kinds, o.workers / SIZED_FOR)
    async with cluster(folder / f"live-{name}", etcd, prefill, o, planner) as running:
        lives, failed, late_s = await serve(running, requests, o.pace)
        moves = 0.0
        if planner:
            address = running.ready("planner-0").metrics_address
            moves = await metric(address, "forebay_planner_moves_total")
    found = kept(lives, Targets(TTFT_S, ITL_S), o.window)
    return {
        **asdict(found),
        "moves": int(moves),
        "requests_sent": len(requests),
        "failed": failed,
        "late_ms": late_s * 1e3,
    }


async def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """All runs, one after the other."""
    names = options.only or [*map(str, range(options.workers)), PLANNER]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Etcd(Path(folder)) as etcd:
        for name in names:
            rows[name] = row = await measure(Path(folder), etcd, name, options)
            console.print(f"{name}: {row}", highlight=False, soft_wrap=True)
    fixed = [name for name in rows if name != PLANNER]
    best = max(fixed, key=lambda name: rows[name]["windows"], default="")
    return {
        "requests": max(row["requests_sent"] for row in rows.values()),
        "targets": asdict(Targets(TTFT_S, ITL_S)),
        "pace": options.pace,
        "workers": options.workers,
        "rows": rows,
        "best_fixed": best,
    }


def main(argv: list[str]) -> int:
    """Measures and prints; 1 when a request failed."""
    options = parse(argv)
    found = uvloop.run(run(options, Console(stderr=True)))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        Console().print(show(f"swing, live at {options.pace:g} of its speed", found))
    return int(any(row["failed"] for row in found["rows"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
