"""An OTLP/gRPC collector that keeps the spans it gets."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True, slots=True)
class Span:
    """What tests look at."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """The service and what it got; safe to read from any thread."""

    endpoint: str = ""
    _spans: list[Span] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._spans.append(
                            Span(
                                names.get("service.name", ""),
                                span.name,
                                span.trace_id.hex(),
                                span.span_id.hex(),
                                span.parent_span_id.hex(),
                            )
                        )
        return pb.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        """Spans of one trace."""
        with self._lock:
            return [s for s in self._spans if s.trace_id == trace_id]


@contextmanager
def open_collector() -> Iterator[Collector]:
    """A running collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        collector, server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    collector.endpoint = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
