"""Files by NIXL: all pieces of a batch at once, by io_uring or Linux AIO.

One agent at a time serves one batch, in a thread of its own, until the kernel is done with all of
it. That is the only fence there is for files: a released handle's pieces go on; a destroyed agent's
go on as well (io_uring), or its destructor stops the whole process until they are done (AIO, which
waits holding the interpreter's lock). So an agent whose batch hangs is set aside with its thread,
another takes its place, and both come back when the disk does.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from services.common.telemetry.logging import get_logger
from services.kvbm.movers import plain
from services.kvbm.movers.port import FilePiece, Memory, Moved
from services.kvbm.movers.threads import Threads

log = get_logger(__name__)

_MOST_PIECES = 256
"""In one transfer: what does not fit into an agent's pool would be sent with a later batch."""
_WHOLE_FILE = (1 << 62) - 1
_FIRST_NAP_S = 0.0001
_LONGEST_NAP_S = 0.005
_FORGET_S = 5.0


class NixlError(OSError):
    """NIXL refuses: the package, the backend or a transfer."""


def new_agent() -> Any:
    """An agent without backends. Raises NixlError when there is no NIXL here."""
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ImportError as exc:
        raise NixlError(f"NIXL is not installed ({exc})") from exc
    # Its own lines about agents and backends say nothing that we don't.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    config = nixl_agent_config(enable_prog_thread=False, backends=[])
    return nixl_agent(f"forebay-{secrets.token_hex(8)}", config)


class _Adrift(Exception):
    """A transfer was begun in part, and nobody can tell when that part ends."""

    def __init__(self, handle: object) -> None:
        super().__init__("a transfer was begun in part")
        self.handle = handle


class _Lane:
    """One agent, used by one thread at a time."""

    def __init__(self, backend: str, parameters: Mapping[str, str]) -> None:
        self._agent = new_agent()
        self._backend = backend
        self._files: dict[int, object] = {}
        self._memories: dict[Memory, object] = {}
        try:
            self._agent.create_backend(backend, dict(parameters))
        except Exception as exc:  # Each of the library's errors is a class of its own.
            raise NixlError(f"NIXL has no {backend} here ({exc})") from exc

    def know(self, memories: frozenset[Memory], files: frozenset[int]) -> None:
        """Registers what is new, and forgets what is gone."""
        for memory in self._memories.keys() - memories:
            self._agent.deregister_memory(self._memories.pop(memory), [self._backend])
        for fd in self._files.keys() - files:
            self._agent.deregister_memory(self._files.pop(fd), [self._backend])
        for memory in memories - self._memories.keys():
            self._memories[memory] = self._register((memory.address, memory.length, 0, ""), "DRAM")
        for fd in files - self._files.keys():
            self._files[fd] = self._register((0, _WHOLE_FILE, fd, ""), "FILE")

    def move(self, operation: str, pieces: Sequence[FilePiece]) -> bool:
        """Moves them, and returns when nothing of it is under way; false: something failed.

        Raises NixlError when nothing was begun, and _Adrift.
        """
        agent = self._agent
        local = [(piece.memory.address, piece.memory.length, 0) for piece in pieces]
        there = [(piece.offset, piece.memory.length, piece.fd) for piece in pieces]
        try:
            handle = agent.initialize_xfer(
                operation,
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(there, "FILE"),
                agent.name,
                backends=[self._backend],
            )
        except Exception as exc:
            raise NixlError(f"NIXL refuses the batch ({exc!r})") from exc
        try:
            state = agent.transfer(handle)
        except Exception as exc:
            raise _Adrift(handle) from exc
        done = self._finish(handle, state)
        handle.release()
        return done

    def _finish(self, handle: Any, state: str) -> bool:
        start = time.monotonic()
        while state == "PROC":
            # A part of what it took so far: late by that at most, and cheap when it takes long.
            nap = (time.monotonic() - start) / 25
            time.sleep(min(max(nap, _FIRST_NAP_S), _LONGEST_NAP_S))
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception:  # So it says that a piece has failed, when all have ended.
                return False
        return bool(state == "DONE")

    def _register(self, region: tuple[int, int, int, str], kind: str) -> object:
        try:
            return self._agent.register_memory([region], kind, [self._backend])
        except Exception as exc:
            raise NixlError(f"NIXL can't register {kind} ({exc!r})") from exc


class NixlMover:
    """Implements FileMover. Pieces must lie in registered memory."""

    def __init__(
        self,
        words: str,
        backend: str,
        parameters: Mapping[str, str],
        *,
        direct: bool,
        why: str = "",
        lanes: int = 2,
        spare: int = 4,
    ) -> None:
        self.name = f"nixl-{words}" + (why and f": {why}")
        self.direct = direct
        self._backend = backend
        self._parameters = dict(parameters)
        # Apart, so that no load waits behind stores.
        self._readers = Threads(lanes, spare=spare, name="kvbm-nixl-read")
        self._writers = Threads(lanes, spare=spare, name="kvbm-nixl-write")
        self._idle: deque[_Lane] = deque()
        self._memories: frozenset[Memory] = frozenset()
        self._files: frozenset[int] = frozenset()

    @property
    def stuck(self) -> int:
        """Batches that hang past their deadline."""
        return self._readers.stuck + self._writers.stuck

    async def read(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        """See FileMover."""
        return await self._move(self._readers, "READ", pieces, timeout_s)

    async def write(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        """See FileMover."""
        return await self._move(self._writers, "WRITE", pieces, timeout_s)

    async def register(self, memory: Memory) -> None:
        """See FileMover. Agents learn of it with their next batch."""
        self._memories |= {memory}

    async def forget(self, memory: Memory) -> None:
        """See FileMover."""
        self._memories -= {memory}
        await self._tidy()

    async def forget_file(self, fd: int) -> None:
        """See FileMover."""
        self._files -= {fd}
        await self._tidy()

    async def close(self) -> None:
        """See FileMover."""
        self._readers.close()
        self._writers.close()
        self._idle.clear()

    async def _move(
        self, threads: Threads, operation: str, pieces: Sequence[FilePiece], timeout_s: float
    ) -> Moved:
        if not pieces:
            return Moved(())
        self._files |= {piece.fd for piece in pieces}
        call = partial(self._run, operation, tuple(pieces), self._memories, self._files)
        ran = await threads.run([call], timeout_s)
        (errors,) = ran.results
        if isinstance(errors, Exception):
            errors = [plain.told(errors)] * len(pieces)
        return Moved(errors, ran.fence)

    def _run(
        self,
        operation: str,
        pieces: Sequence[FilePiece],
        memories: frozenset[Memory],
        files: frozenset[int],
    ) -> list[str | None]:
        """One batch, in a thread; returns when nothing of it is under way."""
        for fd in {piece.fd for piece in pieces}:
            os.fstat(fd)  # A closed one would break off the transfer in the middle.
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = _Lane(self._backend, self._parameters)
        one = plain.read_piece if operation == "READ" else plain.write_piece
        errors: list[str | None] = []
        try:
            lane.know(memories, files)
            for at in range(0, len(pieces), _MOST_PIECES):
                some = pieces[at : at + _MOST_PIECES]
                if lane.move(operation, some):
                    errors += [None] * len(some)
                else:
                    # It says neither which piece nor why: plain calls do.
                    errors += [plain.attempt(partial(one, piece)) for piece in some]
        except _Adrift as exc:
            log.error("a transfer is adrift; its memory is not used again", backend=self.name)
            _wait_for_ever(exc.handle, lane)
        self._idle.append(lane)
        return errors

    async def _tidy(self) -> None:
        call = partial(self._tidy_idle, self._memories, self._files)
        ran = await self._readers.run([call], _FORGET_S)
        for result in ran.results:
            if isinstance(result, Exception):
                log.warning("an agent could not forget", why=str(result))

    def _tidy_idle(self, memories: frozenset[Memory], files: frozenset[int]) -> None:
        for _ in range(len(self._idle)):
            try:
                lane = self._idle.popleft()
            except IndexError:
                return
            lane.know(memories, files)
            self._idle.append(lane)


def _wait_for_ever(*kept: object) -> None:
    """Holds on to what must not be destroyed, and to the thread, whose end is the fence."""
    threading.Event().wait()
    del kept
