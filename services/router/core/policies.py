"""Policies: what candidates cost. They know nothing of liveness, constraints and bookings.

`kv` is the one to use; the others are there to compare with, each after its source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, nextafter
from typing import Protocol

from services.router.core.cost import Candidate, CostModel, Score


class PolicyName(StrEnum):
    """Policies that can be configured."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    P2C = "p2c"
    STICKY = "sticky"
    DYNAMO = "dynamo"
    LMETRIC = "lmetric"


@dataclass(slots=True)
class Ask:
    """What policies may know beside the candidates. One for each decision."""

    now: float = 0.0
    keys: Sequence[int] = ()
    """Of the prompt's full blocks."""
    block_tokens: int = 1
    lot: int = 0
    """A large number drawn for this request."""


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

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """What each candidate would cost, in order, in a unit of the policy's own."""

    def score(self, ask: Ask, candidate: Candidate) -> Score:
        """The parts of a cost; zeros where a policy has none."""

    def chosen(self, slot: int) -> None:
        """A request was placed on `slot`."""

    def forget(self, slot: int) -> None:
        """`slot` is gone for good."""


_NEVER = 1 << 48


class _Simple:
    tolerance = 0.0

    def score(self, ask: Ask, candidate: Candidate) -> Score:
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

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Total scores, in seconds."""
        return self._model.totals(candidates, ask.now)

    def score(self, ask: Ask, candidate: Candidate) -> Score:
        """The score with its parts."""
        return self._model.score(candidate, ask.now)


class RoundRobinPolicy(_Simple):
    """Whoever was chosen longest ago; newcomers first, in order of their appearance."""

    name = PolicyName.ROUND_ROBIN

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[int, int] = {}

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
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

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Nothing."""
        return [0.0] * len(candidates)


class PowerOfTwoPolicy(_Simple):
    """Of two drawn by lot, the one with fewer requests.

    The power of two choices: M. Mitzenmacher, IEEE TPDS 12(10), 2001.
    """

    name = PolicyName.P2C

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Requests of the two; all others are out of choice."""
        count = len(candidates)
        if count < 3:
            return [float(c.active_requests) for c in candidates]
        first, rest = ask.lot % count, ask.lot // count
        # The second is drawn from the others. The bits above serve for ties.
        second = (first + 1 + rest % (count - 1)) % count
        return [
            float(c.active_requests) if i in (first, second) else inf
            for i, c in enumerate(candidates)
        ]


class StickyPolicy(_Simple):
    """Prompts that begin alike go to one worker, whatever waits there.

    Highest random weight (D. Thaler, C. Ravishankar, IEEE/ACM ToN 6(1), 1998) of the prompt's first
    two blocks: a worker that leaves moves only its own prompts. One without a full block goes
    anywhere.
    """

    name = PolicyName.STICKY
    _BLOCKS = 2

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """Random weights that are always the same."""
        if not ask.keys:
            return [0.0] * len(candidates)
        # A key stands for its whole chain, so the last one of those tells of all.
        home = ask.keys[min(self._BLOCKS, len(ask.keys)) - 1]
        return [float(_mixed(home ^ _mixed(c.slot + 1))) for c in candidates]


class FormulaPolicy(_Simple):
    """Least cost by a formula, in whatever unit. Of level ones that with the fewest placements."""

    def __init__(self, name: PolicyName, cost: Callable[[Ask, Candidate], float]) -> None:
        self._name = name
        self._cost = cost

    @property
    def name(self) -> PolicyName:
        """As configured."""
        return self._name

    def costs(self, ask: Ask, candidates: Sequence[Candidate]) -> list[float]:
        """By the formula; those that lose a tie are put behind by the least there is."""
        costs = [self._cost(ask, c) for c in candidates]
        least = min(costs, default=0.0)
        # Sums over time are never quite equal.
        most = least + 1e-9 * (1 + abs(least))
        level = [i for i, cost in enumerate(costs) if cost <= most]
        if len(level) > 1:
            first = min(level, key=lambda i: (candidates[i].placements, candidates[i].slot))
            for i in level:
                costs[i] = least if i == first else nextafter(least, inf)
        return costs


def least_loaded(ask: Ask, c: Candidate) -> float:
    """Blocks queued for prefill, and blocks in use."""
    return c.ahead_tokens(ask.now) / ask.block_tokens + c.active_blocks


def dynamo(weight: float) -> Callable[[Ask, Candidate], float]:
    """NVIDIA Dynamo's KV router: weight x prefill blocks (queued and own) + active decode blocks.

    Source: the cost function in Dynamo's guide to KV cache routing (docs.nvidia.com/dynamo), at
    temperature 0; its default weight is 1. Checked by decisions of its own selection service.
    """

    def cost(ask: Ask, c: Candidate) -> float:
        prefill = c.uncached_tokens + c.ahead_tokens(ask.now)
        return weight * prefill / ask.block_tokens + c.active_blocks

    return cost


def lmetric(ask: Ask, c: Candidate) -> float:
    """LMetric (arXiv 2603.15202): new prefill tokens (queued and own) x batch size."""
    return (c.uncached_tokens + c.ahead_tokens(ask.now)) * (c.active_requests + 1)


def make_policy(name: PolicyName, model: CostModel, dynamo_weight: float = 1.0) -> Policy:
    """The policy of that name; `model` is for `kv`, the weight for `dynamo`."""
    match name:
        case PolicyName.KV:
            return KvPolicy(model)
        case PolicyName.ROUND_ROBIN:
            return RoundRobinPolicy()
        case PolicyName.RANDOM:
            return RandomPolicy()
        case PolicyName.LEAST_LOADED:
            return FormulaPolicy(name, least_loaded)
        case PolicyName.P2C:
            return PowerOfTwoPolicy()
        case PolicyName.STICKY:
            return StickyPolicy()
        case PolicyName.DYNAMO:
            return FormulaPolicy(name, dynamo(dynamo_weight))
        case PolicyName.LMETRIC:
            return FormulaPolicy(name, lmetric)


def _mixed(x: int) -> int:
    """The 64 bits of x, well mixed: the finalizer of MurmurHash3 (A. Appleby, public domain)."""
    x &= 0xFFFF_FFFF_FFFF_FFFF
    x = (x ^ x >> 33) * 0xFF51_AFD7_ED55_8CCD & 0xFFFF_FFFF_FFFF_FFFF
    x = (x ^ x >> 33) * 0xC4CE_B9FE_1A85_EC53 & 0xFFFF_FFFF_FFFF_FFFF
    return x ^ x >> 33
