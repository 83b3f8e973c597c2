"""The error tree that crosses services. Each error knows its gRPC code and a reason for programs.

ForebayError
  InvalidRequest        INVALID_ARGUMENT     the caller's mistake; `field` names the place
  NotFound              NOT_FOUND
  FailedPrecondition    FAILED_PRECONDITION  right request, wrong state
  Overloaded            RESOURCE_EXHAUSTED   later, perhaps
  Unavailable           UNAVAILABLE          this process can't, another may
  DeadlineExceeded      DEADLINE_EXCEEDED
  Internal              INTERNAL             our mistake
"""

from typing import ClassVar

import grpc


class ForebayError(Exception):
    """Base of all errors that a caller may see.

    `reason` is an UPPER_SNAKE word that programs compare; `message` is for people and holds no
    prompt text and no secrets; `metadata` travels in ErrorInfo.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str = "", metadata: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = metadata or {}


class InvalidRequest(ForebayError):
    """The request can't be right at any time. `field` names the value at fault."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        reason: str = "",
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(
            message,
            reason=reason,
            metadata={**(metadata or {}), **({"field": field} if field else {})},
        )
        self.field = field


class NotFound(ForebayError):
    """What was named does not exist here."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class FailedPrecondition(ForebayError):
    """The request is right but not in this state; don't retry unchanged."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class Overloaded(ForebayError):
    """No room now. `retry_after_s` is a guess of when there may be, 0 when unknown."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(
            message,
            reason=reason,
            metadata={"retry_after_s": f"{retry_after_s:.3f}"} if retry_after_s else None,
        )
        self.retry_after_s = retry_after_s


class Unavailable(ForebayError):
    """This process can't serve it; another may, or this one later."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceeded(ForebayError):
    """The deadline passed before the work was done."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE"


class Internal(ForebayError):
    """A fault of ours."""

    code = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"


_TREE: tuple[type[ForebayError], ...] = (
    InvalidRequest,
    NotFound,
    FailedPrecondition,
    Overloaded,
    Unavailable,
    DeadlineExceeded,
    Internal,
)
_BY_CODE = {cls.code: cls for cls in _TREE}


def error_class(code: grpc.StatusCode) -> type[ForebayError]:
    """The class for a status code; Internal for codes that have none."""
    return _BY_CODE.get(code, Internal)


_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


def error_from_number(code: int, reason: str, message: str, *, field: str = "") -> ForebayError:
    """The error for a google.rpc.Code number that travelled inside a message."""
    cls = error_class(_BY_NUMBER.get(code, grpc.StatusCode.INTERNAL))
    if cls is InvalidRequest:
        return InvalidRequest(message, field=field, reason=reason)
    return cls(message, reason=reason)
