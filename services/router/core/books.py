"""The core's books: all that is kept of workers, by worker or by slot, in step.

Whoever came, went or changed is carried to every book here, so that no book misses it. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from services.router.core.board import Board
from services.router.core.choice import Choices, Page
from services.router.core.churn import ChurnBook
from services.router.core.cost import Candidate, CostModel
from services.router.core.index import PrefixIndex
from services.router.core.lives import Liveness
from services.router.core.load import LoadBook
from services.router.core.nodes import NodeTable
from services.router.core.onboard import OnboardDefaults, OnboardModel
from services.router.core.rates import RateBook, RateDefaults
from services.router.core.transfers import TransferBook, TransferDefaults
from services.router.core.usable import Prompt
from services.router.core.workers import Change, Worker, WorkerInfo, WorkerTable


class Books:
    """Worker table, index, load, rates, churn, transfers, daemons, and a page for each slot.

    `on_gone` is told of slots that are gone for good.
    """

    def __init__(
        self,
        *,
        liveness: Liveness,
        rates: RateDefaults,
        transfers: TransferDefaults,
        onboard: OnboardDefaults,
        node_blocks: int,
        booking_ttl_s: float,
        cost: CostModel,
        on_gone: Callable[[int], None],
    ) -> None:
        self._liveness = liveness
        self._cost = cost
        self._on_gone = on_gone
        self.table = WorkerTable(liveness)
        self.index = PrefixIndex()
        self.nodes = NodeTable(liveness, node_blocks)
        self.load = LoadBook(booking_ttl_s)
        self.rates = RateBook(rates)
        self.transfers = TransferBook(transfers)
        self.pages: dict[int, Page] = {}
        self._candidates: dict[int, Candidate] = {}
        self.board = Board(cost, self._candidates)
        self.choices = Choices(self.table, self.pages, self.board, liveness)
        self._churn = ChurnBook()
        self._onboard = OnboardModel(onboard)

    # What happens to workers.

    def record(self, info: WorkerInfo, now: float) -> bool:
        """A worker's discovery record came or changed. False if it is of a life that is over."""
        self.choices.changed()
        change = self.table.record(info, now)
        self._follow(change)
        self.choices.reserve()
        for rank in change.worker.ranks:
            self.index.set_capacity(rank.slot, change.worker.info.total_blocks)
            self._churn.set_capacity(rank.slot, change.worker.info.total_blocks)
            self._regroup(rank.slot, change.worker.info)
        return change.worker.info is info

    def hear(self, worker_id: str, incarnation: int, now: float) -> Worker | None:
        """A worker's stream spoke. None when that concerns nobody (any more)."""
        worker = self.table.get(worker_id)
        if worker is None:
            return None
        if worker.refused or worker.incarnation != incarnation:
            self.choices.changed()
        else:
            # By far the most frequent case, in few words.
            if now - worker.heard_at > self._liveness.suspect_after_s:
                self.choices.changed()
            worker.heard_at = now
            return worker
        change = self.table.heard(worker_id, incarnation, now)
        if change is None:
            return None
        self._follow(change)
        return change.worker

    def tick(self, now: float) -> list[str]:
        """Lets time pass: drops expired bookings and gone workers; returns the ids of these."""
        self.load.expire(now)
        self.transfers.expire(now)
        changes = self.table.tick(now)
        for change in changes:
            self.choices.changed()
            self._follow(change)
        if changes:
            self.choices.reserve()
        # What one worker taught, its model's others learn now.
        self.learn(self.pages)
        self.refresh()
        self.board.write()
        return [change.worker.info.id for change in changes]

    # What candidates show.

    def refresh(self) -> None:
        """Writes into the candidates what has changed of their load."""
        load, candidates = self.load, self._candidates
        if load.changed:
            for slot in load.changed:
                load.fill(candidates[slot])
            self.board.changed(load.changed)
            load.changed.clear()

    def learn(self, slots: Iterable[int]) -> None:
        """Reads the rates of these anew."""
        for slot in slots:
            c = self.pages[slot].candidate
            prefill, decode = self.rates.prefill(slot), self.rates.decode(slot)
            before = c.request_s, c.token_s, c.pair_s, c.sequence_s, c.kv_s
            c.request_s = prefill.request_s
            c.token_s = prefill.token_s
            c.pair_s = prefill.pair_s
            c.sequence_s = decode.sequence_s
            c.kv_s = decode.kv_s
            if before != (c.request_s, c.token_s, c.pair_s, c.sequence_s, c.kv_s):
                c.settle()
                self.board.changed((slot,))
            self._weigh(c)

    def filled(self, slot: int, blocks: float) -> None:
        """So many blocks come to a slot's cache (parts of blocks count as such)."""
        self._churn.stored(slot, blocks)
        self._weigh(self.pages[slot].candidate)

    def prompt(self, keys: Sequence[int], tokens: int, block_size: int, now: float) -> Prompt:
        """A prompt, looked up wherever its blocks may be."""
        return Prompt(
            keys, tokens, block_size, self.index, self.load, self.nodes, self._onboard, now
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when a book contradicts itself or another."""
        self.table.check_invariants()
        self.index.check_invariants()
        self.load.check_invariants()
        self.rates.check_invariants()
        self.transfers.check_invariants()
        self._churn.check_invariants()
        self.nodes.check_invariants()
        assert self._candidates == {slot: page.candidate for slot, page in self.pages.items()}
        slots = {rank.slot: rank for worker in self.table for rank in worker.ranks}
        assert slots == {slot: page.rank for slot, page in self.pages.items()}
        for slot, page in self.pages.items():
            model = page.worker.info.model
            assert self.rates.group(slot) == self._churn.group(slot) == model
            c = page.candidate
            written = c.prompt_tokens or c.g1_tokens or c.lower_tokens or c.mates or c.repeats
            assert not (written or page.below), "left over"
            if slot not in self.load.changed:
                fresh = replace(c)
                self.load.fill(fresh)
                self._cost.line(fresh)
                fresh.line = fresh.line if c.line else None
                assert fresh == c, "a load that nobody wrote down"
        self.choices.check_invariants()
        self.board.check_invariants()

    # Inside.

    def _follow(self, change: Change) -> None:
        """Carries slots that came and went to all who keep something by slot."""
        for rank in change.removed:
            self.index.remove_holder(rank.slot)
            self.load.remove_slot(rank.slot)
            self.rates.remove_slot(rank.slot)
            self._churn.remove_slot(rank.slot)
            self.transfers.forget(rank.holder.id)
            self._on_gone(rank.slot)
            if self.pages.pop(rank.slot, None) is not None:
                del self._candidates[rank.slot]
                self.board.remove(rank.slot)
        info = change.worker.info
        for rank in change.added:
            self.index.add_holder(rank.slot, info.total_blocks)
            self.load.add_slot(rank.slot)
            self.rates.add_slot(rank.slot, info.model)
            self._churn.add_slot(rank.slot, info.model, info.total_blocks)
            candidate = self._candidates[rank.slot] = Candidate(rank.slot)
            self.pages[rank.slot] = Page(change.worker, rank, candidate)
            self.board.add(rank.slot)
            self.learn((rank.slot,))

    def _regroup(self, slot: int, info: WorkerInfo) -> None:
        """A record names the model: with its workers the slot shares what it learns.

        What was learned of it under another name stays behind.
        """
        if self.rates.group(slot) == info.model:
            return
        self.rates.remove_slot(slot)
        self.rates.add_slot(slot, info.model)
        self._churn.remove_slot(slot)
        self._churn.add_slot(slot, info.model, info.total_blocks)
        self.learn((slot,))

    def _weigh(self, candidate: Candidate) -> None:
        most = self._cost.most_churn
        churn = min(max(self._churn.excess(candidate.slot), -most), most)
        if churn != candidate.churn:
            candidate.churn, candidate.line = churn, None
            self.board.changed((candidate.slot,))
