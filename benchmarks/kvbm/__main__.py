"""All parts of the benchmark, one after the other: `python -m benchmarks.kvbm [--json]`.

`--only NAME` runs one of them; each is a program of its own as well (`python -m
benchmarks.kvbm.NAME --help` tells its options). On a machine that does other things too, trust the
ratios. What a part is not able to measure here, it says.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from typing import Any

PARTS = ("copy", "disk", "fetch", "traces", "lookup", "steps", "zero", "ttft", "far", "rival")
"""In this order; the last five run real engines."""


def main() -> int:
    """Runs the parts; 1 when one of them could not be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given repeatedly")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()}
    }
    failed = False
    for part in arguments.only or PARTS:
        if importlib.util.find_spec(f"benchmarks.kvbm.{part}") is None:
            continue
        began = time.monotonic()
        results[part], fine = run(part, as_json=arguments.json)
        failed |= not fine
        if not arguments.json:
            took = f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f}"
            print(f"  [{part}: {took}]\n", flush=True)
    if arguments.json:
        print(json.dumps(results, indent=2))
    return int(failed)


def run(part: str, *, as_json: bool) -> tuple[Any, bool]:
    """What a part printed as JSON, and whether it ran. Without JSON it prints by itself."""
    command = [sys.executable, "-m", f"benchmarks.kvbm.{part}", *(["--json"] if as_json else [])]
    ran = subprocess.run(command, stdout=subprocess.PIPE if as_json else None, check=False)
    if not as_json:
        # 1 also says that a goal was missed; then it has printed what was found.
        return None, ran.returncode in (0, 1)
    try:
        return json.loads(ran.stdout), True
    except ValueError:
        return {"error": f"ended with {ran.returncode}"}, False


if __name__ == "__main__":
    sys.exit(main())
