"""Whatever a client sends, it is served or told its mistake: no 5xx, and the next one works."""

import json
import random
from typing import Any

import pytest

from tests.support.client import chat_body, completion_body

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2.5, 1e308, 10**30, -(10**30), "", "x", "x\ud83d", "\x00", "4",
    [], [None], [[]], {}, {"a": 1}, {"": None}, [1, 2, 3], [-1], [10**12], ["a", 1], [{"x": []}],
    "\U0001f600" * 50, " " * 5000, {"type": "text"}, [{"type": "text", "text": "\udcf0"}],
]  # fmt: skip
FIELDS = [
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "n", "temperature"),
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "min_tokens", "logprobs", "top_logprobs", "logit_bias"),
    *("stream", "stream_options", "echo", "user", "priority", "cache_salt", "ignore_eos", "tools"),
    *("allowed_token_ids", "skip_special_tokens", "include_stop_str_in_output", "response_format"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "request_id"),
    *("tool_choice", "best_of", "suffix", "metadata", "store", "service_tier", "modalities"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_no_5xx(rig: Any, path: str) -> None:
    rng = random.Random(7)
    async with rig() as r:
        statuses: dict[int, int] = {}
        for _ in range(400):
            body = (
                chat_body("tiny", "hi", max_tokens=2)
                if "chat" in path
                else completion_body("tiny", "hi", max_tokens=2)
            )
            for field in rng.sample(FIELDS, rng.choice((1, 1, 1, 2, 3))):
                body[field] = rng.choice(ODD)
            answer = await r.client.post(path, content=json.dumps(body))
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, body
                assert error["type"] == "invalid_request_error"
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert statuses[200] > 20 and statuses[400] > 100
        assert await r.metric("requests_in_flight") == 0.0


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1E400"])
async def test_numbers_that_are_none(rig: Any, raw: str) -> None:
    async with rig() as r:
        body = json.dumps(chat_body("tiny", "hi")).replace(
            '"temperature": 0', f'"temperature": {raw}'
        )
        assert raw in body
        answer = await r.client.post("/v1/chat/completions", content=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "temperature"


async def test_a_few_bad_ones_then_a_good_one(rig: Any) -> None:
    """Mistakes of clients open no breaker and count against no worker."""
    async with rig() as r:
        for _ in range(5):
            bad = await r.client.post(
                "/v1/chat/completions", json=chat_body("tiny", "hi", stream="yes")
            )
            assert bad.status_code == 400
        good = await r.client.post(
            "/v1/chat/completions", json=chat_body("tiny", "hi", max_tokens=1)
        )
        assert good.status_code == 200
        assert not r.router.releases
