"""OpenTelemetry spans across processes: W3C context in and out, OTLP export when configured.

Without an endpoint no span is recorded, but a client's trace context still travels through.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import NoOpTracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


@contextmanager
def tracing(service: str, instance_id: str, endpoint: str) -> Iterator[trace.Tracer]:
    """The process's tracer; flushes at the end. `endpoint` empty: records nothing."""
    if not endpoint:
        yield NoOpTracerProvider().get_tracer("forebay")
        return
    resource = Resource.create(
        {"service.name": f"forebay-{service}", "service.instance.id": instance_id}
    )
    provider = TracerProvider(resource=resource)
    insecure = not endpoint.startswith("https://")
    provider.add_span_processor(
        BatchSpanProcessor(
            # The time limit is also how long an absent collector may delay the process's end.
            OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=2),
            schedule_delay_millis=1000,
        )
    )
    try:
        yield provider.get_tracer("forebay")
    finally:
        provider.shutdown()


def extract(carrier: Mapping[str, str]) -> Context:
    """The trace context that a caller sent (keys `traceparent`, `tracestate`, lower case)."""
    return _PROPAGATOR.extract(carrier)


def inject(context: Context | None = None) -> dict[str, str]:
    """`traceparent` (and `tracestate`) of `context` (the current one); empty without a trace."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier
