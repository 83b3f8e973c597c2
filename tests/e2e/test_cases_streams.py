"""What a stream must look like, token by token, on the real engine.

Numbers are rows of the case list. The tiny model's output is full of half characters, so every
stream here also tests that none is ever shown.
"""

import asyncio
import statistics
from typing import Any

import httpx
import pytest

from tests.models import EOS_ID
from tests.support.client import (
    StreamResult,
    chat_body,
    completion_body,
    http_client,
    stream,
)
from tests.support.cluster import MODEL, Cluster

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def chat(content: str = "Tell me about sequences", **extra: Any) -> dict[str, Any]:
    return chat_body(MODEL, content, **({"max_tokens": 24} | extra))


def complete(prompt: Any = "The following sections", **extra: Any) -> dict[str, Any]:
    return completion_body(MODEL, prompt, **({"max_tokens": 24} | extra))


def unstreamed(body: dict[str, Any]) -> dict[str, Any]:
    """Options of streams are an error without one."""
    return {k: v for k, v in body.items() if k != "stream_options"}


@pytest.mark.parametrize(
    ("path", "body", "choices", "reason"),
    [
        (CHAT, chat(), 1, "length"),
        (CHAT, chat(n=2, temperature=0.9), 2, "length"),
        (CHAT, chat(logprobs=True, top_logprobs=1), 1, "length"),
        (CHAT, chat(n=2, temperature=0.9, logprobs=True, **USAGE), 2, "length"),
        (CHAT, chat(logit_bias={str(EOS_ID): 100}), 1, "stop"),
        (CHAT, chat(logit_bias={str(EOS_ID): 100}, ignore_eos=True, max_tokens=3), 1, "length"),
        (COMPLETIONS, complete(), 1, "length"),
        (COMPLETIONS, complete(["one", "two"], n=2, temperature=0.9), 4, "length"),
        (COMPLETIONS, complete(logprobs=2), 1, "length"),
        (COMPLETIONS, complete(max_tokens=1), 1, "length"),
    ],
)
async def test_31_exactly_one_finish_reason(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], choices: int, reason: str
) -> None:
    result = await stream(client, path, body)
    assert result.status == 200 and result.done and result.error is None
    assert result.headers["content-type"].split(";")[0] == "text/event-stream"
    assert len({(c["id"], c["model"], c["created"]) for c in result.chunks}) == 1
    assert result.chunks[0]["model"] == MODEL
    for chunk in result.chunks:
        for choice in chunk["choices"]:
            assert "finish_reason" in choice
    seen = {c["index"] for chunk in result.chunks for c in chunk["choices"]}
    assert seen == set(range(choices))
    for index in range(choices):
        assert result.finish_reasons(index) == [reason]
        last = [ch for c in result.chunks for ch in c["choices"] if ch["index"] == index][-1]
        assert last["finish_reason"] == reason, "nothing follows the finish reason"
    plain = (await client.post(path, json=unstreamed(body))).raise_for_status().json()
    assert [c["finish_reason"] for c in plain["choices"]] == [reason] * choices
    if body["temperature"] == 0:
        content = plain["choices"][0]
        assert result.text() == (content["message"]["content"] if path == CHAT else content["text"])


async def test_31_the_first_delta_has_the_role(client: httpx.AsyncClient) -> None:
    result = await stream(client, CHAT, chat(n=2))
    for index in (0, 1):
        deltas = [c["delta"] for k in result.chunks for c in k["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in d or d["role"] == "assistant" for d in deltas)


async def test_32_logprobs_and_finish_reason_and_usage(client: httpx.AsyncClient) -> None:
    body = chat(logprobs=True, top_logprobs=1, **USAGE)
    result = await stream(client, CHAT, body)
    assert result.finish_reasons() == ["length"]
    assert result.chunks[-1]["choices"] == [] and result.chunks[-1]["usage"]
    entries = [
        entry
        for chunk in result.chunks
        for choice in chunk["choices"]
        if choice.get("logprobs")
        for entry in choice["logprobs"]["content"]
    ]
    assert len(entries) == 24 == result.chunks[-1]["usage"]["completion_tokens"]
    for entry in entries:
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 1
        assert entry["top_logprobs"][0]["token"] == entry["token"], "greedy takes the likeliest"
    shown = b"".join(bytes(e["bytes"]) for e in entries)
    assert shown.decode(errors="replace") == result.text()
    plain = (await client.post(CHAT, json=unstreamed(body))).json()["choices"][0]
    assert [e["token"] for e in plain["logprobs"]["content"]] == [e["token"] for e in entries]


@pytest.mark.parametrize(
    ("options", "usage"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_35_the_usage_chunk(
    client: httpx.AsyncClient, path: str, options: Any, usage: bool
) -> None:
    body = (chat if path == CHAT else complete)(stream_options=options)
    result = await stream(client, path, body)
    assert result.done
    *rest, last = result.chunks
    if not usage:
        assert all(c["choices"] and not c.get("usage") for c in result.chunks)
        return
    assert last["choices"] == [] and last["id"] and last["id"] == rest[0]["id"]
    assert (last["model"], last["created"]) == (rest[0]["model"], rest[0]["created"])
    assert all(not c.get("usage") and c["choices"] for c in rest)
    counts = last["usage"]
    assert counts["completion_tokens"] == 24
    assert counts["total_tokens"] == counts["prompt_tokens"] + 24
    plain = (await client.post(path, json=unstreamed(body))).json()["usage"]
    assert plain["prompt_tokens"] == counts["prompt_tokens"]


@pytest.mark.parametrize("seed", range(12))
async def test_37_no_half_characters(client: httpx.AsyncClient, seed: int) -> None:
    body = complete("Grüße 🙂", temperature=1.6, seed=seed, max_tokens=120)
    plain = (await client.post(COMPLETIONS, json=body)).raise_for_status().json()["choices"][0]
    result = await stream(client, COMPLETIONS, body)
    assert result.text() == plain["text"]
    assert result.finish_reasons() == [plain["finish_reason"]]
    # Joined in any grouping the text is the same only if no chunk holds a part of a character:
    # a decoder that emits early would show U+FFFD where the whole text has a character.
    assert result.text().count("\ufffd") == plain["text"].count("\ufffd")


async def test_37_whole_characters_come_through(client: httpx.AsyncClient) -> None:
    """Four forced byte tokens make one emoji: it is shown once, whole, never in halves."""
    emoji = "🙂".encode()
    byte_ids = await _byte_ids(client, emoji)
    # One id allowed at a time can't be asked for; equal bias on all four bytes at temperature 0
    # repeats one of them, so half characters are all there is: each is flushed as U+FFFD.
    body = complete("x", allowed_token_ids=byte_ids[1:2], max_tokens=5)
    plain = (await client.post(COMPLETIONS, json=body)).raise_for_status().json()["choices"][0]
    result = await stream(client, COMPLETIONS, body)
    assert result.text() == plain["text"] == "\ufffd" * 5
    echoed = complete("🙂" * 3, echo=True, max_tokens=1)
    text = (await client.post(COMPLETIONS, json=echoed)).raise_for_status().json()
    assert text["choices"][0]["text"].startswith("🙂🙂🙂")


async def _byte_ids(client: httpx.AsyncClient, raw: bytes) -> list[int]:
    """Ids of single bytes in the tiny tokenizer: specials first, then the sorted byte alphabet."""
    from tokenizers.pre_tokenizers import ByteLevel

    shown = ByteLevel(add_prefix_space=False).pre_tokenize_str(raw.decode())[0][0]
    alphabet = sorted(ByteLevel.alphabet())
    return [3 + alphabet.index(character) for character in shown]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("start", [3, 20, 41])
async def test_38_39_stop_strings_over_tokens(
    client: httpx.AsyncClient, path: str, start: int
) -> None:
    body = (chat if path == CHAT else complete)(max_tokens=60, **USAGE)
    whole = (await stream(client, path, body)).text()
    stop = whole[start : start + 10]
    assert len(stop) == 10
    at = whole.index(stop)
    result = await stream(client, path, {**body, "stop": ["never so", stop]})
    assert result.text() == whole[:at]
    assert result.finish_reasons() == ["stop"]
    for chunk_count in range(1, len(result.chunks)):
        partial = StreamResult(200, result.headers, result.chunks[:chunk_count]).text()
        assert whole[:at].startswith(partial), "text of the stop was shown and taken back"
    assert result.usage is not None and 0 < result.usage["completion_tokens"] < 60
    plain = (await client.post(path, json={**body, "stop": stop, "stream_options": None})).json()
    choice = plain["choices"][0]
    assert (choice["message"]["content"] if path == CHAT else choice["text"]) == whole[:at]
    assert choice["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == result.usage["completion_tokens"]
    kept = await stream(client, path, {**body, "stop": stop, "include_stop_str_in_output": True})
    assert kept.text() == whole[:at] + stop
    assert kept.finish_reasons() == ["stop"]


async def test_38_a_stop_that_only_begins_is_shown_at_the_end(client: httpx.AsyncClient) -> None:
    whole = (await stream(client, COMPLETIONS, complete())).text()
    held = await stream(client, COMPLETIONS, complete(stop=whole[-6:] + "never"))
    assert held.text() == whole
    assert held.finish_reasons() == ["length"]


async def test_52_keep_alive_comments_only_when_idle(cluster: Cluster) -> None:
    cluster.start_gateway("gateway-idle", sse_keep_alive_s=0.2)
    await cluster["gateway-idle"].until_ready()
    blockers: list[asyncio.Task[StreamResult]] = []
    async with http_client(cluster.url("gateway-idle")) as client:
        quick = await stream(client, CHAT, chat())
        assert quick.comments == []
        # Long fresh prompts one behind the other: the last one waits for its first token.
        for i in range(4):
            prompt = [(7 * i + j) % 1500 + 300 for j in range(3900)]
            blockers.append(
                asyncio.create_task(stream(client, COMPLETIONS, complete(prompt, max_tokens=1)))
            )
        results = await asyncio.gather(*blockers)
    assert any(r.comments for r in results)
    for result in results:
        assert result.done and result.finish_reasons() == ["length"]
        assert all(c.startswith(":") for c in result.comments)


async def test_52_none_by_default(client: httpx.AsyncClient) -> None:
    prompt = [(11 * j) % 1500 + 300 for j in range(3900)]
    assert (await stream(client, COMPLETIONS, complete(prompt, max_tokens=1))).comments == []


async def test_53_54_tokens_come_as_they_are_made(client: httpx.AsyncClient) -> None:
    await stream(client, CHAT, chat())
    result = await stream(client, CHAT, chat("count", max_tokens=100))
    gaps = [b - a for a, b in zip(result.times, result.times[1:], strict=False)]
    assert len(result.chunks) > 50, "tokens were held back and sent together"
    assert statistics.median(gaps) < 0.035, "Nagle's algorithm costs 40 ms"
    assert result.times[0] - result.times[-1] < -0.1, "everything came at once"


async def test_30_n_greedy_choices_are_equal(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json=chat(n=2))).raise_for_status().json()
    first, second = answer["choices"]
    assert first["message"] == second["message"] and first["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 48


async def test_27_null_absent_and_both_limits(client: httpx.AsyncClient) -> None:
    both = chat(max_tokens=8, max_completion_tokens=2)
    answer = (await client.post(CHAT, json=both)).raise_for_status().json()
    assert answer["usage"]["completion_tokens"] == 2
    measured = chat_body(MODEL, "word " * 1000, max_tokens=1)
    tokens = (await client.post(CHAT, json=measured)).json()["usage"]["prompt_tokens"]
    nearly_full = "word " * (1000 * 4000 // tokens)
    for extra in ({"max_tokens": None}, {}):
        answer = (await client.post(CHAT, json=chat_body(MODEL, nearly_full, **extra))).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 4096, "limited by the context"
