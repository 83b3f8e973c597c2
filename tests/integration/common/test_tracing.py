"""Trace context travels with and without an exporter; spans reach a real OTLP collector."""

import time

import pytest
from opentelemetry import trace

from services.common.rpc.channel import trace_metadata
from services.common.telemetry.tracing import extract, inject, tracing
from tests.support.otlp import open_collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def test_context_passes_through_without_an_exporter() -> None:
    with tracing("toy", "t1", "") as tracer:
        context = extract({"traceparent": PARENT, "tracestate": "a=b"})
        assert inject(context) == {"traceparent": PARENT, "tracestate": "a=b"}
        with tracer.start_as_current_span("work", context):
            assert inject()["traceparent"] == PARENT
            assert dict(trace_metadata()) == inject()


def test_spans_of_two_processes_reach_the_collector_as_one_trace() -> None:
    with open_collector() as collector:
        with tracing("one", "1", collector.endpoint) as one:
            with one.start_as_current_span("outer", extract({"traceparent": PARENT})):
                carried = inject()
            with tracing("two", "2", collector.endpoint) as two:
                two.start_span("inner", extract(carried)).end()
        spans = {s.name: s for s in collector.trace(TRACE)}
    assert spans["outer"].parent_id == PARENT.split("-")[2]
    assert spans["inner"].parent_id == spans["outer"].span_id
    assert (spans["outer"].service, spans["inner"].service) == ("forebay-one", "forebay-two")
    assert carried["traceparent"].startswith(f"00-{TRACE}-{spans['outer'].span_id}")


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_a_broken_traceparent_is_no_context(sent: str) -> None:
    assert inject(extract({"traceparent": sent} if sent else {})) == {}
    assert not trace.get_current_span(extract({"traceparent": sent})).get_span_context().is_valid


def test_an_absent_collector_delays_the_end_by_little(unused_tcp_port: int) -> None:
    started = time.monotonic()
    with tracing("toy", "t1", f"http://127.0.0.1:{unused_tcp_port}") as tracer:
        tracer.start_span("lost").end()
    assert time.monotonic() - started < 5
