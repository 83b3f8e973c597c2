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


Key = tuple[float, ...]
"""What candidates are compared by; the least wins, equal ones are drawn by lot."""


class Policy(Protocol):
    """Orders candidates. `rank` has no effect; `chosen` is told of each placement made."""

    @property
    def name(self) -> PolicyName:
        """Its name in configuration and answers."""

    def rank(self, candidates: Sequence[Candidate]) -> list[tuple[Key, Score]]:
        """A key and a score for each candidate, in order; zeros where a policy doesn't score."""

    def chosen(self, slot: int) -> None:
        """A request was placed on `slot`."""

    def forget(self, slot: int) -> None:
        """`slot` is gone for good."""


class _Stateless:
    def chosen(self, slot: int) -> None:
        """Nothing to remember."""

    def forget(self, slot: int) -> None:
        """Nothing to forget."""


_NO_SCORE = Score()


class KvPolicy(_Stateless):
    """Least cost in seconds (cost.py). Scores within a microsecond are equal."""

    name = PolicyName.KV

    def __init__(self, model: CostModel) -> None:
        self._model = model

    def rank(self, candidates: Sequence[Candidate]) -> list[tuple[Key, Score]]:
        """By total score."""
        scores = [self._model.score(c) for c in candidates]
        return [((round(s.total_s, 6),), s) for s in scores]


class RoundRobinPolicy:
    """Whoever was chosen longest ago; newcomers first, in order of their appearance."""

    name = PolicyName.ROUND_ROBIN

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[int, int] = {}

    def rank(self, candidates: Sequence[Candidate]) -> list[tuple[Key, Score]]:
        """By the turn at which each was last chosen."""
        return [((self._last.get(c.slot, -1), c.slot), _NO_SCORE) for c in candidates]

    def chosen(self, slot: int) -> None:
        """Puts the worker at the end of the row."""
        self._turn += 1
        self._last[slot] = self._turn

    def forget(self, slot: int) -> None:
        """Drops the worker from the row."""
        self._last.pop(slot, None)


class RandomPolicy(_Stateless):
    """All alike: the lot decides."""

    name = PolicyName.RANDOM

    def rank(self, candidates: Sequence[Candidate]) -> list[tuple[Key, Score]]:
        """Equal keys."""
        return [((), _NO_SCORE) for _ in candidates]


class LeastLoadedPolicy(_Stateless):
    """Fewest requests booked or in the engine, then fewest prompt tokens queued."""

    name = PolicyName.LEAST_LOADED

    def rank(self, candidates: Sequence[Candidate]) -> list[tuple[Key, Score]]:
        """By requests, then by tokens."""
        return [((c.active_requests, c.queued_tokens), _NO_SCORE) for c in candidates]


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
