"""What a client of the gateway may be told, in OpenAI's shape.

ApiError
  BadRequest               400  the client's mistake; `param` names the place
    ContextLengthExceeded  400  code context_length_exceeded
    Unsupported            400  code unsupported_parameter: known, but not built yet
  NotAuthenticated         401  code invalid_api_key
  NotFound                 404
    ModelNotFound          404  code model_not_found, param model
  MethodNotAllowed         405
  PayloadTooLarge          413
  UnsupportedMedia         415
  Overloaded               429  Retry-After
  UpstreamFailed           500  a worker or we ourselves failed (502, 504 by `status`)
    NoWorker               503  Retry-After
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar


class ApiError(Exception):
    """Base of all errors that a client sees.

    `message` is for people and never holds prompt text, a body's bytes or a secret; `param` is the
    path of the field at fault ("messages[0].role"); `code` is a word that programs compare;
    `headers` are added to the HTTP answer.
    """

    default_status: ClassVar[int] = 500
    default_type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.default_status if status is None else status
        self.type = type or self.default_type
        self.param = param
        self.code = code or self.default_code
        self.headers: dict[str, str] = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body, `{"error": {"message", "type", "param", "code"}}`, with all four keys."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class BadRequest(ApiError):
    """The request can't be right at any time."""

    default_status = 400
    default_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param=param, code=code)


class ContextLengthExceeded(BadRequest):
    """Prompt, or prompt and wanted output, are longer than the model's context."""

    default_code = "context_length_exceeded"


class Unsupported(BadRequest):
    """A known parameter (or value) that is not built yet: said, never ignored."""

    default_code = "unsupported_parameter"


class NotAuthenticated(ApiError):
    """No key, or one that is not known."""

    default_status = 401
    default_type = "invalid_request_error"
    default_code = "invalid_api_key"

    def __init__(self, message: str = "A valid API key is required.") -> None:
        super().__init__(message, headers={"WWW-Authenticate": "Bearer"})


class NotFound(ApiError):
    """Nothing lives at that path."""

    default_status = 404
    default_type = "invalid_request_error"


class ModelNotFound(NotFound):
    """No worker serves a model of that name."""

    default_code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {model[:200]!r} does not exist.", param="model")


class MethodNotAllowed(ApiError):
    """The path exists, but not for that method; `allow` are those it has."""

    default_status = 405
    default_type = "invalid_request_error"

    def __init__(self, method: str, allow: Iterable[str]) -> None:
        allowed = ", ".join(sorted(allow))
        super().__init__(
            f"{method[:20]} is not allowed here; use {allowed}.", headers={"Allow": allowed}
        )


class PayloadTooLarge(ApiError):
    """The body is longer than the gateway takes."""

    default_status = 413
    default_type = "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is longer than {limit_bytes} bytes.")


class UnsupportedMedia(ApiError):
    """The body's type or encoding can't be read."""

    default_status = 415
    default_type = "invalid_request_error"


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


class Overloaded(ApiError):
    """No room now; `retry_after_s` is a guess of when there may be."""

    default_status = 429
    default_type = "rate_limit_error"
    default_code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, status: int | None = None
    ) -> None:
        super().__init__(message, status=status, headers=_retry_after(retry_after_s))


class UpstreamFailed(ApiError):
    """A worker, the router or the gateway itself failed: not the client's mistake."""


class NoWorker(UpstreamFailed):
    """Nobody can serve the model now."""

    default_status = 503
    default_code = "no_worker"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message, headers=_retry_after(retry_after_s))
