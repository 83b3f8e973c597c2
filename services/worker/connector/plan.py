"""What to save and what to load, for each request: the scheduler's side without vLLM.

Events come in, decisions and instructions go out (`take_instructions`), nothing waits. Joins the
two halves (loads.py, saves.py): what a look-up found stored needs no save, what a load found bad
does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from services.worker.connector.instructions import Instructions
from services.worker.connector.loads import LoadPlan
from services.worker.connector.model import LeasedBlock, Loaded, LoadOrder, Saved, SaveOrder
from services.worker.connector.saves import Pick, SavePlan, Slots
from services.worker.connector.terms import Terms


class Plan:
    """All requests of one engine. One thread's only."""

    def __init__(self, slots: Slots, *, pin_limit: int, ask_s: float = 0.25) -> None:
        """`pin_limit`: most G1 blocks that saves keep at once; `ask_s`: longest wait for an Ask."""
        self._loads = LoadPlan(ask_s)
        self._saves = SavePlan(slots, pin_limit)
        self._out = Instructions()
        self.behind = self._saves.behind
        """As SavePlan's."""
        self.counts: dict[str, float] = defaultdict(float)
        """What happened since somebody last cleared it."""

    @property
    def jobs(self) -> int:
        """Saves whose end is not known yet."""
        return self._saves.jobs

    @property
    def pinned(self) -> int:
        """G1 blocks that they keep."""
        return self._saves.pinned

    @property
    def requests(self) -> int:
        """Requests that are here, or whose load still runs."""
        return len(self._loads)

    def reach(self, reachable: bool) -> None:
        """Whether kvbm can be asked."""
        self._loads.reachable = reachable

    def arrive(self, id: str, terms: Terms) -> None:
        """A request came, with what the worker's shell found out about it."""
        self._loads.arrive(id, terms, self._out)
        self._saves.arrive(id, terms)

    def match(
        self, id: str, keys: Sequence[bytes], usable: int, local: int, now_s: float
    ) -> int | None:
        """As LoadPlan's."""
        return self._loads.match(id, keys, usable, local, now_s, self._out)

    def found(self, id: str, terms: Terms | None) -> None:
        """The answer to an Ask; None: there was none."""
        self.counts["asked_again"] += 1
        if self._loads.found(id, terms, self._out) and terms is not None:
            self._saves.heard(id, terms)

    def promoted(
        self, id: str, lease: int, ready: tuple[LeasedBlock, ...] | None, promoting: int
    ) -> None:
        """As LoadPlan's."""
        self._not_there(id, self._loads.promoted(id, lease, ready, promoting))

    def allocated(
        self, id: str, keys: Sequence[bytes], blocks: Sequence[int], count: int
    ) -> LoadOrder | None:
        """As LoadPlan's."""
        self._not_there(id, self._loads.missing(id))
        return self._loads.allocated(id, keys, blocks, count, self._out)

    def _not_there(self, id: str, position: int | None) -> None:
        """What was promised and does not come is computed, and then wants to be stored again."""
        if position is not None:
            self._saves.lost(id, position)

    def loaded(self, order: LoadOrder, result: Loaded, now_s: float) -> None:
        """A load is over; exactly once for each order, also of a request that has left."""
        wanted = len(order.blocks)
        self.counts["loads"] += 1
        self.counts["loaded_blocks"] += result.good
        self.counts["failed_blocks"] += wanted - result.good
        self.counts["bad_blocks"] += len(result.bad)
        self.counts["load_seconds"] += result.seconds
        self._saves.has((item.key for item in order.items[: result.good]), now_s)
        failed = self._loads.loaded(order.request, result, wanted, self._out)
        if failed is not None:
            self._saves.lost(order.request, failed)

    def preempted(self, id: str) -> None:
        """The engine took a request's blocks away."""
        self._loads.preempted(id, self._saves.complete(id))

    def leave(self, id: str) -> None:
        """A request has ended, however."""
        self.counts["skipped_blocks"] += self._saves.leave(id)
        self._loads.leave(id, self._out)

    def due(self, id: str, complete: int) -> bool:
        """As SavePlan's."""
        return self._saves.due(id, complete)

    def pick(self, id: str, keys: Sequence[bytes], holds: Callable[[int], bool]) -> list[Pick]:
        """As SavePlan's."""
        return self._saves.pick(id, keys, holds)

    def begin_save(self, picks: Sequence[Pick], blocks: Sequence[int]) -> SaveOrder:
        """As SavePlan's `begin`."""
        return self._saves.begin(picks, blocks)

    def saved(self, job: int, result: Saved) -> int:
        """As SavePlan's."""
        good = sum(c is not None for c in result.checksums)
        self.counts["saved_blocks"] += good
        self.counts["unsaved_blocks"] += len(result.checksums) - good
        self.counts["save_seconds"] += result.seconds
        return self._saves.saved(job, result, self._out)

    def committed(self, results: Mapping[bytes, bool], now_s: float) -> None:
        """As SavePlan's."""
        self._saves.committed(results, now_s)

    def take_instructions(self) -> Instructions | None:
        """What is to be done since the last call, if anything."""
        if not self._out:
            return None
        out, self._out = self._out, Instructions()
        return out

    def check_invariants(self) -> None:
        """Raises AssertionError when the plan contradicts itself."""
        self._loads.check_invariants()
        self._saves.check_invariants()
