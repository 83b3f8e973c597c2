"""Load book: what each worker has to do, from its events and from this router's own decisions.

A decision counts at once as a booking. The worker's admission, seen under the booking's attempt id,
confirms it; a booking that nothing confirms expires. Requests that other routers placed appear with
their admissions. Nothing here knows of blocks stored, models or liveness.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.events.model import LoadReport, RequestAdmitted, RunningRequest
from services.common.ids import AttemptId
from services.router.core.inflight import InflightPrefixes, Mates


@dataclass(frozen=True, slots=True)
class LoadView:
    """A worker's load at one moment."""

    booked: int = 0
    """Sequences of placements that no event has confirmed."""
    queued: int = 0
    """Admitted requests without a first token."""
    decoding: int = 0
    """Requests that produce tokens."""
    queued_tokens: int = 0
    """Prompt tokens ahead of a new request, still to be computed; bookings included."""
    active_tokens: int = 0
    """Prompt tokens of all requests booked or in the engine: what they keep of its space."""
    report: LoadReport | None = None
    """Last report of the engine itself."""

    @property
    def active(self) -> int:
        """Requests booked or in the engine."""
        return self.booked + self.queued + self.decoding


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that left an engine; `predicted` is None unless this router placed it."""

    slot: int
    attempt_id: AttemptId
    prompt_tokens: int
    cached_tokens: int
    predicted: int | None
    aborted: bool


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """A request whose first token is out."""

    slot: int
    computed_tokens: int
    admitted_at: float | None
    """None when that is not known, or says nothing of the engine's rate."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an engine is thought not to compute of a request."""

    cached_tokens: int = 0
    onboards: bool = False
    """Whether some of that comes from tiers below G1."""


@dataclass(slots=True)
class _Request:
    slot: int
    prompt_tokens: int
    uncached: int
    keys: Sequence[int]
    sequences: int = 1
    booked_until: float | None = None
    decoding: bool = False
    predicted: int | None = None
    admitted_at: float | None = None
    after_report: bool = True
    onboards: bool = False


@dataclass(slots=True)
class _Sums:
    booked: int = 0
    queued: int = 0
    decoding: int = 0
    booked_tokens: int = 0
    queued_tokens: int = 0
    fresh_tokens: int = 0
    active_tokens: int = 0


class LoadBook:
    """Requests by attempt id, sums by slot; all figures are kept up to date as events come."""

    def __init__(self, booking_ttl_s: float = 10.0) -> None:
        self._ttl = booking_ttl_s
        self._requests: dict[AttemptId, _Request] = {}
        # In order of expiry, since all live equally long.
        self._bookings: dict[AttemptId, None] = {}
        self._sums: dict[int, _Sums] = {}
        self._reports: dict[int, LoadReport] = {}
        self._by_slot: dict[int, set[AttemptId]] = {}
        self._inflight = InflightPrefixes()
        self.expired = 0
        """Bookings that nothing confirmed in time."""

    def add_slot(self, slot: int) -> None:
        """Opens a page for a worker."""
        self._sums[slot] = _Sums()
        self._by_slot[slot] = set()

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker and all its requests."""
        for attempt_id in list(self._by_slot.get(slot, ())):
            self._drop(attempt_id)
        self._sums.pop(slot, None)
        self._by_slot.pop(slot, None)
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
    ) -> None:
        """A placement of this router counts from now on."""
        request = _Request(
            slot,
            prompt_tokens,
            prompt_tokens - cached_tokens,
            keys,
            sequences=sequences,
            booked_until=now + self._ttl,
            predicted=cached_tokens,
            onboards=onboards,
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
            until = self._requests[attempt_id].booked_until
            if until is not None and until > now:
                break
            self._drop(attempt_id)
            count += 1
        self.expired += count
        return count

    def is_booked(self, slot: int, attempt_id: AttemptId) -> bool:
        """Whether this router booked the request there and no event has confirmed it yet."""
        request = self._requests.get(attempt_id)
        return request is not None and request.slot == slot and request.booked_until is not None

    # What workers tell.

    def admitted(self, slot: int, event: RequestAdmitted, estimate: Estimate, now: float) -> None:
        """An engine took a request; the estimate is for one that is booked nowhere here."""
        booked = self._requests.get(event.attempt_id)
        predicted = None
        uncached = max(1, event.prompt_tokens - estimate.cached_tokens)
        onboards = estimate.onboards
        if booked is not None:
            self._drop(event.attempt_id)
            if booked.slot == slot and booked.booked_until is not None:
                predicted = booked.predicted
                uncached = max(1, event.prompt_tokens - (predicted or 0))
                onboards = booked.onboards
        request = _Request(
            slot,
            event.prompt_tokens,
            uncached,
            event.keys,
            predicted=predicted,
            admitted_at=now,
            onboards=onboards,
        )
        self._add(event.attempt_id, request)

    def first_token(
        self, slot: int, attempt_id: AttemptId, cached_tokens: int
    ) -> PrefillDone | None:
        """A request's prefill is over. None if the request is not known."""
        request = self._requests.get(attempt_id)
        if (
            request is None
            or request.slot != slot
            or request.decoding
            or request.booked_until is not None
        ):
            return None
        sums = self._sums[slot]
        self._count(sums, request, -1)
        request.decoding = True
        self._count(sums, request, 1)
        # Time spent on loading tells nothing of how fast the engine computes.
        since = None if request.onboards else request.admitted_at
        return PrefillDone(slot, max(0, request.prompt_tokens - cached_tokens), since)

    def finished(
        self, slot: int, attempt_id: AttemptId, cached_tokens: int, aborted: bool
    ) -> Finished | None:
        """A request left the engine. None if the request is not known."""
        request = self._requests.get(attempt_id)
        if request is None or request.slot != slot:
            return None
        self._drop(attempt_id)
        return Finished(
            slot, attempt_id, request.prompt_tokens, cached_tokens, request.predicted, aborted
        )

    def report(self, slot: int, report: LoadReport) -> None:
        """How busy an engine says it is, all its earlier events included."""
        self._reports[slot] = report
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
        requests: Iterable[tuple[RunningRequest, Estimate]],
        report: LoadReport | None,
        now: float,
    ) -> None:
        """An engine has exactly these requests (each with an estimate).

        Bookings that it doesn't know stay.
        """
        old = {a: self._requests[a] for a in self._by_slot[slot]}
        for attempt_id, request in old.items():
            if request.booked_until is None:
                self._drop(attempt_id)
        for running, estimate in requests:
            event = running.admitted
            before = old.get(event.attempt_id)
            self.admitted(slot, event, estimate, now)
            request = self._requests[event.attempt_id]
            # When it came nobody says: its first token then tells nothing of the engine's rate.
            request.admitted_at = None
            if before is not None:
                request.predicted = before.predicted
                if before.booked_until is None:
                    request.admitted_at = before.admitted_at
            if running.decoding:
                sums = self._sums[slot]
                self._count(sums, request, -1)
                request.decoding = True
                self._count(sums, request, 1)
        if report is not None:
            self.report(slot, report)
        else:
            self._reports.pop(slot, None)

    # Questions.

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

    def mates(self, keys: Sequence[int], limit: int) -> dict[int, Mates]:
        """Requests in flight that share a prefix with `keys`, by slot; depth is at most `limit`."""
        return self._inflight.mates(keys, limit)

    @property
    def bookings(self) -> int:
        """Placements of this router that no event has confirmed yet."""
        return len(self._bookings)

    def check_invariants(self) -> None:
        """Raises AssertionError when a sum differs from what it sums up."""
        prefixes: dict[tuple[int, int], int] = {}
        sums: dict[int, _Sums] = {slot: _Sums() for slot in self._sums}
        for attempt_id, request in self._requests.items():
            assert attempt_id in self._by_slot[request.slot]
            assert (request.booked_until is not None) == (attempt_id in self._bookings)
            assert not (request.decoding and request.booked_until is not None)
            self._count(sums[request.slot], request, 1)
            for key in request.keys:
                prefixes[key, request.slot] = prefixes.get((key, request.slot), 0) + 1
        assert sums == self._sums, (sums, self._sums)
        assert prefixes == self._inflight.counts()
        assert sum(map(len, self._by_slot.values())) == len(self._requests)

    def _add(self, attempt_id: AttemptId, request: _Request) -> None:
        if attempt_id in self._requests:
            self._drop(attempt_id)
        self._requests[attempt_id] = request
        self._by_slot[request.slot].add(attempt_id)
        if request.booked_until is not None:
            self._bookings[attempt_id] = None
        self._count(self._sums[request.slot], request, 1)
        self._inflight.add(request.slot, request.keys)

    def _drop(self, attempt_id: AttemptId) -> None:
        request = self._requests.pop(attempt_id)
        self._by_slot[request.slot].discard(attempt_id)
        self._bookings.pop(attempt_id, None)
        self._count(self._sums[request.slot], request, -1)
        self._inflight.remove(request.slot, request.keys)

    @staticmethod
    def _count(sums: _Sums, request: _Request, sign: int) -> None:
        sums.active_tokens += sign * request.prompt_tokens
        if request.booked_until is not None:
            sums.booked += sign * request.sequences
            sums.booked_tokens += sign * request.uncached
        elif request.decoding:
            sums.decoding += sign
        else:
            sums.queued += sign
            sums.queued_tokens += sign * request.uncached
            if request.after_report:
                sums.fresh_tokens += sign * request.uncached
