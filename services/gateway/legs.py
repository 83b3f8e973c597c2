"""A job's sequences on their way to workers: placed, prefilled elsewhere if so decided, started.

A placement that names a prefill worker makes two legs. The first computes the prompt there and ends
with its first token, which nobody sees; with the KV that it leaves, the sequence starts on the
worker that decodes. Nothing that goes wrong with the first leg is the client's, unless its request
is at fault: the second one starts without and computes. A leg has no limit of time of its own: one
that waits in a living worker's queue waits where the router knew it would, and the client's
deadline and the session's stall watch end it.

One worker does all for several choices of one prompt, which share its KV there; for a request whose
client names a worker; and for a sequence that has had two prefill legs. (So it would have to be for
log probabilities of the prompt, for which all of it is computed; clients can't ask for these yet.)
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from services.common.errors import DeadlineExceeded, FailedPrecondition, ForebayError
from services.common.ids import BlockKey
from services.common.telemetry.logging import get_logger
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import (
    Ask,
    Inbox,
    News,
    Placement,
    Placer,
    Transfer,
    Work,
    WorkerLost,
    WorkerPool,
)
from services.gateway.prepare import Job, hash_blocks
from services.gateway.sequence import Answered, LegEnd, PrefillLeg, SequenceState
from services.gateway.upstream import is_clients_mistake, is_retryable, not_begun, to_api_error

log = get_logger(__name__)

_MAX_REFUSALS = 8
"""Workers that may turn out to be unreachable before one placement is given up."""
_MAX_PREFILLS = 2
"""Prefill legs that one sequence may have."""


class Legs:
    """What runs of one job, and where. News of it arrive in `inbox`."""

    def __init__(
        self,
        job: Job,
        inbox: Inbox,
        placer: Placer,
        pool: WorkerPool,
        metrics: GatewayMetrics,
        new_request_id: Callable[[], str],
    ) -> None:
        self._job = job
        self._inbox = inbox
        self._placer = placer
        self._pool = pool
        self._metrics = metrics
        self._new_request_id = new_request_id
        self._by_id: dict[str, SequenceState] = {}
        self._now = asyncio.get_running_loop().time

    def of(self, request_id: str) -> SequenceState | None:
        """The sequence whose present leg has that id; None: that leg is over."""
        return self._by_id.get(request_id)

    async def launch(self, group: Sequence[SequenceState]) -> None:
        """Places sequences of one prompt together and sends them off. Raises ApiError."""
        job, first = self._job, group[0]
        keys = first.prompt.keys
        if prior := first.choice.output_ids:
            keys = await hash_blocks(job.served, [*first.prompt.ids, *prior], job.salt)
        for attempt in itertools.count(1):
            ask = self._ask(group, keys)
            try:
                placement = await self._placer.place(ask)
            except ForebayError as exc:
                raise to_api_error(exc) from exc
            for sequence in group:
                sequence.placement = placement
            first.booked = True
            try:
                if not await self._prefill(first, placement, ask):
                    await self._send(group, placement)
                return
            except WorkerLost as exc:
                if attempt >= _MAX_REFUSALS:
                    raise to_api_error(exc) from exc

    async def prefill_news(self, sequence: SequenceState, news: News) -> None:
        """Takes news of a running prefill leg; starts the decode leg when it has ended. Raises
        ApiError.
        """
        leg = sequence.leg
        assert leg is not None, "news of no prefill leg"
        end = leg.take(news, self._now())
        if end is None:
            return
        self._count(leg, end)
        if end is LegEnd.INVALID:
            assert news.error is not None
            raise to_api_error(news.error)
        if end is LegEnd.DONE:
            seconds = self._now() - leg.began
            self._metrics.prefill_seconds.labels(self._job.served.name).observe(seconds)
            log.debug(
                "prefilled",
                request_id=self._job.caller.request_id,
                worker=leg.placement.worker.id,
                cached_tokens=leg.cached_tokens,
                seconds=seconds,
            )
            self._unlist(sequence)
        else:
            self._fail(sequence, leg, end, news)
        assert sequence.placement is not None, "a prefill leg without a placement"
        try:
            await self._send([sequence], sequence.placement)
        except WorkerLost:
            self.forget(sequence)
            await self.launch([sequence])

    def first_tokens(self, sequence: SequenceState, news: News) -> None:
        """Notes whose work the first tokens of an attempt are."""
        leg, placement = sequence.leg, sequence.placement
        assert placement is not None, "tokens of nowhere"
        used = news.transferred_tokens
        if leg is not None and not leg.answered and leg.ended is not None:
            leg.answered = True
            name = self._job.served.name
            self._metrics.transfers.labels("used" if used else "unused").inc()
            self._metrics.transferred_tokens.labels(name).inc(used)
            self._metrics.handover_seconds.labels(name).observe(self._now() - leg.ended)
            if not used and leg.transfer is not None:
                # Whoever was given it has computed: it takes nothing any more.
                leg.transfer.given = False
                self._pool.abort(leg.request_id)
        if sequence.answered is not None:
            return
        cached = news.cached_tokens or 0
        if leg is None or not used:
            sequence.answered = Answered(placement, cached, placement.predicted_cached_tokens)
            return
        first = leg.placement
        sequence.answered = Answered(
            placement,
            # Less than the prompt where a transfer failed in part.
            min(leg.cached_tokens, cached),
            first.predicted_cached_tokens,
            first.worker.id,
        )

    def failed_with_transfer(self, sequence: SequenceState, error: ForebayError) -> bool:
        """Whether a decode leg that failed before its first token is to be tried without the KV
        that it was to take. Ask before it is forgotten.
        """
        leg = sequence.leg
        if leg is None or leg.transfer is None or leg.answered:
            return False
        self._metrics.transfers.labels("failed").inc()
        if not_begun(error):
            leg.transfer.given = False  # it can be let go of
        if is_retryable(error) or isinstance(error, DeadlineExceeded):
            return False
        if isinstance(error, FailedPrecondition) and error.reason == "RESUME_UNSUPPORTED":
            return False
        if is_clients_mistake(error):
            return False
        sequence.prefills = _MAX_PREFILLS
        return True

    def forget(self, sequence: SequenceState) -> None:
        """Ends whatever runs of a sequence, is held or booked for it. Never blocks, idempotent."""
        if self._unlist(sequence):
            self._pool.abort(sequence.request_id)
        leg, sequence.leg = sequence.leg, None
        if leg is not None:
            if leg.ended is None:
                self._count(leg, LegEnd.LEFT)
            self._pool.abort(leg.request_id)
        if sequence.booked and sequence.placement is not None:
            sequence.booked = False
            self._placer.release(sequence.placement)

    async def _prefill(self, sequence: SequenceState, placement: Placement, ask: Ask) -> bool:
        """Sends the prefill leg, if there is to be one; False: the sequence can start at once."""
        prefill = placement.prefill
        if prefill is None:
            return False
        if ask.whole:  # a router that does not know this wish
            self._placer.release(prefill)
            return False
        sequence.prefills += 1
        work = self._work(sequence, prefill, prefill_only=True)
        leg = PrefillLeg(work.request_id, prefill, self._now())
        try:
            await self._pool.start(prefill, [work], self._inbox)
        except WorkerLost as exc:
            self._count(leg, LegEnd.UNREACHABLE)
            log.warning(
                "prefill worker can't be reached; the decode worker computes",
                request_id=self._job.caller.request_id,
                worker=prefill.worker.id,
                why=exc.message,
            )
            self._placer.release(prefill, unreachable=exc.refused)
            sequence.excluded.add(prefill.worker.id)
            return False
        except BaseException:
            self._placer.release(prefill)
            raise
        sequence.leg = leg
        self._list(sequence, work)
        return True

    def _fail(self, sequence: SequenceState, leg: PrefillLeg, end: LegEnd, news: News) -> None:
        """A prefill leg was for nothing."""
        log.warning(
            "prefill leg failed; the decode worker computes",
            request_id=self._job.caller.request_id,
            worker=leg.placement.worker.id,
            result=end.value,
            reason=news.error.reason if news.error is not None else "",
        )
        self._unlist(sequence)
        self._pool.abort(leg.request_id)
        sequence.leg = None
        sequence.excluded.add(leg.placement.worker.id)
        self._placer.release(leg.placement)  # if it never got there

    async def _send(self, group: Sequence[SequenceState], placement: Placement) -> None:
        """Starts sequences on the worker that decodes them. Raises WorkerLost: given back."""
        first = group[0]
        transfer = first.leg.transfer if first.leg is not None else None
        works = [self._work(s, placement, number=k, transfer=transfer) for k, s in enumerate(group)]
        try:
            await self._pool.start(placement, works, self._inbox)
        except WorkerLost as exc:
            first.booked = False
            self._placer.release(placement, unreachable=exc.refused)
            first.excluded.add(placement.worker.id)
            raise
        first.booked = False
        for sequence, work in zip(group, works, strict=True):
            self._list(sequence, work)

    def _list(self, sequence: SequenceState, work: Work) -> None:
        sequence.request_id = work.request_id
        self._by_id[work.request_id] = sequence
        self._metrics.sequences.inc()

    def _unlist(self, sequence: SequenceState) -> bool:
        if self._by_id.pop(sequence.request_id, None) is None:
            return False
        self._metrics.sequences.dec()
        return True

    def _count(self, leg: PrefillLeg, end: LegEnd) -> None:
        self._metrics.prefill_legs.labels(end.value).inc()

    def _left_ms(self) -> int:
        """How long the client waits on; at least 1 ms."""
        return max(1, round((self._job.caller.deadline - self._now()) * 1000))

    def _ask(self, group: Sequence[SequenceState], keys: Sequence[BlockKey]) -> Ask:
        job, first = self._job, group[0]
        prior = len(first.choice.output_ids)
        wishes = job.caller.wishes
        return Ask(
            model=job.served.name,
            block_size=job.served.card.block_size,
            keys=keys,
            tokens=len(first.prompt.ids) + prior,
            request_id=job.caller.request_id,
            expected_output=first.sampling.max_tokens - prior,
            tenant=job.caller.tenant,
            priority=-job.priority,  # for routers the higher goes first
            deadline_ms=self._left_ms(),
            admitted=bool(prior or first.excluded or first.prefills),
            sequences=len(group),
            whole=(
                job.n > 1
                or first.prefills >= _MAX_PREFILLS
                or bool(wishes.worker)
                or wishes.rank is not None
            ),
            excluded=frozenset(first.excluded) | job.served.refused,
            wishes=wishes,
            trace=job.caller.trace,
        )

    def _work(
        self,
        sequence: SequenceState,
        placement: Placement,
        *,
        number: int = 0,
        prefill_only: bool = False,
        transfer: Transfer | None = None,
    ) -> Work:
        """A leg of the `number`th sequence of a placement."""
        job = self._job
        prior = list(sequence.choice.output_ids)
        sampling = sequence.sampling
        if prefill_only:
            sampling = sampling.prefill()
        elif prior:
            sampling = sampling.resumed(len(prior))
        return Work(
            request_id=self._new_request_id(),
            attempt_id=f"{placement.attempt_id}#{number}" if number else placement.attempt_id,
            model=job.served.name,
            prompt=sequence.prompt.ids,
            prior=prior,
            sampling=sampling,
            tenant=job.caller.tenant,
            cache_salt=job.salt,
            adapter=job.served.adapter.name if job.served.adapter else "",
            priority=job.priority,
            deadline_ms=self._left_ms(),
            client_request_id=job.caller.request_id,
            trace=job.caller.trace,
            prefill_only=prefill_only,
            transfer=transfer,
        )
