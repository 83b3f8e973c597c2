"""Movers of files for tests: one that works at once, and one that fails as it is told."""

import ctypes
import errno
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.kvbm.movers.plain import attempt, read_piece, words, write_piece
from services.kvbm.movers.port import FileMover, FilePiece, Memory, Moved
from services.kvbm.movers.threads import Fence, joined


class FakeMover:
    """Moves at once, in the caller's thread."""

    name = "fake"
    direct = False
    stuck = 0

    def __init__(self) -> None:
        self.closed = False

    async def read(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        return self._move(read_piece, pieces)

    async def write(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        return self._move(write_piece, pieces)

    async def register(self, memory: Memory) -> None: ...

    async def forget(self, memory: Memory) -> None: ...

    async def forget_file(self, fd: int) -> None: ...

    async def close(self) -> None:
        self.closed = True

    def _move(self, one: Callable[[FilePiece], str | None], pieces: Sequence[FilePiece]) -> Moved:
        if self.closed:
            return Moved(["refused: closed"] * len(pieces))
        return Moved([attempt(lambda piece=piece: one(piece)) for piece in pieces])


class Fault(StrEnum):
    """What may happen to one piece."""

    EIO = "eio"
    ENOSPC = "enospc"
    SHORT = "short"
    """Half of it is moved, and that is said."""
    SILENT = "silent"
    """Half of it is moved, and nobody says so."""
    FLIPPED = "flipped"
    """One bit of the bytes in memory is turned round after a read, of those on disk at a write."""
    HANG = "hang"
    """Not before the deadline. It is done when `release` is called, and not before."""


@dataclass(slots=True)
class _Hanging:
    operation: str
    piece: FilePiece
    fence: Fence


class FaultyMover:
    """Another mover with faults: given ones for the next pieces, and by chance after these."""

    def __init__(
        self,
        inner: FileMover,
        *,
        seed: int = 0,
        rate: float = 0.0,
        faults: Iterable[Fault] = (Fault.EIO, Fault.SHORT, Fault.HANG),
    ) -> None:
        self.inner = inner
        self.name = f"faulty {inner.name}"
        self.direct = inner.direct
        self.rate = rate
        self.next: list[Fault | None] = []
        """Of the next pieces, in order."""
        self.injected: list[tuple[str, Fault]] = []
        self._faults = tuple(faults)
        self._random = random.Random(seed)
        self._hanging: list[_Hanging] = []

    @property
    def stuck(self) -> int:
        return self.inner.stuck + len(self._hanging)

    async def read(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        return await self._move("read", self.inner.read, pieces, timeout_s)

    async def write(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        return await self._move("write", self.inner.write, pieces, timeout_s)

    async def register(self, memory: Memory) -> None:
        await self.inner.register(memory)

    async def forget(self, memory: Memory) -> None:
        await self.inner.forget(memory)

    async def forget_file(self, fd: int) -> None:
        await self.inner.forget_file(fd)

    async def close(self) -> None:
        await self.inner.close()

    async def release(self) -> None:
        """Lets all that hangs go on: it is done now, late."""
        hanging, self._hanging = self._hanging, []
        for item in hanging:
            move = self.inner.read if item.operation == "read" else self.inner.write
            await move([item.piece], 5)
            item.fence.open()

    async def _move(
        self,
        operation: str,
        move: Callable[[Sequence[FilePiece], float], Awaitable[Moved]],
        pieces: Sequence[FilePiece],
        timeout_s: float,
    ) -> Moved:
        faults = [self._draw() for _ in pieces]
        self.injected += [(operation, fault) for fault in faults if fault]
        sound = [piece for piece, fault in zip(pieces, faults, strict=True) if fault is None]
        moved = await move(sound, timeout_s)
        results = iter(moved.errors)
        errors: list[str | None] = []
        fences: list[Awaitable[None] | None] = [moved.fence]
        for piece, fault in zip(pieces, faults, strict=True):
            if fault is None:
                errors.append(next(results))
            elif fault is Fault.HANG:
                fence = Fence()
                self._hanging.append(_Hanging(operation, piece, fence))
                fences.append(fence)
                errors.append(f"timeout: is still running after {timeout_s:.1f} s")
            else:
                errors.append(await self._spoil(fault, operation, move, piece))
        return Moved(errors, joined(*fences))

    def _draw(self) -> Fault | None:
        if self.next:
            return self.next.pop(0)
        return self._random.choice(self._faults) if self._random.random() < self.rate else None

    async def _spoil(
        self,
        fault: Fault,
        operation: str,
        move: Callable[[Sequence[FilePiece], float], Awaitable[Moved]],
        piece: FilePiece,
    ) -> str | None:
        if fault in (Fault.EIO, Fault.ENOSPC):
            code = getattr(errno, fault.name)
            return words(OSError(code, os.strerror(code)))
        half = Memory(piece.memory.address, piece.memory.length // 2)
        if fault is Fault.FLIPPED:
            await move([piece], 5)
            self._flip(operation, piece)
            return None
        await move([FilePiece(half, piece.fd, piece.offset)], 5)
        if fault is Fault.SILENT:
            return None
        return f"short: {half.length} of {piece.memory.length} bytes"

    def _flip(self, operation: str, piece: FilePiece) -> None:
        at = self._random.randrange(piece.memory.length)
        bit = 1 << self._random.randrange(8)
        if operation == "read":
            byte = (ctypes.c_ubyte * 1).from_address(piece.memory.address + at)
            byte[0] ^= bit
            return
        # Through a descriptor of its own, since the file's may be for whole pages only.
        fd = os.open(f"/proc/self/fd/{piece.fd}", os.O_RDWR)
        try:
            (old,) = os.pread(fd, 1, piece.offset + at)
            os.pwrite(fd, bytes([old ^ bit]), piece.offset + at)
        finally:
            os.close(fd)
