"""The router core: takes what workers and discovery tell, and places requests.

Feed it `record`, `record_vanished`, `synced`, `heard`, `reset`, `apply`, `refused` and `tick`; ask
it `place`, `release`, `explain`, `workers`, `index_stats`. What kvbm daemons tell goes to `nodes`.
Times are seconds on any steady clock.
It answers with values, never with exceptions, and holds nothing that its inputs don't bound.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    Snapshot,
    Tier,
)
from services.common.ids import AttemptId
from services.router.core.answers import (
    Backlog,
    IndexStats,
    Outcome,
    Placement,
    Query,
    Refusal,
    RefusalKind,
    Scorecard,
    Scored,
    WorkerSnapshot,
)
from services.router.core.choice import Choice, Choices, Page, Reach, Verdict
from services.router.core.churn import ChurnBook
from services.router.core.cost import Candidate, CostModel
from services.router.core.doubts import Doubts
from services.router.core.fared import fared
from services.router.core.index import PrefixIndex
from services.router.core.lives import Liveness, Status
from services.router.core.load import LoadBook
from services.router.core.nodes import NodeTable
from services.router.core.onboard import OnboardDefaults, OnboardModel
from services.router.core.policies import Ask, PolicyName, make_policy
from services.router.core.rates import RateBook, RateDefaults
from services.router.core.repeats import RepeatBook
from services.router.core.requests import Estimate, PrefillDone
from services.router.core.sessions import SessionBook, home_of, session_key
from services.router.core.usable import Prompt
from services.router.core.workers import (
    Change,
    Rank,
    Worker,
    WorkerInfo,
    WorkerTable,
)

_NEVER = float("inf")
_NOBODY: Set[int] = frozenset()
_MOST_REPEATS = 64
"""Models whose last placements are remembered."""


class Dice(Protocol):
    """Where chance comes from: a seeded random.Random will do."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to stop - 1."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """All that tunes the core."""

    policy: PolicyName = PolicyName.KV
    cost: CostModel = field(default_factory=CostModel)
    dynamo_weight: float = 1.0
    """Weight of prefill blocks in the policy `dynamo`."""
    rates: RateDefaults = field(default_factory=RateDefaults)
    onboard: OnboardDefaults = field(default_factory=OnboardDefaults)
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
        self._config = config
        self._dice = dice
        self._lot = dice.randrange(1 << 62)
        self._table = WorkerTable(config.liveness)
        self._index = PrefixIndex()
        self.nodes = NodeTable(config.liveness, config.node_blocks)
        """The kvbm daemons: tell it what their records and streams say."""
        self._onboard = OnboardModel(config.onboard)
        self._load = LoadBook(config.booking_ttl_s)
        self._rates = RateBook(config.rates)
        self._churn = ChurnBook()
        self._repeats: dict[str, RepeatBook] = {}
        self._sessions = SessionBook(config.sessions, config.session_ttl_s)
        self._policy = make_policy(config.policy, config.cost, config.dynamo_weight)
        self._kv = config.policy is PolicyName.KV
        self._pages: dict[int, Page] = {}
        self._choices = Choices(self._table, self._pages, config.liveness)
        self._touched: list[Page] = []
        """Pages that the prompt of the decision in hand is written into."""
        self._doubts = Doubts()
        self._events = 0
        self._unknown_events = 0

    # What discovery tells.

    def record(self, info: WorkerInfo, now: float) -> bool:
        """A worker's discovery record came or changed. False if it is of a life that is over."""
        self._choices.changed()
        change = self._table.record(info, now)
        self._follow(change)
        self._choices.reserve()
        for rank in change.worker.ranks:
            self._index.set_capacity(rank.slot, change.worker.info.total_blocks)
            self._churn.set_capacity(rank.slot, change.worker.info.total_blocks)
            self._regroup(rank.slot, change.worker.info)
        return change.worker.info is info

    def record_vanished(self, worker_id: str, incarnation: int) -> None:
        """A worker's record went; by itself that removes nobody."""
        self._choices.changed()
        self._table.record_vanished(worker_id, incarnation)

    def synced(self) -> None:
        """The first list of records is complete: a model unknown now does not exist."""
        self._choices.synced = True

    # What workers' streams tell.

    def heard(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker lives, its news is still being recovered. False if it is not known."""
        return self._hear(worker_id, incarnation, now) is not None

    def reset(self, snapshot: Snapshot, now: float) -> bool:
        """A worker holds and runs exactly this. False if it is not known."""
        return any(list(self.resetting(snapshot, now)))

    def resetting(self, snapshot: Snapshot, now: float, step: int = 1 << 62) -> Iterator[bool]:
        """`reset` in steps of about `step` blocks; yields True after each, nothing if not known.

        Between them anything may happen but news of this worker's stream. Ends early when that
        makes the snapshot void.
        """
        worker = self._hear(snapshot.publisher, snapshot.incarnation, now)
        if worker is None:
            return
        self._unknown_events += snapshot.unknown_parts
        for rank in list(worker.ranks):
            dp_rank = rank.holder.dp_rank
            mine = [part for part in snapshot.blocks if part.dp_rank == dp_rank]
            blocks = [key for part in mine if part.tier is Tier.G1 for key in part.keys]
            self._unknown_events += sum(part.tier is not Tier.G1 for part in mine)
            for _ in self._index.replacing(rank.slot, blocks, step):
                yield True
                if self._pages.get(rank.slot) is None:
                    return
            running = [r for r in snapshot.requests if r.admitted.dp_rank == dp_rank]
            estimate = partial(self._estimate, worker.info, rank.slot, now)
            report = snapshot.load if snapshot.load and snapshot.load.dp_rank == dp_rank else None
            self._load.reset(rank.slot, running, estimate, report, now)
        worker.answered(snapshot.sequence)
        self._choices.changed()
        yield True

    def apply(self, batch: Batch, now: float) -> tuple[Outcome, ...]:
        """News of a worker, in order, without gaps. Returns how this router's placements ended."""
        worker = self._hear(batch.publisher, batch.incarnation, now)
        if worker is None:
            return ()
        worker.sequence = batch.sequence
        self._unknown_events += batch.unknown_events
        outcomes: list[Outcome] = []
        prefills: list[PrefillDone] = []
        for event in batch.events:
            if event.dp_rank >= len(worker.ranks):
                self._unknown_events += 1
                continue
            rank = worker.ranks[event.dp_rank]
            self._apply(event, worker, rank, now, outcomes, prefills)
        for slot in {p.slot for p in prefills}:
            mine = [p for p in prefills if p.slot == slot]
            began = [p.admitted_at for p in mine if p.admitted_at is not None]
            # Without tokens it only marks the time.
            teaches = worker.described and len(began) == len(mine)
            tokens = sum(p.computed_tokens for p in mine) if teaches else 0
            pairs = sum(p.pairs for p in mine)
            since = min(began, default=now)
            self._learn(self._rates.prefills_done(slot, len(mine), tokens, pairs, since, now))
        return tuple(outcomes)

    def refused(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker refused a connection: out of choice until heard again. True if that is news."""
        self._choices.changed()
        return self._table.refused(worker_id, incarnation, now)

    def tick(self, now: float) -> list[str]:
        """Lets time pass: drops expired bookings and gone workers; returns the ids of these."""
        self._load.expire(now)
        changes = self._table.tick(now)
        for change in changes:
            self._choices.changed()
            self._follow(change)
            self._doubts.forget(change.worker.info.id)
        if changes:
            self._choices.reserve()
        self._sessions.expire(now)
        # What one worker taught, its model's others learn now.
        self._learn(self._pages)
        return [change.worker.info.id for change in changes]

    def sweep(self, limit: int) -> bool:
        """Frees up to `limit` index entries of whoever went; True while some are left."""
        return self._index.sweep(limit) or self.nodes.sweep(limit)

    def doubted(self, worker_id: str) -> bool:
        """Whether a worker's digest said that its blocks are not as known here; asking answers.

        Then its snapshot is to be taken.
        """
        return self._doubts.take(worker_id)

    # Decisions.

    def place(
        self,
        query: Query,
        attempt_id: AttemptId,
        now: float,
        max_wait_s: float = _NEVER,
        spared: Set[int] = _NOBODY,
    ) -> Placement | Refusal:
        """Chooses a worker and books the request there under `attempt_id`.

        Workers where it would wait longer than `max_wait_s` are left out, and `spared` slots;
        refuses with OVERLOADED if that leaves none.
        """
        self._load.expire(now)
        choice = self._choices.of(query, now)
        if isinstance(choice, Refusal):
            return choice
        if spared:
            # Mostly that is all: no need to look at the prompt.
            self._refresh()
            if not _free(choice, now, max_wait_s, spared):
                return _busy(choice, query, now, max_wait_s)
        prompt = self._prompt(query.keys, query.prompt_tokens, query.block_size, now)
        try:
            self._write(choice, query, prompt)
            ask = Ask(now, query.keys, query.block_size or 1, self._lot)
            verdict = self._decide(choice, query, ask, max_wait_s, spared)
            if not verdict.in_time:
                return _busy(choice, query, now, max_wait_s)
            return self._book(choice.pages[verdict.best], query, prompt, attempt_id, ask)
        finally:
            # Whatever happens: what was written of one prompt must not weigh for the next.
            self._wipe()

    def _book(
        self, page: Page, query: Query, prompt: Prompt, attempt_id: AttemptId, ask: Ask
    ) -> Placement:
        """The decision fell on a worker whose candidate is written."""
        self._lot = self._dice.randrange(1 << 62)
        rank, candidate, worker = page.rank, page.candidate, page.worker
        cached = candidate.g1_tokens + candidate.lower_tokens
        score = self._policy.score(ask, candidate)
        placement = Placement(
            attempt_id,
            rank.holder,
            worker.info.address,
            cached,
            score.ttft_s,
            self._policy.name,
            score,
            prompt.prefetch(worker.info, page.below) if page.below else None,
        )
        self._load.book(
            rank.slot,
            attempt_id,
            prompt_tokens=query.prompt_tokens,
            cached_tokens=cached,
            keys=query.keys,
            now=ask.now,
            sequences=query.sequences,
            onboards=candidate.lower_tokens > 0,
        )
        if self._kv:
            self._repeated(query.model).placed(prompt.fork, rank.slot, candidate.uncached_tokens)
        if query.session:
            key = session_key(query.session, query.model, query.tenant)
            self._sessions.went(key, (rank.holder.id, rank.holder.dp_rank), ask.now)
        self._policy.chosen(rank.slot)
        rank.placements += 1
        candidate.placements = rank.placements
        return placement

    def release(self, attempt_id: AttemptId) -> bool:
        """Takes back a placement that never reached its worker. False if it isn't booked now."""
        return self._load.release(attempt_id) is not None

    def backlog(self, query: Query, now: float, spared: Set[int] = _NOBODY) -> Backlog | Refusal:
        """How busy those are that could take a request; `spared` slots begin nothing for it."""
        choice = self._choices.of(query, now)
        if isinstance(choice, Refusal):
            return choice
        self._refresh()
        return Backlog(
            min(
                (c.queue_s(now) for c in choice.candidates if c.slot not in spared), default=_NEVER
            ),
            sum(c.prefill_rate for c in choice.candidates),
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
        rows: list[Scored] = []
        if isinstance(choice, Refusal):
            if choice.kind is not RefusalKind.NO_WORKER:
                return choice
        else:
            prompt = self._prompt(query.keys, query.prompt_tokens, query.block_size, now)
            try:
                self._write(choice, query, prompt)
                ask = Ask(now, query.keys, query.block_size or 1, self._lot)
                verdict = self._decide(choice, query, ask, max_wait_s, spared)
                rows = fared(choice, verdict, self._policy, ask)
            finally:
                self._wipe()
        barred = self._choices.barred(query, now, {row.holder for row in rows})
        rows += [Scored(holder, bar=bar, reason=bar.value) for holder, bar in barred]
        return Scorecard(self._policy.name, query.prompt_tokens, len(query.keys), tuple(rows))

    # Views.

    def model_worker(self, model: str, block_size: int = 0) -> WorkerInfo | None:
        """A worker's record that serves `model`, of that block size if one is named; to hash by."""
        found = None
        for worker in self._table:
            if worker.info.serves(model):
                if block_size in (0, worker.info.block_size):
                    return worker.info
                found = found or worker.info
        return found

    def workers(self, now: float) -> list[WorkerSnapshot]:
        """All ranks of all workers, in order of id."""
        return [
            WorkerSnapshot(
                info=worker.info,
                holder=rank.holder,
                status=self._table.status(worker, now),
                load=self._load.view(rank.slot),
                indexed_blocks=self._index.digest(rank.slot).blocks,
                sequence=worker.sequence,
                silence_s=worker.silence_s(now),
                placements=rank.placements,
                prompt_tokens=rank.prompt_tokens,
                cached_tokens=rank.cached_tokens,
                prefill_rate=self._rates.prefill_rate(rank.slot),
                has_record=worker.record_incarnation is not None,
            )
            for worker in sorted(self._table, key=lambda w: w.info.id)
            for rank in worker.ranks
        ]

    def statuses(self, now: float) -> Iterator[Status]:
        """How each worker is regarded."""
        return (self._table.status(worker, now) for worker in self._table)

    def index_stats(self, digests: bool = True) -> IndexStats:
        """Figures of the index, and digests for each holder if they are wanted."""
        return IndexStats(
            blocks=self._index.blocks,
            entries=self._index.entries,
            capacity_entries=self._index.capacity_entries,
            refused_entries=self._index.refused,
            events=self._events + self.nodes.events,
            unknown_events=self._unknown_events + self.nodes.unknown_events,
            digests=tuple(
                (rank.holder, worker.sequence, self._index.digest(rank.slot))
                for worker in sorted(self._table, key=lambda w: w.info.id)
                for rank in worker.ranks
                if digests
            ),
            tier_entries=self.nodes.entries,
            tier_capacity_entries=self.nodes.capacity,
            tier_refused_entries=self.nodes.refused_blocks,
            drifts=self._doubts.drifts + self.nodes.drifts,
        )

    @property
    def bookings(self) -> int:
        """Placements that no event has confirmed yet; 0 at idle."""
        return self._load.bookings

    @property
    def expired_bookings(self) -> int:
        """Placements so far that nothing confirmed in time."""
        return self._load.expired

    def check_invariants(self) -> None:
        """Raises AssertionError when a part contradicts itself or another."""
        self._table.check_invariants()
        self._index.check_invariants()
        self._load.check_invariants()
        self._rates.check_invariants()
        self._churn.check_invariants()
        self._sessions.check_invariants()
        for book in self._repeats.values():
            book.check_invariants()
        self.nodes.check_invariants()
        slots = {rank.slot: rank for worker in self._table for rank in worker.ranks}
        assert slots == {slot: page.rank for slot, page in self._pages.items()}
        for slot, page in self._pages.items():
            model = page.worker.info.model
            assert self._rates.group(slot) == self._churn.group(slot) == model
            c = page.candidate
            assert not (c.g1_tokens or c.lower_tokens or c.mates or c.repeats or page.below), (
                "left over"
            )
            if slot not in self._load.changed:
                fresh = replace(c)
                self._load.fill(fresh)
                fresh.stale = c.stale
                assert fresh == c, "a load that nobody wrote down"
        self._choices.check_invariants()

    # Inside.

    def _prompt(self, keys: Sequence[int], tokens: int, block_size: int, now: float) -> Prompt:
        return Prompt(
            keys,
            tokens,
            block_size,
            self._index,
            self._load,
            self.nodes,
            self._onboard,
            now,
        )

    def _write(self, choice: Choice, query: Query, prompt: Prompt) -> None:
        """Writes into the candidates what there is to know of them, until `_wipe`."""
        pages = self._pages
        self._refresh()
        tokens, block_size = query.prompt_tokens, query.block_size or 1
        for candidate in choice.candidates:
            candidate.prompt_tokens = tokens
        touched = self._touched
        deepest = 0
        for slot in prompt.slots():
            page = pages[slot]
            touched.append(page)
            candidate = page.candidate
            own = prompt.own(slot)
            if own > deepest:
                deepest = own
            # A last block may be partly filled, and one token is always computed.
            candidate.g1_tokens = min(own * block_size, max(0, tokens - 1))
            candidate.mates = prompt.crowd(slot)
            candidate.warm = True
        if deepest and self._kv:
            prompt.fork = query.keys[deepest - 1]
            book = self._repeated(query.model)
            share = book.tokens / len(choice.candidates)
            for slot, computed in book.at(prompt.fork).items():
                # Less than a block more is nothing.
                if computed - share >= block_size and slot in pages and pages[slot].candidate.warm:
                    pages[slot].candidate.repeats = computed - share
        for page in choice.tiered:
            candidate = page.candidate
            usable = prompt.at(page.worker.info, page.rank.slot, candidate.prefill_rate)
            overlap = usable.overlap
            if overlap.lower:
                touched.append(page)
                candidate.g2_tokens = overlap.g2 * block_size
                candidate.g3_tokens = overlap.g3 * block_size
                candidate.g4_tokens = overlap.g4 * block_size
                candidate.peer_tokens = overlap.peer * block_size
                candidate.onboard_s = usable.onboard_s
                candidate.warm = True
                page.below = usable

    def _wipe(self) -> None:
        for page in self._touched:
            page.wipe()
        self._touched.clear()

    def _refresh(self) -> None:
        """Writes into the candidates what has changed of their load."""
        load, pages = self._load, self._pages
        if load.changed:
            for slot in load.changed:
                load.fill(pages[slot].candidate)
            load.changed.clear()

    def _decide(
        self, choice: Choice, query: Query, ask: Ask, max_wait_s: float, spared: Set[int]
    ) -> Verdict:
        """Who gets a request whose candidates are written; without effect."""
        candidates = choice.candidates
        costs = self._policy.costs(ask, candidates)
        best = cheapest = self._best(costs)
        if query.session:
            best = self._home(choice, query, best, ask.now)
        liked = candidates[best]
        if liked.queue_s(ask.now) <= max_wait_s and liked.slot not in spared:
            return Verdict(best, costs, best != cheapest, True)
        free = _free(choice, ask.now, max_wait_s, spared)
        if not free:
            return Verdict(best, costs, best != cheapest, False)
        return Verdict(free[self._best([costs[i] for i in free])], costs, False, True)

    def _repeated(self, model: str) -> RepeatBook:
        book = self._repeats.get(model)
        if book is None:
            if len(self._repeats) >= _MOST_REPEATS:
                del self._repeats[next(iter(self._repeats))]
            book = self._repeats[model] = RepeatBook()
        return book

    def _best(self, costs: list[float]) -> int:
        """Number of the cheapest; the lot decides between equal ones."""
        most = min(costs) + self._policy.tolerance
        ties = [i for i, cost in enumerate(costs) if cost <= most]
        return ties[self._lot % len(ties)]

    def _home(self, choice: Choice, query: Query, best: int, now: float) -> int:
        """Number of the session's worker, if it is in choice and `best` is not far sooner."""
        places = [(page.rank.holder.id, page.rank.holder.dp_rank) for page in choice.pages]
        key = session_key(query.session, query.model, query.tenant)
        last = self._sessions.place(key, now)
        home = places.index(last) if last in places else home_of(key, places)
        wait = _ttft_s(choice.candidates[home], now) - _ttft_s(choice.candidates[best], now)
        return home if wait <= self._config.session_wait_s else best

    def _hear(self, worker_id: str, incarnation: int, now: float) -> Worker | None:
        worker = self._table.get(worker_id)
        if worker is None:
            return None
        if worker.refused or worker.incarnation != incarnation:
            self._choices.changed()
        else:
            # By far the most frequent case, in few words.
            if now - worker.heard_at > self._config.liveness.suspect_after_s:
                self._choices.changed()
            worker.heard_at = now
            return worker
        change = self._table.heard(worker_id, incarnation, now)
        if change is None:
            return None
        self._follow(change)
        return change.worker

    def _follow(self, change: Change) -> None:
        """Carries slots that came and went to all who keep something by slot."""
        for rank in change.removed:
            self._index.remove_holder(rank.slot)
            self._load.remove_slot(rank.slot)
            self._rates.remove_slot(rank.slot)
            self._churn.remove_slot(rank.slot)
            self._policy.forget(rank.slot)
            self._pages.pop(rank.slot, None)
        info = change.worker.info
        for rank in change.added:
            self._index.add_holder(rank.slot, info.total_blocks)
            self._load.add_slot(rank.slot)
            self._rates.add_slot(rank.slot, info.model)
            self._churn.add_slot(rank.slot, info.model, info.total_blocks)
            page = Page(change.worker, rank, Candidate(rank.slot, warm=False))
            self._pages[rank.slot] = page
            self._learn((rank.slot,))

    def _regroup(self, slot: int, info: WorkerInfo) -> None:
        """A record names the model: with its workers the slot shares what it learns.

        What was learned of it under another name stays behind.
        """
        if self._rates.group(slot) == info.model:
            return
        self._rates.remove_slot(slot)
        self._rates.add_slot(slot, info.model)
        self._churn.remove_slot(slot)
        self._churn.add_slot(slot, info.model, info.total_blocks)
        self._learn((slot,))

    def _learn(self, slots: Iterable[int]) -> None:
        """Reads the rates of these anew."""
        for slot in slots:
            candidate = self._pages[slot].candidate
            prefill, decode = self._rates.prefill(slot), self._rates.decode(slot)
            candidate.request_s = prefill.request_s
            candidate.token_s = prefill.token_s
            candidate.pair_s = prefill.pair_s
            candidate.sequence_s = decode.sequence_s
            candidate.kv_s = decode.kv_s
            candidate.settle()
            self._weigh(candidate)

    def _weigh(self, candidate: Candidate) -> None:
        most = self._config.cost.most_churn
        candidate.churn = min(max(self._churn.excess(candidate.slot), -most), most)
        candidate.stale = True

    def _estimate(
        self, info: WorkerInfo, slot: int, now: float, event: RequestAdmitted
    ) -> Estimate:
        """What an engine need not compute of a request that somebody else placed."""
        prompt = self._prompt(event.keys, event.prompt_tokens, info.block_size, now)
        overlap = prompt.at(info, slot, self._rates.prefill_rate(slot)).overlap
        return Estimate(overlap.total * info.block_size, overlap.lower > 0)

    def _apply(
        self,
        event: Event,
        worker: Worker,
        rank: Rank,
        now: float,
        outcomes: list[Outcome],
        prefills: list[PrefillDone],
    ) -> None:
        slot, info = rank.slot, worker.info
        self._events += 1
        match event:
            case BlocksStored(tier=Tier.G1, keys=keys):
                self._index.store(slot, keys)
            case BlocksRemoved(tier=Tier.G1, keys=keys):
                self._index.remove(slot, keys)
            case BlocksCleared(tier=Tier.G1):
                self._index.clear(slot)
            case BlocksDigest(tier=Tier.G1, blocks=blocks, xor=xor):
                mine = self._index.digest(slot)
                self._doubts.compare(rank.holder.id, rank.holder.dp_rank, mine, blocks, xor)
            case LoadReport():
                self._load.report(slot, event, now)
            case RequestAdmitted():
                known = self._load.is_booked(slot, event.attempt_id)
                estimate = Estimate() if known else self._estimate(info, slot, now, event)
                uncached = self._load.admitted(slot, event, estimate, now)
                self._churn.stored(slot, uncached / info.block_size)
                self._weigh(self._pages[slot].candidate)
            case RequestFirstToken():
                done = self._load.first_token(slot, event.attempt_id, event.cached_tokens, now)
                if done is not None:
                    prefills.append(done)
            case RequestFinished():
                end = self._load.finished(
                    slot,
                    event.attempt_id,
                    event.cached_tokens,
                    event.aborted,
                    event.output_tokens,
                    now,
                )
                if end is None or end.aborted:
                    return
                if (pace := end.decoded) is not None and worker.described:
                    self._learn(
                        self._rates.decoded(
                            slot, pace.tokens, pace.seconds, pace.batch, pace.kv_tokens
                        )
                    )
                rank.prompt_tokens += end.prompt_tokens
                rank.cached_tokens += end.cached_tokens
                if end.predicted is not None:
                    outcomes.append(
                        Outcome(
                            rank.holder,
                            end.attempt_id,
                            end.prompt_tokens,
                            end.predicted,
                            end.cached_tokens,
                        )
                    )
            case _:
                # Tiers below G1 are a kvbm daemon's to tell of.
                self._events -= 1
                self._unknown_events += 1


def _ttft_s(c: Candidate, now: float) -> float:
    """Predicted seconds to the first token, whatever the policy."""
    return c.queue_s(now) + c.prefill_s + min(c.onboard_s, c.lower_tokens * c.token_s)


def _free(choice: Choice, now: float, max_wait_s: float, spared: Set[int]) -> list[int]:
    """Numbers of those that are free soon enough."""
    return [
        i
        for i, c in enumerate(choice.candidates)
        if c.slot not in spared and c.queue_s(now) <= max_wait_s
    ]


def _busy(choice: Choice, query: Query, now: float, max_wait_s: float) -> Refusal:
    wait_s = min(c.queue_s(now) for c in choice.candidates)
    return Refusal(
        RefusalKind.OVERLOADED,
        f"every worker of {query.model!r} is busy for {wait_s:.1f} s",
        wait_s,
        max(0.0, wait_s - max_wait_s),
    )
