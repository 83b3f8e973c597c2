"""How a part of the benchmark tells what it found: figures, goals, and how far off they are.

Parts are modules with a `measure` of their own; `main` makes a program of one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: float | None
    """None: it could not be taken; `note` says why."""
    unit: str = ""
    goal: float | None = None
    at_most: bool = True
    """Whether the goal is a highest value, not a lowest."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without goal or value."""
        if self.goal is None or self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, goal and verdict, and the note, for people."""
        value = "-" if self.value is None else f"{_number(self.value)}{self.unit}"
        if self.goal is None:
            return self.name, value, "", self.note
        sign = "<=" if self.at_most else ">="
        verdict = {True: "ok", False: "missed", None: "not taken"}[self.met]
        if self.value is not None and not self.met:
            verdict += f" by {_number(abs(self.value - self.goal))}"
        return self.name, value, f"{sign} {_number(self.goal)}{self.unit} {verdict}", self.note


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


@dataclass(slots=True)
class Report:
    """What a part found. `raw`: all values, for who wants to look closer."""

    title: str
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float | None, **more: Any) -> None:
        """Adds a row; arguments as Row's."""
        self.rows.append(Row(name, value, **more))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rows = [
            {
                "name": r.name,
                "value": r.value,
                "unit": r.unit.strip(),
                "goal": r.goal,
                "met": r.met,
                "note": r.note,
            }
            for r in self.rows
        ]
        return {"title": self.title, "rows": rows, "raw": self.raw, "load": os.getloadavg()[0]}

    def table(self) -> str:
        """The rows, for people."""
        cells = [row.cells() for row in self.rows]
        widths = [max((len(c[i]) for c in cells), default=0) for i in range(3)]
        lines = [self.title]
        for name, value, goal, note in cells:
            line = f"  {name:<{widths[0]}}  {value:>{widths[1]}}  {goal:<{widths[2]}}  {note}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile, 0 to 100."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * q / 100))]


def turns(at_most: int, seconds: float) -> Iterator[int]:
    """Numbers of turns to take: so many, or as many as begin in so many seconds; two at least."""
    began = time.monotonic()
    for number in range(at_most):
        if number >= 2 and time.monotonic() - began > seconds:
            return
        yield number


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Ratio of the medians; None when one of them was never taken."""
    if not ours or not theirs:
        return None
    return statistics.median(ours) / statistics.median(theirs)


def main(
    doc: str | None,
    measure: Callable[[argparse.Namespace], Awaitable[Report]],
    extend: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> int:
    """Measures and prints; `extend` adds options of the part's own."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", action="store_true", help="print JSON")
    extend(parser)
    arguments = parser.parse_args()

    async def body() -> Report:
        return await measure(arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(body())
    print(json.dumps(report.to_json(), indent=2) if arguments.json else report.table())
    sys.stdout.flush()
    return 0
