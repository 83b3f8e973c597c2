"""A helper process that holds a NIXL agent and can be killed, from the daemon's side.

Destroying an agent with a stalled transfer takes a minute and more, in which it keeps the
interpreter to itself, and nothing less ends the transfer. The end of a process does, at once.
Requests and answers are JSON messages on a socket; memory travels as descriptors.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.telemetry.logging import get_logger

MESSAGE_BYTES = 1 << 16
log = get_logger(__name__)


class NixlFailed(Exception):
    """NIXL did not do it; the words say why, as far as it tells."""


class Helper:
    """The process of one script that lies beside this module. Loop's thread only."""

    def __init__(self, script: str) -> None:
        self._script = Path(__file__).with_name(script)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._ending: asyncio.Task[int] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._socket is not None

    @property
    def gone(self) -> bool:
        """Whether its process was killed and is dead."""
        return self._ending is not None and self._ending.done()

    @property
    def pid(self) -> int:
        """Of its process; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    def start(self, environment: Mapping[str, str], fds: Sequence[int] = ()) -> None:
        """Starts it. What the daemon's own environment says goes before `environment`.

        It inherits `fds`. Raises NixlFailed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            # Not in a thread: it dies with the thread that started it. By path: it needs none of
            # our packages, and -P keeps those that lie beside it from being taken for NIXL's.
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(self._script), str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), *fds],
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # where UCX writes its log
                    env={"NIXL_LOG_LEVEL": "ERROR", **environment, **os.environ},
                )
            except OSError as exc:
                ours.close()
                raise NixlFailed(f"its process can't be started: {exc}") from exc
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)

    async def ask(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> dict[str, Any]:
        """Its answer to a request, once that is done. Raises NixlFailed.

        When cancelled, it goes on with what it was asked.
        """
        if self._socket is None:
            raise NixlFailed("its process has ended")
        self._next += 1
        id = self._next
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[id] = answer
        self._send({"id": id, **request}, fds)
        try:
            told = await answer
        finally:
            del self._asked[id]
        if told["error"]:
            raise NixlFailed(told["error"])
        return told

    def tell(self, request: Mapping[str, object]) -> None:
        """Something that has no answer; nothing if it has ended."""
        if self._socket is not None:
            self._send({"id": 0, **request}, ())

    def kill(self) -> None:
        """Ends the process, and with it whatever it was doing."""
        self._lost("it was ended")
        if self._process is not None and self._ending is None:
            self._process.kill()
            wait = asyncio.to_thread(self._process.wait)
            self._ending = asyncio.create_task(wait, name=f"end of {self._script.name}")

    async def end(self, wait_s: float | None = None) -> None:
        """Kills it and returns when it is dead, or after `wait_s`."""
        self.kill()
        if self._ending is not None:
            await asyncio.wait([self._ending], timeout=wait_s)

    def _send(self, request: Mapping[str, object], fds: Sequence[int]) -> None:
        assert self._socket is not None, "callers have looked"
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        except OSError as exc:
            self._lost(f"it does not listen: {exc}")

    def _receive(self) -> None:
        assert self._socket is not None, "the reader is removed before the socket goes"
        try:
            while message := self._socket.recv(MESSAGE_BYTES):
                told = json.loads(message)
                answer = self._asked.get(told["id"])
                if answer is not None and not answer.done():
                    answer.set_result(told)
        except BlockingIOError:
            return
        except OSError as exc:
            log.info("a NIXL helper's socket broke", why=str(exc))
        self._lost("it ended")

    def _lost(self, why: str) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._socket = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result({"error": f"its process is gone: {why}"})
