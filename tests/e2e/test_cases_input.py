"""What clients get wrong: each is a 4xx in OpenAI's shape, and the next request works.

Numbers in the ids are rows of the case list: public reports of gateways that broke on the request.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.client import Json, chat_body
from tests.support.cluster import MODEL
from tests.support.errors import openai_error

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def c(**extra: Any) -> bytes:
    """The ordinary chat body with changes; `messages` among them; `...` leaves a field out."""
    body: Json = {"model": MODEL, "messages": HI, "max_tokens": 4, **extra}
    return json.dumps({k: v for k, v in body.items() if v is not ...}).encode()


def k(**extra: Any) -> bytes:
    """The ordinary completion body with changes."""
    body: Json = {"model": MODEL, "prompt": "hi", "max_tokens": 4, **extra}
    return json.dumps({k: v for k, v in body.items() if v is not ...}).encode()


def raw(piece: str) -> bytes:
    """A chat body with a piece of JSON text put in as it stands."""
    return c()[:-1] + b", " + piece.encode() + b"}"


def call(**function: Any) -> list[Json]:
    return [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"} | function}
    ]


SURROGATE = "x \ud83d y"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

# (row and name, path, body, param; ... when any param will do)
BAD: list[tuple[str, str, bytes, Any]] = [
    ("1-malformed", CHAT, b'{"model": "x", "messages": [', None),
    ("1-malformed-completion", COMPLETIONS, b'{"model": ', None),
    ("2-list", CHAT, b"[]", ...),
    ("2-string", CHAT, b'"hi"', ...),
    ("2-null", CHAT, b"null", ...),
    ("2-number", CHAT, b"7", ...),
    ("2-empty", CHAT, b"", ...),
    ("2-empty-object", CHAT, b"{}", ...),
    ("2-completion-list", COMPLETIONS, b"[]", ...),
    ("3-invalid-utf8", CHAT, c().replace(b'"hi"', b'"\xff\xfe"'), ...),
    ("4-surrogate-content", CHAT, c(messages=[{"role": "user", "content": SURROGATE}]), ...),
    (
        "4-surrogate-content-stream",
        CHAT,
        c(messages=[{"role": "user", "content": SURROGATE}], stream=True),
        "messages[0].content",
    ),
    (
        "4-surrogate-part",
        CHAT,
        c(messages=[{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}]),
        ...,
    ),
    ("4-surrogate-prompt", COMPLETIONS, k(prompt="\udcf0"), "prompt"),
    ("4-surrogate-prompt-stream", COMPLETIONS, k(prompt="\udcf0", stream=True), "prompt"),
    ("4-surrogate-stop", CHAT, c(stop=["\ud83d"]), ...),
    ("4-surrogate-model", CHAT, c(model="x\ud83d"), ...),
    ("4-surrogate-name", CHAT, c(messages=[HI[0] | {"name": "\ud83d"}]), ...),
    ("4-surrogate-salt", CHAT, c(cache_salt="\ud83d"), ...),
    (
        "4-surrogate-tool-arguments",
        CHAT,
        c(
            messages=[
                *HI,
                {"role": "assistant", "content": None, "tool_calls": call(arguments='"\ud83d"')},
                {"role": "tool", "tool_call_id": "c1", "content": "42"},
            ]
        ),
        ...,
    ),
    ("8-nan", CHAT, raw('"temperature": NaN'), "temperature"),
    ("8-infinity", CHAT, raw('"temperature": Infinity'), "temperature"),
    ("8-minus-infinity", CHAT, raw('"temperature": -Infinity'), "temperature"),
    ("8-overflow", CHAT, raw('"temperature": 1e999'), "temperature"),
    ("8-nan-top-p", CHAT, raw('"top_p": NaN'), "top_p"),
    ("8-nan-penalty", CHAT, raw('"presence_penalty": NaN'), "presence_penalty"),
    ("8-nan-bias", CHAT, raw('"logit_bias": {"5": NaN}'), "logit_bias"),
    ("16-messages-empty", CHAT, c(messages=[]), "messages"),
    ("16-messages-null", CHAT, c(messages=None), "messages"),
    ("16-messages-string", CHAT, c(messages="hi"), "messages"),
    ("16-messages-missing", CHAT, c(messages=...), "messages"),
    ("16-message-null", CHAT, c(messages=[None]), "messages[0]"),
    ("16-message-string", CHAT, c(messages=["hi"]), "messages[0]"),
    ("16-prompt-missing", COMPLETIONS, k(prompt=...), "prompt"),
    ("16-prompt-null", COMPLETIONS, k(prompt=None), "prompt"),
    ("16-prompt-object", COMPLETIONS, k(prompt={}), "prompt"),
    ("16-prompt-no-ids", COMPLETIONS, k(prompt=[]), "prompt"),
    ("16-prompt-id-out-of-vocabulary", COMPLETIONS, k(prompt=[5, 2048]), "prompt"),
    ("16-prompt-id-negative", COMPLETIONS, k(prompt=[-1]), "prompt"),
    ("16-prompt-id-huge", COMPLETIONS, k(prompt=[10**30]), "prompt"),
    ("16-prompt-id-fraction", COMPLETIONS, k(prompt=[1.5]), "prompt"),
    ("16-model-missing", CHAT, c(model=...), "model"),
    ("16-model-number", CHAT, c(model=7), "model"),
    ("19-role", CHAT, c(messages=[{"role": "banana", "content": "hi"}]), "messages[0].role"),
    ("19-role-missing", CHAT, c(messages=[{"content": "hi"}]), "messages[0].role"),
    ("19-role-number", CHAT, c(messages=[{"role": 5, "content": "hi"}]), "messages[0].role"),
    (
        "22-tool-content-null",
        CHAT,
        c(
            messages=[
                *HI,
                {"role": "assistant", "content": None, "tool_calls": call()},
                {"role": "tool", "tool_call_id": "c1", "content": None},
            ]
        ),
        "messages[2].content",
    ),
    (
        "22-user-content-null",
        CHAT,
        c(messages=[{"role": "user", "content": None}]),
        "messages[0].content",
    ),
    ("22-user-content-missing", CHAT, c(messages=[{"role": "user"}]), "messages[0].content"),
    (
        "24-part-type",
        CHAT,
        c(messages=[{"role": "user", "content": [{"type": "banana", "text": "a"}]}]),
        ...,
    ),
    (
        "24-part-image",
        CHAT,
        c(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                }
            ]
        ),
        ...,
    ),
    ("24-part-string", CHAT, c(messages=[{"role": "user", "content": ["a"]}]), ...),
    ("24-part-no-text", CHAT, c(messages=[{"role": "user", "content": [{"type": "text"}]}]), ...),
    ("24-content-number", CHAT, c(messages=[{"role": "user", "content": 5}]), ...),
    ("26-zero", CHAT, c(max_tokens=0), "max_tokens"),
    ("26-negative", CHAT, c(max_tokens=-1), "max_tokens"),
    ("26-fraction", CHAT, c(max_tokens=4.5), "max_tokens"),
    ("26-string", CHAT, c(max_tokens="4"), "max_tokens"),
    ("26-bool", CHAT, c(max_tokens=True), "max_tokens"),
    ("26-billion", CHAT, c(max_tokens=10**9), "max_tokens"),
    ("26-nonillion", CHAT, c(max_tokens=10**30), "max_tokens"),
    ("26-completion-billion", COMPLETIONS, k(max_tokens=10**9), "max_tokens"),
    (
        "26-completion-tokens",
        CHAT,
        c(max_tokens=..., max_completion_tokens=0),
        "max_completion_tokens",
    ),
    ("29-n-zero", CHAT, c(n=0), "n"),
    ("29-n-zero-stream", CHAT, c(n=0, stream=True), "n"),
    ("29-n-negative", CHAT, c(n=-1), "n"),
    ("29-n-huge", CHAT, c(n=10**9), "n"),
    ("29-n-string", CHAT, c(n="2"), "n"),
    ("33-tools", CHAT, c(tools=[TOOL]), "tools"),
    ("33-tools-stream", CHAT, c(tools=[TOOL], stream=True), "tools"),
    ("33-tool-choice", CHAT, c(tools=[TOOL], tool_choice="required"), ...),
    ("35-options-unstreamed", CHAT, c(stream_options={"include_usage": True}), "stream_options"),
    ("35-options-number", CHAT, c(stream=True, stream_options=5), "stream_options"),
    ("41-stream-yes", CHAT, c(stream="yes"), "stream"),
    ("42-bias-vocabulary", CHAT, c(logit_bias={"999999": 5}), "logit_bias"),
    ("42-bias-edge", CHAT, c(logit_bias={"2048": 5}), "logit_bias"),
    ("42-bias-negative", CHAT, c(logit_bias={"-1": 5}), "logit_bias"),
    ("42-bias-word", CHAT, c(logit_bias={"abc": 5}), "logit_bias"),
    ("42-bias-huge", CHAT, c(logit_bias={str(10**30): 5}), "logit_bias"),
    ("42-bias-value", CHAT, c(logit_bias={"5": "a"}), "logit_bias"),
    ("42-bias-range", CHAT, c(logit_bias={"5": 101}), "logit_bias"),
    ("42-bias-list", CHAT, c(logit_bias=[1]), "logit_bias"),
    ("42-stop-ids", CHAT, c(stop_token_ids=[10**30]), "stop_token_ids"),
    ("42-allowed-ids", CHAT, c(allowed_token_ids=[999999]), "allowed_token_ids"),
    (
        "45-schema",
        CHAT,
        c(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "banana"}},
            }
        ),
        "response_format",
    ),
    ("45-json-object", CHAT, c(response_format={"type": "json_object"}), "response_format"),
    ("45-number", CHAT, c(response_format=5), "response_format"),
    (
        "45-megabyte",
        CHAT,
        c(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"description": "x" * 2**20}},
            }
        ),
        "response_format",
    ),
    ("range-temperature", CHAT, c(temperature=-0.1), "temperature"),
    ("range-temperature-string", CHAT, c(temperature="hot"), "temperature"),
    ("range-top-p-negative", CHAT, c(top_p=-0.1), "top_p"),
    ("range-top-p", CHAT, c(top_p=1.5), "top_p"),
    ("range-presence", CHAT, c(presence_penalty=2.5), "presence_penalty"),
    ("range-frequency", CHAT, c(frequency_penalty=-2.5), "frequency_penalty"),
    ("range-repetition", CHAT, c(repetition_penalty=0), "repetition_penalty"),
    ("range-seed", CHAT, c(seed=1.5), "seed"),
    ("range-seed-huge", CHAT, c(seed=10**30), "seed"),
    ("range-top-logprobs", CHAT, c(logprobs=True, top_logprobs=1000), "top_logprobs"),
    ("range-top-logprobs-alone", CHAT, c(top_logprobs=2), "top_logprobs"),
    ("range-logprobs", COMPLETIONS, k(logprobs=1000), "logprobs"),
    ("range-stop", CHAT, c(stop=[1]), "stop"),
    ("range-min-tokens", CHAT, c(min_tokens=5), "min_tokens"),
    ("range-echo", COMPLETIONS, k(echo="x"), "echo"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
async def test_a_bad_request_is_a_400(
    client: httpx.AsyncClient, path: str, body: bytes, param: Any
) -> None:
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error = openai_error(response)
    assert error["type"] == "invalid_request_error"
    if param is None:
        assert error["param"] is None, error
    elif param is not ...:  # the field, or the place in it
        assert (error["param"] or "").startswith(param), error
    assert len(error["message"]) < 600, "a message must not echo the body"
    await works(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_13_an_unknown_model_is_a_404(client: httpx.AsyncClient, stream: bool) -> None:
    for path, body in ((CHAT, c(model="no/such", stream=stream)), (COMPLETIONS, k(model="x"))):
        response = await client.post(path, content=body)
        assert response.status_code == 404
        error = openai_error(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "no/such" in error["message"] or path == COMPLETIONS
    await works(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_28_a_prompt_beyond_the_context_is_a_400_before_any_stream(
    client: httpx.AsyncClient, stream: bool
) -> None:
    words = "word " * 20_000
    bodies = (
        (CHAT, c(messages=[{"role": "user", "content": words}], stream=stream)),
        (COMPLETIONS, k(prompt=words, stream=stream)),
        (COMPLETIONS, k(prompt=[5] * 20_000, stream=stream)),
    )
    for path, body in bodies:
        response = await client.post(path, content=body)
        assert response.status_code == 400
        assert openai_error(response)["code"] == "context_length_exceeded"
    await works(client)


async def test_17_only_an_assistant_message(client: httpx.AsyncClient) -> None:
    response = await client.post(
        CHAT, content=c(messages=[{"role": "assistant", "content": "Hello"}])
    )
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        openai_error(response)
    await works(client)


async def test_24_an_empty_list_of_parts(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=c(messages=[{"role": "user", "content": []}]))
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        openai_error(response)
    await works(client)


async def test_1_errors_never_echo_the_body(client: httpx.AsyncClient) -> None:
    secret = "correct-horse-battery"
    for body in (
        b'{"model": "x", "messages": [{"content": "' + secret.encode(),
        c(messages=[{"role": "banana", "content": secret}]),
        c(messages=[{"role": "user", "content": secret + " \ud83d"}]),
    ):
        response = await client.post(CHAT, content=body)
        assert response.status_code == 400
        assert secret not in response.text
    await works(client)


async def test_41_bad_requests_blame_no_worker(client: httpx.AsyncClient) -> None:
    for body in (c(stream="yes"), c(logit_bias={"999999": 5}), c(max_tokens=10**9)) * 5:
        assert (await client.post(CHAT, content=body)).status_code == 400
    bodies = [chat_body(MODEL, f"{i} different", max_tokens=20) for i in range(12)]
    answers = await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
    served = {answer.headers["x-forebay-worker"] for answer in answers}
    assert served == {"worker-0", "worker-1"}, "both are still in choice"


async def works(client: httpx.AsyncClient) -> None:
    """The next request always works."""
    response = await client.post(CHAT, content=c())
    assert response.status_code == 200, response.text
