"""NIXL's object backend, in a helper process that can be killed.

Destroying an agent with a stalled transfer takes a minute and more, in which it keeps the
interpreter to itself, and nothing less ends the transfer. The end of a process does, at once: so
the agent has one of its own, and only staging buffers in common with the daemon.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from services.common.telemetry.logging import get_logger
from services.kvbm.movers.staging import Buffer

if TYPE_CHECKING:
    from services.kvbm.movers.s3 import S3Place

log = get_logger(__name__)
Way = Literal["READ", "WRITE"]
MESSAGE_BYTES = 8192
_END_S = 5.0


class NixlFailed(Exception):
    """NIXL did not do it; the words say why, as far as it tells."""


class NixlCourier:
    """The helper, from the daemon's side. Loop's thread only."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._asked: dict[int, asyncio.Future[str]] = {}
        self._next = 0
        self._mapped: set[int] = set()
        self._reaping: asyncio.Task[int] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._socket is not None

    @property
    def gone(self) -> bool:
        """Whether its process has ended."""
        return self._reaping is not None and self._reaping.done()

    async def start(self, place: S3Place) -> None:
        """Starts the process and its agent. Raises NixlFailed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = _spawn(theirs)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)
        scheme, _, host = place.endpoint.rpartition("://")
        parameters = {
            "access_key": place.access_key,
            "secret_key": place.secret_key,
            "bucket": place.bucket,
            "region": place.region,
            "endpoint_override": host,
            "scheme": scheme or "https",
            "use_virtual_addressing": "false",
            "req_checksum": "required",
            "num_threads": "4",
        }
        await self._ask({"open": {k: v for k, v in parameters.items() if v}})

    async def move(self, way: Way, buffer: Buffer, length: int, key: str) -> None:
        """Moves an object. Raises NixlFailed; when cancelled, the helper is killed."""
        fds = []
        request: dict[str, object] = {"way": way, "buffer": buffer.id, "length": length, "key": key}
        if buffer.id not in self._mapped:
            self._mapped.add(buffer.id)
            request["capacity"] = buffer.capacity
            fds = [buffer.fd]
        try:
            await self._ask(request, fds)
        except asyncio.CancelledError:
            # A transfer that nobody waits for any more would go on for as long as it likes.
            self.kill()
            raise

    def forget(self, buffer: Buffer) -> None:
        """The buffer is given up, and isn't in any move."""
        if self._socket is not None and buffer.id in self._mapped:
            self._mapped.discard(buffer.id)
            self._send({"unmap": buffer.id})

    def kill(self) -> None:
        """Ends the process, and with it whatever it was doing."""
        self._lost("it was ended")
        if self._process is not None and self._reaping is None:
            self._process.kill()
            wait = asyncio.to_thread(self._process.wait)
            self._reaping = asyncio.create_task(wait, name="kvbm nixl-obj end")

    async def end(self) -> None:
        """Ends it and waits for that."""
        self.kill()
        if self._reaping is not None:
            await asyncio.wait([self._reaping], timeout=_END_S)

    async def _ask(self, request: dict[str, object], fds: list[int] | None = None) -> None:
        if self._socket is None:
            raise NixlFailed("the helper has ended")
        self._next += 1
        id, answer = self._next, asyncio.get_running_loop().create_future()
        self._asked[id] = answer
        self._send({"id": id, **request}, fds)
        try:
            error = await answer
        finally:
            del self._asked[id]
        if error:
            raise NixlFailed(error)

    def _send(self, request: dict[str, object], fds: list[int] | None = None) -> None:
        assert self._socket is not None, "callers have looked"
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds or [])
        except OSError as exc:
            self._lost(f"it does not listen: {exc}")

    def _receive(self) -> None:
        assert self._socket is not None, "the reader is removed before the socket goes"
        try:
            while message := self._socket.recv(MESSAGE_BYTES):
                told = json.loads(message)
                answer = self._asked.get(told["id"])
                if answer is not None and not answer.done():
                    answer.set_result(told["error"])
        except BlockingIOError:
            return
        except OSError as exc:
            log.info("the NIXL helper's socket broke", why=str(exc))
        self._lost("it ended")

    def _lost(self, why: str) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(f"the helper is gone: {why}")


def _spawn(connection: socket.socket) -> subprocess.Popen[bytes]:
    # Not in a thread: it dies with the thread that started it. By path: it needs none of our
    # packages, and -P keeps those that lie beside it from being taken for NIXL's.
    fd, helper = connection.fileno(), Path(__file__).with_name("nixl_helper.py")
    return subprocess.Popen(
        [sys.executable, "-P", str(helper), str(fd)],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        env={"NIXL_LOG_LEVEL": "ERROR", **os.environ},
    )
