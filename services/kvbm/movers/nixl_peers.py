"""NIXL agents for memory of peers (UCX), each in a process that can be killed (helper.py).

A released transfer goes on, and goes on writing when the link heals; only the end of its agent
ends it. A process has no memory in common with the daemon but what it reads into or shows. Which
blocks, and whether they are what they should be, is the caller's business.
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.kvbm.movers.helper import Helper, NixlFailed
from services.kvbm.movers.readerlock import held_by_child

MOST_PIECES = 512
"""Pieces of one read: what fits into a message."""
_LARGE_PAGE = 1 << 16
_START_S = 20.0
_MAP_S = 10.0
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """Bytes of a peer's window, and where in a mapped region they go."""

    offset: int
    address: int
    length: int


class PeerAgent:
    """One agent in its process. Loop's thread only; `start` before anything else."""

    def __init__(
        self, folder: Path | None = None, *, writes: bool = False, loopback: bool = False
    ) -> None:
        """folder: of the arenas, and for what UCX leaves behind in shared memory.

        writes: it may write into the arenas; then it holds their lock.
        loopback: all peers are on this machine; else UCX listens on all of its networks.
        """
        self._folder = folder
        self._loopback = loopback
        self._writes = writes
        self.name = f"forebay-{secrets.token_hex(8)}"
        self.metadata = b""
        """What peers need to know to reach its registered memory."""
        self._helper = Helper("nixl_peer_helper.py")
        self._regions = 0

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._helper.alive

    @property
    def pid(self) -> int:
        """Of its process; 0 before the start."""
        return self._helper.pid

    async def start(self) -> None:
        """Starts the process and its agent. Raises NixlFailed: there is no NIXL or no UCX."""
        folder = self._folder
        try:
            environment = _environment(folder, self._loopback)
            locks = [held_by_child(folder)] if folder is not None and self._writes else []
        except OSError as exc:
            raise NixlFailed(f"the folder of arenas can't be used: {exc}") from exc
        try:
            self._helper.start(environment, locks)
        finally:
            for lock in locks:
                os.close(lock)
        answer = await self._ask({"open": self.name}, timeout_s=_START_S)
        self.metadata = base64.b64decode(answer["metadata"])

    async def map(self, fd: int, length: int) -> tuple[int, int]:
        """Maps and registers memory: its number, and its address there. Raises NixlFailed."""
        self._regions += 1
        request = {"map": self._regions, "length": length}
        answer = await self._ask(request, [fd], timeout_s=_MAP_S)
        self.metadata = base64.b64decode(answer["metadata"])
        return self._regions, int(answer["address"])

    async def know(self, metadata: bytes, timeout_s: float) -> str:
        """Makes a peer's agent known; its name. Raises NixlFailed."""
        request = {"peer": base64.b64encode(metadata).decode()}
        return str((await self._ask(request, timeout_s=timeout_s))["agent"])

    async def read(
        self, agent: str, region: int, pieces: Sequence[RemotePiece], timeout_s: float
    ) -> None:
        """Reads a peer's bytes into a region. Raises NixlFailed, or TimeoutError.

        After TimeoutError, and when cancelled, it may still write: until `end` has returned.
        """
        read = [(piece.offset, piece.address, piece.length) for piece in pieces]
        request = {"read": read, "region": region, "agent": agent}
        await self._ask(request, timeout_s=timeout_s, late=TimeoutError)

    def expect(self, seconds: float) -> None:
        """Peers may read what it shows within so many seconds from now; 0: nobody does."""
        self._helper.tell({"expect": seconds})

    def kill(self) -> None:
        """Ends the process, and with it whatever it was doing."""
        self._helper.kill()

    async def end(self) -> None:
        """Kills it and returns when it is dead: nothing of it reads or writes any more."""
        await self._helper.end()

    async def close(self) -> None:
        """As `end`, but waits for a few seconds at most."""
        await self._helper.end(_END_S)

    async def _ask(
        self,
        request: Mapping[str, object],
        fds: Sequence[int] = (),
        *,
        timeout_s: float,
        late: type[Exception] = NixlFailed,
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._helper.ask(request, fds)
        except TimeoutError as exc:
            raise late(f"no end after {timeout_s:.1f} s") from exc


def remove_leftovers(folder: Path) -> None:
    """Removes what agents that were killed while they began have left behind in shared memory."""
    for path in folder.glob("ucx_shm_posix_*"):
        path.unlink(missing_ok=True)


def _environment(folder: Path | None, loopback: bool) -> dict[str, str]:
    found = {"UCX_LOG_LEVEL": "error"}
    if loopback:
        found["UCX_NET_DEVICES"] = "lo"
    # Not on hugetlbfs, whose pages are larger.
    if folder is not None and os.statvfs(folder).f_bsize <= _LARGE_PAGE:
        found["UCX_POSIX_DIR"] = str(folder)
    return found
