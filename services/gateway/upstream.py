"""What workers and routers refuse with, in the words of OpenAI's API."""

from __future__ import annotations

from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ForebayError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
)
from services.gateway.errors import (
    ApiError,
    BadRequest,
    NoWorker,
    UpstreamFailed,
)
from services.gateway.errors import Overloaded as ApiOverloaded

_PARAMS = {
    "prompt_token_ids": "prompt",
    "prior_output_token_ids": "prompt",
    "adapter": "model",
}
_OUR_FIELDS = frozenset({"prefill_only", "transfer"})
"""What no client has set."""
_NOT_BEGUN = frozenset(
    {
        "DRAINING",
        "INVALID_REQUEST",
        "MODEL_NOT_FOUND",
        "NO_TRANSFER",
        "OVERLOADED",
        "RESUME_UNSUPPORTED",
        "STARTING",
        "UNSUPPORTED",
    }
)


def is_clients_mistake(error: ForebayError) -> bool:
    """Whether the request can't be right anywhere, and not by what we added to it."""
    return isinstance(error, InvalidRequest) and error.field not in _OUR_FIELDS


def not_begun(error: ForebayError) -> bool:
    """Whether a worker that answers so did not begin with the request."""
    return error.reason in _NOT_BEGUN


def is_retryable(error: ForebayError) -> bool:
    """Whether another worker may well do what this one didn't."""
    if isinstance(error, FailedPrecondition):
        return error.reason == "WRONG_INCARNATION"
    if isinstance(error, NotFound):
        return error.reason == "MODEL_NOT_FOUND"
    return isinstance(error, Unavailable | Overloaded)


def to_api_error(error: ForebayError) -> ApiError:
    """What the client is told. Only what the client itself did wrong is a 4xx."""
    if isinstance(error, InvalidRequest):
        field = error.field
        return BadRequest(error.message, param=_PARAMS.get(field, field) or None)
    if isinstance(error, Overloaded):
        return ApiOverloaded(error.message, retry_after_s=error.retry_after_s or 1.0)
    if isinstance(error, DeadlineExceeded):
        return UpstreamFailed("The request took too long.", status=504, code="timeout")
    if isinstance(error, Unavailable | NotFound):
        return NoWorker(f"No worker can serve this now: {error.message}")
    if isinstance(error, FailedPrecondition) and error.reason == "RESUME_UNSUPPORTED":
        return UpstreamFailed(
            "The worker of this request was lost, and its sampling state can't be restored on "
            "another one. Send the request again.",
            status=503,
            code="worker_lost",
            headers={"Retry-After": "1"},
        )
    return UpstreamFailed("The engine failed this request.", code=error.reason.lower())
