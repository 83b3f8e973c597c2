"""62: a client's trace goes through gateway, router and worker."""

import secrets

import httpx
import pytest

from tests.support.client import chat_body, stream
from tests.support.cluster import MODEL
from tests.support.otlp import Collector, Span
from tests.support.polling import until


@pytest.mark.parametrize("streaming", [False, True])
async def test_62_one_trace_through_all_services(
    client: httpx.AsyncClient, collector: Collector, streaming: bool
) -> None:
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    body = chat_body(MODEL, "trace me", max_tokens=3)
    if streaming:
        assert (await stream(client, "/v1/chat/completions", body, headers=headers)).done
    else:
        (await client.post("/v1/chat/completions", json=body, headers=headers)).raise_for_status()

    async def spans() -> list[Span]:
        return collector.trace(trace_id)

    found = await until(
        spans,
        lambda s: {x.service for x in s} >= {"forebay-gateway", "forebay-router", "forebay-worker"},
        within_s=8,
        what="spans of three services",
    )
    known = {parent_id} | {s.span_id for s in found}
    assert all(s.parent_id in known for s in found), found
    assert any(s.parent_id == parent_id and s.service == "forebay-gateway" for s in found)
