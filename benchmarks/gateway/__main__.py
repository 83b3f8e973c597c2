"""Measures, in one run and in under a minute: `python -m benchmarks.gateway [--json]`.

Added latency is the difference between two medians (or 99th percentiles) of the same load: streams
of 80 prompt and 16 output tokens from an instant worker, through the gateway and from the worker
itself. CPU is what the processes used, divided by the requests. On a machine that does other things
as well, trust the ratios.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway.decisions import core_rate, stream_rate
from benchmarks.gateway.load import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Direct,
    Gateway,
    One,
    Timings,
    closed_loop,
)
from tests.models import default_cache_dir, tiny_model
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd

MODEL = "instant"
CONCURRENCIES = (1, 16, 64)
WORDS = 31
"""With the template around them these are about 80 tokens of the tiny tokenizer."""


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile_ms(values: list[float], q: float) -> float:
    """The q-th percentile (0 to 100), in milliseconds."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))] * 1000


def figures(timings: Timings) -> dict[str, float]:
    """Latencies in milliseconds, and throughput."""
    return {
        "requests": len(timings.total_s),
        "requests_per_second": len(timings.total_s) / timings.elapsed_s,
        "ttft_p50_ms": percentile_ms(timings.ttft_s, 50),
        "ttft_p99_ms": percentile_ms(timings.ttft_s, 99),
        "total_p50_ms": percentile_ms(timings.total_s, 50),
        "total_p99_ms": percentile_ms(timings.total_s, 99),
        "total_mean_ms": statistics.fmean(timings.total_s) * 1000,
    }


async def with_cpu(
    one: One, concurrency: int, seconds: float, pids: dict[str, int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Figures of a run, and the CPU of each process in milliseconds a request."""
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    run = figures(await closed_loop(one, concurrency, seconds))
    used = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    return run, {name: 1000 * s / run["requests"] for name, s in used.items()}


async def measure(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """All figures of a running cluster with an instant worker."""
    pids = {name: process.pid for name, process in cluster.processes.items()}
    pids["client"] = os.getpid()
    worker_address = cluster.ready("instant").address
    gateway = Gateway(cluster.ready("gateway").address, MODEL, WORDS)
    direct = Direct(worker_address, MODEL)
    await direct.open()
    await closed_loop(gateway.request, 8, 1.0)  # warm: connections, templates, first allocations
    await closed_loop(direct.request, 8, 0.5)
    runs = []
    for concurrency in CONCURRENCIES:
        straight, cpu_direct = await with_cpu(direct.request, concurrency, seconds, pids)
        through, cpu_gateway = await with_cpu(gateway.request, concurrency, seconds, pids)
        names = ("ttft_p50_ms", "ttft_p99_ms", "total_p50_ms", "total_p99_ms")
        runs.append(
            {
                "concurrency": concurrency,
                "direct": straight,
                "gateway": through,
                "added": {name: through[name] - straight[name] for name in names},
                "cpu_ms_per_request": {"direct": cpu_direct, "gateway": cpu_gateway},
            }
        )
    await gateway.close()
    await direct.close()
    router = cluster.ready("router").address
    streamed = [await stream_rate(router, MODEL, tokens, seconds / 2) for tokens in (80, 3000)]
    core = [await asyncio.to_thread(core_rate, tokens, seconds / 2) for tokens in (80, 3000)]
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "runs": runs,
        "router_decisions_per_second": {
            "core": {str(r.prompt_tokens): r.per_second for r in core},
            "route_stream": {str(r.prompt_tokens): r.per_second for r in streamed},
        },
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
    }


def table(result: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"Streams of {result['prompt_tokens']} prompt and {result['output_tokens']} output tokens, "
        f"an instant worker, {result['machine']['cpus']} CPUs",
        "",
        "clients |  TTFT p50 / p99 ms        |  total p50 / p99 ms       | added p50 ms | req/s "
        "| CPU ms a request: gateway, router; worker through / direct",
        "        |  direct      gateway      |  direct      gateway      | TTFT  total  |       |",
    ]
    for run in result["runs"]:
        d, g, a, cpu = run["direct"], run["gateway"], run["added"], run["cpu_ms_per_request"]
        lines.append(
            f"{run['concurrency']:7} "
            f"| {d['ttft_p50_ms']:5.1f}/{d['ttft_p99_ms']:<5.1f} "
            f"{g['ttft_p50_ms']:6.1f}/{g['ttft_p99_ms']:<6.1f} "
            f"| {d['total_p50_ms']:5.1f}/{d['total_p99_ms']:<5.1f} "
            f"{g['total_p50_ms']:6.1f}/{g['total_p99_ms']:<6.1f} "
            f"| {a['ttft_p50_ms']:5.1f} {a['total_p50_ms']:6.1f} "
            f"| {g['requests_per_second']:5.0f} "
            f"| {cpu['gateway']['gateway']:5.2f} {cpu['gateway']['router']:5.2f}; "
            f"{cpu['gateway']['instant']:5.2f} / {cpu['direct']['instant']:.2f}"
        )
    lines += ["", "router decisions a second   80-token prompts   3000-token prompts"]
    for name, rates in result["router_decisions_per_second"].items():
        lines.append(f"  {name:24} {rates['80']:12,.0f} {rates['3000']:19,.0f}")
    return "\n".join(lines)


def main() -> int:
    """Starts the processes, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each run")
    options = parser.parse_args()
    model = tiny_model(default_cache_dir())
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        with Etcd(folder) as etcd:
            cluster = Cluster(folder, etcd, model)
            try:
                cluster.start(
                    "benchmarks.gateway.instant_worker",
                    "instant",
                    model=model,
                    served_model_name=MODEL,
                )
                cluster.start_router("router", log_level="warning")
                cluster.start_gateway("gateway", log_level="warning")
                for process in cluster.processes.values():
                    process.wait_ready(30)
                result = uvloop.run(measure(cluster, options.seconds))
            finally:
                cluster.close()
    print(json.dumps(result, indent=2) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
