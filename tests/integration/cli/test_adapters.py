"""gRPC and HTTP to the cluster: what is asked, how answers and refusals are read."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from forebay.common.v1 import common_pb2
from forebay.router.v1 import router_pb2, router_pb2_grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.cli.adapters.http import ChatClient
from services.cli.adapters.rpc import is_serving, open_router, open_worker
from services.cli.errors import RequestFailed
from services.common.cards import Holder
from services.common.errors import FailedPrecondition, Unavailable
from services.common.rpc.server import Service, rpc_server


class Router(router_pb2_grpc.RouterServiceServicer):
    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        view = router_pb2.WorkerView(
            worker=common_pb2.Holder(id="w0", incarnation=2**63 + 1),
            state=router_pb2.WORKER_STATE_SUSPECT,
            indexed_blocks=5,
            total_blocks=9,
            prompt_tokens=200,
            cached_tokens=50,
        )
        other = router_pb2.WorkerView(worker=common_pb2.Holder(id="w1"))
        return router_pb2.ListWorkersResponse(
            workers=[view, other], policy="kv", router_id="router-0"
        )

    async def GetIndexStats(self, request: Any, context: Any) -> router_pb2.GetIndexStatsResponse:
        digest = router_pb2.HolderDigest(
            holder=common_pb2.Holder(id="w0", incarnation=7), sequence=4, blocks=2, xor=3 ^ 2**63
        )
        return router_pb2.GetIndexStatsResponse(digests=[digest])


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Snapshot(self, request: Any, context: Any) -> worker_pb2.SnapshotResponse:
        blocks = [
            worker_pb2.TierBlocks(tier=common_pb2.TIER_G1, block_hashes=[3, 2**63]),
            worker_pb2.TierBlocks(tier=common_pb2.TIER_G2, block_hashes=[99]),
        ]
        return worker_pb2.SnapshotResponse(publisher="w0", incarnation=7, sequence=9, blocks=blocks)

    async def ResetCache(self, request: Any, context: Any) -> worker_pb2.ResetCacheResponse:
        raise FailedPrecondition("requests are running", reason="CACHE_IN_USE")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    services = [
        Service(
            "forebay.router.v1.RouterService",
            router_pb2_grpc.add_RouterServiceServicer_to_server,
            Router(),
        ),
        Service(
            "forebay.worker.v1.WorkerService",
            worker_pb2_grpc.add_WorkerServiceServicer_to_server,
            Worker(),
        ),
    ]
    async with rpc_server("127.0.0.1", 0, services, grace_s=0) as server:
        found = f"127.0.0.1:{server.port}"
        assert not await is_serving(found)
        await server.set_serving(True)
        assert await is_serving(found)
        yield found
    assert not await is_serving(found)


async def test_workers_as_a_router_sees_them(address: str) -> None:
    async with open_router(address) as router:
        listed = await router.list_workers()
    first, second = listed.workers
    assert (listed.policy, listed.router_id) == ("kv", "router-0")
    assert first.holder == Holder("w0", 2**63 + 1) and first.state == "suspect"
    assert (first.indexed_blocks, first.total_blocks, first.hit_rate) == (5, 9, 0.25)
    assert second.hit_rate is None and second.state == "unknown"


async def test_digests_compare_g1_alone(address: str) -> None:
    async with open_router(address) as router, open_worker(address) as worker:
        indexed, own = (await router.digests())["w0"], await worker.digest()
        assert (own.blocks, own.xor) == (2, 3 ^ 2**63)
        assert indexed.same_blocks(own)  # whatever the sequences are
        with pytest.raises(FailedPrecondition, match="requests are running"):
            await worker.reset_cache()


async def test_nobody_there() -> None:
    async with open_router("127.0.0.1:1", timeout_s=1.0) as router:
        with pytest.raises(Unavailable):
            await router.list_workers()


def chat(handler: Callable[[httpx.Request], httpx.Response], key: str = "") -> ChatClient:
    client = httpx.AsyncClient(transport=httpx.MockTransport(handler))
    return ChatClient(client, "http://gateway", key)


def event(data: object) -> str:
    return f"data: {json.dumps(data)}\n\n"


USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32},
}
HEADERS = {"x-forebay-worker": "w1", "x-forebay-predicted-cached-tokens": "32"}


async def test_a_streamed_answer() -> None:
    def gateway(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        assert request.url.path == "/v1/chat/completions"
        assert request.headers["authorization"] == "Bearer k"
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        assert body["max_tokens"] == 3 and body["messages"][0]["content"] == "hi"
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "To"}}]},
            {"choices": [{"delta": {"content": "kyo"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": USAGE},
        ]
        text = ": ping\n\n" + "".join(map(event, events)) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers=HEADERS)

    answer = await chat(gateway, "k").stream("m", "hi", max_tokens=3)
    assert (answer.text, answer.worker) == ("Tokyo", "w1")
    assert (answer.cached_tokens, answer.predicted_cached_tokens) == (32, 32)
    assert (answer.prompt_tokens, answer.completion_tokens) == (40, 3)
    assert answer.ttft_s > 0


async def test_a_stream_that_is_left_when_it_is_enough() -> None:
    def gateway(request: httpx.Request) -> httpx.Response:
        words = [{"choices": [{"delta": {"content": word}}]} for word in ("", "To", "kyo")]
        return httpx.Response(200, text="".join(map(event, words)), headers=HEADERS)

    answer = await chat(gateway).stream("m", "hi", enough=lambda: True)
    assert (answer.text, answer.worker) == ("To", "w1")


async def test_a_stream_that_breaks() -> None:
    def gateway(request: httpx.Request) -> httpx.Response:
        text = event({"choices": [{"delta": {"content": "To"}}]})
        return httpx.Response(200, text=text + event({"error": {"message": "worker died"}}))

    with pytest.raises(RequestFailed, match="the stream broke: worker died"):
        await chat(gateway).stream("m", "hi")


async def test_a_stream_without_text() -> None:
    with pytest.raises(RequestFailed, match="without any text"):
        await chat(lambda r: httpx.Response(200, text="data: [DONE]\n\n")).stream("m", "hi")


async def test_a_plain_answer() -> None:
    def gateway(request: httpx.Request) -> httpx.Response:
        assert "authorization" not in request.headers
        message = {"choices": [{"message": {"content": "Tokyo"}}], "usage": USAGE}
        return httpx.Response(200, json=message, headers=HEADERS)

    answer = await chat(gateway).ask("m", "hi")
    assert (answer.text, answer.cached_tokens) == ("Tokyo", 32)


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_carry_the_gateways_words(stream: bool) -> None:
    refusing = chat(lambda r: httpx.Response(503, json={"error": {"message": "no worker"}}))
    call = refusing.stream if stream else refusing.ask
    with pytest.raises(RequestFailed, match="the gateway answered 503: no worker"):
        await call("m", "hi")
    garbled = chat(lambda r: httpx.Response(502, text="<html>"))
    with pytest.raises(RequestFailed, match="502: <html>"):
        await (garbled.stream if stream else garbled.ask)("m", "hi")


@pytest.mark.parametrize("stream", [True, False])
async def test_nobody_at_the_gateways_address(stream: bool) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    call = chat(refuse).stream if stream else chat(refuse).ask
    with pytest.raises(RequestFailed, match="no answer from http://gateway"):
        await call("m", "hi")
