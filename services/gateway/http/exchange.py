"""One HTTP request and its answer, over raw ASGI: body with a cap, JSON or a stream, errors in
shape.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from services.common.ids import new_id
from services.gateway.errors import ApiError, BadRequest, PayloadTooLarge, UnsupportedMedia
from services.gateway.http.auth import Tenant
from services.gateway.http.guard import ClientGone

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_LINGER_S = 2.0
_LAST_WORD_S = 2.0
"""Longest wait for room to tell a client of an error; one that does not read is cut off then."""
ABORT = "forebay.abort"
"""ASGI extension of our server: `{"call": ...}` drops the connection with all that is unsent."""
_JSON_TYPES = re.compile(r"application/([a-z0-9.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)

encode = msgspec.json.Encoder().encode


def error_bytes(error: ApiError) -> bytes:
    """The error as a JSON body."""
    return encode(error.body())


class Exchange:
    """What a handler sees of a request, and the only way it answers."""

    def __init__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        given = self.headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else new_id("req")
        self.extra_headers: dict[str, str] = {"x-request-id": self.request_id}
        """Added to every answer."""
        self.status = 0
        """Of the answer; 0 before it began."""
        self.streaming = False
        self.route = ""
        """Which path it is, for metrics."""
        self.model = ""
        """The served model, once known; for metrics."""
        self.tenant = Tenant()
        self._receive = receive
        self._send = send
        self._body_done = False
        self._abort: Callable[[], None] | None = (
            (scope.get("extensions") or {}).get(ABORT, {}).get("call")
        )

    async def body(self, limit_bytes: int, timeout_s: float) -> bytes:
        """The whole body. Raises an ApiError for one that is too long, slow, or of another type."""
        kind = self.headers.get("content-type", "")
        if kind and not _JSON_TYPES.fullmatch(kind):
            raise UnsupportedMedia("Send the body as Content-Type: application/json.")
        if self.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
            raise UnsupportedMedia("Send the body without a Content-Encoding.")
        length = self.headers.get("content-length", "0")
        if not length.isdigit():
            raise BadRequest("Content-Length must be a number of bytes.")
        if int(length) > limit_bytes:
            raise PayloadTooLarge(limit_bytes)
        parts: list[bytes] = []
        total = 0
        try:
            async with asyncio.timeout(timeout_s):
                while not self._body_done:
                    part = await self._receive_part()
                    total += len(part)
                    if total > limit_bytes:
                        raise PayloadTooLarge(limit_bytes)
                    parts.append(part)
        except TimeoutError:
            raise ApiError(
                f"The body did not arrive in {timeout_s:g} s.",
                status=408,
                type="invalid_request_error",
            ) from None
        return b"".join(parts)

    async def disconnected(self) -> None:
        """Returns when the client has gone (or the answer is complete). Only after the body was
        read.
        """
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        status: int,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        """The whole answer."""
        every = {"content-length": str(len(body)), **(headers or {})}
        if body:
            every["content-type"] = content_type
        if status == 204:
            del every["content-length"]
        # A body that we don't read must not be taken for the next request.
        unread = not self._body_done and self._has_body()
        if unread:
            every["connection"] = "close"
        await self._start(status, every)
        await self._send({"type": "http.response.body", "body": body, "more_body": unread})
        if unread:
            await self._linger()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def respond_json(
        self, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """An answer of JSON."""
        await self.respond(status, encode(value), headers=headers)

    async def fail(self, error: ApiError) -> None:
        """Tells the client of an error: as the answer, or as the last event of a stream."""
        if not self.status:
            await self.respond(error.status, error_bytes(error), headers=error.headers)
        elif self.streaming:
            try:
                async with asyncio.timeout(_LAST_WORD_S):
                    await self.end_stream(b"data: " + error_bytes(error) + b"\n\n")
            except TimeoutError:
                if self._abort is not None:
                    self._abort()

    async def start_stream(self, headers: Mapping[str, str]) -> None:
        """Begins an event stream."""
        self.streaming = True
        await self._start(
            200,
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **headers,
            },
        )

    async def write(self, data: bytes) -> None:
        """Sends a piece of the stream at once; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self, data: bytes = b"") -> None:
        """Sends the last piece and ends the stream."""
        self.streaming = False
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [
            (name.lower().encode("latin-1"), value.encode("latin-1"))
            for name, value in {**self.extra_headers, **headers}.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _receive_part(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._body_done = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    def _has_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"

    async def _linger(self) -> None:
        """Reads on for a moment: closing at once would reset the connection and lose the answer."""
        try:
            async with asyncio.timeout(_LINGER_S):
                while not self._body_done:
                    await self._receive_part()
        except (TimeoutError, ClientGone):
            return
