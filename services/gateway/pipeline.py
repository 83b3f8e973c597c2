"""A job's life: placement, session, news, text; and migration when a worker is lost on the way.

How its sequences get onto workers, and off them, is in `legs.py`. A sequence that lost its worker
is placed again with its output so far as prior output. What the engine can't restore
(RESUME_UNSUPPORTED) ends a stream with an error; while nothing has been shown, the choice starts
anew instead. `cached_tokens` is told by the attempt that gave a choice its first tokens: later
attempts recompute what the client was already answered.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from services.common.errors import FailedPrecondition, Unavailable
from services.common.telemetry.logging import get_logger
from services.gateway.core.choice import Choice, ChoiceDelta, EndOfSequence
from services.gateway.core.usage import Usage
from services.gateway.legs import Legs
from services.gateway.metrics import GatewayMetrics
from services.gateway.ports import Ended, Inbox, News, Placement, Placer, WorkerPool
from services.gateway.prepare import Job
from services.gateway.sequence import SequenceState
from services.gateway.upstream import is_retryable, to_api_error

log = get_logger(__name__)

_FINISH: dict[Ended, EndOfSequence] = {Ended.STOP: "stop", Ended.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Update:
    """What choice `index` gained. `anew`: it began again, and all that it gave before is void."""

    index: int
    delta: ChoiceDelta
    anew: bool = False


class Generation:
    """A running job. Read `updates` to the end; leave the context to abort what still runs."""

    def __init__(self, pipeline: Pipeline, job: Job) -> None:
        self.job = job
        self._pipeline = pipeline
        # Nobody looks at a whole answer before its end, unless a stop string may end it earlier.
        stops = any(prompt.sampling.stop for prompt in job.prompts)
        self._inbox = Inbox(patient=job.restartable and not stops)
        self._sequences = [
            SequenceState(
                index=p * job.n + i,
                prompt=prompt,
                sampling=(sampling := prompt.sampling.for_choice(i)),
                choice=Choice(job.served.tokenizer, sampling, prompt.ids),
            )
            for p, prompt in enumerate(job.prompts)
            for i in range(job.n)
        ]
        self._open = {s.index for s in self._sequences}
        self._legs = Legs(
            job,
            self._inbox,
            pipeline.placer,
            pipeline.pool,
            pipeline.metrics,
            pipeline.new_request_id,
        )

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
            answered = choices[0].answered
            cached = answered.cached_tokens if answered is not None else 0
            tokens = sum(s.choice.completion_tokens for s in choices)
            total += Usage(len(prompt.ids), tokens, cached)
        return total

    @property
    def placements(self) -> list[Placement]:
        """For each prompt the placement that gave its first choice the first tokens, or is to."""
        firsts = self._sequences[:: self.job.n]
        found = [s.answered.by if s.answered else s.placement for s in firsts]
        return [placement for placement in found if placement is not None]

    @property
    def prefilled_by(self) -> list[str]:
        """The prefill workers whose KV first choices began with; none for what one worker did."""
        firsts = self._sequences[:: self.job.n]
        return [s.answered.prefilled_by for s in firsts if s.answered and s.answered.prefilled_by]

    @property
    def predicted_cached_tokens(self) -> int:
        """What the router expected, all prompts together."""
        return sum(s.predicted_cached_tokens for s in self._sequences[:: self.job.n])

    async def start(self) -> None:
        """Places every prompt and sends its sequences off. Raises ApiError."""
        n = self.job.n
        for p in range(len(self.job.prompts)):
            await self._legs.launch(self._sequences[p * n : (p + 1) * n])

    async def updates(self) -> list[Update]:
        """The next news of any choice, at least one. Raises ApiError when the job has failed."""
        found: list[Update] = []
        while not found and self._open:
            for request_id, news in (await self._inbox.take()).items():
                sequence = self._legs.of(request_id)
                if sequence is None:
                    continue  # of an attempt that is over
                if sequence.prefilling:
                    await self._legs.prefill_news(sequence, news)
                    continue
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
        for sequence in self._sequences:
            self._legs.forget(sequence)

    def _absorb(self, sequence: SequenceState, news: News) -> ChoiceDelta | None:
        finish = _FINISH.get(news.ended) if news.ended else None
        if not news.token_ids and finish is None:
            return None
        if sequence.answered is None or news.cached_tokens is not None:
            self._legs.first_tokens(sequence, news)
        delta = sequence.choice.feed(
            news.token_ids, news.logprobs, finish, stop_token_id=news.stop_token_id
        )
        if sequence.choice.finished:
            self._open.discard(sequence.index)
            self._legs.forget(sequence)  # also aborts a sequence that ended by a stop string
        return delta

    async def _recover(self, sequence: SequenceState, news: News) -> Update | None:
        """Carries a broken sequence on elsewhere, or raises what the client is to be told."""
        error = news.error or Unavailable("the worker aborted the request", reason="ABORTED")
        untransferred = self._legs.failed_with_transfer(sequence, error)
        self._legs.forget(sequence)
        if sequence.choice.at_limit:
            # All is there, only the last word of the worker got lost.
            self._open.discard(sequence.index)
            return Update(sequence.index, sequence.choice.end("length"))
        metrics, worker = self._pipeline.metrics, sequence.placement
        prior = len(sequence.choice.output_ids)
        unsupported = isinstance(error, FailedPrecondition) and error.reason == "RESUME_UNSUPPORTED"
        if unsupported and self.job.restartable:
            sequence.choice = Choice(
                self.job.served.tokenizer, sequence.sampling, sequence.prompt.ids
            )
            sequence.answered = None
            metrics.migrations.labels("restarted").inc()
        elif unsupported:
            metrics.migrations.labels("unsupported").inc()
            raise to_api_error(error)
        elif untransferred:
            pass  # once, and without the transfer
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
        await self._legs.launch([sequence])
        if unsupported:
            return Update(sequence.index, ChoiceDelta(""), anew=True)
        if untransferred:
            return None
        metrics.migrations.labels("resumed").inc()
        return None


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
