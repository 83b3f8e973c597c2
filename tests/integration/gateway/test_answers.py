"""Answers of the gateway, plain and streamed, as OpenAI's clients expect them."""

from typing import Any

from tests.fakes.token_worker import expected_tokens
from tests.support.client import chat_body, completion_body, stream


async def test_chat(rig: Any) -> None:
    async with rig() as r:
        answer = await r.client.post(
            "/v1/chat/completions", json=chat_body("tiny", "hi", max_tokens=4)
        )
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 4
        assert answer.headers["x-forebay-worker"] == "w0"


async def test_chat_stream(rig: Any) -> None:
    async with rig() as r:
        body = chat_body("tiny", "hi", max_tokens=6, stream_options={"include_usage": True})
        whole = (
            await r.client.post("/v1/chat/completions", json=chat_body("tiny", "hi", max_tokens=6))
        ).json()
        result = await stream(r.client, "/v1/chat/completions", body)
        assert result.status == 200, result.body
        assert result.done
        assert result.text() == whole["choices"][0]["message"]["content"]
        assert result.finish_reasons() == ["length"]
        assert result.chunks[-1]["choices"] == []
        assert result.usage["completion_tokens"] == 6


async def test_completion_by_ids(rig: Any) -> None:
    async with rig() as r:
        answer = await r.client.post(
            "/v1/completions", json=completion_body("tiny", [[5, 6, 7], [8, 9]], n=2, max_tokens=3)
        )
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [c["index"] for c in choices] == [0, 1, 2, 3]
        assert choices[0]["text"] == choices[1]["text"] != choices[2]["text"]
        assert [list(q.prompt_token_ids) for q in r.worker.requests] == [[5, 6, 7]] * 2 + [
            [8, 9]
        ] * 2
        assert expected_tokens([5, 6, 7], 3)


async def test_stop_string_ends_the_workers_work(rig: Any) -> None:
    async with rig(interval_s=0.005) as r:
        body = completion_body("tiny", [5, 6, 7], max_tokens=500)
        text = (await r.client.post("/v1/completions", json={**body, "max_tokens": 30})).json()
        stop = text["choices"][0]["text"][4:12]
        choice = (await r.client.post("/v1/completions", json={**body, "stop": stop})).json()
        assert choice["choices"][0]["finish_reason"] == "stop"
        await r.worker.until(lambda: len(r.worker.aborted) == 1, 2)
        assert not r.worker.running
