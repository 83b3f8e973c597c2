"""All tests, in lanes beside each other as far as none takes the machine from another.

`python -m tools.run_tests [pytest's arguments]`. First the tests without engines: those of services
mostly wait, so two lanes of them share the machine, with the unit tests in what they leave. Then
those on real engines, alone: an engine takes every core it gets, and deadlines are promised on both
sides. One lane of each is printed as it runs, the others when they are done. With a choice of its
own among the arguments (`-m`, a path) pytest is run once, as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

NO_TESTS = 5
"""pytest's exit status when none was chosen."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One run of pytest over a part of the tests; `nice` is the priority that it gives up."""

    name: str
    choice: tuple[str, ...]
    nice: int = 0


WITHOUT_ENGINES = (
    Lane("kvbm", ("tests/integration/kvbm", "-m", "not engine")),
    Lane(
        "services",
        ("tests/integration", "--ignore=tests/integration/kvbm", "-m", "not engine"),
    ),
    Lane("units", ("tests", "--ignore=tests/integration", "-m", "not engine"), nice=10),
)
WITH_ENGINES = (Lane("engines", ("tests", "-m", "engine")),)


def main(arguments: list[str]) -> int:
    """Runs pytest once, or lane by lane; its exit status, the worst of all."""
    pytest = [sys.executable, "-m", "pytest"]
    if any(a.startswith("-m") or Path(a.partition("::")[0]).exists() for a in arguments):
        return subprocess.run([*pytest, *arguments], check=False).returncode
    statuses = side_by_side(WITHOUT_ENGINES, pytest, arguments)
    statuses |= side_by_side(WITH_ENGINES, pytest, arguments)
    said = {0: "passed", NO_TESTS: "nothing chosen"}
    lanes = (
        f"{name} {said.get(status, f'failed ({status})')}" for name, status in statuses.items()
    )
    print("\n== " + ", ".join(lanes), flush=True)
    return max((s for s in statuses.values() if s != NO_TESTS), default=NO_TESTS)


def side_by_side(
    lanes: tuple[Lane, ...], pytest: list[str], arguments: list[str]
) -> dict[str, int]:
    """Runs lanes at the same time, the first of them in sight; each one's exit status."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs: list[tuple[Lane, Path | None, subprocess.Popen[bytes]]] = []
        for lane in lanes:
            cache = f"cache_dir=.pytest_cache/{lane.name}"  # each remembers its own failures
            log = folder / f"{lane.name}.log" if runs else None
            out = stack.enter_context(log.open("wb")) if log else None
            run = subprocess.Popen(
                [*pytest, *lane.choice, "-o", cache, *arguments],
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                preexec_fn=partial(os.nice, lane.nice),
            )
            stack.callback(run.wait)
            stack.callback(run.terminate)
            runs.append((lane, log, run))
        statuses = {}
        for lane, log, run in runs:
            statuses[lane.name] = run.wait()
            if log:
                print(f"\n== beside it: {lane.name}", flush=True)
                sys.stdout.buffer.write(log.read_bytes())
                sys.stdout.flush()
        return statuses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
