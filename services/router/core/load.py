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
from services.router.core.inflight import Mates
from services.router.core.ledger import Ledger
from services.router.core.requests import (
    Admitted,
    Decoded,
    Estimate,
    Finished,
    Incoming,
    LoadView,
    PrefillDone,
    Request,
    pairs_of,
)


class LoadBook:
    """Requests by attempt id, sums by slot; all figures are kept up to date as events come."""

    def __init__(self, booking_ttl_s: float = 10.0) -> None:
        self._ttl = booking_ttl_s
        self._ledger = Ledger()
        self._reports: dict[int, LoadReport] = {}
        self.expired = 0
        """Bookings that nothing confirmed in time."""
        self.changed = self._ledger.changed
        """Slots whose load has changed since the caller last emptied this."""

    def add_slot(self, slot: int) -> None:
        """Opens a page for a worker."""
        self._ledger.add_slot(slot)

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker and all its requests."""
        self._ledger.remove_slot(slot)
        self._reports.pop(slot, None)

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
        self._ledger.add(attempt_id, request)

    def release(self, attempt_id: AttemptId) -> int | None:
        """Takes an unconfirmed booking back; returns its slot, None if there is none (any more)."""
        request = self._ledger.requests.get(attempt_id)
        if request is None or request.booked_until is None:
            return None
        self._ledger.drop(attempt_id)
        return request.slot

    def expire(self, now: float) -> int:
        """Drops bookings whose time is over; returns how many."""
        count = 0
        while self._ledger.bookings:
            attempt_id = next(iter(self._ledger.bookings))
            request = self._ledger.requests[attempt_id]
            until = request.booked_until
            if until is not None and until > now:
                break
            if request.incoming is not None and self._is_running(request.incoming.first):
                self._ledger.renew(attempt_id, now + self._ttl)
                continue
            self._ledger.drop(attempt_id)
            count += 1
        self.expired += count
        return count

    def is_booked(self, slot: int, attempt_id: AttemptId) -> bool:
        """Whether this router booked the request there and no event has confirmed it yet."""
        return (
            attempt_id in self._ledger.bookings and self._ledger.requests[attempt_id].slot == slot
        )

    # What workers tell.

    def admitted(
        self, slot: int, event: RequestAdmitted, estimate: Estimate, now: float
    ) -> Admitted:
        """An engine took a request; the estimate is for one that is booked nowhere here."""
        booked = self._ledger.requests.get(event.attempt_id)
        mine = None
        cached, onboards = estimate.cached_tokens, estimate.onboards
        if booked is not None:
            self._ledger.drop(event.attempt_id)
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
        self._ledger.add(event.attempt_id, request)
        if not transfer:
            self._ledger.queue(event.attempt_id, request, now)
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
        request = self._ledger.requests.get(attempt_id)
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
        self._ledger.begin_decode(attempt_id, request, now)
        self.changed.add(slot)
        clock = self._ledger.clocks[slot]
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
        request = self._ledger.requests.get(attempt_id)
        if request is None or request.slot != slot or request.booked_until is not None:
            return None
        if not tokens and request.awaits:
            self._ledger.fail(attempt_id, request, now)
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
        request = self._ledger.requests.get(attempt_id)
        if request is None or request.slot != slot:
            return None
        clock = self._ledger.clocks[slot]
        self._ledger.sum_decodes(slot, now)
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
        self._ledger.drop(attempt_id)
        if request.then is not None and request.then in self._ledger.bookings:
            # From now on it has to hurry.
            self._ledger.renew(request.then, now + self._ttl)
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
        self._ledger.clocks[slot].told_at = now
        self.changed.add(slot)
        sums = self._ledger.sums[slot]
        if sums.fresh_tokens:
            for attempt_id in self._ledger.by_slot[slot]:
                request = self._ledger.requests[attempt_id]
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
        old = {a: self._ledger.requests[a] for a in self._ledger.by_slot[slot]}
        for attempt_id, request in old.items():
            if request.booked_until is None:
                self._ledger.drop(attempt_id)
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
            request = self._ledger.requests[event.attempt_id]
            # When it came nobody says: its first token then tells nothing of the engine's rate.
            request.admitted_at = None
            if before is not None:
                request.predicted = before.predicted
                request.began = before.began
                request.incoming, request.then = before.incoming, before.then
                if before.booked_until is None:
                    request.admitted_at = before.admitted_at
                    if before.failed and request.awaits:
                        self._ledger.fail(event.attempt_id, request, now)
            if running.decoding:
                self._ledger.begin_decode(event.attempt_id, request, now)
                if before is not None and before.decoding:
                    request.transfer = min(before.transfer, request.prompt_tokens)
                    request.failed = before.failed
        if report is not None:
            self.report(slot, report, now)
        else:
            self._reports.pop(slot, None)
            self.changed.add(slot)

    # Questions.

    def fill(self, candidate: Candidate) -> None:
        """Writes a worker's load into what policies see of it."""
        slot = candidate.slot
        sums, clock = self._ledger.sums[slot], self._ledger.clocks[slot]
        queued = sums.queued_tokens + sums.booked_tokens
        candidate.active_requests = sums.booked + sums.queued + sums.decoding
        candidate.decoding = sums.decoding
        candidate.active_tokens = sums.active_tokens
        candidate.active_blocks = sums.active_blocks
        candidate.queued_requests = sums.booked + sums.queued - sums.awaiting
        candidate.queued_tokens = queued
        candidate.queued_pairs = sums.pairs
        head = next(iter(clock.queue), None)
        request = None if head is None else self._ledger.requests[head]
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
        sums = self._ledger.sums[slot]
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
        return self._ledger.inflight.mates(keys, limit, known or {})

    @property
    def bookings(self) -> int:
        """Placements of this router that no event has confirmed yet."""
        return len(self._ledger.bookings)

    def check_invariants(self) -> None:
        """Raises AssertionError when a sum differs from what it sums up."""
        self._ledger.check_invariants()
        assert self._reports.keys() <= self._ledger.sums.keys()

    def _is_running(self, attempt_id: AttemptId) -> bool:
        """Whether an engine has it."""
        request = self._ledger.requests.get(attempt_id)
        return request is not None and request.booked_until is None
