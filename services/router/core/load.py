"""Load book: what each worker has to do, from its events and from this router's own decisions.

A decision counts at once as a booking. The worker's admission, seen under the booking's attempt id,
confirms it; a booking that nothing confirms expires. Requests that other routers placed appear with
their admissions. A request that is prefilled apart is two here: one leg that never decodes, and one
whose prompt is neither queued nor computed as long as its KV is to come. Nothing here knows of
blocks stored, models or liveness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from services.common.events.model import LoadReport, RequestAdmitted, RunningRequest
from services.common.ids import AttemptId
from services.router.core.cost import Candidate
from services.router.core.inflight import InflightPrefixes, Mates, anchored
from services.router.core.requests import (
    Admitted,
    Clock,
    Decoded,
    Estimate,
    Finished,
    Incoming,
    LoadView,
    PrefillDone,
    Request,
    Sums,
    pairs_of,
)


class LoadBook:
    """Requests by attempt id, sums by slot; all figures are kept up to date as events come."""

    def __init__(self, booking_ttl_s: float = 10.0) -> None:
        self._ttl = booking_ttl_s
        self._requests: dict[AttemptId, Request] = {}
        # In order of expiry, since all live equally long.
        self._bookings: dict[AttemptId, None] = {}
        self._sums: dict[int, Sums] = {}
        self._reports: dict[int, LoadReport] = {}
        self._clocks: dict[int, Clock] = {}
        self._by_slot: dict[int, set[AttemptId]] = {}
        self._inflight = InflightPrefixes()
        self.expired = 0
        """Bookings that nothing confirmed in time."""
        self.changed: set[int] = set()
        """Slots whose load has changed since the caller last emptied this."""

    def add_slot(self, slot: int) -> None:
        """Opens a page for a worker."""
        self._sums[slot] = Sums()
        self._clocks[slot] = Clock()
        self._by_slot[slot] = set()
        self.changed.add(slot)

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker and all its requests."""
        for attempt_id in list(self._by_slot.get(slot, ())):
            self._drop(attempt_id)
        self._sums.pop(slot, None)
        self._clocks.pop(slot, None)
        self._by_slot.pop(slot, None)
        self._reports.pop(slot, None)
        self.changed.discard(slot)

    # Own decisions.

    def book(
        self,
        slot: int,
        attempt_id: AttemptId,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        keys: Sequence[int],
        now: float,
        sequences: int = 1,
        onboards: bool = False,
        then: AttemptId | None = None,
        incoming: Incoming | None = None,
    ) -> None:
        """A placement of this router counts from now on.

        `then` names the leg that decodes when this one has prefilled; `incoming` tells that leg
        what will be handed to it. Book the prefill first: the other lasts as long as that runs.
        """
        transfer = incoming.tokens if incoming else 0
        request = Request(
            slot,
            prompt_tokens,
            max(0, prompt_tokens - cached_tokens - transfer),
            keys,
            sequences=sequences,
            booked_until=now + self._ttl,
            predicted=cached_tokens,
            onboards=onboards,
            prefill_only=then is not None,
            transfer=transfer,
            incoming=incoming,
            then=then,
            shared=not transfer,
        )
        self._add(attempt_id, request)

    def release(self, attempt_id: AttemptId) -> int | None:
        """Takes an unconfirmed booking back; returns its slot, None if there is none (any more)."""
        request = self._requests.get(attempt_id)
        if request is None or request.booked_until is None:
            return None
        self._drop(attempt_id)
        return request.slot

    def expire(self, now: float) -> int:
        """Drops bookings whose time is over; returns how many."""
        count = 0
        while self._bookings:
            attempt_id = next(iter(self._bookings))
            request = self._requests[attempt_id]
            until = request.booked_until
            if until is not None and until > now:
                break
            if request.incoming is not None and self._is_running(request.incoming.first):
                self._renew(attempt_id, now)
                continue
            self._drop(attempt_id)
            count += 1
        self.expired += count
        return count

    def is_booked(self, slot: int, attempt_id: AttemptId) -> bool:
        """Whether this router booked the request there and no event has confirmed it yet."""
        return attempt_id in self._bookings and self._requests[attempt_id].slot == slot

    # What workers tell.

    def admitted(
        self, slot: int, event: RequestAdmitted, estimate: Estimate, now: float
    ) -> Admitted:
        """An engine took a request; the estimate is for one that is booked nowhere here."""
        booked = self._requests.get(event.attempt_id)
        mine = None
        cached, onboards = estimate.cached_tokens, estimate.onboards
        if booked is not None:
            self._drop(event.attempt_id)
            if booked.slot == slot and booked.booked_until is not None:
                mine = booked
                cached, onboards = booked.predicted or 0, booked.onboards
        filled = max(1, event.prompt_tokens - cached)
        # Nothing more can come than what isn't there.
        transfer = min(event.transfer_tokens, max(0, event.prompt_tokens - cached))
        request = Request(
            slot,
            event.prompt_tokens,
            max(0, filled - transfer),
            event.keys,
            predicted=mine.predicted if mine else None,
            admitted_at=now,
            onboards=onboards,
            prefill_only=event.prefill_only,
            transfer=transfer,
            incoming=mine.incoming if mine else None,
            then=mine.then if mine else None,
            shared=not transfer,
        )
        self._add(event.attempt_id, request)
        if not transfer:
            self._queue(event.attempt_id, request, now)
        missed = None
        if mine and mine.incoming and not event.transfer_tokens:
            missed = mine.incoming.source
        return Admitted(filled, missed)

    def first_token(
        self,
        slot: int,
        attempt_id: AttemptId,
        cached_tokens: int,
        now: float,
        transferred_tokens: int = 0,
    ) -> PrefillDone | None:
        """A request's prefill is over. None if the request is not known, or had none: its KV came.

        `transferred_tokens` are those of the cached ones whose KV came from another worker.
        """
        request = self._requests.get(attempt_id)
        if (
            request is None
            or request.slot != slot
            or request.decoding
            or request.booked_until is not None
        ):
            return None
        computed = max(0, request.prompt_tokens - cached_tokens)
        came = request.awaits and (
            transferred_tokens >= request.transfer or computed <= max(1, request.uncached)
        )
        self._begin_decode(slot, attempt_id, request, now)
        self.changed.add(slot)
        clock = self._clocks[slot]
        request.began = (now, clock.decoding_s, clock.kv_s)
        if request.transfer:
            request.transfer = min(transferred_tokens, cached_tokens, request.prompt_tokens)
            request.failed = False
            if came:
                return None
            request.admitted_at = None
        # Time spent on loading tells nothing of how fast the engine computes.
        since = None if request.onboards else request.admitted_at
        return PrefillDone(slot, computed, pairs_of(request.prompt_tokens, computed), since)

    def transfer_ended(
        self, slot: int, attempt_id: AttemptId, tokens: int, now: float
    ) -> Incoming | None:
        """KV has come for a request that waits, or (0 tokens) it computes its prompt after all.

        Returns what this router had thought of it, if it decided it.
        """
        request = self._requests.get(attempt_id)
        if request is None or request.slot != slot or request.booked_until is not None:
            return None
        if not tokens and request.awaits:
            self._fail(attempt_id, request, now)
        return request.incoming

    def finished(
        self,
        slot: int,
        attempt_id: AttemptId,
        cached_tokens: int,
        aborted: bool,
        output_tokens: int,
        now: float,
    ) -> Finished | None:
        """A request left the engine. None if the request is not known."""
        request = self._requests.get(attempt_id)
        if request is None or request.slot != slot:
            return None
        clock = self._clocks[slot]
        self._sum_decodes(slot, now)
        decoded = None
        if request.began is not None and output_tokens > 1 and now > request.began[0]:
            began, decoding_s, kv_s = request.began
            seconds = now - began
            decoded = Decoded(
                output_tokens - 1,
                seconds,
                (clock.decoding_s - decoding_s) / seconds,
                (clock.kv_s - kv_s) / seconds,
            )
        if next(iter(clock.queue), None) == attempt_id:
            clock.head_since = now
        self._drop(attempt_id)
        if request.then is not None and request.then in self._bookings:
            # From now on it has to hurry.
            self._renew(request.then, now)
        handed = 0 if request.failed else min(request.transfer, cached_tokens)
        return Finished(
            slot,
            attempt_id,
            request.prompt_tokens - handed,
            cached_tokens - handed,
            request.predicted,
            aborted,
            decoded,
        )

    def report(self, slot: int, report: LoadReport, now: float) -> None:
        """How busy an engine says it is, all its earlier events included."""
        self._reports[slot] = report
        self._clocks[slot].told_at = now
        self.changed.add(slot)
        sums = self._sums[slot]
        if sums.fresh_tokens:
            for attempt_id in self._by_slot[slot]:
                request = self._requests[attempt_id]
                if request.booked_until is None:
                    request.after_report = False
            sums.fresh_tokens = 0

    def reset(
        self,
        slot: int,
        requests: Iterable[RunningRequest],
        estimate: Callable[[RequestAdmitted], Estimate],
        report: LoadReport | None,
        now: float,
    ) -> None:
        """An engine has exactly these requests, in order. Bookings that it doesn't know stay.

        `estimate` is asked about those not known yet, when those ahead of them are booked and
        they themselves aren't: else each would find its own blocks on their way.
        """
        old = {a: self._requests[a] for a in self._by_slot[slot]}
        for attempt_id, request in old.items():
            if request.booked_until is None:
                self._drop(attempt_id)
        for running in requests:
            event = running.admitted
            before = old.get(event.attempt_id)
            if before is None:
                expected = estimate(event)
            else:
                had = before.prompt_tokens - before.uncached
                had -= 0 if before.failed else before.transfer
                expected = Estimate(max(0, had), before.onboards)
            self.admitted(slot, event, expected, now)
            request = self._requests[event.attempt_id]
            # When it came nobody says: its first token then tells nothing of the engine's rate.
            request.admitted_at = None
            if before is not None:
                request.predicted = before.predicted
                request.began = before.began
                request.incoming, request.then = before.incoming, before.then
                if before.booked_until is None:
                    request.admitted_at = before.admitted_at
                    if before.failed and request.awaits:
                        self._fail(event.attempt_id, request, now)
            if running.decoding:
                self._begin_decode(slot, event.attempt_id, request, now)
                if before is not None and before.decoding:
                    request.transfer, request.failed = before.transfer, before.failed
        if report is not None:
            self.report(slot, report, now)
        else:
            self._reports.pop(slot, None)
            self.changed.add(slot)

    # Questions.

    def fill(self, candidate: Candidate) -> None:
        """Writes a worker's load into what policies see of it."""
        slot = candidate.slot
        sums, clock = self._sums[slot], self._clocks[slot]
        queued = sums.queued_tokens + sums.booked_tokens
        candidate.active_requests = sums.booked + sums.queued + sums.decoding
        candidate.decoding = sums.decoding
        candidate.active_tokens = sums.active_tokens
        candidate.active_blocks = sums.active_blocks
        candidate.queued_requests = sums.booked + sums.queued - sums.awaiting
        candidate.queued_tokens = queued
        candidate.queued_pairs = sums.pairs
        head = next(iter(clock.queue), None)
        request = None if head is None else self._requests[head]
        candidate.head_tokens = 0 if request is None else request.uncached
        candidate.head_pairs = 0.0 if request is None else request.pairs
        candidate.head_since = clock.head_since
        report = self._reports.get(slot)
        candidate.told_share = candidate.fresh_share = 0.0
        candidate.told_at = inf
        if report is not None:
            candidate.told_at = clock.told_at
            if queued:
                fresh = sums.fresh_tokens
                told = min(sums.queued_tokens - fresh, report.pending_prefill_tokens)
                candidate.told_share = told / queued
                candidate.fresh_share = (fresh + sums.booked_tokens) / queued
        candidate.settle()

    def view(self, slot: int) -> LoadView:
        """A worker's load now."""
        sums = self._sums[slot]
        report = self._reports.get(slot)
        queued = sums.queued_tokens
        if report is not None:
            # Both are upper bounds: ours ignores progress inside a prompt, the engine's its cache.
            queued = min(queued, report.pending_prefill_tokens + sums.fresh_tokens)
        return LoadView(
            booked=sums.booked,
            queued=sums.queued,
            decoding=sums.decoding,
            queued_tokens=queued + sums.booked_tokens,
            active_tokens=sums.active_tokens,
            report=report,
        )

    def mates(
        self, keys: Sequence[int], limit: int, known: Mapping[int, int] | None = None
    ) -> Mates:
        """Requests in flight that share a prefix with `keys`, by slot; depth is at most `limit`.

        `known`: blocks that slots have anyhow.
        """
        return self._inflight.mates(keys, limit, known or {})

    @property
    def bookings(self) -> int:
        """Placements of this router that no event has confirmed yet."""
        return len(self._bookings)

    def check_invariants(self) -> None:
        """Raises AssertionError when a sum differs from what it sums up."""
        prefixes: dict[tuple[int, int], int] = {}
        sums: dict[int, Sums] = {slot: Sums() for slot in self._sums}
        for attempt_id, request in self._requests.items():
            assert attempt_id in self._by_slot[request.slot]
            assert (request.booked_until is not None) == (attempt_id in self._bookings)
            assert not (request.decoding and request.booked_until is not None)
            assert 0 <= request.uncached <= max(1, request.prompt_tokens)
            assert 0 <= request.transfer <= request.prompt_tokens
            assert request.shared != request.awaits
            self._count(sums[request.slot], request, 1)
            for key in anchored(request.keys) if request.shared else ():
                prefixes[key, request.slot] = prefixes.get((key, request.slot), 0) + 1
        for slot, mine in self._sums.items():
            # Pairs are halves of integers, so they add up exactly.
            assert sums[slot] == mine, (sums[slot], mine)
            assert min(mine.booked, mine.queued, mine.awaiting, mine.decoding) >= 0
            queue = [
                a
                for a in self._by_slot[slot]
                if not self._requests[a].decoding
                and not self._requests[a].awaits
                and self._requests[a].booked_until is None
            ]
            assert set(queue) == self._clocks[slot].queue.keys()
            kv = sum(
                self._requests[a].prompt_tokens
                for a in self._by_slot[slot]
                if self._requests[a].decodes
            )
            assert kv == self._clocks[slot].kv_tokens
        assert prefixes == self._inflight.counts()
        self._inflight.check_invariants()
        assert sum(map(len, self._by_slot.values())) == len(self._requests)

    def _add(self, attempt_id: AttemptId, request: Request) -> None:
        if attempt_id in self._requests:
            self._drop(attempt_id)
        self._requests[attempt_id] = request
        self._by_slot[request.slot].add(attempt_id)
        if request.booked_until is not None:
            self._bookings[attempt_id] = None
        self._count(self._sums[request.slot], request, 1)
        if request.shared:
            self._inflight.add(request.slot, request.keys)
        self.changed.add(request.slot)

    def _drop(self, attempt_id: AttemptId) -> None:
        request = self._requests.pop(attempt_id)
        self._by_slot[request.slot].discard(attempt_id)
        clock = self._clocks[request.slot]
        clock.queue.pop(attempt_id, None)
        if request.decoding and not request.prefill_only:
            clock.kv_tokens -= request.prompt_tokens
        self._bookings.pop(attempt_id, None)
        self._count(self._sums[request.slot], request, -1)
        if request.shared:
            self._inflight.remove(request.slot, request.keys)
        self.changed.add(request.slot)

    def _queue(self, attempt_id: AttemptId, request: Request, now: float) -> None:
        """An admitted request waits for its engine's turn from now on."""
        clock = self._clocks[request.slot]
        if not clock.queue:
            clock.head_since = now
        clock.queue[attempt_id] = None

    def _fail(self, attempt_id: AttemptId, request: Request, now: float) -> None:
        """Its KV does not come: it has to be computed, behind those that are there by now."""
        sums = self._sums[request.slot]
        self._count(sums, request, -1)
        request.failed = True
        request.uncached = min(max(1, request.prompt_tokens), request.uncached + request.transfer)
        request.admitted_at = None
        self._count(sums, request, 1)
        self._share(request)
        self._queue(attempt_id, request, now)
        self.changed.add(request.slot)

    def _share(self, request: Request) -> None:
        """What it brings will be there for those behind it."""
        if not request.shared:
            request.shared = True
            self._inflight.add(request.slot, request.keys)

    def _is_running(self, attempt_id: AttemptId) -> bool:
        """Whether an engine has it."""
        request = self._requests.get(attempt_id)
        return request is not None and request.booked_until is None

    def _renew(self, attempt_id: AttemptId, now: float) -> None:
        """A booking lives as long again as a new one."""
        self._requests[attempt_id].booked_until = now + self._ttl
        # The last one to expire.
        del self._bookings[attempt_id]
        self._bookings[attempt_id] = None

    def _begin_decode(self, slot: int, attempt_id: AttemptId, request: Request, now: float) -> None:
        self._sum_decodes(slot, now)
        sums, clock = self._sums[slot], self._clocks[slot]
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

    def _sum_decodes(self, slot: int, now: float) -> None:
        """Carries the sums over time on to `now`; called before the decodes change."""
        clock = self._clocks[slot]
        passed = max(0.0, now - clock.summed_at)
        clock.decoding_s += passed * self._sums[slot].decoding
        clock.kv_s += passed * clock.kv_tokens
        clock.summed_at = max(clock.summed_at, now)

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
