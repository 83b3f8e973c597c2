"""A span for each request, child of the caller's trace, with its phases as attributes."""

from __future__ import annotations

from opentelemetry.trace import Span, StatusCode, Tracer

from services.common.telemetry.tracing import extract
from services.worker.core.model import FinishReason, Generation


class RequestSpan:
    """The span "worker.generate" of one request; ended exactly once."""

    def __init__(self, tracer: Tracer, generation: Generation, attempt_id: str) -> None:
        carrier = {"traceparent": generation.traceparent, "tracestate": generation.tracestate}
        self._span: Span = tracer.start_span(
            "worker.generate",
            context=extract({k: v for k, v in carrier.items() if v}),
            attributes={
                "forebay.attempt_id": attempt_id,
                "forebay.request_id": generation.client_request_id or generation.request_id,
                "forebay.prompt_tokens": len(generation.prompt),
                "forebay.prior_output_tokens": len(generation.prior_output),
            },
        )

    def end(
        self,
        finish: FinishReason,
        *,
        queue_s: float | None,
        prefill_s: float | None,
        decode_s: float | None,
        cached_tokens: int,
        output_tokens: int,
    ) -> None:
        """Ends it; a phase that was not reached is None."""
        phases = {"queue": queue_s, "prefill": prefill_s, "decode": decode_s}
        for name, seconds in phases.items():
            if seconds is not None:
                self._span.set_attribute(f"forebay.{name}_ms", round(seconds * 1000, 3))
        self._span.set_attribute("forebay.cached_tokens", cached_tokens)
        self._span.set_attribute("forebay.output_tokens", output_tokens)
        self._span.set_attribute("forebay.finish_reason", finish.value)
        if finish is FinishReason.ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()
