"""The router core: takes what workers and discovery tell, and places requests.

Feed it `record`, `record_vanished`, `synced`, `heard`, `reset`, `apply`, `refused` and `tick`; ask
it `place`, `release`, `explain`, `workers`, `index_stats`. What kvbm daemons tell goes to `nodes`.
Times are seconds on any steady clock.
It answers with values, never with exceptions, and holds nothing that its inputs don't bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Set
from dataclasses import dataclass, field, replace

from services.common.events.model import Batch, Snapshot
from services.common.ids import AttemptId
from services.router.core.answers import (
    Backlog,
    IndexStats,
    Placement,
    Query,
    Refusal,
    RefusalKind,
    Report,
    Scorecard,
    Scored,
    WorkerSnapshot,
)
from services.router.core.apart import ApartConfig
from services.router.core.booking import book, placed
from services.router.core.books import Books
from services.router.core.choice import Choice, Reach
from services.router.core.cost import CostModel
from services.router.core.decide import Decider, Dice
from services.router.core.intake import Intake
from services.router.core.lives import Liveness, Status
from services.router.core.onboard import OnboardDefaults
from services.router.core.policies import PolicyName, make_policy
from services.router.core.rates import RateDefaults
from services.router.core.sessions import SessionBook
from services.router.core.transfers import TransferDefaults
from services.router.core.views import index_stats, model_worker, worker_snapshots
from services.router.core.workers import WorkerInfo

_NEVER = float("inf")
_NOBODY: Set[int] = frozenset()


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """All that tunes the core."""

    policy: PolicyName = PolicyName.KV
    cost: CostModel = field(default_factory=CostModel)
    dynamo_weight: float = 1.0
    """Weight of prefill blocks in the policy `dynamo`."""
    rates: RateDefaults = field(default_factory=RateDefaults)
    onboard: OnboardDefaults = field(default_factory=OnboardDefaults)
    apart: ApartConfig = field(default_factory=ApartConfig)
    transfers: TransferDefaults = field(default_factory=TransferDefaults)
    liveness: Liveness = field(default_factory=Liveness)
    node_blocks: int = 1 << 20
    """Most index entries of one kvbm daemon."""
    session_wait_s: float = 1.0
    """A session stays with its worker if its first token comes no later by more than this."""
    session_ttl_s: float = 3600.0
    """How long a session is remembered after its last request."""
    sessions: int = 1 << 16
    """Most sessions remembered."""
    booking_ttl_s: float = 10.0
    """How long a placement counts as load without the worker's word, in seconds."""


class RouterCore:
    """Index, load book, rates, worker table and policy, in step. For one thread; never waits."""

    def __init__(self, config: CoreConfig, dice: Dice) -> None:
        policy = make_policy(config.policy, config.cost, config.dynamo_weight)
        self._policy = policy
        self._books = Books(
            liveness=config.liveness,
            rates=config.rates,
            transfers=config.transfers,
            onboard=config.onboard,
            node_blocks=config.node_blocks,
            booking_ttl_s=config.booking_ttl_s,
            cost=config.cost,
            on_gone=policy.forget,
        )
        self.nodes = self._books.nodes
        """The kvbm daemons: tell it what their records and streams say."""
        self._sessions = SessionBook(config.sessions, config.session_ttl_s)
        self._decider = Decider(
            self._books,
            policy,
            config.cost,
            config.apart,
            self._sessions,
            config.session_wait_s,
            dice,
        )
        self._choices = self._books.choices
        self._intake = Intake(self._books)

    # What discovery tells.

    def record(self, info: WorkerInfo, now: float) -> bool:
        """A worker's discovery record came or changed. False if it is of a life that is over."""
        return self._books.record(info, now)

    def record_vanished(self, worker_id: str, incarnation: int) -> None:
        """A worker's record went; by itself that removes nobody."""
        self._choices.changed()
        self._books.table.record_vanished(worker_id, incarnation)

    def synced(self) -> None:
        """The first list of records is complete: a model unknown now does not exist."""
        self._choices.synced = True

    # What workers' streams tell.

    def heard(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker lives, its news is still being recovered. False if it is not known."""
        return self._books.hear(worker_id, incarnation, now) is not None

    def reset(self, snapshot: Snapshot, now: float) -> bool:
        """A worker holds and runs exactly this. False if it is not known."""
        return any(list(self.resetting(snapshot, now)))

    def resetting(self, snapshot: Snapshot, now: float, step: int = 1 << 62) -> Iterator[bool]:
        """`reset` in steps of about `step` blocks; yields True after each, nothing if not known.

        Between them anything may happen but news of this worker's stream. Ends early when that
        makes the snapshot void.
        """
        return self._intake.resetting(snapshot, now, step)

    def apply(self, batch: Batch, now: float) -> tuple[Report, ...]:
        """News of a worker, in order, without gaps. Returns how earlier decisions fared."""
        return self._intake.apply(batch, now)

    def refused(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker refused a connection: out of choice until heard again. True if that is news."""
        self._choices.changed()
        return self._books.table.refused(worker_id, incarnation, now)

    def tick(self, now: float) -> list[str]:
        """Lets time pass: drops expired bookings and gone workers; returns the ids of these."""
        gone = self._books.tick(now)
        for worker_id in gone:
            self._intake.doubts.forget(worker_id)
        self._sessions.expire(now)
        return gone

    def sweep(self, limit: int) -> bool:
        """Frees up to `limit` index entries of whoever went; True while some are left."""
        return self._books.index.sweep(limit) or self.nodes.sweep(limit)

    def doubted(self, worker_id: str) -> bool:
        """Whether a worker's digest said that its blocks are not as known here; asking answers.

        Then its snapshot is to be taken.
        """
        return self._intake.doubts.take(worker_id)

    # Decisions.

    def place(
        self,
        query: Query,
        attempt_id: AttemptId,
        now: float,
        max_wait_s: float = _NEVER,
        spared: Set[int] = _NOBODY,
    ) -> Placement | Refusal:
        """Chooses a worker and books the request there under `attempt_id`; it may choose another
        one for its prefill, and books that as well, under an id made of this one.

        Workers where it would wait longer than `max_wait_s` are left out, and `spared` slots;
        refuses with OVERLOADED if that leaves none.
        """
        self._books.load.expire(now)
        choice = self._choices.of(query, now)
        if isinstance(choice, Refusal):
            return choice
        if spared:
            # Mostly that is all: no need to look at the prompt.
            self._books.refresh()
            if not any(
                c.slot not in spared and c.queue_s(now) <= max_wait_s for c in choice.candidates
            ):
                return _busy(choice, query, now, max_wait_s)
        try:
            decision = self._decider.decide(choice, query, now, max_wait_s, spared)
            if not decision.verdict.in_time:
                return _busy(choice, query, now, max_wait_s)
            placement = placed(decision, attempt_id, self._policy)
            book(self._books.load, decision, placement)
            self._decider.taken(decision)
            return placement
        finally:
            self._decider.wipe()

    def release(self, attempt_id: AttemptId) -> bool:
        """Takes back a placement, or a leg of one, that never reached its worker. False if it isn't
        booked now.
        """
        return self._books.load.release(attempt_id) is not None

    def backlog(self, query: Query, now: float, spared: Set[int] = _NOBODY) -> Backlog | Refusal:
        """How busy those are that could take a request; `spared` slots begin nothing for it."""
        choice = self._choices.of(query, now)
        if isinstance(choice, Refusal):
            return choice
        self._books.refresh()
        pool = self._choices.pool(query, choice, now)
        prefilling = pool.candidates if pool else []
        return Backlog(
            min(
                (c.queue_s(now) for c in choice.candidates if c.slot not in spared), default=_NEVER
            ),
            sum(c.prefill_rate for c in (*choice.candidates, *prefilling)),
        )

    def lane(self, query: Query) -> Hashable:
        """Equal for requests that may run on the same workers, until `lanes_version` changes."""
        return self._choices.lane(query)

    @property
    def lanes_version(self) -> int:
        """Another whenever `lane` may say something else of a request than before."""
        return self._choices.lanes_version

    def reach(self, query: Query, now: float) -> Reach:
        """Whom a request may run on now, busy or not."""
        return self._choices.reach(query, now)

    @property
    def choices_version(self) -> int:
        """Another whenever `reach` may say something else of a request than before."""
        return self._choices.version

    def holds(self, reach: Reach, now: float) -> bool:
        """Whether `reach` would say the same."""
        return reach.version == self._choices.version and now <= reach.until

    def explain(
        self,
        query: Query,
        now: float,
        max_wait_s: float = _NEVER,
        spared: Set[int] = _NOBODY,
    ) -> Scorecard | Refusal:
        """How `place` would decide now; changes nothing.

        Where it would refuse since all are busy, the one is shown that it would choose otherwise.
        """
        choice = self._choices.of(query, now)
        card = Scorecard(self._policy.name, query.prompt_tokens, len(query.keys), ())
        prefills = None
        if isinstance(choice, Refusal):
            if choice.kind is not RefusalKind.NO_WORKER:
                return choice
        else:
            try:
                decision = self._decider.decide(choice, query, now, max_wait_s, spared)
                whole, apart = self._decider.ways(decision)
                rows = tuple(self._decider.rows(decision))
            finally:
                self._decider.wipe()
            card = replace(card, workers=rows, whole=whole, apart=apart)
            prefills = apart.prefill if apart is not None and apart.chosen else None
        barred = self._choices.barred(query, now, {row.holder for row in card.workers})
        others = tuple(
            Scored(
                holder,
                role,
                bar=bar,
                reason="prefills this one" if holder == prefills else bar.value,
            )
            for holder, role, bar in barred
        )
        return replace(card, workers=card.workers + others)

    # Views.

    def model_worker(self, model: str, block_size: int = 0) -> WorkerInfo | None:
        """A worker's record that serves `model`, of that block size if one is named; to hash by."""
        return model_worker(self._books, model, block_size)

    def workers(self, now: float) -> list[WorkerSnapshot]:
        """All ranks of all workers, in order of id."""
        return worker_snapshots(self._books, now)

    def statuses(self, now: float) -> Iterator[Status]:
        """How each worker is regarded."""
        return (self._books.table.status(worker, now) for worker in self._books.table)

    def index_stats(self, digests: bool = True) -> IndexStats:
        """Figures of the index, and digests for each holder if they are wanted."""
        return index_stats(self._books, self._intake, digests)

    @property
    def bookings(self) -> int:
        """Placements that no event has confirmed yet; 0 at idle."""
        return self._books.load.bookings

    @property
    def expired_bookings(self) -> int:
        """Placements so far that nothing confirmed in time."""
        return self._books.load.expired

    def check_invariants(self) -> None:
        """Raises AssertionError when a part contradicts itself or another."""
        self._books.check_invariants()
        self._decider.check_invariants()


def _busy(choice: Choice, query: Query, now: float, max_wait_s: float) -> Refusal:
    wait_s = min(c.queue_s(now) for c in choice.candidates)
    return Refusal(
        RefusalKind.OVERLOADED,
        f"every worker of {query.model!r} is busy for {wait_s:.1f} s",
        wait_s,
        max(0.0, wait_s - max_wait_s),
    )
