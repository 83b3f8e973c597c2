"""Plain reads and writes in threads: what always works."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial

from services.common.telemetry.logging import get_logger
from services.kvbm.movers.port import FilePiece, Memory, Moved
from services.kvbm.movers.threads import Threads

log = get_logger(__name__)


def words(exc: OSError) -> str:
    """An error as tiers tell it: its name first, where it has one."""
    if isinstance(exc, TimeoutError) and exc.errno is None:
        return f"timeout: {exc}"
    if exc.errno is None:
        return f"refused: {exc}"
    return f"{errno.errorcode.get(exc.errno, exc.errno)}: {exc.strerror}"


def close_file(fd: int) -> None:
    """Closes a file, once. A file system that is gone or fails says so here too: nobody minds.

    The kernel takes the number back all the same, so that a second try could close a stranger's.
    """
    try:
        os.close(fd)
    except OSError as exc:
        if exc.errno == errno.EBADF:
            raise
        log.info("a file did not close well", why=words(exc))


class PlainMover:
    """preadv and pwritev in a bounded pool; one call a piece. They release the GIL.

    A piece that hangs keeps its thread and its memory until the kernel lets go: that is the fence.
    """

    def __init__(self, *, direct: bool, why: str = "", threads: int = 4, spare: int = 8) -> None:
        self.name = f"plain({'direct' if direct else 'buffered'})" + (why and f": {why}")
        self.direct = direct
        self._threads = Threads(threads, spare=spare, name="kvbm-plain")

    @property
    def stuck(self) -> int:
        """Threads that hang in the kernel past their deadline."""
        return self._threads.stuck

    async def read(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        """See FileMover."""
        return await self._move(read_piece, pieces, timeout_s)

    async def write(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        """See FileMover."""
        return await self._move(write_piece, pieces, timeout_s)

    async def register(self, memory: Memory) -> None:
        """See FileMover; there is nothing to do."""

    async def forget(self, memory: Memory) -> None:
        """See FileMover; there is nothing to do."""

    async def forget_file(self, fd: int) -> None:
        """See FileMover; there is nothing to do."""

    async def close(self) -> None:
        """Ends idle threads; those that hang end when the kernel lets go."""
        self._threads.close()

    async def _move(
        self, call: Callable[[FilePiece], str | None], pieces: Sequence[FilePiece], timeout_s: float
    ) -> Moved:
        ran = await self._threads.run([partial(call, piece) for piece in pieces], timeout_s)
        errors = [told(item) if isinstance(item, Exception) else item for item in ran.results]
        return Moved(errors, ran.fence)


def told(exc: Exception) -> str:
    """What went wrong with a piece, in words as in `Moved.errors`."""
    return words(exc) if isinstance(exc, OSError) else f"failed: {exc!r}"


def attempt(call: Callable[[], str | None]) -> str | None:
    """Does it; why it failed, or None."""
    try:
        return call()
    except OSError as exc:
        return words(exc)


def _view(memory: Memory) -> memoryview:
    return memoryview((ctypes.c_char * memory.length).from_address(memory.address)).cast("B")


def read_piece(piece: FilePiece) -> str | None:
    """Reads one; None, or how much was missing. Raises OSError."""
    view, done = _view(piece.memory), 0
    while done < len(view):
        count = os.preadv(piece.fd, [view[done:]], piece.offset + done)
        if count == 0:
            return f"short: {done} of {len(view)} bytes"
        done += count
    return None


def write_piece(piece: FilePiece) -> str | None:
    """Writes one; None, or how much went missing. Raises OSError."""
    view, done = _view(piece.memory), 0
    while done < len(view):
        count = os.pwritev(piece.fd, [view[done:]], piece.offset + done)
        if count == 0:
            return f"short: {done} of {len(view)} bytes"
        done += count
    return None
