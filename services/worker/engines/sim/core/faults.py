"""Faults on request: what a simulated worker is to do wrong, and when. Seconds since its start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What goes wrong."""

    STALL = "stall"
    """No step ends: the engine hangs, the worker around it lives."""
    SLOW = "slow"
    """Steps take `factor` times as long. Nobody is told."""
    DIE = "die"
    """The engine dies. Its worker says so, ends, and comes back with a new incarnation."""
    DROP = "drop"
    """A `share` of the event batches is lost on the way: their numbers are missing."""
    LIE = "lie"
    """A `share` of the event batches is lost, and their numbers are given out again: no hole
    shows. Only a comparison with what the worker really holds finds that."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one worker, or of all."""

    kind: FaultKind
    at_s: float = 0.0
    """When it begins, in seconds after the worker began to serve."""
    for_s: float = math.inf
    """How long it lasts."""
    factor: float = 2.0
    """Of SLOW."""
    share: float = 1.0
    """Of DROP and LIE: the part of the batches, 0 to 1."""
    workers: tuple[int, ...] = ()
    """Which workers of the process, by number from 0; empty: all."""

    def concerns(self, worker: int) -> bool:
        """Whether the worker of that number has it."""
        return not self.workers or worker in self.workers


def faults_from(rows: Sequence[object]) -> tuple[Fault, ...]:
    """Faults from a list of tables as in Fault. Raises ValueError that names what is wrong."""
    return tuple(_fault(i, row) for i, row in enumerate(rows))


def _fault(number: int, row: object) -> Fault:
    where = f"fault {number}"
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} is {row!r}; it must be an object")
    known = {"kind", "at_s", "for_s", "factor", "share", "workers"}
    if unknown := sorted(set(row) - known):
        raise ValueError(f"{where} has unknown fields {', '.join(map(str, unknown))}")
    kinds = ", ".join(FaultKind)
    if row.get("kind") not in list(FaultKind):
        raise ValueError(f"{where} has kind {row.get('kind')!r}; it must be one of {kinds}")
    numbers: dict[str, float] = {}
    for name in ("at_s", "for_s", "factor", "share"):
        if name in row:
            value = row[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"{where} has {name} {value!r}; it must be a number from 0 on")
            numbers[name] = float(value)
    if numbers.get("share", 1.0) > 1:
        raise ValueError(f"{where} has share {numbers['share']:g}; it must be from 0 to 1")
    if numbers.get("factor", 1.0) == 0:
        raise ValueError(f"{where} has factor 0; it must be more")
    workers = row.get("workers", ())
    if not isinstance(workers, list | tuple) or not all(
        isinstance(w, int) and not isinstance(w, bool) and w >= 0 for w in workers
    ):
        raise ValueError(f"{where} has workers {workers!r}; it must be a list of numbers from 0 on")
    return Fault(FaultKind(str(row["kind"])), workers=tuple(workers), **numbers)
