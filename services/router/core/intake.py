"""Intake: what workers' streams and snapshots tell, event by event, into the books.

Counts what it is told and can't use. Answers how decisions fared that were taken before, and knows
whose digests differ from what is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
    TransferEnded,
)
from services.router.core.answers import Outcome, Report, Transfer, TransferResult
from services.router.core.books import Books
from services.router.core.doubts import Doubts
from services.router.core.requests import Estimate, Finished, PrefillDone
from services.router.core.workers import Rank, Worker, WorkerInfo


class Intake:
    """Applies news to the books. For one thread."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.doubts = Doubts()
        self.events = 0
        """Events applied."""
        self.unknown = 0
        """Events and parts of snapshots dropped: of unknown kind, tier or rank."""

    def resetting(self, snapshot: Snapshot, now: float, step: int) -> Iterator[bool]:
        """A worker holds and runs exactly this; see RouterCore.resetting."""
        books = self._books
        worker = books.hear(snapshot.publisher, snapshot.incarnation, now)
        if worker is None:
            return
        self.unknown += snapshot.unknown_parts
        for rank in list(worker.ranks):
            dp_rank = rank.holder.dp_rank
            mine = [part for part in snapshot.blocks if part.dp_rank == dp_rank]
            blocks = [key for part in mine if part.tier is Tier.G1 for key in part.keys]
            self.unknown += sum(part.tier is not Tier.G1 for part in mine)
            for _ in books.index.replacing(rank.slot, blocks, step):
                yield True
                if books.pages.get(rank.slot) is None:
                    return
            running = [r for r in snapshot.requests if r.admitted.dp_rank == dp_rank]
            estimate = partial(self._estimate, worker.info, rank.slot, now)
            report = snapshot.load if snapshot.load and snapshot.load.dp_rank == dp_rank else None
            books.load.reset(rank.slot, running, estimate, report, now)
        worker.answered(snapshot.sequence)
        books.choices.changed()
        yield True

    def apply(self, batch: Batch, now: float) -> tuple[Report, ...]:
        """News of a worker, in order, without gaps."""
        books = self._books
        worker = books.hear(batch.publisher, batch.incarnation, now)
        if worker is None:
            return ()
        worker.sequence = batch.sequence
        self.unknown += batch.unknown_events
        reports: list[Report] = []
        prefills: list[PrefillDone] = []
        for event in batch.events:
            if event.dp_rank >= len(worker.ranks):
                self.unknown += 1
                continue
            rank = worker.ranks[event.dp_rank]
            self._apply(event, worker, rank, now, reports, prefills)
        for slot in {p.slot for p in prefills}:
            mine = [p for p in prefills if p.slot == slot]
            began = [p.admitted_at for p in mine if p.admitted_at is not None]
            # Without tokens it only marks the time.
            teaches = worker.described and len(began) == len(mine)
            tokens = sum(p.computed_tokens for p in mine) if teaches else 0
            pairs = sum(p.pairs for p in mine)
            since = min(began, default=now)
            books.learn(books.rates.prefills_done(slot, len(mine), tokens, pairs, since, now))
        return tuple(reports)

    def _apply(
        self,
        event: Event,
        worker: Worker,
        rank: Rank,
        now: float,
        reports: list[Report],
        prefills: list[PrefillDone],
    ) -> None:
        books, slot, info = self._books, rank.slot, worker.info
        self.events += 1
        match event:
            case BlocksStored(tier=Tier.G1, keys=keys):
                books.index.store(slot, keys)
            case BlocksRemoved(tier=Tier.G1, keys=keys):
                books.index.remove(slot, keys)
            case BlocksCleared(tier=Tier.G1):
                books.index.clear(slot)
            case BlocksDigest(tier=Tier.G1, blocks=blocks, xor=xor):
                mine = books.index.digest(slot)
                self.doubts.compare(rank.holder.id, rank.holder.dp_rank, mine, blocks, xor)
            case LoadReport():
                books.load.report(slot, event, now)
            case RequestAdmitted():
                self._admitted(event, info, rank, now, reports)
            case RequestFirstToken():
                done = books.load.first_token(
                    slot, event.attempt_id, event.cached_tokens, now, event.transferred_tokens
                )
                if done is not None:
                    prefills.append(done)
            case TransferEnded():
                reports.append(self._transferred(event, worker, rank, now))
            case RequestFinished():
                end = books.load.finished(
                    slot,
                    event.attempt_id,
                    event.cached_tokens,
                    event.aborted,
                    event.output_tokens,
                    now,
                )
                if end is not None and not end.aborted:
                    self._finished(end, worker, rank, reports)
            case _:
                # Tiers below G1 are a kvbm daemon's to tell of.
                self.events -= 1
                self.unknown += 1

    def _admitted(
        self,
        event: RequestAdmitted,
        info: WorkerInfo,
        rank: Rank,
        now: float,
        reports: list[Report],
    ) -> None:
        books, slot = self._books, rank.slot
        known = books.load.is_booked(slot, event.attempt_id)
        estimate = Estimate() if known else self._estimate(info, slot, now, event)
        admitted = books.load.admitted(slot, event, estimate, now)
        books.filled(slot, admitted.filled_tokens / info.block_size)
        if admitted.missed is not None:
            books.transfers.failed(admitted.missed, info.id, 0.0, now)
            reports.append(Transfer(TransferResult.MISSED, admitted.missed, rank.holder))

    def _transferred(
        self, event: TransferEnded, worker: Worker, rank: Rank, now: float
    ) -> Transfer:
        books = self._books
        incoming = books.load.transfer_ended(rank.slot, event.attempt_id, event.tokens, now)
        source, receiver = event.source, rank.holder.id
        if event.tokens:
            if worker.described:
                model = worker.info.model
                books.transfers.arrived(model, source, receiver, event.tokens, event.seconds)
            result = TransferResult.CAME
        else:
            books.transfers.failed(source, receiver, event.seconds, now)
            result = TransferResult.FAILED
        return Transfer(
            result,
            source,
            rank.holder,
            event.tokens,
            event.bytes,
            event.seconds,
            incoming.seconds if incoming else None,
        )

    def _finished(self, end: Finished, worker: Worker, rank: Rank, reports: list[Report]) -> None:
        """A request reached its own end."""
        books = self._books
        if (pace := end.decoded) is not None and worker.described:
            books.learn(
                books.rates.decoded(
                    rank.slot, pace.tokens, pace.seconds, pace.batch, pace.kv_tokens
                )
            )
        rank.prompt_tokens += end.prompt_tokens
        rank.cached_tokens += end.cached_tokens
        if end.predicted is not None:
            reports.append(
                Outcome(
                    rank.holder,
                    end.attempt_id,
                    end.prompt_tokens,
                    end.predicted,
                    end.cached_tokens,
                )
            )

    def _estimate(
        self, info: WorkerInfo, slot: int, now: float, event: RequestAdmitted
    ) -> Estimate:
        """What an engine need not compute of a request that somebody else placed."""
        books = self._books
        prompt = books.prompt(event.keys, event.prompt_tokens, info.block_size, now)
        if event.transfer_tokens:
            # A transfer is not combined with loads from tiers.
            return Estimate(prompt.depths.get(slot, 0) * info.block_size)
        overlap = prompt.at(info, slot, 1 / books.rates.prefill_rate(slot)).overlap
        return Estimate(overlap.total * info.block_size, overlap.lower > 0)
