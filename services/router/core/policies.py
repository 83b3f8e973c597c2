"""Policies: how candidates are ordered. They know nothing of liveness, constraints and bookings."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from services.router.core.cost import Candidate, CostModel, Score


class PolicyName(StrEnum):
    """Policies that can be configured."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"


class Policy(Protocol):
    """Puts a cost on candidates: the least wins, equal ones are drawn by lot.

    `costs` runs for all workers in each decision, so it makes numbers and nothing else; `score`
    explains one of them. Both are without effect; `chosen` is told of each placement made.
    """

    @property
    def name(self) -> PolicyName:
        """Its name in configuration and answers."""

    @property
    def tolerance(self) -> float:
        """Costs that differ by no more are equal."""

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """What each candidate would cost, in order, in a unit of the policy's own."""

    def score(self, candidate: Candidate) -> Score:
        """The parts of a cost; zeros where a policy has none."""

    def chosen(self, slot: int) -> None:
        """A request was placed on `slot`."""

    def forget(self, slot: int) -> None:
        """`slot` is gone for good."""


_NEVER = 1 << 48
_MOST_TOKENS = 1 << 32


class _Simple:
    tolerance = 0.0

    def score(self, candidate: Candidate) -> Score:
        """No parts."""
        return Score()

    def chosen(self, slot: int) -> None:
        """Nothing to remember."""

    def forget(self, slot: int) -> None:
        """Nothing to forget."""


class KvPolicy(_Simple):
    """Least cost in seconds (cost.py). Scores within a microsecond are equal."""

    name = PolicyName.KV
    tolerance = 1e-6

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """Total scores, in seconds."""
        return self._model.totals(candidates)

    def score(self, candidate: Candidate) -> Score:
        """The score with its parts."""
        return self._model.score(candidate)


class RoundRobinPolicy(_Simple):
    """Whoever was chosen longest ago; newcomers first, in order of their appearance."""

    name = PolicyName.ROUND_ROBIN

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[int, int] = {}

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """The turn at which each was last chosen; newcomers before all, by their slot."""
        last = self._last
        return [last.get(c.slot) or c.slot - _NEVER for c in candidates]

    def chosen(self, slot: int) -> None:
        """Puts the worker at the end of the row."""
        self._turn += 1
        self._last[slot] = self._turn

    def forget(self, slot: int) -> None:
        """Drops the worker from the row."""
        self._last.pop(slot, None)


class RandomPolicy(_Simple):
    """All alike: the lot decides."""

    name = PolicyName.RANDOM

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """Nothing."""
        return [0.0] * len(candidates)


class LeastLoadedPolicy(_Simple):
    """Fewest requests booked or in the engine, then fewest prompt tokens queued."""

    name = PolicyName.LEAST_LOADED

    def costs(self, candidates: Sequence[Candidate]) -> list[float]:
        """Requests, and tokens as a small part of one."""
        return [c.active_requests + c.queued_tokens / _MOST_TOKENS for c in candidates]


def make_policy(name: PolicyName, model: CostModel) -> Policy:
    """The policy of that name; `model` is for those that score."""
    match name:
        case PolicyName.KV:
            return KvPolicy(model)
        case PolicyName.ROUND_ROBIN:
            return RoundRobinPolicy()
        case PolicyName.RANDOM:
            return RandomPolicy()
        case PolicyName.LEAST_LOADED:
            return LeastLoadedPolicy()
