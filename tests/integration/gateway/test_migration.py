"""A worker is lost on the way: its sequences go on elsewhere, or the client is told."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.worker.v1 import worker_pb2 as pb

from tests.fakes.router import FakeRouter, choose
from tests.fakes.token_worker import TokenWorker, error, expected_tokens
from tests.support.client import completion_body, stream
from tests.support.polling import until

PROMPT = list(range(10, 80))


@pytest.fixture
def text_of(tiny_model_path: Path) -> Any:
    """The text of token ids, by the tokenizers library itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))
    return lambda token_ids: tokenizer.decode(token_ids, skip_special_tokens=True)


async def test_killed_mid_stream(rig: Any, text_of: Any) -> None:
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        options = {"include_usage": True}
        body = completion_body("tiny", PROMPT, max_tokens=20, stream_options=options)
        seen = asyncio.Event()
        task = asyncio.create_task(
            stream(r.client, "/v1/completions", body, on_chunk=lambda _: seen.set())
        )
        await first.until(lambda: len(first.running) == 1)
        first.step(7)
        await seen.wait()
        await first.kill()
        await second.until(lambda: len(second.running) == 1)
        resumed = second.requests[0]
        prior = list(resumed.prior_output_token_ids)
        assert prior == expected_tokens(PROMPT, 20)[: len(prior)] and 0 < len(prior) <= 7
        assert list(resumed.prompt_token_ids) == PROMPT
        assert resumed.sampling.max_tokens == 20 - len(prior)
        second.step(20 - len(prior))
        result = await task
        assert result.done and result.error is None
        assert result.text() == text_of(expected_tokens(PROMPT, 20))
        assert result.finish_reasons() == ["length"]
        assert result.usage["prompt_tokens"] == len(PROMPT)
        assert result.usage["completion_tokens"] == 20
        assert await r.metric("migrations_total", result="resumed") == 1.0
        route = r.router.requests[-1]
        assert route.excluded_workers == ["w0"] and route.prompt_tokens == len(PROMPT) + len(prior)
        assert len(route.block_hashes) == (len(PROMPT) + len(prior)) // 32


async def test_n_choices_move_together(rig: Any, text_of: Any) -> None:
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        body = completion_body("tiny", PROMPT, max_tokens=9, n=3)
        task = asyncio.create_task(r.client.post("/v1/completions", json=body))
        await first.until(lambda: len(first.running) == 3)
        attempts = [q.attempt_id for q in first.requests]
        assert attempts == [attempts[0], f"{attempts[0]}#1", f"{attempts[0]}#2"]
        assert r.router.requests[0].sequences == 3
        first.step(2)
        await first.kill()
        await second.until(lambda: len(second.running) == 3)
        second.step(9)
        answer = (await task).json()
        assert [c["text"] for c in answer["choices"]] == [text_of(expected_tokens(PROMPT, 9))] * 3
        assert answer["usage"]["completion_tokens"] == 27
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)


async def test_unsupported_ends_a_stream_with_an_error(rig: Any) -> None:
    """Never a changed answer that looks whole."""
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        second.refuse = lambda q: (
            error(grpc.StatusCode.FAILED_PRECONDITION, "RESUME_UNSUPPORTED", "seed")
            if q.prior_output_token_ids
            else None
        )
        body = completion_body("tiny", PROMPT, max_tokens=9, seed=1, temperature=1.0)
        seen = asyncio.Event()
        task = asyncio.create_task(
            stream(r.client, "/v1/completions", body, on_chunk=lambda _: seen.set())
        )
        await first.until(lambda: len(first.running) == 1)
        first.step(2)
        await seen.wait()
        await first.kill()
        result = await task
        assert not result.done and result.finish_reasons() == []
        assert result.error is not None and result.error["code"] == "worker_lost"
        assert await r.metric("migrations_total", result="unsupported") == 1.0


async def test_unsupported_starts_anew_when_nothing_was_shown(rig: Any, text_of: Any) -> None:
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        second.refuse = lambda q: (
            error(grpc.StatusCode.FAILED_PRECONDITION, "RESUME_UNSUPPORTED", "seed")
            if q.prior_output_token_ids
            else None
        )
        body = completion_body("tiny", PROMPT, max_tokens=5, seed=1, temperature=1.0)
        task = asyncio.create_task(r.client.post("/v1/completions", json=body))
        await first.until(lambda: len(first.running) == 1)
        first.step(2)
        tokens = "time_to_first_token_seconds_count"
        await until(
            lambda: r.metric(tokens, model="tiny"), within_s=10, what="tokens at the gateway"
        )
        await first.kill()
        await second.until(lambda: len(second.running) == 1)
        assert not second.running[0].request.prior_output_token_ids
        second.step(5)
        answer = (await task).json()
        assert answer["choices"][0]["text"] == text_of(expected_tokens(PROMPT, 5))
        assert answer["usage"]["completion_tokens"] == 5
        assert await r.metric("migrations_total", result="restarted") == 1.0


async def test_seeded_without_a_token_is_simply_retried(rig: Any) -> None:
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        body = completion_body("tiny", PROMPT, max_tokens=2, seed=1, temperature=1.0)
        task = asyncio.create_task(stream(r.client, "/v1/completions", body))
        await first.until(lambda: len(first.running) == 1)
        await first.kill()
        await second.until(lambda: len(second.running) == 1)
        assert second.requests[0].sampling.max_tokens == 2
        second.step(2)
        assert (await task).done


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "DRAINING"),
        (grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    ],
)
async def test_refused_by_one_is_taken_to_another(rig: Any, code: Any, reason: str) -> None:
    async with rig(workers=2) as r:
        r.workers[0].refuse = lambda q: error(code, reason)
        answer = await r.client.post(
            "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2)
        )
        assert answer.status_code == 200, answer.text
        assert len(r.workers[1].requests) == 1
        assert answer.headers["x-forebay-worker"] == "w1"


async def test_aborted_by_the_worker(rig: Any) -> None:
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        task = asyncio.create_task(
            r.client.post("/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2))
        )
        await first.until(lambda: len(first.running) == 1)
        first.say(
            first.requests[0].request_id,
            pb.RequestDelta(finish_reason=pb.FINISH_REASON_ABORT),
        )
        await second.until(lambda: len(second.running) == 1)
        second.step(2)
        assert (await task).status_code == 200


async def test_given_up_after_the_last_migration(rig: Any) -> None:
    async with rig(workers=5, max_migrations=2) as r:
        for worker in r.workers:
            worker.refuse = lambda q: error(grpc.StatusCode.UNAVAILABLE, "DRAINING")
        answer = await r.client.post(
            "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2)
        )
        assert answer.status_code == 503 and "retry-after" in answer.headers
        assert [len(w.requests) for w in r.workers] == [1, 1, 1, 0, 0]
        assert await r.metric("migrations_total", result="exhausted") == 1.0


async def test_clients_mistake_is_no_workers_failure(rig: Any) -> None:
    """A 400 from the worker is the client's, at once, and nobody else is asked."""
    async with rig(workers=2) as r:
        r.workers[0].refuse = lambda q: error(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", "too hot", field="temperature"
        )
        for streaming in (False, True):
            answer = await r.client.post(
                "/v1/completions", json=completion_body("tiny", PROMPT, stream=streaming)
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "temperature"
            assert answer.json()["error"]["type"] == "invalid_request_error"
        assert not r.workers[1].requests and not r.router.releases
        r.workers[0].refuse = lambda q: None
        good = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert good.status_code == 200


async def test_engine_error_is_told(rig: Any) -> None:
    async with rig() as r:
        r.worker.refuse = lambda q: error(grpc.StatusCode.INTERNAL, "ENGINE_ERROR", "boom")
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"
        assert "boom" not in answer.text


async def test_refused_connection(rig: Any, tiny_model_path: Path) -> None:
    """The worker's port is closed: another one takes it at once, and the router hears of it."""
    workers = [TokenWorker(f"w{i}", tiny_model_path) for i in range(2)]
    router = FakeRouter("r0", lambda q: choose(q, [w.instance for w in workers]))
    async with rig(workers=workers, router=router) as r:
        await r.lose(r.workers[0])
        answer = await r.client.post(
            "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2)
        )
        assert answer.status_code == 200
        assert answer.headers["x-forebay-worker"] == "w1"
        await router.until(lambda: len(router.releases) == 1)
        release = router.releases[0]
        assert release.worker_unreachable and release.worker.id == "w0"
        assert release.worker.incarnation == workers[0].incarnation
        assert release.attempt_id == router.issued[0]


async def test_last_word_lost(rig: Any, text_of: Any) -> None:
    """All tokens came and only the finish is missing: the answer is whole."""
    async with rig(workers=2, interval_s=None) as r:
        first, second = r.workers
        task = asyncio.create_task(
            r.client.post("/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=3))
        )
        await first.until(lambda: len(first.running) == 1)
        tokens = expected_tokens(PROMPT, 3)
        first.say(first.requests[0].request_id, pb.RequestDelta(token_ids=tokens, cached_tokens=0))
        first.say(
            first.requests[0].request_id, pb.RequestDelta(finish_reason=pb.FINISH_REASON_ABORT)
        )
        answer = (await task).json()
        assert answer["choices"][0]["text"] == text_of(tokens)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert not second.requests


async def test_worker_restarts_in_place(rig: Any, tiny_model_path: Path) -> None:
    """Another incarnation on the same id and port is met by a new session."""
    async with rig() as r:
        old = r.worker
        await old.kill()
        async with TokenWorker("w0", tiny_model_path, port=old.port) as new:
            r.discovery.put(new.instance)
            answer = await r.client.post(
                "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2)
            )
            assert answer.status_code == 200 and len(new.requests) == 1


async def test_silent_worker(rig: Any, text_of: Any) -> None:
    """No frame for stall_timeout_s while it has our requests: they go elsewhere."""
    async with rig(workers=2, interval_s=None, stall_timeout_s=0.3) as r:
        first, second = r.workers
        task = asyncio.create_task(
            r.client.post("/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=4))
        )
        await first.until(lambda: len(first.running) == 1)
        first.step()
        await second.until(lambda: len(second.running) == 1)
        second.step(4)
        answer = (await task).json()
        assert answer["choices"][0]["text"] == text_of(expected_tokens(PROMPT, 4))


async def test_worker_without_a_sign_of_life(rig: Any, text_of: Any) -> None:
    """A session that gave signs of life and gives none any more is over, long before it stalls."""
    async with rig(workers=2, interval_s=None, silence_timeout_s=3) as r:
        first, second = r.workers
        body = completion_body("tiny", PROMPT, max_tokens=4)
        task = asyncio.create_task(r.client.post("/v1/completions", json=body))
        await first.until(lambda: len(first.running) == 1)
        first.step()
        first.sign()
        await second.until(lambda: len(second.running) == 1)
        second.step(4)
        answer = (await task).json()
        assert answer["choices"][0]["text"] == text_of(expected_tokens(PROMPT, 4))


async def test_vanished_record_removes_nobody(rig: Any) -> None:
    """etcd may come back empty: a worker whose connection lives is still served from."""
    async with rig() as r:
        r.discovery.drop(r.worker.instance)
        for _ in range(3):
            answer = await r.client.post(
                "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=1)
            )
            assert answer.status_code == 200
        await r.worker.kill()
        await until(lambda: r.client.get("/v1/models"), lambda a: not a.json()["data"], within_s=5)
        answer = await r.client.post("/v1/completions", json=completion_body("tiny", PROMPT))
        assert answer.status_code == 503 and answer.headers["retry-after"]


async def test_slow_is_not_refused(rig: Any, tiny_model_path: Path) -> None:
    """A worker that accepts and says nothing (stopped, or busy) is avoided, not called gone."""
    stopped = socket.create_server(("127.0.0.1", 0))
    workers = [TokenWorker("w1", tiny_model_path)]
    silent = TokenWorker("w0", tiny_model_path)
    silent.port = stopped.getsockname()[1]
    router = FakeRouter("r0", lambda q: choose(q, [silent.instance, workers[0].instance]))
    async with rig(workers=workers, router=router, connect_timeout_s=0.3) as r:
        r.discovery.put(silent.instance)
        answer = await r.client.post(
            "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2)
        )
        assert answer.status_code == 200 and answer.headers["x-forebay-worker"] == "w1"
        await router.until(lambda: len(router.releases) == 1)
        assert not router.releases[0].worker_unreachable
    stopped.close()


async def test_refused_by_another_life(rig: Any) -> None:
    """The router means a worker's next life, which we don't know yet: that one is not blamed."""
    async with rig(workers=2) as r:
        first, second = r.workers
        await r.lose(first)
        r.router.decide = lambda q: choose(
            q, [replace(first.instance, incarnation=77), second.instance]
        )
        answer = await r.client.post(
            "/v1/completions", json=completion_body("tiny", PROMPT, max_tokens=2)
        )
        assert answer.status_code == 200
        await r.router.until(lambda: len(r.router.releases) == 1)
        assert not r.router.releases[0].worker_unreachable
