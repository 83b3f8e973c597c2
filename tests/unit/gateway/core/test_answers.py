"""Usage, log probabilities, salt and errors: the small shapes."""

import json
import math

import pytest

from services.gateway import errors
from services.gateway.core.logprobs import (
    LogprobEntry,
    TokenLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from services.gateway.core.salt import effective_salt
from services.gateway.core.usage import Usage


class Texts:
    def token_bytes(self, token_id: int) -> bytes | None:
        return {0: b" a", 1: b"\xf0\x9f", 2: b"\xf0\x98"}.get(token_id)


ENTRIES = [
    LogprobEntry(TokenLogprobs(0, -0.5, ((0, -0.5), (1, -1.0), (2, -math.inf))), 0),
    LogprobEntry(TokenLogprobs(1, -math.inf, ((0, -0.1), (2, -2.0))), 2),
    LogprobEntry(TokenLogprobs(9, math.nan), 2),
]


def test_case_32_chat_log_probabilities() -> None:
    shown = chat_logprobs(ENTRIES, Texts(), 2)
    assert shown["refusal"] is None
    assert shown["content"][0] == {
        "token": " a",
        "logprob": -0.5,
        "bytes": [32, 97],
        "top_logprobs": [
            {"token": " a", "logprob": -0.5, "bytes": [32, 97]},
            {"token": "\\xf0\\x9f", "logprob": -1.0, "bytes": [0xF0, 0x9F]},
        ],
    }
    assert shown["content"][1]["logprob"] == -9999.0
    assert shown["content"][2] == {"token": "", "logprob": -9999.0, "bytes": [], "top_logprobs": []}
    json.dumps(shown, allow_nan=False)


def test_completion_log_probabilities() -> None:
    shown = completion_logprobs(ENTRIES, Texts(), 1)
    assert shown["tokens"] == [" a", "bytes:\\xf0\\x9f", ""]
    assert shown["token_logprobs"] == [-0.5, -9999.0, -9999.0]
    assert shown["top_logprobs"] == [
        {" a": -0.5},
        {" a": -0.1, "bytes:\\xf0\\x9f": -9999.0},
        {"": -9999.0},
    ]
    assert shown["text_offset"] == [0, 2, 2]
    assert completion_logprobs(ENTRIES, Texts(), 0)["top_logprobs"] is None


def test_usage() -> None:
    usage = Usage(10, 3, 8) + Usage(5, 2)
    assert usage.to_dict() == {
        "prompt_tokens": 15,
        "completion_tokens": 5,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_salts_never_meet() -> None:
    assert effective_salt() == effective_salt("", None) == effective_salt("", "") == ""
    pairs = [("a", ""), ("", "a"), ("a", "b"), ("ab", ""), ("", "ab"), ("b", "a"), ("a", "a")]
    salts = {effective_salt(*pair) for pair in pairs}
    assert len(salts) == len(pairs)
    assert effective_salt("a", "b") == effective_salt("a", "b")
    assert all(len(salt) == 64 for salt in salts)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.BadRequest("x"), 400, None),
        (errors.ContextLengthExceeded("x"), 400, "context_length_exceeded"),
        (errors.Unsupported("x"), 400, "unsupported_parameter"),
        (errors.NotAuthenticated(), 401, "invalid_api_key"),
        (errors.NotFound("x"), 404, None),
        (errors.ModelNotFound("no/such"), 404, "model_not_found"),
        (errors.MethodNotAllowed("PUT", ["POST", "GET"]), 405, None),
        (errors.PayloadTooLarge(5), 413, None),
        (errors.UnsupportedMedia("x"), 415, None),
        (errors.Overloaded("x", retry_after_s=0.2), 429, "overloaded"),
        (errors.UpstreamFailed("x"), 500, None),
        (errors.UpstreamFailed("x", status=502), 502, None),
        (errors.NoWorker("x", retry_after_s=2.1), 503, "no_worker"),
    ],
)
def test_case_11_errors_have_openais_shape(error, status: int, code: str | None) -> None:
    assert error.status == status
    body = error.body()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["code"] == code
    assert body["message"]
    assert (body["type"] == "server_error") == (status >= 500)


def test_headers_of_errors() -> None:
    assert errors.MethodNotAllowed("PUT", ["POST", "GET"]).headers == {"Allow": "GET, POST"}
    assert errors.NoWorker("x", retry_after_s=2.1).headers == {"Retry-After": "3"}
    assert errors.Overloaded("x", retry_after_s=0).headers == {"Retry-After": "1"}
    assert errors.NotAuthenticated().headers == {"WWW-Authenticate": "Bearer"}
