"""Picks the best mover of files that works in a folder, by trying."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from services.kvbm.movers.nixl import NixlMover
from services.kvbm.movers.plain import PlainMover, close_file, words
from services.kvbm.movers.port import FileMover, FilePiece, Memory
from services.kvbm.movers.threads import Threads

_PIECE = 64 << 10
_PIECES = 4
_SIZE = _PIECE * _PIECES
_START_S = 10.0
"""For a try at start, when libraries are still to be read from disk as well."""
_PROBE_S = 2.0


async def open_file_mover(*, nixl: bool, direct: bool, gds: bool, folder: Path) -> FileMover:
    """The best that works in `folder`; its name says why it isn't a better one.

    Raises OSError when not even plain writes and reads work there.
    """
    why: list[str] = []
    probe = Probe(folder)
    try:
        for what, build in _candidates(nixl=nixl, direct=direct, gds=gds):
            mover = build("; ".join(why))
            problem = await probe.check(mover, _START_S)
            if not problem:
                return mover
            await mover.close()
            why.append(f"{what} refused ({problem})")
    finally:
        probe.close()
    raise OSError(f"{folder} can't be used: {'; '.join(why)}")


def _candidates(
    *, nixl: bool, direct: bool, gds: bool
) -> Iterator[tuple[str, Callable[[str], FileMover]]]:
    """What may be tried, best first: its name, and how to make it with the reasons before it."""
    if nixl and gds and direct:
        for backend in ("GDS_MT", "GDS"):
            yield backend, _nixl(f"{backend.lower()}(direct)", backend, {})
    # Without O_DIRECT, NIXL's queues only add to what the page cache does: plain calls are better.
    if nixl and direct:
        for words, use in (("uring", "use_uring"), ("aio", "use_aio")):
            parameters = {use: "true", "ios_pool_size": "1024"}
            yield f"NIXL POSIX {words}", _nixl(f"posix({words},direct)", "POSIX", parameters)
    for open_direct in (True, False) if direct else (False,):
        yield "O_DIRECT" if open_direct else "plain I/O", _plain(open_direct)


def _nixl(words: str, backend: str, parameters: Mapping[str, str]) -> Callable[[str], FileMover]:
    return lambda why: NixlMover(words, backend, parameters, direct=True, why=why)


def _plain(direct: bool) -> Callable[[str], FileMover]:
    return lambda why: PlainMover(direct=direct, why=why)


class Probe:
    """Tries movers in a folder: writes a file, reads it back. Loop's thread only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = Threads(1, spare=2, name="kvbm-probe")
        self._lost: list[object] = []
        """Memory and files of tries that hang: never used again, never given back."""

    async def check(self, mover: FileMover, timeout_s: float = _PROBE_S) -> str:
        """Empty, or what went wrong. Returns after a few times `timeout_s` at the latest."""
        try:
            fd = await self._threads.call(lambda: self._open(mover.direct), timeout_s)
        except OSError as exc:
            return words(exc)
        pages = mmap.mmap(-1, 2 * _SIZE)
        problem, hangs = await _round_trip(mover, fd, pages, timeout_s)
        if hangs:
            self._lost.append((fd, pages))
            return problem
        await mover.forget_file(fd)
        close_file(fd)
        return problem

    def close(self) -> None:
        """Ends its thread."""
        self._threads.close()

    def _open(self, direct: bool) -> int:
        path = self._folder / f".probe-{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            return os.open(path, flags, 0o600)
        finally:
            path.unlink(missing_ok=True)


async def _round_trip(
    mover: FileMover, fd: int, pages: mmap.mmap, timeout_s: float
) -> tuple[str, bool]:
    """What went wrong, and whether something hangs."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    pages[:_SIZE] = os.urandom(_SIZE)
    out = [FilePiece(Memory(address + at, _PIECE), fd, at) for at in range(0, _SIZE, _PIECE)]
    back = [
        FilePiece(Memory(address + _SIZE + at, _PIECE), fd, at) for at in range(0, _SIZE, _PIECE)
    ]
    await mover.register(Memory(address, 2 * _SIZE))
    for move, pieces in ((mover.write, out), (mover.read, back)):
        moved = await move(pieces, timeout_s)
        if moved.fence is not None:
            return "timeout: it hangs", True
        if not moved.ok:
            return next(error for error in moved.errors if error), False
    await mover.forget(Memory(address, 2 * _SIZE))
    same = pages[:_SIZE] == pages[_SIZE:]
    return "" if same else "other bytes came back than were written", False
