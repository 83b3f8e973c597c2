"""One modelled worker: a queue of prompts, a batch of decodes, and the time that steps take.

A worker that only prefills computes one prompt after the other at its rate. One that only decodes
makes steps of base + sequences + context. One that has both (its role has just changed, or it does
both) mixes: each step decodes and computes a piece of a prompt beside it. Its events are those of a
real worker. Pure and deterministic; times are seconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from services.common.cards import Role
from services.common.events.model import (
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
)
from services.common.ids import AttemptId, BlockKey
from services.router.replay.trace import BLOCK_TOKENS, TraceRequest


@dataclass(frozen=True, slots=True)
class Hardware:
    """Speeds of one worker. Defaults: about an 8 B model on a GPU of 2023, from its data sheet."""

    prefill_tokens_s: float = 10_000.0
    prompt_s: float = 0.01
    """What a prompt costs beside its tokens."""
    step_s: float = 0.010
    """A decode step, ..."""
    sequence_s: float = 0.000_2
    """... and more for each sequence, ..."""
    context_s: float = 2e-8
    """... and for each token of their contexts."""
    chunk_tokens: int = 512
    """Prompt tokens computed beside decodes in one step."""
    kv_tokens: int = 400_000
    """Tokens whose KV fits."""
    cache_blocks: int = 600
    """Blocks of 512 tokens whose KV is kept for prompts to come."""
    transfer_s: float = 0.01
    """Before the first byte of a handed-over prompt is there, ..."""
    transfer_tokens_s: float = 100_000.0
    """... and how fast it then comes."""


@dataclass(slots=True)
class Life:
    """What became of one request."""

    request: TraceRequest
    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def ttft_s(self) -> float:
        """Infinite when it never came."""
        return inf if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def itl_s(self) -> float:
        """Mean time between tokens; 0 for a single one."""
        if self.first_token_s is None or self.finished_s is None:
            return inf
        gaps = max(1, self.request.output_tokens) - 1
        return (self.finished_s - self.first_token_s) / gaps if gaps else 0.0


@dataclass(slots=True)
class Job:
    """A request, or a leg of one, at a worker."""

    attempt: AttemptId
    life: Life
    prefill_only: bool
    transfer: bool
    ready_s: float = 0.0
    """When its KV has come, for a decode leg."""
    cached: int = 0
    left: int = 0
    """Prompt tokens still to be computed."""
    tokens: int = 0
    """Output tokens still to be produced."""

    @property
    def context(self) -> int:
        """Tokens of KV that it holds."""
        return self.life.request.input_tokens + self.life.request.output_tokens


@dataclass(slots=True)
class _Step:
    """Steps under way: so many decode steps alike, or one with a piece of a prompt."""

    began: float
    each_s: float
    count: int = 1
    prompt_tokens: int = 0

    @property
    def ends(self) -> float:
        return self.began + self.each_s * self.count


@dataclass(slots=True)
class Worker:
    """One worker. `submit` and `advance` return what it tells, `prefilled` what it hands on."""

    hardware: Hardware
    role: Role
    waiting: deque[Job] = field(default_factory=deque)
    """Prompts to compute, the first of them perhaps under way."""
    coming: list[Job] = field(default_factory=list)
    """Decode legs whose KV is on its way, or waits for room."""
    batch: list[Job] = field(default_factory=list)
    prefilled: list[Job] = field(default_factory=list)
    """Prefill legs that ended in the last `advance`; the caller takes them."""
    kv: int = 0
    pending_tokens: int = 0
    """Prompt tokens still to be computed."""
    promised: int = 0
    """Tokens of KV that it has, or that are on their way to it."""
    steps: int = 0
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    _step: _Step | None = None

    def hits(self, request: TraceRequest) -> int:
        """Tokens of the prompt that its cache has; the last one is always computed."""
        blocks = 0
        for block in request.blocks:
            if block not in self.cache:
                break
            blocks += 1
        return min(blocks * BLOCK_TOKENS, request.input_tokens - 1)

    def submit(self, job: Job, now: float) -> list[Event]:
        """Takes a job."""
        request = job.life.request
        job.tokens = 1 if job.prefill_only else max(1, request.output_tokens)
        if job.transfer:
            self.coming.append(job)
            self.promised += job.context
        else:
            job.cached = self.hits(request)
            job.left = request.input_tokens - job.cached
            self.waiting.append(job)
            self.pending_tokens += job.left
        self._interrupt(now)
        self._begin(now)
        return [
            RequestAdmitted(
                job.attempt,
                request.input_tokens,
                job.tokens,
                tuple(BlockKey(b) for b in request.blocks[-1:]),
                transfer_tokens=request.input_tokens if job.transfer else 0,
                prefill_only=job.prefill_only,
            )
        ]

    def next_time(self) -> float:
        """When something happens by itself; infinity if nothing does."""
        ready = min((job.ready_s for job in self.coming), default=inf) if self._room() else inf
        return self._step.ends if self._step is not None else ready

    def advance(self, now: float) -> list[Event]:
        """Lets happen what is due."""
        events: list[Event] = []
        if self._step is not None and self._step.ends <= now + 1e-12:
            events = self._end_step(self._step, now)
        self._begin(now)
        return events

    def report(self, now: float) -> LoadReport:
        """How busy it is."""
        steps = self.steps
        if self._step is not None and self._step.each_s:
            steps += min(self._step.count, int((now - self._step.began) / self._step.each_s))
        return LoadReport(
            running_requests=len(self.batch) + (1 if self.waiting else 0),
            waiting_requests=max(0, len(self.waiting) - 1) + len(self.coming),
            pending_prefill_tokens=self.pending_tokens,
            used_blocks=self.kv // BLOCK_TOKENS,
            total_blocks=self.hardware.kv_tokens // BLOCK_TOKENS,
            steps=steps,
        )

    def _room(self) -> bool:
        return self.kv < self.hardware.kv_tokens

    def _interrupt(self, now: float) -> None:
        """A run of equal steps ends with the one that runs now: somebody may want to join."""
        step = self._step
        if step is not None and not step.prompt_tokens:
            step.count = min(step.count, int((now - step.began) / step.each_s) + 1)

    def _begin(self, now: float) -> None:
        if self._step is not None:
            return
        come = sorted((j for j in self.coming if j.ready_s <= now), key=lambda j: j.ready_s)
        for job in come if self._room() else ():
            if self.kv + job.context > self.hardware.kv_tokens and self.batch:
                break
            self.coming.remove(job)
            self.batch.append(job)
            self.kv += job.context
        h, batch = self.hardware, self.batch
        if not batch and not self.waiting:
            return
        decode_s = 0.0
        if batch:
            decode_s = h.step_s + h.sequence_s * len(batch) + h.context_s * self.kv
        if self.waiting:
            head = self.waiting[0]
            tokens = min(head.left, h.chunk_tokens) if batch else head.left
            first = h.prompt_s if tokens == head.left else 0.0
            self._step = _Step(now, decode_s + first + tokens / h.prefill_tokens_s, 1, tokens)
            return
        count = min(job.tokens for job in batch)
        until = min((j.ready_s for j in self.coming if j.ready_s > now), default=inf)
        if until < inf:
            count = min(count, int((until - now) / decode_s) + 1)
        self._step = _Step(now, decode_s, max(1, count))

    def _end_step(self, step: _Step, now: float) -> list[Event]:
        events: list[Event] = []
        self._step = None
        self.steps += step.count
        for job in self.batch:
            if job.life.first_token_s is None:
                job.life.first_token_s = step.began + step.each_s
                given = job.life.request.input_tokens if job.transfer else job.cached
                events.append(
                    RequestFirstToken(job.attempt, given, transferred_tokens=given * job.transfer)
                )
            job.tokens -= step.count
        for job in [j for j in self.batch if j.tokens <= 0]:
            self.batch.remove(job)
            self.kv -= job.context
            self.promised -= job.context
            job.life.finished_s = now
            events.append(self._finish(job, max(1, job.life.request.output_tokens)))
        if step.prompt_tokens:
            head = self.waiting[0]
            head.left -= step.prompt_tokens
            self.pending_tokens -= step.prompt_tokens
            if head.left <= 0:
                self.waiting.popleft()
                events += self._end_prefill(head, now)
        return events

    def _end_prefill(self, job: Job, now: float) -> Sequence[Event]:
        self._keep(job.life.request)
        first = RequestFirstToken(job.attempt, job.cached)
        if job.prefill_only:
            self.prefilled.append(job)
            return first, self._finish(job, 1)
        job.life.first_token_s = now
        job.tokens -= 1
        if job.tokens <= 0:
            job.life.finished_s = now
            return first, self._finish(job, 1)
        self.batch.append(job)
        self.kv += job.context
        self.promised += job.context
        return (first,)

    def _keep(self, request: TraceRequest) -> None:
        for block in request.blocks[: request.input_tokens // BLOCK_TOKENS]:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.hardware.cache_blocks:
            self.cache.popitem(last=False)

    def _finish(self, job: Job, output_tokens: int) -> RequestFinished:
        return RequestFinished(job.attempt, job.cached, output_tokens)
