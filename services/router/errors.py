"""The router's errors: which of the common tree a refusal of the core becomes.

InvalidRequest (INVALID_ARGUMENT)   a field of the request can't be right; also a wrong block size
NotFound (MODEL_NOT_FOUND)          no worker serves the model
Unavailable (NO_WORKER, DRAINING)   none can take it now; this router is leaving
Overloaded (OVERLOADED)             it would wait too long; says how long, and when to come again
"""

from services.common.errors import ForebayError, InvalidRequest, NotFound, Overloaded, Unavailable
from services.router.core.answers import Refusal, RefusalKind


def invalid(message: str, field: str) -> InvalidRequest:
    """A request that can't be right; `field` is the path in RouteRequest."""
    return InvalidRequest(message, field=field, reason="INVALID_ARGUMENT")


def error_of(refusal: Refusal) -> ForebayError:
    """The error that a refusal stands for."""
    match refusal.kind:
        case RefusalKind.MODEL_NOT_FOUND:
            return NotFound(refusal.message, reason="MODEL_NOT_FOUND")
        case RefusalKind.NO_WORKER:
            return Unavailable(refusal.message, reason="NO_WORKER")
        case RefusalKind.OVERLOADED:
            # A wait of nothing would read as one that nobody knows.
            error = Overloaded(
                refusal.message, reason="OVERLOADED", retry_after_s=max(0.001, refusal.retry_s)
            )
            error.metadata["predicted_wait_s"] = f"{refusal.wait_s:.3f}"
            return error
        case RefusalKind.WRONG_BLOCK_SIZE:
            return invalid(f"block_size_tokens: {refusal.message}", "block_size_tokens")
        case RefusalKind.PROMPT_TOO_LONG:
            return invalid(f"prompt_tokens: {refusal.message}", "prompt_tokens")
