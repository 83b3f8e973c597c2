"""Objects as files below a folder, such as an NFS mount that nodes share.

A file appears under its name only when it is whole: it is written under another name and renamed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.common.telemetry.logging import get_logger
from services.kvbm.movers.objects import MISSING, SKIP, Entry, StoreError, told
from services.kvbm.movers.plain import close_file, words
from services.kvbm.movers.port import FileMover, FilePiece, Memory, Moved, ObjectPiece
from services.kvbm.movers.threads import Ran, Threads, joined

log = get_logger(__name__)
T = TypeVar("T")
PART = ".part"
"""Ends the names of files that are being written."""
_LIST = 1000


class DirectoryObjects:
    """Implements Objects. Payloads go by a FileMover, all else by threads that may hang."""

    def __init__(
        self, folder: Path, open_mover: Callable[[], Awaitable[FileMover]], *, owned: bool = True
    ) -> None:
        """`owned`: the mover is for this folder alone, and is closed with it."""
        self.place = f"file://{folder}"
        self.name = "directory: not probed"
        self._folder = folder
        self._open_mover = open_mover
        self._owned = owned
        self._mover: FileMover | None = None
        self._threads = Threads(8, spare=16, name="kvbm-directory")
        self._memories: list[Memory] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._id = secrets.token_hex(8)
        self._device: int | None = None

    async def open(self, timeout_s: float) -> None:
        """See Objects."""
        probe = f"probe/{self._id}"
        self._device = await self._call(self._prepare, timeout_s)
        await self.write(probe, probe.encode(), timeout_s)
        if await self.read(probe, timeout_s) != probe.encode():
            raise StoreError("it returns other bytes than were written")
        await self.delete([probe], timeout_s)
        if self._mover is None:
            try:
                mover = await self._open_mover()
            except OSError as exc:
                raise StoreError(str(exc)) from exc
            for memory in self._memories:
                await mover.register(memory)
            self._mover = mover
            self.name = f"directory, {mover.name}"

    async def get(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        """See ObjectMover."""
        moved = await asyncio.gather(*(self._get(piece, timeout_s) for piece in pieces))
        return Moved([m.errors[0] for m in moved], joined(*(m.fence for m in moved)))

    async def put(self, pieces: Sequence[ObjectPiece], timeout_s: float) -> Moved:
        """See ObjectMover. No fence: what still reads the memory writes a file nobody will see."""
        return Moved(await asyncio.gather(*(self._put(piece, timeout_s) for piece in pieces)))

    async def register(self, memory: Memory) -> None:
        """See ObjectMover."""
        self._memories.append(memory)
        if self._mover is not None:
            await self._mover.register(memory)

    async def forget(self, memory: Memory) -> None:
        """See ObjectMover."""
        self._memories.remove(memory)
        if self._mover is not None:
            await self._mover.forget(memory)

    async def size(self, key: str, timeout_s: float) -> Entry | None:
        """See Objects."""

        def stat() -> Entry | None:
            try:
                found = os.stat(self._folder / key)
            except FileNotFoundError:
                return None
            return Entry(key, found.st_size, found.st_mtime)

        return await self._call(stat, timeout_s)

    async def read(self, key: str, timeout_s: float) -> bytes | None:
        """See Objects."""

        def read() -> bytes | None:
            try:
                return (self._folder / key).read_bytes()
            except FileNotFoundError:
                return None

        return await self._call(read, timeout_s)

    async def write(self, key: str, data: bytes, timeout_s: float, *, absent: bool = False) -> bool:
        """See Objects."""

        def write() -> bool:
            path, temporary = self._names(key)
            fd = self._create(temporary, 0)
            try:
                with os.fdopen(fd, "wb", closefd=False) as file:
                    file.write(data)
                os.fdatasync(fd)
                if not absent:
                    temporary.rename(path)
                    return True
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    return False
                return True
            finally:
                close_file(fd)
                temporary.unlink(missing_ok=True)

        return await self._call(write, timeout_s)

    async def delete(self, keys: Sequence[str], timeout_s: float) -> None:
        """See Objects. Folders go with their last file."""

        def delete(key: str) -> None:
            path = self._folder / key
            path.unlink(missing_ok=True)
            try:
                path.parent.rmdir()
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                    raise

        await self._calls([partial(delete, key) for key in keys], timeout_s)

    async def entries(self, prefix: str, timeout_s: float) -> AsyncIterator[Sequence[Entry]]:
        """See Objects; files that are being written (`PART`) are among them."""

        def names() -> list[str]:
            top = self._folder / prefix
            return [
                os.path.relpath(os.path.join(at, name), self._folder)
                for at, _, files in os.walk(top)
                for name in files
            ]

        found = await self._call(names, timeout_s)
        for start in range(0, len(found), _LIST):
            batch = found[start : start + _LIST]
            entries = [await self.size(key, timeout_s) for key in batch]
            yield [entry for entry in entries if entry is not None]

    async def folders(self, timeout_s: float) -> Sequence[str]:
        """See Objects."""

        def folders() -> list[str]:
            with os.scandir(self._folder) as entries:
                return [entry.name for entry in entries if entry.is_dir()]

        return await self._call(folders, timeout_s)

    async def close(self) -> None:
        """See Objects."""
        for task in self._closing:
            task.cancel()
        if self._mover is not None and self._owned:
            await self._mover.close()
        self._threads.close()

    async def _get(self, piece: ObjectPiece, timeout_s: float) -> Moved:
        mover, deadline = self._mover, time.monotonic() + timeout_s
        if mover is None:
            return Moved([f"{self.place} is not open"])
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if mover.direct else 0)

        def open_file() -> int | None:
            try:
                fd = os.open(self._folder / piece.key, flags)
            except FileNotFoundError:
                return None
            if (size := os.fstat(fd).st_size) < piece.length:
                close_file(fd)
                raise ValueError(f"short: {size} of {piece.length} bytes")
            return fd

        try:
            fd = await self._open_file(open_file, timeout_s)
        except ValueError as exc:
            return Moved([str(exc)])
        except StoreError as exc:
            return Moved([told(exc)])
        if fd is None:
            return Moved([MISSING])
        moved = await mover.read(_pieces(piece, fd), max(0.0, deadline - time.monotonic()))
        if moved.fence is None:
            await mover.forget_file(fd)
            close_file(fd)
        else:
            self._later(self._abandon(mover, fd, moved.fence))
        return Moved([_first(moved)], moved.fence)

    async def _put(self, piece: ObjectPiece, timeout_s: float) -> str | None:
        mover, deadline = self._mover, time.monotonic() + timeout_s
        if mover is None:
            return f"{self.place} is not open"
        path, temporary = self._names(piece.key)
        direct = os.O_DIRECT if mover.direct else 0
        try:
            fd = await self._open_file(lambda: self._create(temporary, direct), timeout_s)
        except StoreError as exc:
            return told(exc)
        assert fd is not None, "a file is made or an error is raised"
        moved = await mover.write(_pieces(piece, fd), max(0.0, deadline - time.monotonic()))
        error = _first(moved)
        if moved.fence is not None:
            # The unfinished file stays; a sweep removes it. It never gets its name.
            self._later(self._abandon(mover, fd, moved.fence))
            return error
        await mover.forget_file(fd)

        def settle() -> None:
            try:
                if error is None:
                    # After a crash of the server no name shall lead to bytes that never got there.
                    os.fdatasync(fd)
                    temporary.rename(path)
            finally:
                temporary.unlink(missing_ok=True)
                close_file(fd)

        try:
            await self._call(settle, max(0.1, deadline - time.monotonic()))
        except StoreError as exc:
            return error or told(exc)
        return error

    async def _open_file(self, call: Callable[[], int | None], timeout_s: float) -> int | None:
        """Opens a file in a thread. Should it come too late, it is closed again."""
        box: list[int] = []

        def opening() -> int | None:
            fd = call()
            if fd is not None:
                box.append(fd)
            return fd

        ran = await self._threads.run([opening], timeout_s)
        if ran.fence is not None:
            self._later(self._close_late(box, ran.fence))
        return self._results(ran)[0]

    async def _close_late(self, box: Sequence[int], fence: Awaitable[None]) -> None:
        await fence
        for fd in box:
            close_file(fd)

    async def _abandon(self, mover: FileMover, fd: int, fence: Awaitable[None]) -> None:
        """Closes a file when the last operation on it is over."""
        await fence
        await mover.forget_file(fd)
        close_file(fd)

    def _later(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work, name="kvbm directory fence")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _prepare(self) -> int:
        """Makes the folder at start, and again when it was deleted; its device.

        Not when its file system is away: then the folder would be made in the mount's place.
        """
        if self._device is None:
            self._folder.mkdir(parents=True, exist_ok=True)
        elif not self._folder.exists() and self._folder.parent.stat().st_dev == self._device:
            self._folder.mkdir(exist_ok=True)
        return self._folder.stat().st_dev

    def _names(self, key: str) -> tuple[Path, Path]:
        path = self._folder / key
        return path, path.with_name(f".{path.name}.{secrets.token_hex(6)}{PART}")

    def _create(self, path: Path, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for attempt in range(3):
            try:
                # The folder itself isn't made: a mount that is away must not be written beside.
                if path.parent != self._folder:
                    path.parent.mkdir(exist_ok=True)
                return os.open(path, flags, 0o644)
            except FileNotFoundError:
                # Somebody removed the folder of what was its last file.
                if attempt == 2 or not self._folder.is_dir():
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _call(self, call: Callable[[], T], timeout_s: float) -> T:
        return (await self._calls([call], timeout_s))[0]

    async def _calls(self, calls: Sequence[Callable[[], T]], timeout_s: float) -> list[T]:
        return self._results(await self._threads.run(calls, timeout_s))

    def _results(self, ran: Ran[T]) -> list[T]:
        results: list[T] = []
        for result in ran.results:
            if isinstance(result, OSError):
                hangs = isinstance(result, TimeoutError) or result.errno is None
                gone = result.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV)
                raise StoreError(words(result), away=hangs or gone) from result
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return results


def _pieces(piece: ObjectPiece, fd: int) -> list[FilePiece]:
    pieces, offset = [], 0
    for part in piece.parts:
        if part.address != SKIP:
            pieces.append(FilePiece(part, fd, offset))
        offset += part.length
    return pieces


def _first(moved: Moved) -> str | None:
    return next((error for error in moved.errors if error is not None), None)
