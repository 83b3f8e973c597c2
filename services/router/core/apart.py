"""Prefill and decode apart: which two workers could share a request, and whether that pays.

Two ways are compared, in seconds of delay for all whom it concerns, the request and others:

    whole = queue + prefill + stall                     all of it on the policy's choice
    apart = queue + prefill + stall                     at the worker that prefills
          + transfer                                    hand-over, and the KV that is not there yet
          + decode queue                                what is left by then of what waits ahead at
                                                        the worker that decodes

prefill   with what comes up from lower tiers, there
stall     stall_weight x prefill x decodes that run there: each is held up by that prefill
transfer  by the speed that was measured, and doubts if transfers failed lately (transfers.py)

A transfer is not combined with loads from tiers, so a good hit there makes `whole` cheap; a short
rest of a prompt stays where it is by the hand-over's price, and by a floor. Knows no bookings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from services.router.core.answers import PathScore
from services.router.core.choice import Choice, Page, Way
from services.router.core.cost import Candidate, CostModel
from services.router.core.transfers import TransferBook
from services.router.core.workers import WorkerRole

T = TypeVar("T")
_LEVEL_S = 1e-6
"""Costs within this are equal."""


class Disagg(StrEnum):
    """When prefill and decode go apart."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ApartConfig:
    """What tunes the comparison."""

    when: Disagg = Disagg.AUTO
    """Always: wherever there is a way, whatever it costs."""
    stall_weight: float = 1.0
    """Seconds that a second of each held up decode counts for."""
    min_tokens: int = 256
    """With fewer tokens to compute a request stays whole."""
    handover_s: float = 0.02
    """Seconds between the end of a prefill and the begin of its transfer."""


class Obstacle(StrEnum):
    """Why there is no way apart."""

    NEVER = "this router takes no requests apart"
    ASKED = "the request asks for one worker"
    SHORT = "the prompt is short"
    CACHED = "the prompt is mostly cached"
    NO_PREFILL = "no prefill worker takes requests"
    NO_DECODE = "none but prefill workers are there, so they do all of it"
    MISMATCH = "no prefill worker can hand its KV to one that decodes: namespace or way differ"
    BUSY = "all queues that it would have to pass are longer than the limit, or others wait there"


@dataclass(slots=True)
class Path:
    """One way to serve a request."""

    decode: Page
    prefill: Page | None = None
    """None: the one that decodes."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    handover_s: float = 0.0
    """With what is thought to be lost by transfers that fail."""
    transfer_tokens: int = 0
    transfer_s: float = 0.0
    decode_queue_s: float = 0.0
    stall_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return (
            self.queue_s + self.prefill_s + self.handover_s + self.transfer_s + self.decode_queue_s
        )

    @property
    def total_s(self) -> float:
        """What is compared."""
        return self.ttft_s + self.stall_s

    def pays_beside(self, whole: Path) -> bool:
        """Whether this way is the better one."""
        return self.total_s < whole.total_s - _LEVEL_S


@dataclass(slots=True)
class Limits:
    """Whose time is asked for, and who has any."""

    now: float
    max_wait_s: float
    spared: Set[int]
    """Slots that are left to others."""

    def free(self, candidate: Candidate) -> bool:
        """Whether a worker begins something new soon enough."""
        return candidate.slot not in self.spared and candidate.queue_s(self.now) <= self.max_wait_s


class Pairing:
    """Finds the ways. Pages' candidates must have been written for the prompt in question."""

    def __init__(self, config: ApartConfig, cost: CostModel, transfers: TransferBook) -> None:
        self._config = config
        self._cost = cost
        self._transfers = transfers

    def whole(self, page: Page, now: float) -> Path:
        """All of it on one worker."""
        c = page.candidate
        return Path(
            page, queue_s=c.queue_s(now), prefill_s=c.prefill_s + c.load_s(), stall_s=self._stall(c)
        )

    def hindrance(self, page: Page) -> Obstacle | None:
        """Why a prompt that would be whole on `page` needs no other worker, if that is plain."""
        c = page.candidate
        if page.worker.info.role is WorkerRole.PREFILL:
            return Obstacle.NO_DECODE
        if c.uncached_tokens < self._config.min_tokens:
            return Obstacle.SHORT if c.prompt_tokens < self._config.min_tokens else Obstacle.CACHED
        return None

    def apart(
        self, decoders: Mapping[Way, Sequence[Page]], pool: Choice, limits: Limits, lot: int
    ) -> Path | Obstacle:
        """The best two of those who may decode, by way, and those who may prefill; ties by lot."""
        if not pool.pages:
            return Obstacle.NO_PREFILL
        common = [way for way in decoders if way in pool.ways]
        if not common:
            return Obstacle.MISMATCH
        pairs = _Least[tuple[Page, Page]](lot)
        for way in common:
            prefill = self._prefiller(pool.ways[way], limits, lot)
            if prefill is not None:
                self._offer_pairs(prefill, decoders[way], limits, pairs)
        return Obstacle.BUSY if pairs.best is None else self._path(*pairs.best, limits.now)

    def _prefiller(self, pages: Sequence[Page], limits: Limits, lot: int) -> Page | None:
        """Who prefills best, by the score of `kv`."""
        free = [page for page in pages if limits.free(page.candidate)]
        costs = self._cost.totals([page.candidate for page in free], limits.now)
        least = _Least[Page](lot)
        for cost, page in zip(costs, free, strict=True):
            least.offer(cost + self._doubt_s(page, limits.now), page)
        return least.best

    def _offer_pairs(
        self,
        prefill: Page,
        decoders: Sequence[Page],
        limits: Limits,
        pairs: _Least[tuple[Page, Page]],
    ) -> None:
        """What it costs with each of those who decode; runs for all of them in each decision."""
        now, cost = limits.now, self._cost
        c = prefill.candidate
        before_s = c.queue_s(now) + c.prefill_s + c.load_s() + self._stall(c)
        before_s += self._doubt_s(prefill, now)
        speeds: dict[str, tuple[float, float]] = {}
        for page in decoders:
            c = page.candidate
            queue_s = c.queue_s(now) if c.queued_s else 0.0
            if queue_s > limits.max_wait_s or c.slot in limits.spared:
                continue
            model = page.worker.info.model
            if model not in speeds:
                speeds[model] = self._transfers.speed(model)
            latency_s, token_s = speeds[model]
            transfer_s = latency_s + token_s * (c.prompt_tokens - c.g1_tokens)
            decode_s = queue_s + transfer_s + cost.decode_s(c) + self._doubt_s(page, now)
            pairs.offer(before_s + decode_s, (prefill, page))

    def _path(self, prefill: Page, decode: Page, now: float) -> Path:
        first, then = prefill.candidate, decode.candidate
        travelling = then.prompt_tokens - then.g1_tokens
        doubt_s = self._doubt_s(prefill, now) + self._doubt_s(decode, now)
        path = Path(
            decode,
            prefill,
            queue_s=first.queue_s(now),
            prefill_s=first.prefill_s + first.load_s(),
            handover_s=self._config.handover_s + doubt_s,
            transfer_tokens=travelling,
            transfer_s=self._transfers.seconds(decode.worker.info.model, travelling),
            stall_s=self._stall(first),
        )
        # It goes on while the prefill runs elsewhere: else an idle cluster's burst would all go to
        # one worker, since its queue would count for both ways.
        path.decode_queue_s = max(0.0, then.queue_s(now) - path.ttft_s)
        return path

    def _doubt_s(self, page: Page, now: float) -> float:
        return self._transfers.doubt_s(page.rank.holder.id, now)

    def _stall(self, c: Candidate) -> float:
        return self._config.stall_weight * c.decoding * c.prefill_s


def path_score(path: Path, chosen: bool, other: Path | None) -> PathScore:
    """A way in an answer's words; `other` is the one that it was compared with."""
    reason = ""
    if not chosen:
        more_ms = (path.total_s - other.total_s) * 1000 if other else 0.0
        way = "whole" if path.prefill else "apart"
        reason = f"{more_ms:.1f} ms more than {way}"
    return PathScore(
        path.decode.rank.holder,
        path.prefill.rank.holder if path.prefill else None,
        path.queue_s,
        path.prefill_s,
        path.handover_s + path.transfer_s,
        path.decode_queue_s,
        path.stall_s,
        path.total_s,
        chosen,
        reason,
    )


class _Least(Generic[T]):
    """The cheapest of what is offered; the lot decides between equal ones."""

    def __init__(self, lot: int) -> None:
        self._lot = lot
        self._cost = float("inf")
        self._level: list[T] = []

    def offer(self, cost: float, what: T) -> None:
        if cost < self._cost - _LEVEL_S:
            self._cost, self._level = cost, [what]
        elif cost <= self._cost + _LEVEL_S:
            self._level.append(what)

    @property
    def best(self) -> T | None:
        return self._level[self._lot % len(self._level)] if self._level else None
