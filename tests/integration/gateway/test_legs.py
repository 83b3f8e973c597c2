"""Prefill on one worker, decode on another, over real gRPC: the text is as of one worker alone."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.router.v1 import router_pb2
from forebay.worker.v1 import worker_pb2 as pb

from tests.fakes.router import FakeRouter, pair
from tests.fakes.token_worker import TokenWorker, error, expected_tokens
from tests.support.client import PROMISE_S, completion_body, send, stream
from tests.support.polling import until

PROMPT = list(range(10, 110))
TOKENS = 6


@pytest.fixture
def text_of(tiny_model_path: Path) -> Any:
    """The text of token ids, by the tokenizers library itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.fixture
def pairs(rig: Any, tiny_model_path: Path) -> Any:
    """A rig with a prefill worker and decode workers, `p0`, `d0`, `d1` ..., and a router that names
    pairs of them.
    """

    @asynccontextmanager
    async def make(*, decode: int = 1, **settings: Any) -> AsyncIterator[Any]:
        interval_s = settings.pop("interval_s", 0.0)
        names = ["p0", *(f"d{i}" for i in range(decode))]
        workers = [TokenWorker(n, tiny_model_path, interval_s=interval_s) for n in names]
        for worker in workers:
            worker.peers = {w.id: w for w in workers}
        router = FakeRouter(
            "r0",
            lambda q: pair(q, [workers[0].instance], [w.instance for w in workers[1:]], 32, 64),
        )
        async with rig(workers=workers, router=router, **settings) as r:
            yield r

    return make


async def assert_quiet(r: Any, **legs: int) -> None:
    """Nothing is left anywhere, and `legs` ended so."""
    for gauge in ("requests_in_flight", "sequences_in_flight", "sse_clients"):
        assert await r.metric(gauge) == 0.0, gauge
    for result, count in legs.items():
        assert await r.metric("prefill_legs_total", result=result) == count, result
    for worker in r.workers:
        assert not worker.running and not worker.held, worker.id


def post(r: Any, **extra: Any) -> Any:
    body = completion_body("tiny", PROMPT, max_tokens=TOKENS, **extra)
    return r.client.post("/v1/completions", json=body)


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
async def test_text_is_the_same(pairs: Any, text_of: Any, streaming: bool) -> None:
    async with pairs() as r:
        prefill, decode = r.workers
        extra = {"seed": 7, "stop": ["\x00"], "logprobs": 1, "cache_salt": "x", "priority": 2}
        if streaming:
            body = completion_body("tiny", PROMPT, max_tokens=TOKENS, **extra)
            result = await stream(
                r.client,
                "/v1/completions",
                {**body, "stream_options": {"include_usage": True}},
                headers={"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
            )
            text, usage, headers = result.text(), result.usage, result.headers
        else:
            answer = await post(r, **extra)
            assert answer.status_code == 200, answer.text
            headers, usage = answer.headers, answer.json()["usage"]
            text = answer.json()["choices"][0]["text"]
            assert headers["x-forebay-cached-tokens"] == "0"
        assert text == text_of(expected_tokens(PROMPT, TOKENS))
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert usage["completion_tokens"] == TOKENS
        assert headers["x-forebay-worker"] == "d0"
        assert headers["x-forebay-prefill-worker"] == "p0"
        assert headers["x-forebay-predicted-cached-tokens"] == "64"

        (leg,), (work,) = prefill.requests, decode.requests
        assert leg.prefill_only and not leg.HasField("transfer")
        assert leg.sampling.max_tokens == 1 and not leg.sampling.HasField("seed")
        assert not leg.sampling.HasField("logprobs")
        assert not work.prefill_only and work.transfer.source.id == "p0"
        assert work.transfer.engine_params == b"where it is" and work.transfer.tokens == 100
        assert work.sampling.max_tokens == TOKENS and work.sampling.seed == 7
        route = r.router.requests[0]
        assert not route.whole
        assert [work.attempt_id, leg.attempt_id] == r.router.issued
        for name in ("model", "tenant", "cache_salt", "priority", "client_request_id"):
            assert getattr(leg, name) == getattr(work, name)
        assert leg.traceparent == work.traceparent
        assert leg.cache_salt and leg.client_request_id == headers["x-request-id"]
        if streaming:
            assert "ab" * 16 in leg.traceparent
        assert not r.router.releases and not prefill.released
        await assert_quiet(r, done=1)
        assert await r.metric("transfers_total", result="used") == 1
        assert await r.metric("transferred_tokens_total", model="tiny") == 99
        assert await r.metric("predicted_cached_tokens_total", model="tiny") == 64


async def test_what_was_cached_is_the_prefill_workers_word(pairs: Any) -> None:
    async with pairs() as r:
        await post(r)
        answer = await post(r)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 96
        # The decode worker had 96 of its own by then, and took the rest.
        assert await r.metric("transferred_tokens_total", model="tiny") == 99 + 3
        assert await r.metric("cached_tokens_total", model="tiny") == 96
        await assert_quiet(r, done=2)


async def test_other_sampling_states_stay_whole(pairs: Any, text_of: Any) -> None:
    async with pairs() as r:
        answer = await post(r, n=3)
        assert [c["text"] for c in answer.json()["choices"]] == [
            text_of(expected_tokens(PROMPT, TOKENS))
        ] * 3
        body = completion_body("tiny", PROMPT, max_tokens=1)
        pinned = await r.client.post(
            "/v1/completions", json=body, headers={"x-forebay-worker": "d0"}
        )
        assert pinned.status_code == 200 and "x-forebay-prefill-worker" not in pinned.headers
        assert [q.whole for q in r.router.requests] == [True, True]
        assert not r.workers[0].requests
        await assert_quiet(r)


async def test_several_prompts(pairs: Any, text_of: Any) -> None:
    prompts = [PROMPT, PROMPT[:70], PROMPT[5:]]
    async with pairs() as r:
        body = completion_body("tiny", prompts, max_tokens=3)
        answer = (await r.client.post("/v1/completions", json=body)).json()
        assert [c["text"] for c in answer["choices"]] == [
            text_of(expected_tokens(p, 3)) for p in prompts
        ]
        await assert_quiet(r, done=3)


async def test_no_router_no_legs(pairs: Any) -> None:
    async with pairs() as r:
        await r.router.kill()
        assert (await post(r)).status_code == 200
        assert not any(q.prefill_only for w in r.workers for q in w.requests)


async def test_prefill_worker_refuses_connections(pairs: Any, text_of: Any) -> None:
    async with pairs() as r:
        prefill, decode = r.workers
        await r.lose(prefill)
        answer = await post(r)
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        assert "x-forebay-prefill-worker" not in answer.headers
        assert answer.headers["x-forebay-predicted-cached-tokens"] == "32"
        assert not decode.requests[0].HasField("transfer")
        await r.router.until(lambda: len(r.router.releases) == 1)
        release = r.router.releases[0]
        assert release.worker_unreachable and release.worker.id == "p0"
        assert release.attempt_id == r.router.issued[1]
        assert decode.requests[0].attempt_id == r.router.issued[0]
        await assert_quiet(r, unreachable=1)


async def test_prefill_worker_says_nothing(pairs: Any, tiny_model_path: Path) -> None:
    """It accepts and is silent, as when stopped: not gone, and not waited for longer than for any
    other connection.
    """
    stopped = socket.create_server(("127.0.0.1", 0))
    silent = TokenWorker("p9", tiny_model_path)
    silent.port = stopped.getsockname()[1]
    async with pairs(connect_timeout_s=0.3) as r:
        r.discovery.put(silent.instance)
        decode = r.workers[1].instance
        r.router.decide = lambda q: pair(q, [silent.instance], [decode])
        assert (await post(r)).status_code == 200
        await r.router.until(lambda: len(r.router.releases) == 1)
        assert not r.router.releases[0].worker_unreachable
        await assert_quiet(r, unreachable=1)
    stopped.close()


async def test_prefill_worker_dies_midway(pairs: Any, text_of: Any) -> None:
    async with pairs(interval_s=None) as r:
        prefill, decode = r.workers
        task = asyncio.create_task(post(r))
        await prefill.until(lambda: len(prefill.running) == 1)
        await prefill.kill()
        await decode.until(lambda: len(decode.running) == 1)
        assert not decode.requests[0].HasField("transfer")
        decode.step(TOKENS)
        answer = await task
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        prefill._sessions.clear()  # it is dead, and so is what ran there
        await assert_quiet(r, lost=1)


async def test_prefill_worker_hangs(pairs: Any) -> None:
    """A living session that tells nothing of our leg ends as it does for whole requests."""
    async with pairs(interval_s=None, stall_timeout_s=0.3) as r:
        prefill, decode = r.workers
        task = asyncio.create_task(post(r))
        await prefill.until(lambda: len(prefill.running) == 1)
        await decode.until(lambda: len(decode.running) == 1)
        decode.step(TOKENS)
        assert (await task).status_code == 200
        await assert_quiet(r, lost=1)


@pytest.mark.parametrize(
    ("refusal", "result"),
    [
        (error(grpc.StatusCode.UNAVAILABLE, "DRAINING"), "refused"),
        (error(grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"), "refused"),
        (
            error(grpc.StatusCode.FAILED_PRECONDITION, "UNSUPPORTED", field="prefill_only"),
            "refused",
        ),
        (error(grpc.StatusCode.INTERNAL, "ENGINE_ERROR"), "failed"),
        (None, "no_handle"),
    ],
)
async def test_prefill_worker_does_not_do_it(
    pairs: Any, text_of: Any, refusal: pb.RequestError | None, result: str
) -> None:
    async with pairs() as r:
        prefill, decode = r.workers
        prefill.refuse = lambda q: refusal
        prefill.hands_over = False
        answer = await post(r)
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        assert decode.requests[0].attempt_id == r.router.issued[0]
        assert len(r.router.requests) == 1
        await assert_quiet(r, **{result: 1})


async def test_prefill_worker_aborts(pairs: Any) -> None:
    async with pairs(interval_s=None) as r:
        prefill, decode = r.workers
        task = asyncio.create_task(post(r))
        await prefill.until(lambda: len(prefill.running) == 1)
        aborted = pb.RequestDelta(finish_reason=pb.FINISH_REASON_ABORT)
        prefill.say(prefill.requests[0].request_id, aborted)
        await decode.until(lambda: len(decode.running) == 1)
        decode.step(TOKENS)
        assert (await task).status_code == 200
        await assert_quiet(r, aborted=1)


@pytest.mark.parametrize("streaming", [True, False])
async def test_clients_mistake_is_told_at_once(pairs: Any, streaming: bool) -> None:
    async with pairs() as r:
        prefill, decode = r.workers
        prefill.refuse = lambda q: error(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "no", field="prompt_token_ids"
        )
        answer = await post(r, stream=streaming)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
        assert not decode.requests
        await r.router.until(lambda: len(r.router.releases) == 1)
        assert r.router.releases[0].attempt_id == r.router.issued[0]
        assert not r.router.releases[0].worker_unreachable
        await assert_quiet(r, invalid=1)


async def test_stale_handle_is_a_recompute(pairs: Any, text_of: Any) -> None:
    """What the prefill worker held is gone when the decode worker comes."""
    async with pairs(interval_s=None) as r:
        prefill, decode = r.workers
        task = asyncio.create_task(post(r))
        await prefill.until(lambda: len(prefill.running) == 1)
        prefill.step()
        await decode.until(lambda: len(decode.running) == 1)
        prefill.held.clear()
        decode.step(TOKENS)
        answer = await task
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert "x-forebay-prefill-worker" not in answer.headers
        assert await r.metric("transfers_total", result="unused") == 1
        await assert_quiet(r, done=1)


async def test_decode_worker_out_of_reach(pairs: Any, text_of: Any) -> None:
    """What nobody was given is let go of, and the next pair gets another leg, which hits."""
    async with pairs(decode=2) as r:
        prefill, dead, decode = r.workers
        await r.lose(dead)
        answer = await post(r)
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        assert answer.headers["x-forebay-worker"] == "d1"
        assert answer.headers["x-forebay-prefill-worker"] == "p0"
        first, second = prefill.requests
        await prefill.until(lambda: prefill.released == [f"kv-{first.request_id}"])
        assert decode.requests[0].transfer.request_id == f"kv-{second.request_id}"
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        release = r.router.releases[0]
        assert release.worker_unreachable and release.worker.id == "d0"
        await assert_quiet(r, done=2)


async def test_decode_worker_lost_with_the_handle(pairs: Any, text_of: Any) -> None:
    async with pairs(decode=2, interval_s=None) as r:
        prefill, first, second = r.workers
        task = asyncio.create_task(post(r))
        await prefill.until(lambda: len(prefill.running) == 1)
        prefill.step()
        await first.until(lambda: len(first.running) == 1)
        await first.kill()
        await prefill.until(lambda: len(prefill.running) == 1)
        prefill.step()
        await second.until(lambda: len(second.running) == 1)
        second.step(TOKENS)
        answer = await task
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        assert not prefill.released  # the dead one was told of it: only the lease knows
        assert prefill.held.pop(f"kv-{prefill.requests[0].request_id}")
        assert r.router.requests[1].excluded_workers == ["d0"]
        assert await r.metric("transfers_total", result="failed") == 1
        first._sessions.clear()
        await assert_quiet(r, done=2)


async def test_decode_worker_lost_mid_stream(pairs: Any, text_of: Any) -> None:
    async with pairs(decode=2, interval_s=None) as r:
        prefill, first, second = r.workers
        body = completion_body("tiny", PROMPT, max_tokens=TOKENS)
        seen = asyncio.Event()
        task = asyncio.create_task(
            stream(r.client, "/v1/completions", body, on_chunk=lambda _: seen.set())
        )
        await prefill.until(lambda: len(prefill.running) == 1)
        prefill.step()
        await first.until(lambda: len(first.running) == 1)
        first.step(2)
        await seen.wait()
        await first.kill()
        await prefill.until(lambda: len(prefill.running) == 1)
        prior = list(prefill.requests[1].prior_output_token_ids)
        assert prior and prior == expected_tokens(PROMPT, TOKENS)[: len(prior)]
        prefill.step()
        await second.until(lambda: len(second.running) == 1)
        assert second.requests[0].transfer.tokens == len(PROMPT) + len(prior)
        second.step(TOKENS - len(prior))
        result = await task
        assert result.text() == text_of(expected_tokens(PROMPT, TOKENS))
        assert result.finish_reasons() == ["length"]
        first._sessions.clear()
        await assert_quiet(r, done=2)


async def test_decode_worker_that_refuses_is_no_owner(pairs: Any) -> None:
    async with pairs(decode=2) as r:
        prefill, draining, _ = r.workers
        draining.refuse = lambda q: error(grpc.StatusCode.UNAVAILABLE, "DRAINING")
        answer = await post(r)
        assert answer.status_code == 200 and answer.headers["x-forebay-worker"] == "d1"
        first = prefill.requests[0].request_id
        await prefill.until(lambda: prefill.released == [f"kv-{first}"])
        await assert_quiet(r, done=2)


async def test_engine_that_fails_over_a_handle(pairs: Any, text_of: Any) -> None:
    async with pairs() as r:
        prefill, decode = r.workers
        decode.refuse = lambda q: (
            error(grpc.StatusCode.INTERNAL, "ENGINE_ERROR") if q.HasField("transfer") else None
        )
        answer = await post(r)
        assert answer.json()["choices"][0]["text"] == text_of(expected_tokens(PROMPT, TOKENS))
        assert r.router.requests[1].whole and r.router.requests[1].admitted
        assert len(prefill.requests) == 1
        prefill.held.clear()  # by its lease: that engine was told
        await assert_quiet(r, done=1)


class Gone:
    """A client that can leave."""

    def __init__(self, r: Any, streaming: bool) -> None:
        self.r = r
        self.body = completion_body("tiny", PROMPT, max_tokens=500, stream=streaming)

    async def __aenter__(self) -> "Gone":
        _, self.writer = await send(self.r.port, self.body, "/v1/completions")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def leave(self) -> float:
        self.writer.close()
        return asyncio.get_running_loop().time()


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
async def test_client_leaves_during_the_prefill(pairs: Any, streaming: bool) -> None:
    async with pairs(interval_s=None) as r:
        prefill, decode = r.workers
        async with Gone(r, streaming) as client:
            await prefill.until(lambda: len(prefill.running) == 1)
            left = client.leave()
            await prefill.until(lambda: len(prefill.aborted) == 1)
        assert prefill.aborted[0][1] - left < PROMISE_S
        await r.router.until(lambda: len(r.router.releases) == 1)
        assert r.router.releases[0].attempt_id == r.router.issued[0]
        assert not decode.requests
        await assert_quiet(r, left=1)


async def test_client_leaves_while_the_end_of_the_prefill_is_under_way(pairs: Any) -> None:
    """The abort crosses the last delta: the handle that comes is let go of."""
    async with pairs(interval_s=None) as r:
        prefill, decode = r.workers
        async with Gone(r, True) as client:
            await prefill.until(lambda: len(prefill.running) == 1)
            name = f"kv-{prefill.requests[0].request_id}"
            prefill.deaf = True
            client.leave()
            await until(lambda: r.metric("requests_in_flight"), lambda n: n == 0, within_s=5)
            prefill.step()
            await prefill.until(lambda: prefill.released == [name])
        assert not decode.requests
        await assert_quiet(r, left=1)


async def test_client_leaves_between_the_legs(pairs: Any, tiny_model_path: Path) -> None:
    """While the decode worker is being connected."""
    stopped = socket.create_server(("127.0.0.1", 0))
    silent = TokenWorker("d9", tiny_model_path)
    silent.port = stopped.getsockname()[1]
    async with pairs(interval_s=None, connect_timeout_s=30) as r:
        prefill = r.workers[0]
        r.discovery.put(silent.instance)
        r.router.decide = lambda q: pair(q, [prefill.instance], [silent.instance])
        async with Gone(r, True) as client:
            await prefill.until(lambda: len(prefill.running) == 1)
            prefill.step()
            done = {"result": "done"}
            await until(lambda: r.metric("prefill_legs_total", **done), within_s=5)
            left = client.leave()
            await prefill.until(lambda: len(prefill.released) == 1)
            assert asyncio.get_running_loop().time() - left < PROMISE_S
        await r.router.until(lambda: len(r.router.releases) == 1)
        assert r.router.releases[0].attempt_id == r.router.issued[0]
        assert not r.router.releases[0].worker_unreachable
        await assert_quiet(r, done=1)
    stopped.close()


@pytest.mark.parametrize("reading", [True, False], ids=["decoding", "queued"])
async def test_client_leaves_during_the_decode(pairs: Any, reading: bool) -> None:
    async with pairs(interval_s=None) as r:
        prefill, decode = r.workers
        async with Gone(r, True) as client:
            await prefill.until(lambda: len(prefill.running) == 1)
            prefill.step()
            await decode.until(lambda: len(decode.running) == 1)
            if reading:
                decode.step(3)
            left = client.leave()
            await decode.until(lambda: len(decode.aborted) == 1)
        assert decode.aborted[0][1] - left < PROMISE_S
        assert not prefill.aborted and not prefill.released and not r.router.releases
        if not reading:
            prefill.held.clear()  # by its lease: the decode worker was told
        await assert_quiet(r, done=1)


async def test_two_hundred_cancelled(pairs: Any) -> None:
    """In all phases at once; gauges are exactly zero afterwards, and nothing is held."""
    async with pairs(interval_s=None) as r, AsyncExitStack() as stack:
        prefill, decode = r.workers
        clients = [Gone(r, i % 2 == 0) for i in range(200)]
        for client in clients[:100]:
            await stack.enter_async_context(client)
        await prefill.until(lambda: len(prefill.running) == 100)
        prefill.step()
        await decode.until(lambda: len(decode.running) == 100)
        decode.step()
        assert not prefill.held
        for client in clients[100:]:
            await stack.enter_async_context(client)
        await prefill.until(lambda: len(prefill.running) == 100)
        for client in clients:
            client.leave()
        await prefill.until(lambda: len(prefill.aborted) == 100)
        await decode.until(lambda: len(decode.aborted) == 100)
        await until(lambda: r.metric("requests_in_flight"), lambda n: n == 0, within_s=5)
        await assert_quiet(r, done=100, left=100)
        await r.router.until(lambda: len(r.router.releases) == 100)


async def test_deadline_during_the_prefill(pairs: Any) -> None:
    async with pairs(interval_s=None, request_timeout_s=0.3) as r:
        prefill = r.workers[0]
        answer = await post(r)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        await prefill.until(lambda: len(prefill.aborted) == 1)
        assert 0 < prefill.requests[0].deadline_ms <= 300
        await assert_quiet(r, left=1)


async def test_keep_alive_during_the_prefill(pairs: Any) -> None:
    """A stream's client hears of us while the prompt is computed."""
    async with pairs(interval_s=None, sse_keep_alive_s=0.05) as r:
        prefill, decode = r.workers
        reader, writer = await send(
            r.port, completion_body("tiny", PROMPT, max_tokens=2, stream=True), "/v1/completions"
        )
        await prefill.until(lambda: len(prefill.running) == 1)
        head = await reader.readuntil(b": keep-alive\n\n")
        assert b"x-forebay-worker: d0" in head
        prefill.step()
        await decode.until(lambda: len(decode.running) == 1)
        decode.step(2)
        assert b"[DONE]" in await reader.readuntil(b"[DONE]")
        writer.close()
        await writer.wait_closed()
        await until(lambda: r.metric("requests_in_flight"), lambda n: n == 0, within_s=5)
        await assert_quiet(r, done=1)


async def test_answer_that_comes_too_late(pairs: Any) -> None:
    """A pair for which nobody waits any more: both bookings are given back."""
    async with pairs(router_timeout_s=30) as r:
        prefill, decode = (w.instance for w in r.workers)
        r.router.later = asyncio.Event()
        r.router.decide = lambda q: router_pb2.RouteWaiting(at_most_ms=60_000)
        async with Gone(r, True) as client:
            await r.router.until(lambda: r.router.signs > 0)
            client.leave()
            await until(lambda: r.metric("requests_in_flight"), lambda n: n == 0, within_s=5)
        r.router.decide = lambda q: pair(q, [prefill], [decode])
        r.router.later.set()
        await r.router.until(lambda: len(r.router.releases) == 2)
        assert {x.attempt_id for x in r.router.releases} == {*r.router.issued}
        assert len(r.router.issued) == 2
