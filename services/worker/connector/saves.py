"""Which blocks to save with a step, and where to: each block once, heads before tails.

A block that finds no slot is passed over for now; nothing waits for slots. Time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.worker.connector.instructions import Fill, Instructions
from services.worker.connector.model import Saved, SaveOrder, Slot
from services.worker.connector.terms import Terms

KNOWN_KEYS = 65_536
"""Keys remembered as stored."""
AHEAD_BLOCKS = (64, 1024)
"""Fewest and most blocks that may be on their way to kvbm: pinned in G1, and slots granted."""


def ahead_blocks(step_tokens: int, block_size: int) -> int:
    """Blocks that may be on their way when a step computes up to `step_tokens`: those of two steps.

    With fewer a long prompt whose answer is one token, as every prefill worker's is, would be over
    before all its blocks had their turn.
    """
    fewest, most = AHEAD_BLOCKS
    return min(most, max(fewest, 2 * -(-step_tokens // block_size)))


class Slots(Protocol):
    """The slots granted to this engine."""

    @property
    def owner(self) -> int:
        """As whom slots were taken last; 0: nobody yet."""
        ...

    def take(self) -> Slot | None:
        """One to fill; None: there is none now."""
        ...


@dataclass(frozen=True, slots=True)
class Pick:
    """A block to save now."""

    position: int
    key: bytes
    parent: bytes
    slot: Slot
    tenant: str


@dataclass(slots=True)
class _Request:
    cursor: int
    """Blocks before it are stored, or on their way."""
    looked_s: float
    tenant: str
    complete: int = 0
    """Blocks that were complete when last seen."""


class KnownKeys:
    """Keys that were stored not long ago, with when that was known; the oldest are forgotten."""

    def __init__(self, limit: int = KNOWN_KEYS) -> None:
        self._limit = limit
        self._times: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes, now_s: float) -> None:
        """Notes that the key is stored."""
        self._times[key] = now_s
        self._times.move_to_end(key)
        if len(self._times) > self._limit:
            self._times.popitem(last=False)

    def since(self, key: bytes, since_s: float) -> bool:
        """Whether it was stored at `since_s` or later, as far as is known."""
        return self._times.get(key, -1.0) >= since_s

    def forget(self, key: bytes) -> None:
        """Notes that the key is not stored."""
        self._times.pop(key, None)

    def __len__(self) -> int:
        return len(self._times)


class SavePlan:
    """The saves of one engine's requests. One thread's only."""

    def __init__(self, slots: Slots, pin_limit: int) -> None:
        """`pin_limit`: most G1 blocks that saves keep at once."""
        self._slots = slots
        self._pin_limit = pin_limit
        self._scan = max(AHEAD_BLOCKS[0], pin_limit)
        """Most blocks of one request that a step looks at; the rest follow with later steps."""
        self._requests: dict[str, _Request] = {}
        self._jobs: dict[int, tuple[int, tuple[Pick, ...]]] = {}
        self._next_job = 1
        self._saving: set[bytes] = set()
        self._known = KnownKeys()
        self.behind: set[str] = set()
        """Requests with blocks that may have to be saved though they don't complete one now."""
        self.pinned = 0
        """G1 blocks that unfinished saves keep."""

    @property
    def jobs(self) -> int:
        """Saves whose end is not known yet."""
        return len(self._jobs)

    def arrive(self, id: str, terms: Terms) -> None:
        """A request came, with what is known of its blocks."""
        self._requests[id] = _Request(terms.stored, terms.looked_s, terms.tenant)
        self.behind.add(id)

    def heard(self, id: str, terms: Terms) -> None:
        """kvbm was asked again."""
        request = self._requests.get(id)
        if request is not None:
            request.cursor = max(request.cursor, terms.stored)
            request.looked_s = terms.looked_s

    def has(self, keys: Iterable[bytes], now_s: float) -> None:
        """These were found stored."""
        for key in keys:
            self._known.add(key, now_s)

    def lost(self, id: str, position: int) -> None:
        """What was thought to be stored from this block on has to be stored again."""
        request = self._requests.get(id)
        if request is not None:
            request.cursor = min(request.cursor, position)
            self.behind.add(id)

    def leave(self, id: str) -> int:
        """A request has ended; how many of its complete blocks were passed over."""
        request = self._requests.pop(id, None)
        self.behind.discard(id)
        return max(0, request.complete - request.cursor) if request is not None else 0

    def complete(self, id: str) -> int:
        """Blocks of a request that were complete when last seen."""
        request = self._requests.get(id)
        return request.complete if request is not None else 0

    def due(self, id: str, complete: int) -> bool:
        """Whether a request's `complete` leading blocks hold some that could be saved now."""
        request = self._requests.get(id)
        if request is None:
            return False
        request.complete = complete
        if request.cursor >= complete:
            self.behind.discard(id)
            return False
        self.behind.add(id)
        return self.pinned < self._pin_limit

    def pick(self, id: str, keys: Sequence[bytes], holds: Callable[[int], bool]) -> list[Pick]:
        """Blocks of a request to save with this step, in order, each with its slot.

        `holds`: whether the engine has the block of that number under its hash.
        """
        request = self._requests[id]
        picks: list[Pick] = []
        end = min(request.complete, request.cursor + self._scan)
        for position in range(request.cursor, end):
            key = bytes(keys[position])
            if not self._known.since(key, request.looked_s) and key not in self._saving:
                if self.pinned >= self._pin_limit or not holds(position):
                    break
                slot = self._slots.take()
                if slot is None:
                    break
                parent = bytes(keys[position - 1]) if position else b""
                picks.append(Pick(position, key, parent, slot, request.tenant))
                self._saving.add(key)
                self.pinned += 1
            request.cursor = position + 1
        if request.cursor >= request.complete:
            self.behind.discard(id)
        return picks

    def begin(self, picks: Sequence[Pick], blocks: Sequence[int]) -> SaveOrder:
        """The order for a step's picks, which lie in the engine's `blocks`."""
        job, self._next_job = self._next_job, self._next_job + 1
        self._jobs[job] = (self._slots.owner, tuple(picks))
        return SaveOrder(job, tuple(blocks), tuple(p.slot.index for p in picks))

    def saved(self, job: int, result: Saved, out: Instructions) -> int:
        """A save is over. Returns how many G1 blocks are free again."""
        owner, picks = self._jobs.pop(job)
        self.pinned -= len(picks)
        for pick, checksum in zip(picks, result.checksums, strict=True):
            if checksum is None:
                self._saving.discard(pick.key)
                out.fills.append(Fill(owner, pick.slot))
            else:
                out.fills.append(
                    Fill(
                        owner,
                        pick.slot,
                        pick.key,
                        pick.parent,
                        pick.position,
                        pick.tenant,
                        checksum,
                    )
                )
        return len(picks)

    def committed(self, results: Mapping[bytes, bool], now_s: float) -> None:
        """What became of fills: by key, whether there is no need to save it again."""
        for key, stored in results.items():
            self._saving.discard(key)
            if stored:
                self._known.add(key, now_s)
            else:
                self._known.forget(key)

    def check_invariants(self) -> None:
        """Raises AssertionError when the plan contradicts itself."""
        late = {id for id, r in self._requests.items() if r.cursor < r.complete}
        assert late <= self.behind <= self._requests.keys(), "a request's blocks were passed over"
        kept = sum(len(picks) for _, picks in self._jobs.values())
        assert self.pinned == kept, f"{self.pinned} blocks pinned, {kept} in jobs"
        assert self.pinned <= self._pin_limit
        running = {pick.key for _, picks in self._jobs.values() for pick in picks}
        assert running <= self._saving, "a running save is not known as such"
