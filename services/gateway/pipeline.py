"""A job's life: placement, session, news, text; and migration when a worker is lost on the way.

A sequence that lost its worker is placed again with its output so far as prior output. What the
engine can't restore (RESUME_UNSUPPORTED) ends a stream with an error; while nothing has been shown,
the choice starts anew instead. `cached_tokens` is told by the attempt that gave a choice its first
tokens: later attempts recompute what the client was already answered.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.common.errors import FailedPrecondition, ForebayError, Unavailable
from services.common.telemetry.logging import get_logger
from services.gateway.core.choice import Choice, ChoiceDelta, EndOfSequence
from services.gateway.core.sampling import Sampling
from services.gateway.core.usage import Usage
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import (
    Ask,
    Ended,
    Inbox,
    News,
    Placement,
    Placer,
    Work,
    WorkerLost,
    WorkerPool,
)
from services.gateway.prepare import Job, Prompt, hash_blocks
from services.gateway.upstream import is_retryable, to_api_error

log = get_logger(__name__)

_MAX_REFUSALS = 8
"""Workers that may turn out to be unreachable before one placement is given up."""
_FINISH: dict[Ended, EndOfSequence] = {Ended.STOP: "stop", Ended.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Update:
    """What choice `index` gained. `anew`: it began again, and all that it gave before is void."""

    index: int
    delta: ChoiceDelta
    anew: bool = False


@dataclass(slots=True)
class _Sequence:
    index: int
    prompt: Prompt
    sampling: Sampling
    choice: Choice
    request_id: str = ""
    placement: Placement | None = None
    migrations: int = 0
    excluded: set[str] = field(default_factory=set)
    cached_tokens: int | None = None
    answered_by: Placement | None = None
    """The attempt that gave the first tokens, which `cached_tokens` are of."""


class Generation:
    """A running job. Read `updates` to the end; leave the context to abort what still runs."""

    def __init__(self, pipeline: Pipeline, job: Job) -> None:
        self.job = job
        self._pipeline = pipeline
        # Nobody looks at a whole answer before its end, unless a stop string may end it earlier.
        stops = any(prompt.sampling.stop for prompt in job.prompts)
        self._inbox = Inbox(patient=job.restartable and not stops)
        self._sequences = [
            _Sequence(
                index=p * job.n + i,
                prompt=prompt,
                sampling=(sampling := prompt.sampling.for_choice(i)),
                choice=Choice(job.served.tokenizer, sampling, prompt.ids),
            )
            for p, prompt in enumerate(job.prompts)
            for i in range(job.n)
        ]
        self._open = {s.index for s in self._sequences}
        self._by_id: dict[str, _Sequence] = {}

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return not self._open

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        n = self.job.n
        total = Usage(0, 0, 0)
        for p, prompt in enumerate(self.job.prompts):
            choices = self._sequences[p * n : (p + 1) * n]
            # The first choice computed what the later ones of the same prompt then found.
            cached = choices[0].cached_tokens or 0
            tokens = sum(s.choice.completion_tokens for s in choices)
            total += Usage(len(prompt.ids), tokens, cached)
        return total

    @property
    def placements(self) -> list[Placement]:
        """For each prompt the placement that gave its first choice the first tokens, or is to."""
        firsts = self._sequences[:: self.job.n]
        found = [s.answered_by or s.placement for s in firsts]
        return [placement for placement in found if placement is not None]

    @property
    def predicted_cached_tokens(self) -> int:
        """What the router expected, all prompts together."""
        return sum(p.predicted_cached_tokens for p in self.placements)

    async def start(self) -> None:
        """Places every prompt and sends its sequences off. Raises ApiError."""
        n = self.job.n
        for p in range(len(self.job.prompts)):
            group = self._sequences[p * n : (p + 1) * n]
            await self._launch(group)

    async def updates(self) -> list[Update]:
        """The next news of any choice, at least one. Raises ApiError when the job has failed."""
        found: list[Update] = []
        while not found and self._open:
            for request_id, news in (await self._inbox.take()).items():
                sequence = self._by_id.get(request_id)
                if sequence is None:
                    continue  # of an attempt that is over
                delta = self._absorb(sequence, news)
                if delta is not None:
                    found.append(Update(sequence.index, delta))
                if sequence.index in self._open and (news.error or news.ended):
                    update = await self._recover(sequence, news)
                    if update is not None:
                        found.append(update)
        return found

    def close(self) -> None:
        """Aborts whatever still runs. Never blocks; safe at any time."""
        for request_id in list(self._by_id):
            self._forget(self._by_id[request_id])

    def _absorb(self, sequence: _Sequence, news: News) -> ChoiceDelta | None:
        finish = _FINISH.get(news.ended) if news.ended else None
        if not news.token_ids and finish is None:
            return None
        if sequence.answered_by is None:
            sequence.answered_by = sequence.placement
            sequence.cached_tokens = news.cached_tokens
        delta = sequence.choice.feed(
            news.token_ids, news.logprobs, finish, stop_token_id=news.stop_token_id
        )
        if sequence.choice.finished:
            self._open.discard(sequence.index)
            self._forget(sequence)  # also aborts a sequence that ended by a stop string
        return delta

    def _forget(self, sequence: _Sequence) -> None:
        if self._by_id.pop(sequence.request_id, None) is not None:
            self._pipeline.pool.abort(sequence.request_id)
            self._pipeline.metrics.sequences.dec()

    async def _recover(self, sequence: _Sequence, news: News) -> Update | None:
        """Carries a broken sequence on elsewhere, or raises what the client is to be told."""
        self._forget(sequence)
        if sequence.choice.at_limit:
            # All is there, only the last word of the worker got lost.
            self._open.discard(sequence.index)
            return Update(sequence.index, sequence.choice.end("length"))
        error = news.error or Unavailable("the worker aborted the request", reason="ABORTED")
        metrics, worker = self._pipeline.metrics, sequence.placement
        prior = len(sequence.choice.output_ids)
        unsupported = isinstance(error, FailedPrecondition) and error.reason == "RESUME_UNSUPPORTED"
        if unsupported and self.job.restartable:
            sequence.choice = Choice(
                self.job.served.tokenizer, sequence.sampling, sequence.prompt.ids
            )
            sequence.cached_tokens = sequence.answered_by = None
            metrics.migrations.labels("restarted").inc()
        elif unsupported:
            metrics.migrations.labels("unsupported").inc()
            raise to_api_error(error)
        elif not is_retryable(error) or sequence.migrations >= self._pipeline.max_migrations:
            if is_retryable(error):
                metrics.migrations.labels("exhausted").inc()
            raise to_api_error(error)
        else:
            sequence.migrations += 1
            if worker is not None:
                sequence.excluded.add(worker.worker.id)
        log.warning(
            "sequence goes on elsewhere",
            request_id=self.job.caller.request_id,
            lost=worker.worker.id if worker else "",
            reason=error.reason,
            prior_tokens=prior,
        )
        await self._launch([sequence])
        if unsupported:
            return Update(sequence.index, ChoiceDelta(""), anew=True)
        metrics.migrations.labels("resumed").inc()
        return None

    async def _launch(self, group: Sequence[_Sequence]) -> None:
        """Places sequences of one prompt together and sends them off."""
        job, pipeline = self.job, self._pipeline
        first = group[0]
        prior = first.choice.output_ids
        keys = first.prompt.keys
        if prior:
            keys = await hash_blocks(job.served, [*first.prompt.ids, *prior], job.salt)
        for attempt in itertools.count(1):
            ask = Ask(
                model=job.served.name,
                block_size=job.served.card.block_size,
                keys=keys,
                tokens=len(first.prompt.ids) + len(prior),
                request_id=job.caller.request_id,
                expected_output=first.sampling.max_tokens - len(prior),
                tenant=job.caller.tenant,
                priority=-job.priority,  # for routers the higher goes first
                deadline_ms=self._left_ms(),
                admitted=bool(prior or first.excluded),
                sequences=len(group),
                excluded=frozenset(first.excluded) | job.served.refused,
                wishes=job.caller.wishes,
                trace=job.caller.trace,
            )
            try:
                placement = await pipeline.placer.place(ask)
            except ForebayError as exc:
                raise to_api_error(exc) from exc
            try:
                await pipeline.pool.start(placement, self._works(group, placement), self._inbox)
                return
            except WorkerLost as exc:
                self._unbook(group)
                pipeline.placer.release(placement, unreachable=exc.refused)
                first.excluded.add(placement.worker.id)
                if attempt >= _MAX_REFUSALS:
                    raise to_api_error(exc) from exc
            except BaseException:
                self._unbook(group)
                pipeline.placer.release(placement)
                raise

    def _left_ms(self) -> int:
        """How long the client waits on; at least 1 ms."""
        left_s = self.job.caller.deadline - asyncio.get_running_loop().time()
        return max(1, round(left_s * 1000))

    def _works(self, group: Sequence[_Sequence], placement: Placement) -> list[Work]:
        job = self.job
        works = []
        deadline_ms = self._left_ms()
        for k, sequence in enumerate(group):
            sequence.request_id = self._pipeline.new_request_id()
            sequence.placement = placement
            self._by_id[sequence.request_id] = sequence
            self._pipeline.metrics.sequences.inc()
            prior = list(sequence.choice.output_ids)
            works.append(
                Work(
                    request_id=sequence.request_id,
                    attempt_id=f"{placement.attempt_id}#{k}" if k else placement.attempt_id,
                    model=job.served.name,
                    prompt=sequence.prompt.ids,
                    prior=prior,
                    sampling=sequence.sampling.resumed(len(prior)) if prior else sequence.sampling,
                    tenant=job.caller.tenant,
                    cache_salt=job.salt,
                    adapter=job.served.adapter.name if job.served.adapter else "",
                    priority=job.priority,
                    deadline_ms=deadline_ms,
                    client_request_id=job.caller.request_id,
                    trace=job.caller.trace,
                )
            )
        return works

    def _unbook(self, group: Sequence[_Sequence]) -> None:
        for sequence in group:
            if self._by_id.pop(sequence.request_id, None) is not None:
                self._pipeline.metrics.sequences.dec()


class Pipeline:
    """Runs jobs."""

    def __init__(
        self,
        placer: Placer,
        pool: WorkerPool,
        metrics: GatewayMetrics,
        *,
        gateway_id: str,
        max_migrations: int,
    ) -> None:
        self.placer = placer
        self.pool = pool
        self.metrics = metrics
        self.max_migrations = max_migrations
        self._numbers = itertools.count(1)
        self._gateway_id = gateway_id

    def new_request_id(self) -> str:
        """A name for one sequence's attempt, unique at this gateway."""
        return f"{self._gateway_id}/{next(self._numbers)}"

    @asynccontextmanager
    async def run(self, job: Job) -> AsyncIterator[Generation]:
        """A job, placed and sent. Leaving the context, however, ends what still runs of it."""
        generation = Generation(self, job)
        try:
            await generation.start()
            yield generation
        finally:
            generation.close()
