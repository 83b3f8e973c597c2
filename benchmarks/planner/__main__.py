"""The planner beside every fixed split of the same workers, in simulated time:
`python -m benchmarks.planner [--json] [--load swing] [--traces FOLDER]`.

For each load: the share of time windows in which both targets were kept by the wanted share of the
requests that arrived in them, the share of requests that kept both, and the number of moves. A
split "k" has k prefill workers; "both" is every worker doing both, prompts cut into pieces beside
decodes. Deterministic: the same figures on any machine. Traces are files of Mooncake's and Azure's
forms (services/router/replay/trace.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.planner.loads import LOADS, Load
from benchmarks.planner.measure import Kept, kept
from benchmarks.planner.model import Hardware
from benchmarks.planner.run import Cluster, Outcome, Planning, split
from benchmarks.planner.show import PLANNER, show
from services.planner.core.targets import Targets
from services.router.replay.trace import TraceError, TraceRequest


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--load", action="append", choices=[load.name for load in LOADS])
    parser.add_argument("--traces", type=Path, default=Path("../shared/data"), help="their folder")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=960.0, help="of each load")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window")
    parser.add_argument("--itl-ms", type=float, default=25.0)
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument("--verbose", action="store_true", help="tell each move on stderr")
    options = parser.parse_args(argv)
    if options.workers < 2 or options.seconds <= 0 or options.window <= 0:
        parser.error("there must be two workers at least, and times above 0")
    return options


def measure(load: Load, requests: list[TraceRequest], o: argparse.Namespace) -> dict[str, Any]:
    """All splits, and the planner, on one load."""
    targets = Targets(load.ttft_s, o.itl_ms / 1e3, o.quantile)
    rows: dict[str, Any] = {}
    for prefill in range(o.workers):
        outcome = Cluster(split(o.workers, prefill), Hardware()).run(requests)
        name = str(prefill) if prefill else "both"
        rows[name] = _row(kept(outcome.lives, targets, o.window), outcome)
    # It begins in the middle, and nobody tells it what comes.
    roles = split(o.workers, o.workers // 2)
    outcome = Cluster(roles, Hardware(), Planning(targets)).run(requests)
    rows[PLANNER] = _row(kept(outcome.lives, targets, o.window), outcome)
    if o.verbose:
        for now, decision in outcome.decisions:
            if decision.move is not None:
                print(f"{load.name} {now:7.1f} {decision.reason}", file=sys.stderr)
    fixed = {name: row for name, row in rows.items() if name != PLANNER}
    best = max(fixed, key=lambda name: fixed[name]["windows"])
    return {
        "requests": len(requests),
        "targets": asdict(targets),
        "rows": rows,
        "best_fixed": best,
        "ahead": rows[PLANNER]["windows"] - fixed[best]["windows"],
    }


def _row(found: Kept, outcome: Outcome) -> dict[str, Any]:
    return {**asdict(found), "moves": outcome.moves}


def main(argv: list[str]) -> int:
    """Measures and prints; 1 when a trace can't be read."""
    options = parse(argv)
    found: dict[str, Any] = {}
    console = Console()
    for load in LOADS:
        if options.load and load.name not in options.load:
            continue
        try:
            requests = load.requests(options.seconds, options.traces)
        except TraceError as exc:
            print(f"{load.name}: {exc}", file=sys.stderr)
            return 1
        found[load.name] = measure(load, requests, options)
        if not options.json:
            console.print(show(load.name, found[load.name]))
    if options.json:
        print(json.dumps({"workers": options.workers, "loads": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
