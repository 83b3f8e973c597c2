"""Refusals of workers and routers in OpenAI's words; who may try again elsewhere."""

import pytest

from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ForebayError,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from services.gateway.upstream import is_retryable, to_api_error


@pytest.mark.parametrize(
    ("error", "status", "retryable"),
    [
        (InvalidRequest("no", field="top_p"), 400, False),
        (InvalidRequest("no", field="prompt_token_ids"), 400, False),
        (Overloaded("full", retry_after_s=3), 429, True),
        (Unavailable("gone", reason="DRAINING"), 503, True),
        (Unavailable("gone", reason="ENGINE_DEAD"), 503, True),
        (NotFound("which?", reason="MODEL_NOT_FOUND"), 503, True),
        (FailedPrecondition("seed", reason="RESUME_UNSUPPORTED"), 503, False),
        (FailedPrecondition("other life", reason="WRONG_INCARNATION"), 500, True),
        (DeadlineExceeded("late"), 504, False),
        (Internal("secret detail", reason="ENGINE_ERROR"), 500, False),
    ],
)
def test_words(error: ForebayError, status: int, retryable: bool) -> None:
    told = to_api_error(error)
    assert told.status == status and is_retryable(error) is retryable
    assert "secret" not in told.message
    if status in (429, 503):
        assert int(told.headers["Retry-After"]) >= 1


def test_params() -> None:
    assert to_api_error(InvalidRequest("no", field="top_p")).param == "top_p"
    assert to_api_error(InvalidRequest("no", field="prompt_token_ids")).param == "prompt"
    assert to_api_error(InvalidRequest("no")).param is None
