"""The `simple` worker model: an LRU prefix cache, one prefill at a time, decodes beside it.

Small and deterministic, so that "better placement" has one meaning:

* the cache holds `capacity_blocks` of 512 tokens; the tail of a chain leaves before its root;
* a hit is the longest leading run of blocks that is held; they are held from placement on;
* prefill is FIFO at `prefill_tps` uncached tokens a second, and computes one token at least;
* the first token comes when it ends; decode takes `tpot_s` a token beside it and only keeps the
  request's blocks active.

`pooled_hit_ratio` is the ceiling of hits that placement alone can reach: one shared cache of all
workers' capacity.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.events.model import (
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
)
from services.common.ids import AttemptId, BlockKey
from services.router.replay.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class SimpleSettings:
    """Figures of the model; the defaults are those of the reference."""

    capacity_blocks: int = 2000
    prefill_tps: float = 16000.0
    tpot_s: float = 0.020


class LruBlocks:
    """Block ids in order of use; `touch` inserts a chain so that its tail is the oldest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.ids: OrderedDict[int, None] = OrderedDict()

    def overlap(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are held."""
        for count, block in enumerate(blocks):
            if block not in self.ids:
                return count
        return len(blocks)

    def touch(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Uses a chain; returns what came (in chain order) and what had to leave."""
        ids = self.ids
        came = []
        for block in reversed(blocks[: self.capacity]):
            if block not in ids:
                came.append(block)
            ids[block] = None
            ids.move_to_end(block)
        left = []
        while len(ids) > self.capacity:
            left.append(ids.popitem(last=False)[0])
        came.reverse()
        if left and came:
            # A chain as long as the cache may push out its own tail.
            gone = set(left) & set(came)
            if gone:
                came = [b for b in came if b not in gone]
                left = [b for b in left if b not in gone]
        return came, left


def uncached_tokens(cache: LruBlocks, request: TraceRequest) -> int:
    """Tokens that have to be computed: all that isn't held, and the last one at least."""
    held = min(cache.overlap(request.blocks) * BLOCK_TOKENS, request.input_tokens)
    return max(1, request.input_tokens - held)


@dataclass(slots=True)
class _Running:
    admitted: RequestAdmitted
    cached: int
    output_tokens: int
    decoding: bool = False


class SimpleWorker:
    """One worker of the model."""

    block_tokens = BLOCK_TOKENS
    first_gap = 0

    def __init__(self, settings: SimpleSettings, cache: LruBlocks | None = None) -> None:
        self.settings = settings
        self.cache = cache or LruBlocks(settings.capacity_blocks)
        self.free_at = 0.0
        """When its queue of prefills is empty."""
        self.active_blocks = 0
        """Of requests that have not finished."""
        self.served = 0
        self._computed = 0
        self._running: dict[AttemptId, _Running] = {}
        self._waiting = 0
        self._due: list[tuple[float, int, AttemptId]] = []

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return self._computed

    @property
    def running(self) -> int:
        """Requests that have not finished."""
        return len(self._running)

    def wait_s(self, now: float) -> float:
        """Seconds until a new prefill could start."""
        return max(0.0, self.free_at - now)

    def submit(self, request: TraceRequest, attempt_id: AttemptId, now: float) -> Sequence[Event]:
        """Queues its prefill; its blocks are held from now on."""
        todo = uncached_tokens(self.cache, request)
        came, left = self.cache.touch(request.blocks)
        self.free_at = max(now, self.free_at) + todo / self.settings.prefill_tps
        self._computed += todo
        self.served += 1
        self.active_blocks += len(request.blocks)
        keys = [BlockKey(block) for block in request.blocks]
        admitted = RequestAdmitted(attempt_id, request.input_tokens, request.output_tokens, keys)
        running = _Running(admitted, request.input_tokens - todo, request.output_tokens)
        self._running[attempt_id] = running
        self._waiting += 1
        heapq.heappush(self._due, (self.free_at, 0, attempt_id))
        events: list[Event] = [admitted]
        if left:
            events.append(BlocksRemoved(Tier.G1, [BlockKey(b) for b in left]))
        if came:
            events.append(BlocksStored(Tier.G1, [BlockKey(b) for b in came]))
        events.append(self._report(now))
        return events

    def next_time(self) -> float:
        """The next first token or end."""
        return self._due[0][0] if self._due else float("inf")

    def advance(self, now: float) -> Sequence[Event]:
        """First tokens and ends up to `now`."""
        events: list[Event] = []
        while self._due and self._due[0][0] <= now:
            when, _, attempt_id = heapq.heappop(self._due)
            running = self._running[attempt_id]
            if running.decoding:
                del self._running[attempt_id]
                self.active_blocks -= len(running.admitted.keys)
                events.append(RequestFinished(attempt_id, running.cached, running.output_tokens))
                continue
            running.decoding = True
            self._waiting -= 1
            end = when + running.output_tokens * self.settings.tpot_s
            heapq.heappush(self._due, (end, 1, attempt_id))
            events.append(RequestFirstToken(attempt_id, running.cached))
        if events:
            events.append(self._report(now))
        return events

    tiers = None

    def snapshot(self, publisher: str, sequence: int, now: float) -> Snapshot:
        """Blocks and requests as they are."""
        return Snapshot(
            publisher,
            1,
            sequence,
            blocks=(TierBlocks(Tier.G1, [BlockKey(b) for b in self.cache.ids]),),
            requests=tuple(RunningRequest(r.admitted, r.decoding) for r in self._running.values()),
            load=self._report(now),
        )

    def _report(self, now: float) -> LoadReport:
        waiting = self._waiting
        return LoadReport(
            running_requests=len(self._running) - waiting,
            waiting_requests=waiting,
            pending_prefill_tokens=round(self.wait_s(now) * self.settings.prefill_tps),
            used_blocks=len(self.cache.ids),
            total_blocks=self.settings.capacity_blocks,
        )


def pooled_hit_ratio(
    requests: Sequence[TraceRequest], workers: int, settings: SimpleSettings
) -> float:
    """Cached share of all prompt tokens when one cache had the room of all workers'."""
    shared = LruBlocks(settings.capacity_blocks * workers)
    cached = total = 0
    for request in requests:
        cached += request.input_tokens - uncached_tokens(shared, request)
        shared.touch(request.blocks)
        total += request.input_tokens
    return cached / total
