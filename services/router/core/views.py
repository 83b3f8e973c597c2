"""What the core shows of its books to people and metrics."""

from __future__ import annotations

from services.router.core.answers import IndexStats, WorkerSnapshot
from services.router.core.books import Books
from services.router.core.intake import Intake
from services.router.core.workers import WorkerInfo


def model_worker(books: Books, model: str, block_size: int) -> WorkerInfo | None:
    """A worker's record that serves `model`, of that block size if one is named."""
    found = None
    for worker in books.table:
        if worker.info.serves(model):
            if block_size in (0, worker.info.block_size):
                return worker.info
            found = found or worker.info
    return found


def worker_snapshots(books: Books, now: float) -> list[WorkerSnapshot]:
    """All ranks of all workers, in order of id."""
    return [
        WorkerSnapshot(
            info=worker.info,
            holder=rank.holder,
            status=books.table.status(worker, now),
            load=books.load.view(rank.slot),
            indexed_blocks=books.index.digest(rank.slot).blocks,
            sequence=worker.sequence,
            silence_s=worker.silence_s(now),
            placements=rank.placements,
            prompt_tokens=rank.prompt_tokens,
            cached_tokens=rank.cached_tokens,
            prefill_rate=books.rates.prefill_rate(rank.slot),
            has_record=worker.record_incarnation is not None,
        )
        for worker in sorted(books.table, key=lambda w: w.info.id)
        for rank in worker.ranks
    ]


def index_stats(books: Books, intake: Intake, digests: bool) -> IndexStats:
    """Figures of the index, and digests for each holder if they are wanted."""
    index, nodes = books.index, books.nodes
    return IndexStats(
        blocks=index.blocks,
        entries=index.entries,
        capacity_entries=index.capacity_entries,
        refused_entries=index.refused,
        events=intake.events + nodes.events,
        unknown_events=intake.unknown + nodes.unknown_events,
        digests=tuple(
            (rank.holder, worker.sequence, index.digest(rank.slot))
            for worker in sorted(books.table, key=lambda w: w.info.id)
            for rank in worker.ranks
            if digests
        ),
        tier_entries=nodes.entries,
        tier_capacity_entries=nodes.capacity,
        tier_refused_entries=nodes.refused_blocks,
        drifts=intake.doubts.drifts + nodes.drifts,
    )
