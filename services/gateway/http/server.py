"""uvicorn, embedded: our own stop and drain instead of its signal handlers, and what it lacks of
HTTP.

The protocol class sets TCP_NODELAY, answers unparsable requests in OpenAI's error shape, frames
streams for HTTP/1.0 clients by closing instead of by chunks, bounds a request's head in time and
size, and tells a running request of a hang-up also when another one waits behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn._types import Scope as AnyScope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.common.errors import Unavailable
from services.gateway.errors import ApiError, BadRequest
from services.gateway.http.exchange import ABORT, error_bytes

_MARGIN_S = 5.0
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A client whose machine or link is gone says nothing: ask after 30 s, give up after 60 s.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    # One that has stopped reading, or acknowledging, is gone after two minutes.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)
_HEAD_S = 30.0
"""Longest wait for the rest of a request's head once it has begun."""
_HEAD_BYTES = 64 << 10
"""Longest head that may arrive in pieces; more than one read of the socket is never kept."""


class Protocol(HttpToolsProtocol):
    """One client connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Sends small writes at once: a stream's chunks must not wait for the client's ACKs."""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            for level, option, value in _SOCKET_OPTIONS:
                sock.setsockopt(level, option, value)
        self._running: RequestResponseCycle | None = None
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        # uvicorn starts its clock after the first answer only.
        self._wait_for_head(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request that runs, too: with another one behind it, uvicorn tells only that."""
        self._stop_waiting()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuses a head without an end."""
        super().data_received(data)
        if not self._in_head:
            if not self._busy and not self.timeout_keep_alive_task and not self._head_timer:
                # Blank lines: no request, but they have stopped uvicorn's clock.
                self._wait_for_head(self.timeout_keep_alive)
            return
        self._head_bytes += len(data)
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(
                b"431 Request Header Fields Too Large",
                ApiError(
                    f"The request's headers are longer than {_HEAD_BYTES} bytes.",
                    status=431,
                    type="invalid_request_error",
                ),
            )

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._wait_for_head(_HEAD_S)

    def on_headers_complete(self) -> None:
        """The head is all there."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answers what the parser could not read."""
        self._refuse(b"400 Bad Request", BadRequest(msg))

    def _refuse(self, status: bytes, error: ApiError) -> None:
        # In the middle of another request's answer there is no place for one of our own.
        if not self.transport.is_closing() and not self._busy:
            body = error_bytes(error)
            self.transport.write(
                b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (status, len(body), body)
            )
        self.transport.close()

    @property
    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _wait_for_head(self, seconds: float) -> None:
        self._stop_waiting()
        self._head_timer = self.loop.call_later(seconds, self._no_head)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _no_head(self) -> None:
        if self._busy:
            self._wait_for_head(_HEAD_S)
        else:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.scope["extensions"] = {ABORT: {"call": self.transport.abort}}
        if cycle.scope["http_version"] == "1.0":
            app = _framed_by_close(cycle, app)
        super()._start_asgi_task(cycle, app)


def _framed_by_close(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    async def framed(scope: AnyScope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def unchunked(message: ASGISendEvent) -> None:
            # The cycle then writes neither a chunked header nor chunk sizes, and expects just this.
            cycle.chunked_encoding = False
            if message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, unchunked)

    return framed


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The lifecycle owns the signals."""
        yield


class HttpServer:
    """A running HTTP server. `port` is the bound one."""

    def __init__(self, server: uvicorn.Server, port: int) -> None:
        self._server = server
        self.port = port

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._server.server_state.connections)


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(backlog)
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
    except OSError as exc:
        raise Unavailable(
            f"HTTP port {host}:{port} can't be opened ({exc.strerror}): is it taken?",
            reason="PORT_TAKEN",
        ) from exc
    return sock


@asynccontextmanager
async def http_server(
    app: Any, host: str, port: int, *, backlog: int, keep_alive_s: float, grace_s: float
) -> AsyncIterator[HttpServer]:
    """Serves the ASGI app on host:port until the block ends; then running requests get `grace_s`
    seconds.

    At the end the listener closes first, idle connections next, busy ones after their answers.
    Raises Unavailable (PORT_TAKEN) when the port can't be had.
    """
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    sock = _listen(host, port, backlog)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="off",
        loop="none",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=backlog,
        timeout_keep_alive=max(1, round(keep_alive_s)),
        timeout_graceful_shutdown=max(1, round(grace_s + _MARGIN_S)),
    )
    server = _Server(config)
    bound: int = sock.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[sock]), name="http-server")
    try:
        while not server.started:
            if task.done():
                task.result()
                raise Unavailable("the HTTP server ended at its start", reason="HTTP_SERVER")
            await asyncio.sleep(0.005)
        yield HttpServer(server, bound)
    finally:
        server.should_exit = True
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
