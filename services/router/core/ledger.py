"""Ledger: requests by attempt id, and what they add up to at each slot, in step.

Every change of a request goes through here, so that no sum misses it. Knows no events and decides
nothing: load.py does.
"""

from __future__ import annotations

from services.common.ids import AttemptId
from services.router.core.inflight import InflightPrefixes, anchored
from services.router.core.requests import Clock, Request, Sums


class Ledger:
    """Read its parts, change them by its methods only."""

    def __init__(self) -> None:
        self.requests: dict[AttemptId, Request] = {}
        self.bookings: dict[AttemptId, None] = {}
        """Those of them that no event has confirmed; in order of expiry, since all live equally
        long.
        """
        self.sums: dict[int, Sums] = {}
        self.clocks: dict[int, Clock] = {}
        self.by_slot: dict[int, set[AttemptId]] = {}
        self.inflight = InflightPrefixes()
        self.changed: set[int] = set()
        """Slots whose load has changed since the caller last emptied this."""

    def add_slot(self, slot: int) -> None:
        """Opens a page for a worker."""
        self.sums[slot] = Sums()
        self.clocks[slot] = Clock()
        self.by_slot[slot] = set()
        self.changed.add(slot)

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker and all its requests."""
        for attempt_id in list(self.by_slot.get(slot, ())):
            self.drop(attempt_id)
        self.sums.pop(slot, None)
        self.clocks.pop(slot, None)
        self.by_slot.pop(slot, None)
        self.changed.discard(slot)

    def add(self, attempt_id: AttemptId, request: Request) -> None:
        """A request is there, instead of a former one of that id."""
        if attempt_id in self.requests:
            self.drop(attempt_id)
        self.requests[attempt_id] = request
        self.by_slot[request.slot].add(attempt_id)
        if request.booked_until is not None:
            self.bookings[attempt_id] = None
        self._count(self.sums[request.slot], request, 1)
        if request.shared:
            self.inflight.add(request.slot, request.keys)
        self.changed.add(request.slot)

    def drop(self, attempt_id: AttemptId) -> None:
        """It is gone."""
        request = self.requests.pop(attempt_id)
        self.by_slot[request.slot].discard(attempt_id)
        clock = self.clocks[request.slot]
        clock.queue.pop(attempt_id, None)
        if request.decoding and not request.prefill_only:
            clock.kv_tokens -= request.prompt_tokens
        self.bookings.pop(attempt_id, None)
        self._count(self.sums[request.slot], request, -1)
        if request.shared:
            self.inflight.remove(request.slot, request.keys)
        self.changed.add(request.slot)

    def queue(self, attempt_id: AttemptId, request: Request, now: float) -> None:
        """An admitted request waits for its engine's turn from now on."""
        clock = self.clocks[request.slot]
        if not clock.queue:
            clock.head_since = now
        clock.queue[attempt_id] = None

    def fail(self, attempt_id: AttemptId, request: Request, now: float) -> None:
        """Its KV does not come: it has to be computed, behind those that are there by now."""
        sums = self.sums[request.slot]
        self._count(sums, request, -1)
        request.failed = True
        request.uncached = min(max(1, request.prompt_tokens), request.uncached + request.transfer)
        request.admitted_at = None
        self._count(sums, request, 1)
        self._share(request)
        self.queue(attempt_id, request, now)
        self.changed.add(request.slot)

    def begin_decode(self, attempt_id: AttemptId, request: Request, now: float) -> None:
        """Its first token is out."""
        slot = request.slot
        self.sum_decodes(slot, now)
        sums, clock = self.sums[slot], self.clocks[slot]
        awaited = request.awaits
        self._count(sums, request, -1)
        request.decoding = True
        self._count(sums, request, 1)
        self._share(request)
        if request.decodes:
            clock.kv_tokens += request.prompt_tokens
        if not awaited:
            clock.queue.pop(attempt_id, None)
            # It works on the next one from now on.
            clock.head_since = now

    def sum_decodes(self, slot: int, now: float) -> None:
        """Carries the sums over time on to `now`; called before the decodes change."""
        clock = self.clocks[slot]
        passed = max(0.0, now - clock.summed_at)
        clock.decoding_s += passed * self.sums[slot].decoding
        clock.kv_s += passed * clock.kv_tokens
        clock.summed_at = max(clock.summed_at, now)

    def renew(self, attempt_id: AttemptId, until: float) -> None:
        """A booking lives on until then, longer than all others."""
        self.requests[attempt_id].booked_until = until
        del self.bookings[attempt_id]
        self.bookings[attempt_id] = None

    def check_invariants(self) -> None:
        """Raises AssertionError when a sum differs from what it sums up."""
        ends = [self.requests[attempt_id].booked_until or 0.0 for attempt_id in self.bookings]
        assert ends == sorted(ends)
        prefixes: dict[tuple[int, int], int] = {}
        sums: dict[int, Sums] = {slot: Sums() for slot in self.sums}
        for attempt_id, request in self.requests.items():
            assert attempt_id in self.by_slot[request.slot]
            assert (request.booked_until is not None) == (attempt_id in self.bookings)
            assert not (request.decoding and request.booked_until is not None)
            assert 0 <= request.uncached <= max(1, request.prompt_tokens)
            assert 0 <= request.transfer <= request.prompt_tokens
            assert request.shared != request.awaits
            self._count(sums[request.slot], request, 1)
            for key in anchored(request.keys) if request.shared else ():
                prefixes[key, request.slot] = prefixes.get((key, request.slot), 0) + 1
        for slot, mine in self.sums.items():
            # Pairs are halves of integers, so they add up exactly.
            assert sums[slot] == mine, (sums[slot], mine)
            assert min(mine.booked, mine.queued, mine.awaiting, mine.decoding) >= 0
            queue = [
                a
                for a in self.by_slot[slot]
                if not self.requests[a].decoding
                and not self.requests[a].awaits
                and self.requests[a].booked_until is None
            ]
            assert set(queue) == self.clocks[slot].queue.keys()
            kv = sum(
                self.requests[a].prompt_tokens
                for a in self.by_slot[slot]
                if self.requests[a].decodes
            )
            assert kv == self.clocks[slot].kv_tokens
        assert prefixes == self.inflight.counts()
        self.inflight.check_invariants()
        assert sum(map(len, self.by_slot.values())) == len(self.requests)

    def _share(self, request: Request) -> None:
        """What it brings will be there for those behind it."""
        if not request.shared:
            request.shared = True
            self.inflight.add(request.slot, request.keys)

    @staticmethod
    def _count(sums: Sums, request: Request, sign: int) -> None:
        sums.active_tokens += sign * request.prompt_tokens
        sums.active_blocks += sign * max(1, len(request.keys))
        if not request.decoding:
            sums.pairs += sign * request.pairs
        if request.transfer and request.awaits:
            sums.awaiting += sign * (1 if request.booked_until is None else request.sequences)
        if request.booked_until is not None:
            sums.booked += sign * request.sequences
            sums.booked_tokens += sign * request.uncached
        elif request.decoding:
            sums.decoding += sign * (not request.prefill_only)
        else:
            sums.queued += sign
            sums.queued_tokens += sign * request.uncached
            if request.after_report:
                sums.fresh_tokens += sign * request.uncached
