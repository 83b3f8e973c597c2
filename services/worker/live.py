"""One request between admission and end: when things happened to it, and what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.events.model import TransferEnded
from services.common.ids import AttemptId
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.spans import RequestSpan
from services.worker.core.model import Delta, Failure, FinishReason, Generation, Handle
from services.worker.engines.port import Output, TransferNews
from services.worker.ports import Sink


@dataclass(slots=True)
class Live:
    """Times are the loop's, in seconds."""

    sink: Sink
    span: RequestSpan
    received_s: float
    prompt_tokens: int
    """With the prior output."""
    attempt: AttemptId
    generation: Generation
    tokens: Sequence[int]
    """Prompt and prior output of a prefill leg; empty for others."""
    queue_s: float | None = None
    first_s: float | None = None
    cached_tokens: int = 0
    transferred_tokens: int = 0
    output_tokens: int = 0
    timer: asyncio.TimerHandle | None = None
    failure: Failure | None = None

    def transferred(self, news: TransferNews, block_size: int) -> TransferEnded | None:
        """What came from another worker; None for a request that is not to take any."""
        if self.generation.transfer is None:
            return None
        # All of the prompt's last blocks came, but its last token is computed in any case.
        local = max(0, -(-self.prompt_tokens // block_size) * block_size - news.tokens)
        self.transferred_tokens = max(0, self.prompt_tokens - 1 - local) if news.tokens else 0
        # A good one has some, though all but the prompt's last token may have been here.
        tokens = 0 if news.why else max(1, self.transferred_tokens)
        return TransferEnded(
            self.attempt,
            self.generation.transfer.source,
            tokens,
            news.bytes,
            news.seconds,
            self.generation.dp_rank or 0,
        )

    def take(self, output: Output, now_s: float, metrics: WorkerMetrics) -> int | None:
        """Notes and counts what the engine says; the prompt's cached tokens once it tells them."""
        self.output_tokens += len(output.token_ids)
        metrics.output_tokens.inc(len(output.token_ids))
        if output.queued_s is not None:
            self.queue_s = output.queued_s
            metrics.queue.observe(output.queued_s)
        if output.token_ids and self.first_s is None:
            self.first_s = now_s
            metrics.first_token.observe(now_s - self.received_s)
        if output.cached_tokens is None:
            return None
        # vLLM counts a transferred prompt as a whole; its last token is computed all the same.
        self.cached_tokens = min(output.cached_tokens, self.prompt_tokens - 1)
        self.transferred_tokens = min(self.transferred_tokens, self.cached_tokens)
        metrics.prompt_tokens.inc(self.prompt_tokens)
        metrics.cached_tokens.inc(self.cached_tokens)
        return self.cached_tokens

    def delta(self, output: Output, cached_tokens: int | None, handle: Handle | None) -> Delta:
        """An output as its client's gateway hears it; `cached_tokens` is what `take` gave."""
        failure = None
        if output.finish is FinishReason.ABORT:
            failure = self.failure
        elif output.finish is FinishReason.ERROR:
            failure = Failure(13, "ENGINE_ERROR", output.error or "the engine failed the request")
        return Delta(
            request_id=self.generation.request_id,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            stop_token_id=output.stop_token_id,
            cached_tokens=cached_tokens,
            failure=failure,
            transfer=handle,
            transferred_tokens=0 if cached_tokens is None else self.transferred_tokens,
        )

    def end(self, finish: FinishReason, now_s: float) -> None:
        """Stops its timer and ends its span."""
        self.stop_timer()
        prefill_s = decode_s = None
        if self.first_s is not None:
            prefill_s = self.first_s - self.received_s - (self.queue_s or 0.0)
            decode_s = now_s - self.first_s
        self.span.end(
            finish,
            queue_s=self.queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
        )

    def stop_timer(self) -> None:
        """Its deadline is nobody's concern any more."""
        if self.timer is not None:
            self.timer.cancel()
