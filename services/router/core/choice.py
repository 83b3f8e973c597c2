"""Who is in choice for a request, remembered from one decision to the next.

Most requests ask for nothing special, and workers change seldom: looking at each of a thousand
anew would cost more than the rest of a decision. Whatever changes who may be chosen must say so
(`changed`); that time passes, a memory knows by itself.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from services.router.core.answers import Bar, Query, Refusal
from services.router.core.board import Board, Costs, Sheet
from services.router.core.cost import Candidate
from services.router.core.eligibility import bar_of, has_own_workers, refusal
from services.router.core.lives import Liveness, Status
from services.router.core.usable import Usable
from services.router.core.workers import (
    HolderId,
    Rank,
    Worker,
    WorkerInfo,
    WorkerRole,
    WorkerTable,
)

_NEVER = float("inf")
_MOST_CHOICES = 256
"""Models and block sizes whose workers are remembered."""


@dataclass(slots=True)
class Page:
    """A worker's rank, with what policies see of it."""

    worker: Worker
    rank: Rank
    candidate: Candidate
    below: Usable | None = None
    """What tiers below G1 bring, for the decision in hand."""

    def wipe(self) -> None:
        """Forgets what was written of one prompt."""
        candidate = self.candidate
        candidate.prompt_tokens = 0
        candidate.g1_tokens = candidate.g2_tokens = candidate.g3_tokens = candidate.g4_tokens = 0
        candidate.peer_tokens = 0
        candidate.mates = candidate.repeats = candidate.onboard_s = 0.0
        self.below = None


Way = tuple[str, bytes]
"""How KV gets from one worker to another, and the namespace of its bytes."""


@dataclass(slots=True)
class Choice:
    """Workers in choice for a model and block size, as long as nothing changes."""

    pages: list[Page]
    candidates: list[Candidate]
    numbers: dict[int, int]
    """Where in these two a slot is."""
    sheet: Sheet
    """What they cost where nothing of a prompt is."""
    above: dict[tuple[str, bytes], list[int]]
    """Daemons, by id and namespace, and the numbers of those above them: the sheet's groups."""
    until: float
    """When the first of them may have been silent for too long."""
    longest: float
    """Longest prompt that all of them take."""
    ways: dict[Way, list[Page]]
    """Those that can hand KV over, by way: those of one way to each other."""

    @property
    def prefills(self) -> bool:
        """Whether they have the role of prefill, since no others are there."""
        return bool(self.pages) and self.pages[0].worker.info.role is WorkerRole.PREFILL


@dataclass(frozen=True, slots=True)
class Reach:
    """Slots of those that a request may run on; none: nobody could take it."""

    slots: frozenset[int]
    version: int
    """What `Choices.version` was then."""
    until: float
    """When time alone may have changed it."""
    prefill: frozenset[int] = frozenset()
    """Slots of those that might do its prefill alone."""

    @property
    def all(self) -> frozenset[int]:
        """Whoever may have any part in it."""
        return self.slots | self.prefill if self.prefill else self.slots


@dataclass(slots=True)
class Verdict:
    """Whom a decision fell on."""

    best: int
    """Number of the worker among those in choice."""
    costs: Costs
    """Of all of them."""
    stays: bool
    """It is not the cheapest: a session stays with it."""
    in_time: bool
    """False: everybody's queue is longer than the limit."""


class Choices:
    """Who may be chosen, by the table's workers; `pages` by slot are the caller's."""

    def __init__(
        self, table: WorkerTable, pages: Mapping[int, Page], board: Board, liveness: Liveness
    ) -> None:
        self._table = table
        self._pages = pages
        self._board = board
        self._liveness = liveness
        self._remembered: dict[tuple[str, int, str], Choice] = {}
        self._pools: dict[tuple[str, int, str], Choice] = {}
        self.prefillers = False
        """Whether any worker has the role of prefill."""
        self._reserved: frozenset[str] = frozenset()
        self._lengths: list[int] = []
        """Longest prompts that workers take, each once, in order."""
        self.version = 0
        """Another whenever somebody's right to be chosen may have changed."""
        self.lanes_version = 0
        """Another whenever `lane` may say something else of a request than before."""
        self.synced = False
        """Whether all records have been read once: a model unknown then does not exist."""

    def changed(self) -> None:
        """Somebody's right to be chosen may have changed."""
        self.version += 1
        self._remembered.clear()
        self._pools.clear()

    def reserve(self) -> None:
        """Records came, went or changed: notes anew whose tenants have workers of their own, how
        long prompts may be, and whether anybody prefills for others.
        """
        self.prefillers = any(w.info.role is WorkerRole.PREFILL for w in self._table)
        reserved = frozenset[str]().union(*(w.info.tenants for w in self._table))
        lengths = sorted({w.info.max_model_len for w in self._table} - {0})
        if (reserved, lengths) != (self._reserved, self._lengths):
            self._reserved, self._lengths = reserved, lengths
            self.lanes_version += 1

    def lane(self, query: Query) -> Hashable:
        """Equal for requests under the same constraints: all that `bar_of` asks of a request."""
        return (
            query.model,
            query.block_size,
            query.pinned,
            query.rank,
            query.excluded,
            frozenset(query.labels.items()),
            query.tenant if query.tenant in self._reserved else "",
            bisect_left(self._lengths, query.prompt_tokens),
            query.whole,
        )

    def reach(self, query: Query, now: float) -> Reach:
        """Whom a request may run on now."""
        choice = self.of(query, now)
        if isinstance(choice, Refusal):
            return Reach(frozenset(), self.version, now)
        slots = frozenset(page.rank.slot for page in choice.pages)
        pool = self.pool(query, choice, now)
        if pool is None:
            return Reach(slots, self.version, choice.until)
        prefill = frozenset(page.rank.slot for page in pool.pages)
        return Reach(slots, self.version, min(choice.until, pool.until), prefill)

    def of(self, query: Query, now: float) -> Choice | Refusal:
        """Who may be chosen for a request, or why nobody may."""
        tenant = query.tenant if query.tenant in self._reserved else ""
        key = query.model, query.block_size, tenant
        choice = self._remembered.get(key)
        if choice is None or now > choice.until:
            anyone = Query(query.model, 1, (), query.block_size, tenant=tenant)
            there, prefilling, *_ = self.classes(anyone, now)
            choice = self._made_of(there or prefilling) if there or prefilling else None
            if choice is not None:
                _remember(self._remembered, key, choice)
        special = query.excluded or query.pinned or query.labels or query.rank is not None
        if choice is not None and not special and query.prompt_tokens <= choice.longest:
            return choice
        eligible = self._eligible(query, now)
        if isinstance(eligible, Refusal):
            return eligible
        return self._made_of(eligible, query.rank)

    def pool(self, query: Query, choice: Choice, now: float) -> Choice | None:
        """Who might do a request's prefill for those in choice; may be empty. None: that is out of
        the question.

        Those that are there, of the role prefill, whose KV can be taken; whom the request is pinned
        to is only said of the worker that decodes.
        """
        if not self.prefillers or query.whole or choice.prefills:
            return None
        tenant = query.tenant if query.tenant in self._reserved else ""
        key = query.model, query.block_size, tenant
        pool = self._pools.get(key)
        if pool is None or now > pool.until:
            pool = self._pool(Query(query.model, 1, (), query.block_size, tenant=tenant), now)
            _remember(self._pools, key, pool)
        if query.excluded or query.labels or query.prompt_tokens > pool.longest:
            return self._pool(replace(query, pinned="", rank=None), now)
        return pool

    def barred(
        self, query: Query, now: float, chosen: Collection[HolderId]
    ) -> Iterator[tuple[HolderId, WorkerRole, Bar]]:
        """All ranks but those chosen, with what keeps them out of choice."""
        own = self._own(query)
        workers = {holder.id for holder in chosen}
        for worker in self._table:
            bar = bar_of(worker.info, self._table.status(worker, now), query, own)
            if bar is None and worker.info.role is WorkerRole.PREFILL:
                bar = Bar.PREFILL_ONLY
            bar = bar or (Bar.STARTING if worker.starting else Bar.SUSPECT)
            for rank in worker.ranks:
                if rank.holder not in chosen:
                    other = query.rank not in (None, rank.holder.dp_rank)
                    yield (
                        rank.holder,
                        worker.info.role,
                        Bar.OTHER_RANK if other and worker.info.id in workers else bar,
                    )

    def classes(self, query: Query, now: float) -> tuple[list[Worker], ...]:
        """First those that are there; then those that are silent or only starting; at last those
        that refused somebody's connection and have spoken since, for that one may have been cut
        off. In each of these, workers of the role prefill come after the others.
        """
        classes: tuple[list[Worker], ...] = ([], [], [], [], [], [])
        own = self._own(query)
        for worker in self._table:
            status = self._table.status(worker, now)
            bar = bar_of(worker.info, status, query, own)
            prefills = worker.info.role is WorkerRole.PREFILL
            if bar is None:
                silent = status is Status.SUSPECT
                classes[(2 if silent or worker.starting else 0) + prefills].append(worker)
            elif bar is Bar.UNREACHABLE and worker.heard_since_refusal:
                classes[4 + prefills].append(worker)
        return classes

    def check_invariants(self) -> None:
        """Raises AssertionError when a memory is of somebody who can't be chosen."""
        roles = {worker.info.role for worker in self._table}
        assert self.prefillers == (WorkerRole.PREFILL in roles)
        for pool in self._pools.values():
            assert all(p.worker.info.role is WorkerRole.PREFILL for p in pool.pages)
        for choice in (*self._remembered.values(), *self._pools.values()):
            assert all(self._pages.get(page.rank.slot) is page for page in choice.pages)
            assert not any(page.worker.refused or page.worker.starting for page in choice.pages)

    def _pool(self, query: Query, now: float) -> Choice:
        there = [w for w in self.classes(query, now)[1] if w.info.transfer]
        return self._made_of(there)

    def _made_of(self, workers: list[Worker], dp_rank: int | None = None) -> Choice:
        pages = [
            self._pages[rank.slot]
            for worker in workers
            for rank in worker.ranks
            if dp_rank is None or rank.holder.dp_rank == dp_rank
        ]
        ways: dict[Way, list[Page]] = {}
        for page in pages if self.prefillers else ():
            if page.worker.info.transfer:
                ways.setdefault(way_of(page.worker.info), []).append(page)
        slots = [page.rank.slot for page in pages]
        above: dict[tuple[str, bytes], list[int]] = {}
        for number, page in enumerate(pages):
            if page.worker.info.kvbm:
                where = page.worker.info.kvbm, page.worker.info.namespace
                above.setdefault(where, []).append(number)
        return Choice(
            pages,
            [page.candidate for page in pages],
            dict(zip(slots, itertools.count())),
            self._board.sheet(slots, list(above.values())),
            above,
            min((w.heard_at for w in workers), default=_NEVER) + self._liveness.suspect_after_s,
            min((w.info.max_model_len or _NEVER for w in workers), default=_NEVER),
            ways,
        )

    def _eligible(self, query: Query, now: float) -> list[Worker] | Refusal:
        """Workers in choice: the first class that has any."""
        for some in self.classes(query, now):
            if some:
                return some
        own = self._own(query)
        all_bars = {bar_of(w.info, self._table.status(w, now), query, own) for w in self._table}
        bars = {bar for bar in all_bars if bar is not None}
        known = self._table.remembers(query.model, now)
        return refusal(query, bars, [w.info for w in self._table], known, self.synced)

    def _own(self, query: Query) -> bool:
        """Whether the request's tenant has workers of its own."""
        return query.tenant in self._reserved and has_own_workers(
            query, (w.info for w in self._table)
        )


def way_of(info: WorkerInfo) -> Way:
    """The way of a worker that can hand KV over."""
    return info.transfer, info.namespace


def _remember(
    where: dict[tuple[str, int, str], Choice], key: tuple[str, int, str], choice: Choice
) -> None:
    if len(where) >= _MOST_CHOICES:
        where.clear()
    where[key] = choice
