"""The port of a mover: bytes between memory and files, or objects. Every piece ends once."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in this process that stay mapped: an arena slot, a bounce buffer."""

    address: int
    length: int


@dataclass(frozen=True, slots=True)
class FilePiece:
    """One contiguous piece between memory and an open file."""

    memory: Memory
    fd: int
    offset: int


@dataclass(frozen=True, slots=True)
class ObjectPiece:
    """One object at `key`: its bytes are those of the parts, one after the other."""

    parts: Sequence[Memory]
    key: str

    @property
    def length(self) -> int:
        """Bytes of all parts."""
        return sum(part.length for part in self.parts)


@dataclass(frozen=True, slots=True)
class Moved:
    """How a batch ended: for each piece, in order, None (done) or why not.

    `fence` is None when all pieces are terminal. Else some ran into the deadline, and their memory
    may still be written or read until the fence was awaited: the caller quarantines it until then.
    That wait is bounded for movers that can end an operation by force (an agent destroyed), and as
    long as the operation for those that can't (a thread in the kernel).
    """

    errors: Sequence[str | None]
    fence: Awaitable[None] | None = None

    @property
    def ok(self) -> bool:
        """Whether all pieces are done."""
        return all(error is None for error in self.errors)


class FileMover(Protocol):
    """Moves pieces of files. Loop's thread only; the work is done elsewhere.

    Errors begin with their kind: an errno's name ("EIO: ..."), "short: ...", "timeout: ...", or
    "refused: ..." (not even tried). A call that is cancelled begins nothing more, but what it had
    begun goes on: who cancels must not reuse the memory before `close`.
    """

    name: str
    """As shown to people, with what is in use, and why nothing better is:
    "nixl-posix(aio,direct)", "plain(buffered): O_DIRECT refused (EINVAL)"."""
    direct: bool
    """Whether files are to be opened with O_DIRECT, and pieces to be whole pages."""

    @property
    def stuck(self) -> int:
        """Operations that hang past their deadline."""
        ...

    async def read(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        """File -> memory."""
        ...

    async def write(self, pieces: Sequence[FilePiece], timeout_s: float) -> Moved:
        """Memory -> file. Done means handed to the file system, not that it is on the platter."""
        ...

    async def register(self, memory: Memory) -> None:
        """Announces memory that pieces will lie in (an arena's payloads), once; may do nothing."""
        ...

    async def forget(self, memory: Memory) -> None:
        """Takes `register` back before the memory is unmapped."""
        ...

    async def forget_file(self, fd: int) -> None:
        """No more pieces of this file will come; before it is closed."""
        ...

    async def close(self) -> None:
        """Ends it. Waits for nothing that hangs."""
        ...


class ObjectMover(Protocol):
    """Moves whole objects. Loop's thread only."""

    name: str

    async def get(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        """Object -> memory. An object that isn't there, or is shorter, is an error.

        Of a longer one the leading bytes are read.
        """
        ...

    async def put(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        """Memory -> object; an object appears whole or not at all."""
        ...

    async def register(self, memory: Memory) -> None:
        """As FileMover's."""
        ...

    async def forget(self, memory: Memory) -> None:
        """As FileMover's."""
        ...
