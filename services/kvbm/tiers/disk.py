"""The local disk (G3): a folder with a byte cap and a floor of free space, for one daemon."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.common.arena import HEADER_BYTES, PAGE, Arena, Geometry
from services.common.telemetry.logging import get_logger
from services.kvbm.movers.plain import close_file, words
from services.kvbm.movers.port import FileMover, Memory
from services.kvbm.movers.select import Probe, open_file_mover
from services.kvbm.movers.threads import Threads
from services.kvbm.tiers.files import Namespace, SpaceFiles, namespaces, remove, same_file
from services.kvbm.tiers.port import Health
from services.kvbm.tiers.space import LocalSpace

log = get_logger(__name__)
T = TypeVar("T")

_SEGMENT_BYTES = 1 << 30
_SEGMENT_SLOTS = 64
_MOST_SEGMENTS = 256
_CRUMB_SLOTS = 16
_FILES_S = 20.0
_FILL_S = 300.0
"""A segment may have to be filled with zeros."""
_FULL_S = 5.0
"""After this long without room, it is looked for again."""
_LOCK_S = 5.0
_LOCK_POLL_S = 0.05
_LOCK_CALL_S = 5.0
_STALL_S = 2.0
_CRAWL_BYTES_S = 10 << 20
_OURS = ("corrupt", "refused")
"""Kinds of errors that say nothing about the disk's health."""


@dataclass(slots=True)
class DiskCounters:
    """What the disk has done since the start."""

    stored_blocks: int = 0
    loaded_blocks: int = 0
    written_bytes: int = 0
    """Payloads of blocks, and zeros where a file system can't allocate without."""
    read_bytes: int = 0
    corrupt_blocks: int = 0
    """Whose bytes or header were found bad at a load."""
    failed_stores: int = 0
    failed_loads: int = 0
    """Without those that were corrupt."""
    timeouts: int = 0
    """Of all failures, those at the deadline."""
    degraded: int = 0
    """Times that the tier stopped storing."""


@asynccontextmanager
async def open_disk_tier(
    folder: Path,
    cap_bytes: int,
    free_floor_bytes: int,
    *,
    nixl: bool = True,
    direct: bool = True,
    gds: bool = False,
    purge: bool = False,
) -> AsyncIterator[LocalDisk]:
    """The tier in `folder`, which it makes if need be. Raises OSError when it can't be used.

    The folder holds at most `cap_bytes`, and nothing is added to it while less than
    `free_floor_bytes` of the disk would stay free. `purge` removes all blocks first.
    """
    threads = Threads(4, name="kvbm-disk")
    lock = _FolderLock(folder)
    pick = partial(open_file_mover, nixl=nixl, direct=direct, gds=gds, folder=folder)
    try:
        await lock.take(threads)
        disk = LocalDisk(
            folder, cap_bytes, free_floor_bytes, await pick(), threads, lock, pick_mover=pick
        )
        try:
            if purge:
                for item in await disk.namespaces():
                    await disk.remove(item.namespace)
            yield disk
        finally:
            await disk.close()
    finally:
        threads.close()
        lock.release()


class LocalDisk:
    """Implements DiskTier. Loop's thread only; file work is done in threads, with deadlines."""

    def __init__(
        self,
        folder: Path,
        cap_bytes: int,
        floor_bytes: int,
        mover: FileMover,
        threads: Threads,
        lock: _FolderLock,
        *,
        pick_mover: Callable[[], Awaitable[FileMover]],
    ) -> None:
        self.backend = mover.name
        """What moves the bytes, and what the file system refuses."""
        self.place = str(folder)
        self.health = Health(True)
        self.counters = DiskCounters()
        self.mover = mover
        self.threads = threads
        self._folder = folder
        self._cap = cap_bytes
        self._floor = floor_bytes
        self._probe = Probe(folder)
        self._lock = lock
        self._pick_mover = pick_mover
        self._spaces: dict[bytes, LocalSpace] = {}
        self._full_until = 0.0
        self._gate = asyncio.Lock()
        """Who makes or removes files does so alone."""

    @property
    def stuck(self) -> int:
        """Operations that hang past their deadline."""
        return self.mover.stuck + self.threads.stuck

    async def open(self, namespace: bytes, arena: Arena) -> LocalSpace:
        """See DiskTier. Also raises OSError when the namespace is open already."""
        async with self._gate:
            if namespace in self._spaces:
                raise OSError(errno.EBUSY, "the namespace is open already", self.place)
            # The folder may have been deleted, and made by another daemon meanwhile.
            await self._lock.take(self.threads, wait=False)
            files = await self._adopt(namespace, arena.geometry)
            if not files.slots and not await self._add_segment(files, arena.geometry):
                await self._files(files.close)
                raise OSError(
                    errno.ENOSPC,
                    f"no room for a block: the cap is {self._cap / 2**30:.2f} GiB, and "
                    f"{self._floor / 2**30:.2f} GiB must stay free",
                    self.place,
                )
            found = await self._files(files.read_headers)
            space = LocalSpace(self, files, namespace, arena, found)
            self._spaces[namespace] = space
        await self.mover.register(_payloads(arena))
        log.info(
            "disk blocks open",
            folder=str(files.path),
            slots=space.slots,
            found=sum(len(raw) for raw in found) // HEADER_BYTES,
            backend=self.backend,
        )
        return space

    async def namespaces(self) -> list[Namespace]:
        """Everybody's files in the folder, least recently used first. Raises OSError."""
        return await self._files(partial(namespaces, self._folder))

    async def remove(self, namespace: bytes) -> bool:
        """Removes a namespace's files; false: it is open. Raises OSError."""
        async with self._gate:
            return await self._remove(namespace)

    async def probe(self) -> Health:
        """See DiskTier. Makes anew what was deleted; those blocks are lost (`take_lost`)."""
        async with self._gate:
            try:
                await self._lock.take(self.threads, wait=False)
                await self._check_mover()
                for space in self._spaces.values():
                    await space.restore()
                    if why := await space.pay():
                        raise OSError(f"blocks can't be erased: {why}")
            except OSError as exc:
                self.degrade(words(exc))
            else:
                if not self.health.ok:
                    log.info("the disk works again", folder=self.place)
                self.health = Health(True)
        return self.health

    async def close(self) -> None:
        """See DiskTier."""
        for space in list(self._spaces.values()):
            await space.close()
        self._probe.close()
        await self.mover.close()

    # ---- what spaces need

    def refusal(self) -> str:
        """Why nothing is stored at present; empty: it is."""
        return "" if self.health.ok else f"refused: the disk is degraded: {self.health.why}"

    def ended(self, storing: bool, errors: Sequence[str | None], size: int, seconds: float) -> None:
        """Counts a batch, and judges the disk by it."""
        counters = self.counters
        kinds = [error.split(":", 1)[0] for error in errors if error]
        corrupt = kinds.count("corrupt")
        counters.corrupt_blocks += corrupt
        counters.timeouts += kinds.count("timeout")
        done = len(errors) - len(kinds)
        if storing:
            counters.stored_blocks += done
            counters.written_bytes += size
            counters.failed_stores += len(kinds)
        else:
            counters.loaded_blocks += done
            counters.read_bytes += size
            counters.failed_loads += len(kinds) - corrupt
        for error in errors:
            if error and not error.startswith(_OURS):
                self.degrade(error)
                return
        if seconds > _STALL_S + size / _CRAWL_BYTES_S:
            self.degrade(f"a batch of {size >> 10} KiB took {seconds:.1f} s")

    def degrade(self, why: str) -> None:
        """Stores nothing more until a probe has worked."""
        if self.health.ok:
            self.counters.degraded += 1
            log.warning("the disk stores nothing for now", folder=self.place, why=why)
        self.health = Health(False, why)

    async def enlarge(self, space: LocalSpace) -> int:
        """Adds a segment to an open namespace; the slots it has."""
        async with self._gate:
            if not self.health.ok or time.monotonic() < self._full_until:
                return 0
            count = await self._add_segment(space.files, space.geometry)
            if not count:
                self._full_until = time.monotonic() + _FULL_S
            return count

    async def closed(self, space: LocalSpace, remove: bool) -> None:
        """An open namespace is open no more."""
        await self.mover.forget(_payloads(space.arena))
        self._spaces.pop(space.namespace, None)
        if remove:
            await self.remove(space.namespace)

    # ---- files

    async def _adopt(self, namespace: bytes, geometry: Geometry) -> SpaceFiles:
        """Opens what is there, as much of it as cap and floor still allow."""
        path = self._folder / namespace.hex()
        files = await self._files(
            partial(SpaceFiles.adopt, path, namespace, geometry, self.mover.direct)
        )
        while await self._files(self._excess) > 0:
            if await self._remove_oldest(namespace):
                continue
            if not files.segments:
                break
            await self._files(files.drop_last)
        return files

    def _excess(self) -> int:
        """Bytes too many in the folder, by the cap, or by what others have left of the disk."""
        used = sum(item.bytes for item in namespaces(self._folder))
        return max(used - self._cap, self._floor - _free_bytes(self._folder))

    async def _add_segment(self, files: SpaceFiles, geometry: Geometry) -> int:
        """Adds as many slots as cap and disk allow, one segment at most; how many.

        Namespaces without users make room first.
        """
        each = geometry.stride + HEADER_BYTES
        size = max(_SEGMENT_BYTES, self._cap // _MOST_SEGMENTS)
        whole = max(size // each, _SEGMENT_SLOTS)
        count = 0
        while count < whole:
            room = -await self._files(self._excess) - PAGE
            count = min(whole, room // each)
            if count < whole and not await self._remove_oldest(files.namespace):
                break
        if count < (_CRUMB_SLOTS if files.slots else 1):
            return 0
        before = files.zero_filled
        try:
            await self.threads.call(partial(files.add, count), _FILL_S)
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return 0
        if filled := files.zero_filled - before:
            self.counters.written_bytes += filled
            self.backend = f"{self.mover.name}; fallocate refused: files are filled with zeros"
        return count

    async def _remove(self, namespace: bytes) -> bool:
        if namespace in self._spaces:
            return False
        await self._files(partial(remove, self._folder, namespace))
        return True

    async def _remove_oldest(self, spared: bytes) -> bool:
        """Removes the namespace without users that was used longest ago; false: there is none."""
        for item in await self.namespaces():
            if item.namespace != spared and await self._remove(item.namespace):
                log.info("blocks of a namespace without users removed", bytes=item.bytes)
                return True
        return False

    async def _check_mover(self) -> None:
        """Tries the mover, and another one when this can't any more. Raises OSError."""
        problem = await self._probe.check(self.mover)
        if problem and not self.mover.stuck:
            # Not while something hangs: each new one would hang as well, and keep its threads.
            mover, self.mover = self.mover, await self._pick_mover()
            for space in self._spaces.values():
                await self.mover.register(_payloads(space.arena))
            self.backend = self.mover.name
            await mover.close()
        elif problem:
            raise OSError(f"the disk still fails: {problem}")

    async def _files(self, call: Callable[[], T]) -> T:
        return await self.threads.call(call, _FILES_S)


class _FolderLock:
    """Keeps a folder for one daemon. Dead ones hold nothing: the kernel lets go for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "lock"
        self._fd: int | None = None

    async def take(self, threads: Threads, *, wait: bool = True) -> None:
        """Makes folder and lock, unless this holds it already. Raises OSError.

        Waits a little: whoever was killed a moment ago may still be ending.
        """
        end = time.monotonic() + (_LOCK_S if wait else 0.0)
        while True:
            try:
                await threads.call(self._take, _LOCK_CALL_S)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise OSError(
                        errno.EBUSY, "another daemon uses the folder", str(self._folder)
                    ) from None
            await asyncio.sleep(_LOCK_POLL_S)

    def release(self) -> None:
        """Lets another daemon have it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            close_file(fd)

    def _take(self) -> None:
        if self._fd is not None and same_file(self._path, self._fd):
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not same_file(self._path, fd):
                raise BlockingIOError(errno.EAGAIN, "the lock was removed meanwhile")
        except OSError:
            close_file(fd)
            raise
        # The one before it, if any, belongs to a file that nobody finds any more.
        self.release()
        self._fd = fd


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    if not found.f_blocks:
        # A file system without a size of its own: the cap alone bounds it.
        return sys.maxsize
    return found.f_bavail * found.f_frsize


def _payloads(arena: Arena) -> Memory:
    return Memory(arena.payload_address(0), arena.slots * arena.geometry.stride)
