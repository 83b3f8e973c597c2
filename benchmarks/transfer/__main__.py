"""How long KV stays fenced when a transfer is late: `python -m benchmarks.transfer`.

Two processes, real NIXL, UCX over TCP. One shows memory and is stopped (SIGSTOP) with all of a read
still to come, as a worker that hangs; the other reads by the code of the engine's connector. After
the deadline its agent is destroyed: the time until that is done is the fence, for so long blocks
are held that nobody uses. Then the memory is given other bytes, as by the next request, the first
process goes on, and what was written late is counted; one that dies of it writes nothing, so the
table says how many did. Beside it NIXL's own way to give a read up, releasing its handle: what it
says at once, and what is written then.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from benchmarks import report
from benchmarks.report import Report, percentile
from benchmarks.transfer.late import Late, fenced, released
from benchmarks.transfer.source import SHOWN


async def measure(arguments: argparse.Namespace) -> Report:
    """All figures."""
    os.environ |= {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
    told = Report(
        f"A late read of {SHOWN >> 20} MiB from a stopped process, {arguments.repeat} times"
    )
    ways: dict[str, Callable[[], Late]] = {
        "agent destroyed (ours)": partial(fenced, arguments.deadline),
        "handle released": released,
    }
    # A process for each: what a read that was given up leaves behind in one is nobody else's.
    spawn = multiprocessing.get_context("spawn")
    for way, run in ways.items():
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
            found = [pool.submit(run).result() for _ in range(arguments.repeat)]
        seconds = [s * 1e3 for s, _, _ in found]
        wrote = sum(late > 0 for _, late, _ in found)
        died = sum(not alive for *_, alive in found)
        told.raw[way] = found
        told.add(f"{way}: fence, p50", percentile(seconds, 50), unit=" ms")
        told.add(f"{way}: fence, longest", max(seconds), unit=" ms")
        told.add(
            f"{way}: reads that wrote after it", wrote, note=f"{sum(n for _, n, _ in found)} bytes"
        )
        told.add(f"{way}: sources that died", died, note="see docs/disagg.md, UCX over TCP")
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds that a read may take")


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
