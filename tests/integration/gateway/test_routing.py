"""Routers: asked first, left when they fail, done without when none is there."""

import asyncio
from typing import Any

import grpc
import pytest
from forebay.router.v1 import router_pb2

from services.common.blocks import block_keys
from tests.fakes.router import FakeRouter, choose
from tests.support.client import chat_body, completion_body, stream
from tests.support.polling import until

PROMPT = list(range(100, 200))


async def ask(r: Any, **extra: Any) -> Any:
    body = completion_body("tiny", PROMPT, max_tokens=1, **extra)
    return await r.client.post("/v1/completions", json=body)


async def test_what_the_router_is_asked(rig: Any) -> None:
    async with rig() as r:
        answer = await ask(r, cache_salt="s", priority=3, n=2)
        assert answer.status_code == 200
        route = r.router.requests[0]
        work = r.worker.requests[0]
        assert list(route.block_hashes) == block_keys(PROMPT, 32, cache_salt=work.cache_salt)
        assert work.cache_salt and work.cache_salt != "s"
        assert (route.model, route.block_size_tokens, route.prompt_tokens) == ("tiny", 32, 100)
        assert (route.sequences, route.priority, route.expected_output_tokens) == (2, -3, 1)
        assert work.priority == 3
        assert route.request_id == answer.headers["x-request-id"]
        assert work.attempt_id == r.router.issued[0]
        assert work.client_request_id == answer.headers["x-request-id"]


async def test_what_headers_say_of_where_it_runs(rig: Any) -> None:
    headers = {
        "x-session-id": "s1",
        "x-forebay-worker": "w0/2",
        "x-forebay-exclude": "w7",
        "x-forebay-labels": "zone=a",
    }
    body = completion_body("tiny", PROMPT, max_tokens=1)
    async with rig() as r:
        answer = await r.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        route = r.router.requests[0]
        assert (route.session_id, route.pinned_worker, route.pinned_rank) == ("s1", "w0", 2)
        assert list(route.excluded_workers) == ["w7"]
        assert dict(route.required_labels) == {"zone": "a"}
        await ask(r)
        route = r.router.requests[1]
        assert not (route.session_id or route.pinned_worker or route.HasField("pinned_rank"))
        bad = await r.client.post(
            "/v1/completions", json=body, headers={"x-forebay-labels": "zone"}
        )
        assert bad.status_code == 400
        assert bad.json()["error"]["param"] == "x-forebay-labels"
    async with rig(routing_headers=False) as r:
        answer = await r.client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        route = r.router.requests[0]
        assert not (route.session_id or route.pinned_worker or route.required_labels)


async def test_second_turn_hits(rig: Any) -> None:
    """A chat goes by the same tokens as everything else, and its usage tells the truth."""
    async with rig() as r:
        instance = r.worker.instance
        r.router.decide = lambda q: choose(q, [instance], predicted=64)
        long = "once upon a time " * 40
        body = chat_body("tiny", long, max_tokens=20)
        first = (await r.client.post("/v1/chat/completions", json=body)).json()
        body = chat_body("tiny", long, first["choices"][0]["message"]["content"], "and then?")
        answer = await r.client.post("/v1/chat/completions", json={**body, "max_tokens": 2})
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached >= first["usage"]["prompt_tokens"] // 32 * 32 - 32 > 0
        assert answer.headers["x-forebay-cached-tokens"] == str(cached)
        assert answer.headers["x-forebay-predicted-cached-tokens"] == "64"
        one, two = r.router.requests
        shared = len(one.block_hashes)
        assert list(two.block_hashes[: shared - 1]) == list(one.block_hashes[: shared - 1])
        assert await r.metric("cached_tokens_total", model="tiny") == cached
        assert await r.metric("predicted_cached_tokens_total", model="tiny") == 128


async def test_headers_can_be_switched_off(rig: Any) -> None:
    async with rig(response_headers=False) as r:
        answer = await ask(r)
        assert not [h for h in answer.headers if h.startswith("x-forebay")]
        assert answer.headers["x-request-id"]


async def test_no_router(rig: Any) -> None:
    """Least-loaded from discovery, with a metric."""
    async with rig(workers=2, router=False, interval_s=None) as r:
        tasks = [asyncio.create_task(ask(r)) for _ in range(8)]
        for worker in r.workers:
            await worker.until(lambda w=worker: len(w.running) == 4)  # type: ignore[misc]
            worker.step()
        answers = await asyncio.gather(*tasks)
        assert {a.status_code for a in answers} == {200}
        assert await r.metric("router_fallback_total", reason="NO_ROUTER") == 8.0
        assert await r.metric("router_connected") == 0.0


async def test_router_dies(rig: Any) -> None:
    async with rig() as r:
        assert (await ask(r)).status_code == 200
        await r.router.kill()
        for _ in range(3):
            assert (await ask(r)).status_code == 200
        assert len(r.router.requests) == 1


async def test_another_router_takes_over(rig: Any) -> None:
    async with rig() as r:
        instance = r.worker.instance
        async with FakeRouter("r1", lambda q: choose(q, [instance])) as other:
            r.discovery.put(other.instance)
            await r.router.kill()
            await other.until(lambda: other.streams == 1)
            assert (await ask(r)).status_code == 200
            assert len(other.requests) == 1


async def test_router_dies_with_a_question(rig: Any) -> None:
    """The question is asked again at the next router, not lost."""
    silent = FakeRouter("r0", lambda q: None)
    async with rig(router=silent, router_timeout_s=20) as r:
        instance = r.worker.instance
        task = asyncio.create_task(ask(r))
        await silent.until(lambda: len(silent.requests) == 1)
        async with FakeRouter("r1", lambda q: choose(q, [instance])) as other:
            r.discovery.put(other.instance)
            await silent.kill()
            assert (await task).status_code == 200
            assert len(other.requests) == 1


async def test_silent_router_is_left(rig: Any) -> None:
    silent = FakeRouter("r0", lambda q: None)
    async with rig(router=silent, router_timeout_s=0.2) as r:
        instance = r.worker.instance
        assert (await ask(r)).status_code == 200
        assert await r.metric("router_fallback_total", reason="ROUTER_TIMEOUT") == 1.0
        async with FakeRouter("r1", lambda q: choose(q, [instance])) as other:
            r.discovery.put(other.instance)
            for _ in range(50):
                assert (await ask(r)).status_code == 200
                if other.requests:
                    break
            assert other.requests


async def test_draining_router_is_left(rig: Any) -> None:
    from dataclasses import replace

    async with rig() as r:
        instance = r.worker.instance
        async with FakeRouter("r1", lambda q: choose(q, [instance])) as other:
            r.discovery.put(other.instance)
            r.discovery.put(replace(r.router.instance, draining=True))
            await other.until(lambda: other.streams == 1)
            assert (await ask(r)).status_code == 200
            assert len(other.requests) == 1 and not r.router.requests


@pytest.mark.parametrize("reason", ["NO_WORKER", "MODEL_NOT_FOUND", "INVALID_ARGUMENT"])
async def test_router_knows_less_than_we(rig: Any, reason: str) -> None:
    """A router that has just started sees nobody yet: our living session is used."""
    codes = {
        "NO_WORKER": grpc.StatusCode.UNAVAILABLE,
        "MODEL_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
        "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    }
    failure = router_pb2.RouteFailure(code=codes[reason].value[0], reason=reason, message="no")
    async with rig(router=FakeRouter("r0", lambda q: failure)) as r:
        assert (await ask(r)).status_code == 200
        assert await r.metric("router_fallback_total", reason=reason) == 1.0


async def test_overload_is_the_routers_word(rig: Any) -> None:
    failure = router_pb2.RouteFailure(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0],
        reason="OVERLOADED",
        message="every wait is above the limit",
        retry_after_ms=2500,
    )
    async with rig(router=FakeRouter("r0", lambda q: failure)) as r:
        for streaming in (False, True):
            answer = await ask(r, stream=streaming)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "3"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert not r.worker.requests


async def test_no_worker(rig: Any) -> None:
    async with rig() as r:
        await r.worker.kill()
        result = await stream(r.client, "/v1/completions", completion_body("tiny", PROMPT))
        assert result.status == 503
        assert int(result.headers["retry-after"]) >= 1
        assert result.error is not None and result.error["code"] == "no_worker"
        assert (await r.client.get("/health")).status_code == 503
        assert (await r.client.get("/live")).status_code == 200


async def test_given_routers(rig: Any) -> None:
    """router_addresses wins over discovery."""
    async with rig(workers=1) as outer:
        instance = outer.worker.instance
        async with FakeRouter("r9", lambda q: choose(q, [instance])) as given:
            address = f"127.0.0.1:{given.port}"
            async with rig(workers=[], router_addresses=address) as r:
                r.discovery.put(instance)
                ready = lambda a: a.status_code == 200  # noqa: E731
                await until(lambda: r.client.get("/ready"), ready, within_s=10)
                assert (await ask(r)).status_code == 200
                assert len(given.requests) == 1 and not r.router.requests


async def test_adapter(rig: Any, tiny_model_path: Any) -> None:
    """An adapter is a model of its own: other hashes, the same worker."""
    from services.common.blocks import HashedAdapter
    from services.common.cards import Adapter
    from tests.fakes.token_worker import TokenWorker

    worker = TokenWorker("w0", tiny_model_path, adapters=(Adapter("org/lora", "/adapters/abc"),))
    async with rig(workers=[worker]) as r:
        answer = await r.client.post(
            "/v1/completions", json=completion_body("org/lora", PROMPT, max_tokens=1)
        )
        assert answer.status_code == 200 and answer.json()["model"] == "org/lora"
        request = worker.requests[0]
        assert (request.model, request.adapter) == ("org/lora", "org/lora")
        keys = block_keys(PROMPT, 32, adapter=HashedAdapter("org/lora", "/adapters/abc"))
        assert list(r.router.requests[0].block_hashes) == keys
        for path in ("/v1/models/org/lora", "/v1/models/org%2Flora"):
            model = await r.client.get(path)
            assert model.status_code == 200 and model.json()["parent"] == "tiny"


async def test_a_request_that_waits_for_room_is_given_the_time_it_was_told(rig: Any) -> None:
    """Not taken for a silent router, nor for one that keeps us waiting; a client's end is told."""
    waits = router_pb2.RouteWaiting(predicted_wait_ms=100, at_most_ms=60_000)
    async with rig(router_timeout_s=20) as r:
        r.router.decide = lambda q: waits
        asking = asyncio.create_task(ask(r))
        await r.router.until(lambda: len(r.router.requests) == 1)
        assert 0 < r.router.requests[0].deadline_ms <= 600_000
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await r.router.until(lambda: len(r.router.cancels) == 1)
        assert r.router.streams == 1


async def test_patience_grows_with_the_wait(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few timeouts are a router's time for an answer; what it says to need comes on top."""
    monkeypatch.setattr("services.gateway.adapters.router._PATIENCE", 1)
    async with rig(router_timeout_s=1.0) as r:
        instance = r.worker.instance
        r.router.later = asyncio.Event()
        r.router.decide = lambda q: router_pb2.RouteWaiting(at_most_ms=60_000)
        asking = asyncio.create_task(ask(r))
        # More than a second of signs of life, each a tenth of a second after the one before.
        await r.router.until(lambda: r.router.signs > 15)
        r.router.decide = lambda q: choose(q, [instance])
        r.router.later.set()
        assert (await asking).status_code == 200
        assert len(r.router.issued) == 1 and r.router.streams == 1
        assert not r.router.cancels
