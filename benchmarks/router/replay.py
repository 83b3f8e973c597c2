"""How well `kv` places, on recorded traces: `python -m benchmarks.router.replay [--data FOLDER]`.

Everything by `forebay bench router`'s own code, at `kv`'s defaults, beside the best of the
reference grid, whose placements are told every worker's true queue and speed, and beside other
policies. Deterministic, so it doesn't matter what else the machine does; half an hour on one core,
less with `--only`. `gain` is the way from round-robin's hits to those of one cache of all workers'
room.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Report
from services.cli.bench.run import BenchOptions, ModelKind, run_bench
from services.router.replay.measure import Row
from services.router.replay.reference import reference_grid

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
GAINS = {("conversation", 1): 0.93, ("conversation", 2): 0.90}
GAINS |= {("toolagent", 1): 0.96, ("toolagent", 2): 0.90}
FIXED = ("dynamo:1", "dynamo:4", "dynamo:16", "dynamo:64")
OTHERS = ("round-robin", "least-loaded", "p2c", "sticky", "dynamo", "dynamo:16", "lmetric")
ENGINE_REQUESTS = 3000
"""So many of a trace's first requests run on the `engine` model."""


class Runs:
    """Rows by options and policy, each run once."""

    def __init__(self) -> None:
        self._known: dict[tuple[BenchOptions, str], Row] = {}

    def rows(self, options: BenchOptions, *policies: str) -> list[Row]:
        """Of these policies, in order."""
        wanted = [p for p in policies if (options, p) not in self._known]
        for row in run_bench(replace(options, policies=tuple(wanted)), self._progress):
            self._known[options, row.policy] = row
        return [self._known[options, p] for p in policies]

    def row(self, options: BenchOptions, policy: str) -> Row:
        """Of one policy."""
        return self.rows(options, policy)[0]

    @staticmethod
    def _progress(title: str, share: float) -> None:
        if sys.stderr.isatty():
            print(f"\r{title:<70.70} {share:4.0%}", end="\r", file=sys.stderr)


def load(runs: Runs, report: Report, options: BenchOptions, trace: str) -> None:
    """Hits, evenness and times at the trace's own load and at twice that."""
    for speedup in (1, 2):
        at = replace(options, speedup=speedup)
        kv, spread, dynamo = runs.rows(at, "kv", "round-robin", "dynamo")
        best = min(row.ttft_s.p90 for row in runs.rows(at, *reference_grid()))
        ceiling = kv.pooled_hit_ratio - spread.hit_ratio
        name = f"{trace}, {speedup}x load:"
        report.add(
            f"{name} gain",
            (kv.hit_ratio - spread.hit_ratio) / ceiling,
            goal=GAINS.get((trace, speedup)),
            at_most=False,
            note=f"hits {kv.hit_ratio:.3f}, ceiling {kv.pooled_hit_ratio:.3f}",
        )
        report.add(f"{name} imbalance", kv.imbalance, goal=1.15)
        report.add(f"{name} p90 TTFT / best of the grid", kv.ttft_s.p90 / best, goal=1.03)
        report.add(f"{name} mean / dynamo's", kv.ttft_s.mean / dynamo.ttft_s.mean, goal=0.85)


def slow_worker(runs: Runs, report: Report, options: BenchOptions, trace: str) -> None:
    """One worker at half speed, which nobody tells."""
    at = replace(options, slow_worker=0.5)
    kv = runs.row(at, "kv").ttft_s.p90
    best = min(row.ttft_s.p90 for row in runs.rows(at, *reference_grid()))
    fixed = min(row.ttft_s.p90 for row in runs.rows(at, *FIXED))
    report.add(f"{trace}, a slow worker: p90 / best of the grid", kv / best, goal=1.05)
    report.add(f"{trace}, a slow worker: p90 / best fixed weight", kv / fixed, goal=1.0)


def replicas(runs: Runs, report: Report, options: BenchOptions, trace: str) -> None:
    """Routers that hear late, or not all, and nothing of one another."""
    alone = runs.row(options, "kv").hit_ratio
    for words, goal, changes in (
        ("2 routers", 0.97, {"replicas": 2}),
        ("4 routers", 0.97, {"replicas": 4}),
        ("1% of events lost, all 1 s late", 0.98, {"drop": 0.01, "event_lag_s": 1.0}),
        ("that, and 4 routers", None, {"drop": 0.01, "event_lag_s": 1.0, "replicas": 4}),
    ):
        row = runs.row(replace(options, **changes), "kv")
        name = f"{trace}, {words}: hits / one router's"
        report.add(name, row.hit_ratio / alone, goal=goal, at_most=False)


def beside(runs: Runs, report: Report, options: BenchOptions, trace: str, words: str) -> None:
    """Level with every other policy in p90, ahead in hits of all that are."""
    kv = runs.row(options, "kv")
    others = runs.rows(options, *OTHERS)
    best = min(others, key=lambda row: row.ttft_s.p90)
    report.add(
        f"{trace}, {words}: p90 / best other policy's",
        kv.ttft_s.p90 / best.ttft_s.p90,
        goal=1.0,
        note=best.policy,
    )
    most = max((r for r in others if r.policy != "sticky"), key=lambda row: row.hit_ratio)
    sticky = next(row for row in others if row.policy == "sticky")
    report.add(
        f"{trace}, {words}: hits / most of another's",
        kv.hit_ratio / most.hit_ratio,
        goal=1.0,
        at_most=False,
        note=f"{most.policy}; sticky, whose p90 is {sticky.ttft_s.p90 / kv.ttft_s.p90:.2f} of "
        f"kv's: {kv.hit_ratio / sticky.hit_ratio:.3f}",
    )


def think_time(runs: Runs, report: Report, options: BenchOptions, trace: str) -> None:
    """Turns of a conversation wait for the answer before."""
    beside(runs, report, replace(options, think_time=True), trace, "think time")


def engine(runs: Runs, report: Report, options: BenchOptions, trace: str) -> None:
    """The simulator's engine: chunked prefill, batching, preemption."""
    at = replace(options, model=ModelKind.ENGINE, limit=ENGINE_REQUESTS)
    at = replace(at, profile="h100/llama-3.1-8b")
    beside(runs, report, at, trace, "engine model")


Part = Callable[[Runs, Report, BenchOptions, str], None]
PARTS: dict[str, Part] = {
    "load": load,
    "slow-worker": slow_worker,
    "replicas": replicas,
    "think-time": think_time,
    "engine": engine,
}


def measure(data: Path, parts: Sequence[str]) -> Report:
    """The parts, on both traces. Raises CliError."""
    report = Report("Placement on recorded traces, 8 workers of 2,000 blocks")
    runs = Runs()
    for trace, file in (("conversation", "conversation_dev"), ("toolagent", "toolagent_like_dev")):
        options = BenchOptions((data / f"{file}.jsonl",), ())
        for part in parts:
            PARTS[part](runs, report, options, trace)
    return report


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part (repeatable)")
    arguments = parser.parse_args()
    report = measure(arguments.data, arguments.only or list(PARTS))
    print(json.dumps(report.to_json(), indent=2) if arguments.json else report.table())


if __name__ == "__main__":
    main()
