"""Admission: requests are placed at once while some worker is free soon enough, else they wait.

Where every worker that could take a request has more than `max_wait_s` of work ahead, a place in an
engine's queue is worth nothing yet: what is decided later is decided better, in a fairer order. So
the request waits here (queue.py), for `queue_wait_s` at most. Who would wait longer than that, or
than its client does, is refused at once with the predicted wait. Workers that somebody waits for
are left to those who wait (lanes.py); whoever comes may have any other.

Ask it `ask`, tell it `cancel`, and let it `pump` whenever workers have told something or time has
passed. Times are seconds on the core's clock. It answers with values and never waits itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass

from services.common.ids import AttemptId
from services.router.core.answers import Backlog, Placement, Query, Refusal, RefusalKind
from services.router.core.lanes import Lanes
from services.router.core.placement import RouterCore
from services.router.core.queue import Entry, FairQueue

_NEVER = float("inf")
_MATE_BLOCKS = 4
"""Requests that share so many first blocks (or all, of shorter prompts) go together."""


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Limits. `max_wait_s` 0: there is none, all is placed at once."""

    max_wait_s: float = 30.0
    """Work ahead of a request at its worker, in seconds; with more it waits here."""
    queue_length: int = 1024
    """Most that wait here."""
    queue_wait_s: float = 30.0
    """How long one may wait here."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request waits; `pump` will answer it under this number."""

    number: int
    predicted_s: float
    """Until it is placed."""
    most_s: float
    """Until it is answered, at most."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of a request that has waited."""

    number: int
    answer: Placement | Refusal
    waited_s: float
    result: str
    """placed, refused, expired or displaced."""
    heavy: bool
    """Whether its tenant waited with more than its share."""


@dataclass(frozen=True, slots=True)
class _Displaced:
    entry: Entry
    query: Query


class Admission:
    """Places through a core, or lets wait. For one thread."""

    def __init__(
        self, core: RouterCore, config: AdmissionConfig, new_attempt: Callable[[], AttemptId]
    ) -> None:
        self._core = core
        self._config = config
        self._new_attempt = new_attempt
        self._limit_s = config.max_wait_s or _NEVER
        self._queue = FairQueue(config.queue_length)
        self._queries: dict[int, Query] = {}
        self._lanes = Lanes(core)
        self._lanes_version = core.lanes_version
        self._numbers = 0
        self._closed: set[Hashable] = set()
        """Lanes found busy since the queue was last gone through."""
        self._busy: set[int] = set()
        """Slots that those of closed lanes may run on."""
        self._displaced: list[_Displaced] = []
        """Those that had to go and have not been answered."""
        self.deciding = 0
        """Number of the one that `pump` decided last."""
        self.more = False
        """Whether the last `pump` left anything to decide at once."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of all that wait."""
        return sum(entry.tokens for entry in self._queue)

    @property
    def limit_s(self) -> float:
        """The limit on work ahead; infinity: none."""
        return self._limit_s

    def taken(self, now: float) -> Set[int]:
        """Slots that somebody waits for: left to those by whoever comes now."""
        self._sort()
        return self._lanes.taken(now) if self._lanes else frozenset()

    def heavy(self, tenant: str) -> bool:
        """Whether a tenant waits with more than its share of the tokens."""
        return self._queue.heavy(tenant)

    def ask(self, query: Query, now: float) -> Placement | Refusal | Waiting:
        """Places a request on a worker that nobody waits for, or lets it wait, too."""
        if query.admitted:
            return self._core.place(query, self._new_attempt(), now)
        taken = self.taken(now)
        answer = self._core.place(query, self._new_attempt(), now, self._limit_s, taken)
        if not isinstance(answer, Refusal) or answer.kind is not RefusalKind.OVERLOADED:
            return answer
        backlog = self._core.backlog(query, now)
        if isinstance(backlog, Refusal):
            return backlog
        self._numbers += 1
        most_s = min(self._config.queue_wait_s, query.patience_s)
        entry = self._entry(self._numbers, query, now, most_s)
        predicted_s = self._predict(entry, query, backlog, now)
        if predicted_s > most_s:
            return self._overloaded(query, predicted_s, "it would wait")
        displaced = self._queue.put(entry)
        if displaced is entry:
            return self._overloaded(query, predicted_s, "too many wait; it would wait")
        self._queries[entry.number] = query
        self._lanes.enter(entry.lane, query)
        if displaced is not None:
            self._displaced.append(_Displaced(displaced, self._forget(displaced)))
        return Waiting(entry.number, predicted_s, most_s)

    def cancel(self, number: int) -> bool:
        """Nobody waits for it any more. False if it has been answered."""
        entry = self._queue.remove(number)
        if entry is not None:
            self._forget(entry)
        return entry is not None

    def pump(self, now: float, limit: int) -> Iterator[Answered]:
        """Answers those whose turn or end has come, in at most `limit` decisions.

        Each answer is given before the next is decided. Should that fail, `deciding` is whose it
        was: `cancel` that one and pump again.
        """
        self.more = True
        self._sort()
        while self._displaced:
            gone = self._displaced.pop(0)
            yield self._dismissed(gone.entry, gone.query, now, "displaced")
        while (entry := self._queue.expired(now)) is not None:
            yield self._dismissed(entry, self._forget(entry), now, "expired")
        for _ in range(limit):
            entry = self._queue.next(self._closed)
            if entry is None:
                self._open()
                self.more = False
                return
            answered = self._turn(entry, now)
            if answered is not None:
                yield answered
        self.more = bool(self._queue)

    def outlook(self, query: Query, now: float) -> tuple[float, bool]:
        """Predicted seconds until a request's prefill began, and whether it would not be placed
        at once. Changes nothing; nothing and no if nobody could take it.
        """
        backlog = self._core.backlog(query, now)
        if isinstance(backlog, Refusal):
            return 0.0, False
        untaken = self._core.backlog(query, now, self.taken(now))
        if not isinstance(untaken, Refusal) and untaken.wait_s <= self._limit_s:
            return untaken.wait_s, False
        most_s = min(self._config.queue_wait_s, query.patience_s)
        entry = self._entry(self._numbers + 1, query, now, most_s)
        predicted_s = self._predict(entry, query, backlog, now)
        return predicted_s + min(backlog.wait_s, self._limit_s), True

    def check_invariants(self) -> None:
        """Raises AssertionError when it contradicts itself."""
        self._queue.check_invariants()
        assert {entry.number for entry in self._queue} == set(self._queries)
        self._lanes.check_invariants({entry.number: entry.lane for entry in self._queue})

    # Inside.

    def _entry(self, number: int, query: Query, now: float, most_s: float) -> Entry:
        keys = query.keys
        return Entry(
            number=number,
            lane=self._core.lane(query),
            tenant=query.tenant,
            priority=query.priority,
            tokens=max(1, query.prompt_tokens),
            since=now,
            until=now + most_s,
            mate=keys[min(len(keys), _MATE_BLOCKS) - 1] if keys else None,
        )

    def _turn(self, entry: Entry, now: float) -> Answered | None:
        """Decides one whose turn it is; None: all are busy that it may run on, and it stays."""
        self.deciding = entry.number
        query = self._queries[entry.number]
        answer = self._core.place(query, self._new_attempt(), now, self._limit_s, self._busy)
        if isinstance(answer, Refusal) and answer.kind is RefusalKind.OVERLOADED:
            # Should one of these be free in a moment, it is for those of this lane.
            self._closed.add(entry.lane)
            self._busy |= self._lanes.claims(entry.lane, now)
            return None
        heavy = self._queue.heavy(entry.tenant)
        if isinstance(answer, Refusal):
            # Nobody could take it any more: that is not on its tenant's account.
            self._queue.remove(entry.number)
            result = "refused"
        else:
            self._queue.take(entry.number)
            result = "placed"
        self._forget(entry)
        return Answered(entry.number, answer, now - entry.since, result, heavy)

    def _sort(self) -> None:
        """Sorts those who wait by lane anew, if workers' records have changed what lanes are."""
        if self._lanes_version == self._core.lanes_version:
            return
        self._lanes_version = self._core.lanes_version
        self._queue.sort(lambda number: self._core.lane(self._queries[number]))
        self._lanes.clear()
        for entry in self._queue:
            self._lanes.enter(entry.lane, self._queries[entry.number])
        self._open()

    def _open(self) -> None:
        """Lanes found busy may be free again."""
        self._closed.clear()
        self._busy.clear()

    def _predict(self, entry: Entry, query: Query, backlog: Backlog, now: float) -> float:
        """Seconds until it is placed: until a worker is free enough, and those before it are that
        compete for the same workers.
        """
        shares = self._lanes.shares(entry.lane, query, now) if self._lanes else {}
        ahead_s = self._queue.ahead(entry, shares) / backlog.tokens_per_s
        return max(0.0, backlog.wait_s - self._limit_s) + ahead_s

    def _overloaded(self, query: Query, predicted_s: float, why: str) -> Refusal:
        wait_s = predicted_s + self._limit_s
        return Refusal(
            RefusalKind.OVERLOADED,
            f"all workers of {query.model!r} are busy: {why} {wait_s:.1f} s for its turn",
            wait_s,
            predicted_s,
        )

    def _dismissed(self, entry: Entry, query: Query, now: float, result: str) -> Answered:
        """The end of one that has left the queue without a placement."""
        self.deciding = entry.number
        backlog = self._core.backlog(query, now)
        if isinstance(backlog, Refusal):
            answer = backlog
        else:
            predicted_s = self._predict(entry, query, backlog, now)
            waited = f"{now - entry.since:.1f} s in vain; it would wait"
            answer = self._overloaded(query, predicted_s, f"it waited {waited}")
        heavy = self._queue.heavy(entry.tenant)
        return Answered(entry.number, answer, now - entry.since, result, heavy)

    def _forget(self, entry: Entry) -> Query:
        self._lanes.leave(entry.lane)
        if not self._lanes:
            self._open()
        return self._queries.pop(entry.number)
