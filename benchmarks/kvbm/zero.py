"""What kvbm costs where it can't help: prompts that never come again.

`python -m benchmarks.kvbm.zero [--json]`. Two engines with the real small model take the same
batches in turns, one with kvbm (every block is saved, nothing is ever found), one without; the
order changes from pair to pair. The ratio is the median of the pairs' ratios. "while running"
leaves out the time in which the engine's thread was ready but another had the CPU: on a machine
that does other things as well, that is the steadier figure.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks import report
from benchmarks.kvbm.rig import Worker, daemon, folders, prompt, small_model, worker
from benchmarks.report import Report, turns

GOAL = 0.99
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 16
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch by one engine. All in seconds."""

    elapsed_s: float
    running_s: float
    """Without the waits for a CPU of the engine's thread."""
    engine_cpu_s: float
    """Of the engine's thread alone."""
    process_cpu_s: float


async def batch(engine: Worker, prompts: list[list[int]]) -> Turn:
    """All prompts, so many at once."""
    lane = asyncio.Semaphore(AT_ONCE)

    async def one(tokens: list[int]) -> None:
        async with lane:
            answer = await engine.ask(tokens, OUTPUT_TOKENS)
        if answer.cached:
            raise RuntimeError("a prompt was found that nobody had asked before")

    process = engine.process
    # What computes is the engine's thread.
    id, (ran, waited) = max(process.threads().items(), key=lambda item: item[1][0])
    cpu = process.cpu_s
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for tokens in prompts:
            tasks.create_task(one(tokens))
    elapsed = time.perf_counter() - began
    ran_now, waited_now = process.threads()[id]
    return Turn(elapsed, elapsed - (waited_now - waited), ran_now - ran, process.cpu_s - cpu)


async def measure(arguments: argparse.Namespace) -> Report:
    """Pairs of turns."""
    told = Report("Throughput at zero reuse, with kvbm / without")
    model = small_model()
    shape: dict[str, object] = {"kv_cache_gb": 0.25, "max_model_len": 2048}
    with folders() as place:
        async with (
            daemon(place, cpu_cache_gb=0.5, disk_cache_gb=1) as kvbm,
            worker("with", place, model, flags={"kvbm": kvbm.address, **shape}) as ours,
            worker("without", place, model, flags=shape) as plain,
        ):
            await kvbm.attached(1)
            for engine in (ours, plain):
                await batch(engine, [prompt(PROMPT_TOKENS) for _ in range(2)])
            daemon_cpu = kvbm.process.cpu_s
            pairs: list[tuple[Turn, Turn]] = []
            for number in turns(arguments.pairs, arguments.seconds):
                order = [ours, plain] if number % 2 else [plain, ours]
                took = {}
                for engine in order:
                    prompts = [prompt(PROMPT_TOKENS) for _ in range(arguments.batch)]
                    took[engine] = await batch(engine, prompts)
                pairs.append((took[ours], took[plain]))
            daemon_cpu = (kvbm.process.cpu_s - daemon_cpu) / len(pairs)
            saved = (await kvbm.stats()).counters.get("offload_blocks_d2h", 0.0)
    told.raw = {
        "pairs": [[asdict(a), asdict(b)] for a, b in pairs],
        "daemon_cpu_s_a_turn": daemon_cpu,
        "saved_blocks": saved,
    }
    tokens = arguments.batch * (PROMPT_TOKENS + OUTPUT_TOKENS)
    rate = tokens / statistics.median(b.elapsed_s for _, b in pairs)
    spread = sorted(b.elapsed_s / a.elapsed_s for a, b in pairs)
    told.add(
        "tokens a second",
        statistics.median(spread),
        goal=GOAL,
        at_most=False,
        note=f"{len(pairs)} pairs, {spread[0]:.2f} to {spread[-1]:.2f}; without: {rate:.0f}/s",
    )
    told.add(
        "... while running",
        statistics.median(b.running_s / a.running_s for a, b in pairs),
        goal=GOAL,
        at_most=False,
    )
    told.add(
        "CPU of the engine's thread, without / with",
        statistics.median(b.engine_cpu_s / a.engine_cpu_s for a, b in pairs),
    )
    told.add(
        "CPU of the whole process, without / with",
        statistics.median(b.process_cpu_s / a.process_cpu_s for a, b in pairs),
        note=f"and the daemon's: {daemon_cpu:.2f} s a turn; {saved:.0f} blocks saved in all",
    )
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=24, help="turns of both, at most")
    parser.add_argument("--seconds", type=float, default=120, help="no turn begins after that")
    parser.add_argument("--batch", type=int, default=4, help="prompts in a turn")


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
