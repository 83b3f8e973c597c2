"""NIXL agents for memory of peers (UCX), each in a process of its own that can be killed.

A released transfer goes on, and goes on writing when the link heals; destroying its agent ends it,
but takes as long as it takes and keeps the interpreter to itself. The end of a process ends it at
once: so every agent has one of its own, with no memory in common with the daemon but what it reads
into or shows. Which blocks, and whether they are what they should be, is the caller's business.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.telemetry.logging import get_logger
from services.kvbm.movers.readerlock import held_by_child

log = get_logger(__name__)
MESSAGE_BYTES = 1 << 16
MOST_PIECES = 512
"""Pieces of one read: what fits into a message."""
_LARGE_PAGE = 1 << 16
_START_S = 20.0
_MAP_S = 10.0
_END_S = 5.0


class PeerMoverError(Exception):
    """NIXL did not do it; the words say why, as far as it tells."""


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """Bytes of a peer's window, and where in a mapped region they go."""

    offset: int
    address: int
    length: int


class PeerAgent:
    """One agent in its process. Loop's thread only; `start` before anything else."""

    def __init__(self, folder: Path | None = None, *, writes: bool = False) -> None:
        """folder: of the arenas, and for what UCX leaves behind in shared memory.

        writes: it may write into the arenas; then it holds their lock.
        """
        self._folder = folder
        self._writes = writes
        self.name = f"forebay-{secrets.token_hex(8)}"
        self.metadata = b""
        """What peers need to know to reach its registered memory."""
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._regions = 0
        self._ending: asyncio.Task[int] | None = None

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._socket is not None

    @property
    def pid(self) -> int:
        """Of its process; 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Starts the process and its agent. Raises PeerMoverError: there is no NIXL or no UCX."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                self._process = _spawn(theirs, self._folder, self._writes)
            except OSError as exc:
                ours.close()
                raise PeerMoverError(f"its process can't be started: {exc}") from exc
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)
        answer = await self._ask({"open": self.name}, timeout_s=_START_S)
        self.metadata = base64.b64decode(answer["metadata"])

    async def map(self, fd: int, length: int) -> tuple[int, int]:
        """Maps and registers memory: its number, and its address there. Raises PeerMoverError."""
        self._regions += 1
        request = {"map": self._regions, "length": length}
        answer = await self._ask(request, [fd], timeout_s=_MAP_S)
        self.metadata = base64.b64decode(answer["metadata"])
        return self._regions, int(answer["address"])

    async def know(self, metadata: bytes, timeout_s: float) -> str:
        """Makes a peer's agent known; its name. Raises PeerMoverError."""
        request = {"peer": base64.b64encode(metadata).decode()}
        return str((await self._ask(request, timeout_s=timeout_s))["agent"])

    async def read(
        self, agent: str, region: int, pieces: Sequence[RemotePiece], timeout_s: float
    ) -> None:
        """Reads a peer's bytes into a region. Raises PeerMoverError, or TimeoutError.

        After TimeoutError, and when cancelled, it may still write: until `end` has returned.
        """
        read = [(piece.offset, piece.address, piece.length) for piece in pieces]
        request = {"read": read, "region": region, "agent": agent}
        await self._ask(request, timeout_s=timeout_s, late=TimeoutError)

    def expect(self, seconds: float) -> None:
        """Peers may read what it shows within so many seconds from now; 0: nobody does."""
        if self._socket is not None:
            self._send({"id": 0, "expect": seconds}, ())

    def kill(self) -> None:
        """Ends the process, and with it whatever it was doing."""
        self._lost("it was ended")
        if self._process is not None and self._ending is None:
            self._process.kill()
            wait = asyncio.to_thread(self._process.wait)
            self._ending = asyncio.create_task(wait, name="kvbm nixl peer end")

    async def end(self) -> None:
        """Kills it and returns when it is dead: nothing of it reads or writes any more."""
        self.kill()
        if self._ending is not None:
            await asyncio.shield(self._ending)

    async def close(self) -> None:
        """As `end`, but waits for a few seconds at most."""
        self.kill()
        if self._ending is not None:
            await asyncio.wait([self._ending], timeout=_END_S)

    async def _ask(
        self,
        request: Mapping[str, object],
        fds: Sequence[int] = (),
        *,
        timeout_s: float,
        late: type[Exception] = PeerMoverError,
    ) -> dict[str, Any]:
        if self._socket is None:
            raise PeerMoverError("its process has ended")
        self._next += 1
        id = self._next
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._asked[id] = answer
        self._send({"id": id, **request}, fds)
        try:
            async with asyncio.timeout(timeout_s):
                told = await answer
        except TimeoutError as exc:
            raise late(f"no end after {timeout_s:.1f} s") from exc
        finally:
            del self._asked[id]
        if told["error"]:
            raise PeerMoverError(told["error"])
        return told

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


def remove_leftovers(folder: Path) -> None:
    """Removes what agents that were killed while they began have left behind in shared memory."""
    for path in folder.glob("ucx_shm_posix_*"):
        path.unlink(missing_ok=True)


def _environment(folder: Path | None) -> dict[str, str]:
    found = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
    # Not on hugetlbfs, whose pages are larger.
    if folder is not None and os.statvfs(folder).f_bsize <= _LARGE_PAGE:
        found["UCX_POSIX_DIR"] = str(folder)
    return {**found, **os.environ}


def _spawn(connection: socket.socket, folder: Path | None, writes: bool) -> subprocess.Popen[bytes]:
    # Not in a thread: it dies with the thread that started it. By path: it needs none of our
    # packages, and -P keeps those that lie beside it from being taken for NIXL's.
    fd, helper = connection.fileno(), Path(__file__).with_name("nixl_peer_helper.py")
    locks = [held_by_child(folder)] if folder is not None and writes else []
    try:
        return subprocess.Popen(
            [sys.executable, "-P", str(helper), str(fd)],
            pass_fds=[fd, *locks],
            stdin=subprocess.DEVNULL,
            stdout=2,  # where UCX writes its log
            env=_environment(folder),
        )
    finally:
        for lock in locks:
            os.close(lock)
