"""The router core: takes what workers and discovery tell, and places requests.

Feed it `record`, `record_vanished`, `synced`, `heard`, `reset`, `apply`, `refused` and `tick`; ask
it `place`, `release`, `explain`, `workers`, `index_stats`. What kvbm daemons tell goes to `nodes`.
Times are seconds on any steady clock.
It answers with values, never with exceptions, and holds nothing that its inputs don't bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.common.events.model import (
    Batch,
    BlocksCleared,
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
    Bar,
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
from services.router.core.cost import Candidate, CostModel, Score
from services.router.core.eligibility import bar_of, refusal
from services.router.core.index import PrefixIndex
from services.router.core.lives import Liveness, Status
from services.router.core.load import Estimate, LoadBook, PrefillDone
from services.router.core.nodes import NodeTable
from services.router.core.onboard import OnboardDefaults, OnboardModel
from services.router.core.policies import Key, PolicyName, make_policy
from services.router.core.rates import RateBook, RateDefaults
from services.router.core.usable import Prompt, Usable
from services.router.core.workers import (
    Change,
    Rank,
    Worker,
    WorkerInfo,
    WorkerTable,
)


class Dice(Protocol):
    """Where chance comes from: a seeded random.Random will do."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to stop - 1."""


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """All that tunes the core."""

    policy: PolicyName = PolicyName.KV
    cost: CostModel = field(default_factory=CostModel)
    rates: RateDefaults = field(default_factory=RateDefaults)
    onboard: OnboardDefaults = field(default_factory=OnboardDefaults)
    liveness: Liveness = field(default_factory=Liveness)
    node_blocks: int = 1 << 20
    """Most index entries of one kvbm daemon."""
    booking_ttl_s: float = 10.0
    """How long a placement counts as load without the worker's word, in seconds."""


@dataclass(slots=True)
class _Choice:
    worker: Worker
    rank: Rank
    usable: Usable
    candidate: Candidate
    key: Key = ()
    score: Score = field(default_factory=Score)


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
        self._policy = make_policy(config.policy, config.cost)
        self._ranks: dict[int, Rank] = {}
        self._synced = False
        self._events = 0
        self._unknown_events = 0

    # What discovery tells.

    def record(self, info: WorkerInfo, now: float) -> bool:
        """A worker's discovery record came or changed. False if it is of a life that is over."""
        change = self._table.record(info, now)
        self._follow(change)
        for rank in change.worker.ranks:
            self._index.set_capacity(rank.slot, change.worker.info.total_blocks)
        return change.worker.info is info

    def record_vanished(self, worker_id: str, incarnation: int) -> None:
        """A worker's record went; by itself that removes nobody."""
        self._table.record_vanished(worker_id, incarnation)

    def synced(self) -> None:
        """The first list of records is complete: a model unknown now does not exist."""
        self._synced = True

    # What workers' streams tell.

    def heard(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker lives, its news is still being recovered. False if it is not known."""
        return self._hear(worker_id, incarnation, now) is not None

    def reset(self, snapshot: Snapshot, now: float) -> bool:
        """A worker holds and runs exactly this. False if it is not known."""
        worker = self._hear(snapshot.publisher, snapshot.incarnation, now)
        if worker is None:
            return False
        worker.answered(snapshot.sequence)
        self._unknown_events += snapshot.unknown_parts
        for rank in worker.ranks:
            dp_rank = rank.holder.dp_rank
            mine = [part for part in snapshot.blocks if part.dp_rank == dp_rank]
            blocks: set[int] = set()
            blocks.update(*(part.keys for part in mine if part.tier is Tier.G1))
            self._unknown_events += sum(part.tier is not Tier.G1 for part in mine)
            self._index.replace(rank.slot, blocks)
            running = [
                (r, self._estimate(worker.info, rank.slot, r.admitted, now))
                for r in snapshot.requests
                if r.admitted.dp_rank == dp_rank
            ]
            report = snapshot.load if snapshot.load and snapshot.load.dp_rank == dp_rank else None
            self._load.reset(rank.slot, running, report, now)
        return True

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
            self._apply(event, worker.info, rank, now, outcomes, prefills)
        for slot in {p.slot for p in prefills}:
            mine = [p for p in prefills if p.slot == slot]
            began = [p.admitted_at for p in mine if p.admitted_at is not None]
            # Without tokens it only marks the time.
            tokens = sum(p.computed_tokens for p in mine) if len(began) == len(mine) else 0
            self._rates.prefills_done(slot, tokens, min(began, default=now), now)
        return tuple(outcomes)

    def refused(self, worker_id: str, incarnation: int, now: float) -> bool:
        """A worker refused a connection: out of choice until heard again. True if that is news."""
        return self._table.refused(worker_id, incarnation, now)

    def tick(self, now: float) -> list[str]:
        """Lets time pass: drops expired bookings and gone workers; returns the ids of these."""
        self._load.expire(now)
        changes = self._table.tick(now)
        for change in changes:
            self._follow(change)
        return [change.worker.info.id for change in changes]

    def sweep(self, limit: int) -> bool:
        """Frees up to `limit` index entries of whoever went; True while some are left."""
        return self._index.sweep(limit) or self.nodes.sweep(limit)

    # Decisions.

    def place(self, query: Query, attempt_id: AttemptId, now: float) -> Placement | Refusal:
        """Chooses a worker and books the request there under `attempt_id`."""
        self._load.expire(now)
        prompt = self._prompt(query.keys, query.prompt_tokens, query.block_size, now)
        ranked = self._choose(query, prompt, now)
        if isinstance(ranked, Refusal):
            return ranked
        best = ranked[0]
        self._lot = self._dice.randrange(1 << 62)
        rank, candidate = best.rank, best.candidate
        self._load.book(
            rank.slot,
            attempt_id,
            prompt_tokens=query.prompt_tokens,
            cached_tokens=candidate.g1_tokens + candidate.lower_tokens,
            keys=query.keys,
            now=now,
            sequences=query.sequences,
            onboards=candidate.lower_tokens > 0,
        )
        self._policy.chosen(rank.slot)
        rank.placements += 1
        return Placement(
            attempt_id,
            rank.holder,
            best.worker.info.address,
            candidate.g1_tokens + candidate.lower_tokens,
            best.score.ttft_s,
            self._policy.name,
            best.score,
            prompt.prefetch(best.worker.info, best.usable),
        )

    def release(self, attempt_id: AttemptId) -> bool:
        """Takes back a placement that never reached its worker. False if it isn't booked now."""
        return self._load.release(attempt_id) is not None

    def explain(self, query: Query, now: float) -> Scorecard | Refusal:
        """How `place` would decide now; changes nothing."""
        prompt = self._prompt(query.keys, query.prompt_tokens, query.block_size, now)
        ranked = self._choose(query, prompt, now)
        if isinstance(ranked, Refusal) and ranked.kind is not RefusalKind.NO_WORKER:
            return ranked
        choices = [] if isinstance(ranked, Refusal) else ranked
        rows = [
            Scored(c.rank.holder, c.candidate, c.score, i == 0, None, _why_lost(c, choices[0]))
            for i, c in enumerate(choices)
        ]
        shown = {row.holder for row in rows}
        for worker in self._table:
            bar = bar_of(worker.info, self._table.status(worker, now), query)
            bar = bar or (Bar.STARTING if worker.starting else Bar.SUSPECT)
            rows.extend(
                Scored(rank.holder, bar=bar, reason=bar.value)
                for rank in worker.ranks
                if rank.holder not in shown
            )
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

    def index_stats(self) -> IndexStats:
        """Figures and digests of the index."""
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
            ),
            tier_entries=self.nodes.entries,
            tier_capacity_entries=self.nodes.capacity,
            tier_refused_entries=self.nodes.refused_blocks,
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
        self.nodes.check_invariants()
        slots = {rank.slot: rank for worker in self._table for rank in worker.ranks}
        assert slots == self._ranks
        for slot in slots:
            view = self._load.view(slot)
            assert min(view.booked, view.queued, view.decoding, view.queued_tokens) >= 0
            self._index.digest(slot)
            self._rates.prefill_rate(slot)

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

    def _choose(self, query: Query, prompt: Prompt, now: float) -> list[_Choice] | Refusal:
        """Candidates, the chosen one first."""
        eligible = self._eligible(query, now)
        if isinstance(eligible, Refusal):
            return eligible
        block_size = query.block_size or 1
        choices = []
        for worker in eligible:
            for rank in worker.ranks:
                load = self._load.view(rank.slot)
                rate = self._rates.prefill_rate(rank.slot)
                usable = prompt.at(worker.info, rank.slot, rate)
                overlap = usable.overlap
                candidate = Candidate(
                    slot=rank.slot,
                    prompt_tokens=query.prompt_tokens,
                    g1_tokens=overlap.g1 * block_size,
                    g2_tokens=overlap.g2 * block_size,
                    g3_tokens=overlap.g3 * block_size,
                    g4_tokens=overlap.g4 * block_size,
                    mates=usable.mates,
                    active_requests=load.active,
                    decoding=load.decoding,
                    queued_tokens=load.queued_tokens,
                    active_tokens=load.active_tokens,
                    prefill_rate=rate,
                    decode_delay_s=self._rates.decode_delay_s(rate),
                    onboard_s=usable.onboard_s,
                )
                choices.append(_Choice(worker, rank, usable, candidate))
        for choice, (key, score) in zip(
            choices, self._policy.rank([c.candidate for c in choices]), strict=True
        ):
            choice.key, choice.score = key, score
        choices.sort(key=lambda c: c.key)
        ties = sum(1 for c in choices if c.key == choices[0].key)
        drawn = self._lot % ties
        choices.insert(0, choices.pop(drawn))
        return choices

    def _eligible(self, query: Query, now: float) -> list[Worker] | Refusal:
        """Workers in choice: the first class that has any.

        First those that are there; then those that are silent or only starting; at last those that
        refused somebody's connection and have spoken since, for that one may have been cut off.
        """
        first: list[Worker] = []
        second: list[Worker] = []
        last: list[Worker] = []
        bars: set[Bar] = set()
        for worker in self._table:
            status = self._table.status(worker, now)
            bar = bar_of(worker.info, status, query)
            if bar is None:
                silent = status is Status.SUSPECT
                (second if silent or worker.starting else first).append(worker)
                continue
            bars.add(bar)
            if bar is Bar.UNREACHABLE and worker.heard_since_refusal:
                last.append(worker)
        if chosen := first or second or last:
            return chosen
        known = self._table.remembers(query.model, now)
        return refusal(query, bars, [w.info for w in self._table], known, self._synced)

    def _hear(self, worker_id: str, incarnation: int, now: float) -> Worker | None:
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
            self._policy.forget(rank.slot)
            self._ranks.pop(rank.slot, None)
        info = change.worker.info
        for rank in change.added:
            self._index.add_holder(rank.slot, info.total_blocks)
            self._load.add_slot(rank.slot)
            self._rates.add_slot(rank.slot, info.model)
            self._ranks[rank.slot] = rank

    def _estimate(
        self, info: WorkerInfo, slot: int, event: RequestAdmitted, now: float
    ) -> Estimate:
        """What an engine need not compute of a request that somebody else placed."""
        prompt = self._prompt(event.keys, event.prompt_tokens, info.block_size, now)
        overlap = prompt.at(info, slot, self._rates.prefill_rate(slot)).overlap
        return Estimate(overlap.total * info.block_size, overlap.lower > 0)

    def _apply(
        self,
        event: Event,
        info: WorkerInfo,
        rank: Rank,
        now: float,
        outcomes: list[Outcome],
        prefills: list[PrefillDone],
    ) -> None:
        slot = rank.slot
        self._events += 1
        match event:
            case BlocksStored(tier=Tier.G1, keys=keys):
                self._index.store(slot, keys)
            case BlocksRemoved(tier=Tier.G1, keys=keys):
                self._index.remove(slot, keys)
            case BlocksCleared(tier=Tier.G1):
                self._index.clear(slot)
            case LoadReport():
                self._load.report(slot, event)
            case RequestAdmitted():
                known = self._load.is_booked(slot, event.attempt_id)
                estimate = Estimate() if known else self._estimate(info, slot, event, now)
                self._load.admitted(slot, event, estimate, now)
            case RequestFirstToken():
                done = self._load.first_token(slot, event.attempt_id, event.cached_tokens)
                if done is not None:
                    prefills.append(done)
            case RequestFinished():
                end = self._load.finished(
                    slot, event.attempt_id, event.cached_tokens, event.aborted
                )
                if end is None or end.aborted:
                    return
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


def _why_lost(choice: _Choice, best: _Choice) -> str:
    if choice is best:
        return ""
    if choice.key == best.key:
        return f"level with {best.rank.holder.id}; the lot fell on that one"
    if choice.score.total_s:
        more = choice.score.total_s - best.score.total_s
        return f"{more * 1000:.1f} ms more than {best.rank.holder.id}"
    return f"comes after {best.rank.holder.id} in the policy's order"
