"""Errors over gRPC: ForebayError <-> status code with google.rpc.ErrorInfo (domain "forebay").

The interceptor is the only place where a domain error becomes a status; `translate` the only way
back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.common.errors import ForebayError, Internal, InvalidRequest, Overloaded, error_class
from services.common.telemetry.logging import get_logger

DOMAIN = "forebay"
log = get_logger(__name__)


def to_status(exc: ForebayError) -> Any:
    """The status (for `abort_with_status`) that carries code, message, reason and metadata."""
    info = error_details_pb2.ErrorInfo(reason=exc.reason, domain=DOMAIN, metadata=exc.metadata)
    detail = any_pb2.Any()
    detail.Pack(info)
    return rpc_status.to_status(
        status_pb2.Status(code=exc.code.value[0], message=exc.message, details=[detail])
    )


def translate(exc: grpc.RpcError) -> ForebayError:
    """The domain error that a failed call stands for.

    Its reason is the server's; the code's name when the server gave none (or never answered).
    """
    code = exc.code()
    message = exc.details() or code.name
    reason, metadata = code.name, dict[str, str]()
    try:
        status = rpc_status.from_call(exc)
    except (ValueError, DecodeError):
        # Something between us and the server changed code or message; those still count.
        status = None
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
    cls = error_class(code)
    if cls is InvalidRequest:
        return InvalidRequest(
            message, field=metadata.get("field", ""), reason=reason, metadata=metadata
        )
    if cls is Overloaded:
        try:
            retry_after_s = float(metadata.get("retry_after_s", 0))
        except ValueError:
            retry_after_s = 0.0
        return Overloaded(message, reason=reason, retry_after_s=retry_after_s)
    return cls(message, reason=reason, metadata=metadata)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns ForebayError into its status, all else into INTERNAL with a log line and no detail."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the method's handler of whichever of the four kinds."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method

        def answer(
            call: Callable[[Any, Any], Awaitable[Any]],
        ) -> Callable[[Any, Any], Awaitable[Any]]:
            async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
                try:
                    return await call(request, context)
                except (asyncio.CancelledError, grpc.aio.AbortError):
                    raise
                except Exception as exc:
                    await _abort(context, exc, method)

            return wrapped

        def stream(
            call: Callable[[Any, Any], AsyncIterator[Any]],
        ) -> Callable[[Any, Any], AsyncIterator[Any]]:
            async def wrapped(
                request: Any, context: grpc.aio.ServicerContext[Any, Any]
            ) -> AsyncIterator[Any]:
                try:
                    async for item in call(request, context):
                        yield item
                except (asyncio.CancelledError, grpc.aio.AbortError):
                    raise
                except Exception as exc:
                    await _abort(context, exc, method)

            return wrapped

        make: dict[tuple[bool, bool], tuple[str, Any, Any]] = {
            (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler, answer),
            (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler, stream),
            (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler, answer),
            (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler, stream),
        }
        attribute, build, wrap = make[
            bool(handler.request_streaming), bool(handler.response_streaming)
        ]
        built: grpc.RpcMethodHandler[Any, Any] = build(
            wrap(getattr(handler, attribute)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return built


async def _abort(context: grpc.aio.ServicerContext[Any, Any], exc: Exception, method: str) -> None:
    if isinstance(exc, NotImplementedError):
        # What generated base classes raise for methods that a servicer leaves out.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not implemented here")
    if not isinstance(exc, ForebayError):
        log.error("unexpected error in a call", method=method, exc_info=exc)
        exc = Internal(f"internal error in {method}; the log has the details")
    await context.abort_with_status(to_status(exc))
