"""Board: what a prompt of which nothing is there costs at every worker in choice.

A few candidates are looked at one by one. To look so at a thousand would cost more than the rest of
a decision, so their figures are kept in columns as well, and all answer in one go; among few that
would be the slower way. Candidates where something of the prompt is are the caller's, in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.router.core.cost import Candidate, CostModel

MANY = 96
"""Candidates from which on columns are faster."""

Costs = list[float] | npt.NDArray[np.float64]
Load = tuple[int, float, float]
"""What lower tiers bring: tokens, and what it takes to load them in seconds, and in tokens that
could be computed meanwhile.
"""

# Columns: two times, at the earlier of which the queue is over; how long it lasts at least, by
# either; the coefficients of what comes on top, a polynomial in the prompt's length; and a token's
# seconds and price.
_COLUMNS = 9
_TIMES, _LEAST, _LINE, _TOKEN = slice(0, 2), slice(2, 4), slice(4, 7), slice(7, 9)


class Sheet(Protocol):
    """What candidates cost, numbered in their order; some are in groups, numbered as well."""

    def totals(self, now: float, tokens: int) -> Costs:
        """What `CostModel.total` says of a prompt of so many tokens of which nothing is there.

        Holds until the next call.
        """

    def spread(self) -> Iterable[tuple[float, float]]:
        """Of each group, the seconds a token of its fastest and its slowest. After `totals`."""

    def lighten(self, loads: Sequence[Load]) -> None:
        """Takes off the totals what need not be computed, since each group can load it."""


def level(costs: Costs, tolerance: float) -> Sequence[int]:
    """The numbers of the cheapest, all that cost no more than `tolerance` on top."""
    if isinstance(costs, list):
        most = min(costs) + tolerance
        return [number for number, cost in enumerate(costs) if cost <= most]
    (found,) = (costs <= costs.item(costs.argmin()) + tolerance).nonzero()
    return found.tolist()  # type: ignore[no-any-return]


class Board:
    """A row for each slot, written when somebody asks for many of them."""

    def __init__(self, model: CostModel, candidates: Mapping[int, Candidate]) -> None:
        self._model = model
        self._candidates = candidates
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._columns = np.zeros((_COLUMNS, 8))
        self._cells = memoryview(self._columns.data).cast("B").cast("d")
        self._stale: set[int] = set()
        self._wide = False
        """Whether anybody has ever asked for many."""

    def add(self, slot: int) -> None:
        """A candidate is there."""
        if not self._free and len(self._rows) == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
            self._cells = memoryview(self._columns.data).cast("B").cast("d")
        self._rows[slot] = self._free.pop() if self._free else len(self._rows)
        self._stale.add(slot)

    def remove(self, slot: int) -> None:
        """It is gone for good."""
        self._free.append(self._rows.pop(slot))
        self._stale.discard(slot)

    def changed(self, slots: Iterable[int]) -> None:
        """The load or rates of these have changed."""
        self._stale.update(slots)

    def sheet(self, slots: Sequence[int], groups: Sequence[Sequence[int]]) -> Sheet:
        """Of these, in order; holds as long as they do. No group is empty."""
        if len(slots) < MANY:
            return _Few(self._model, [self._candidates[slot] for slot in slots], groups)
        self._wide = True
        return _Many(self, np.array([self._rows[slot] for slot in slots], np.intp), groups)

    def write(self) -> None:
        """Brings the rows up to date, if anybody has use for them: in good time, or a decision will
        have to.
        """
        if not self._wide:
            return
        cells, size = self._cells, self._columns.shape[1]
        for slot in self._stale:
            # One by one: an assignment to all of a row would make an array first.
            at = self._rows[slot]
            for value in self._row(self._candidates[slot]):
                cells[at] = value
                at += size
        self._stale.clear()

    def read(self, rows: npt.NDArray[np.intp], into: npt.NDArray[np.float64]) -> None:
        """Copies rows as they are now."""
        if self._stale:
            self.write()
        self._columns.take(rows, 1, into, "clip")

    def check_invariants(self) -> None:
        """Raises AssertionError when it has others' rows, or one is neither stale nor right."""
        assert self._rows.keys() == self._candidates.keys()
        assert self._stale <= self._rows.keys()
        taken = [*self._rows.values(), *self._free]
        assert sorted(taken) == list(range(len(taken)))
        for slot, row in self._rows.items():
            if slot not in self._stale:
                candidate = replace(self._candidates[slot], line=None)
                assert tuple(self._columns[:, row]) == self._row(candidate), slot

    def _row(self, c: Candidate) -> tuple[float, ...]:
        token = c.token_s, self._model.weight(c) * c.token_s
        return c.free_at, c.told_free_at, c.rest_s, c.fresh_s, *self._model.line(c), *token


class _Few:
    """One candidate after the other."""

    def __init__(
        self, model: CostModel, candidates: list[Candidate], groups: Sequence[Sequence[int]]
    ) -> None:
        self._model = model
        self._candidates = candidates
        self._groups = groups
        self._totals: list[float] = []

    def totals(self, now: float, tokens: int) -> Costs:
        line_of, totals = self._model.line, []
        for c in self._candidates:
            base, line, square = line_of(c)
            total = base + tokens * (line + tokens * square)
            totals.append(total + c.queue_s(now) if c.queued_s else total)
        self._totals = totals
        return totals

    def spread(self) -> Iterator[tuple[float, float]]:
        for group in self._groups:
            token = [self._candidates[number].token_s for number in group]
            yield min(token), max(token)

    def lighten(self, loads: Sequence[Load]) -> None:
        for group, (tokens, load_s, load_tokens) in zip(self._groups, loads, strict=True):
            for number in group if tokens else ():
                c = self._candidates[number]
                load = min(load_s + load_tokens * c.token_s, tokens * c.token_s)
                self._totals[number] += load - self._model.worth(c, tokens)


class _Many:
    """Columns, with room to work in."""

    def __init__(
        self, board: Board, rows: npt.NDArray[np.intp], groups: Sequence[Sequence[int]]
    ) -> None:
        self._board = board
        self._rows = rows
        self._room = np.empty((_COLUMNS, len(rows)))
        self._times, self._least = self._room[_TIMES], self._room[_LEAST]
        self._queue, self._told = self._times
        self._base, self._line, self._square = self._room[_LINE]
        self._token, self._price = self._room[_TOKEN]
        self._totals = np.empty(len(rows))
        self._grouped = np.array([number for group in groups for number in group], np.intp)
        self._starts = np.cumsum([0, *map(len, groups)])[:-1]
        # Those of no group are in one more.
        self._group = np.full(len(rows), len(groups))
        for number, group in enumerate(groups):
            self._group[list(group)] = number

    def totals(self, now: float, tokens: int) -> Costs:
        times, queue, totals = self._times, self._queue, self._totals
        self._board.read(self._rows, self._room)
        np.subtract(times, now, times)
        np.maximum(times, self._least, times)
        np.minimum(queue, self._told, queue)
        np.multiply(self._square, tokens, totals)
        np.add(totals, self._line, totals)
        np.multiply(totals, tokens, totals)
        np.add(totals, self._base, totals)
        np.add(totals, queue, totals)
        return totals

    def spread(self) -> Iterator[tuple[float, float]]:
        token = self._token[self._grouped]
        fastest = np.minimum.reduceat(token, self._starts).tolist()
        slowest = np.maximum.reduceat(token, self._starts).tolist()
        return zip(fastest, slowest, strict=True)

    def lighten(self, loads: Sequence[Load]) -> None:
        table = np.array((*loads, (0, 0.0, 0.0))).T
        tokens, load_s, load_tokens = table.take(self._group, 1)
        worth = tokens * (self._price + tokens * self._square)
        load = np.minimum(load_s + load_tokens * self._token, tokens * self._token)
        self._totals += load - worth
