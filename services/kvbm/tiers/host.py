"""Host memory (G2): the arena files, one a namespace, within one budget of bytes.

Makes, finds again and removes them. What their slots hold is the catalog's. Nothing here touches a
file that is in use other than by its name: an arena is unlinked, never truncated.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog

from services.common.arena import Arena, ArenaError, CorruptHeader, Geometry, amount
from services.kvbm.owners import private_directory
from services.kvbm.tiers.memory import Available, memory_available

log = structlog.get_logger(__name__)

GIB = 1 << 30
_LEAST_PART = 4
"""A namespace that gets less than its share by this factor gets nothing."""
_TELL_EVERY_S = 2.0


class GeometryMismatch(ValueError):
    """The namespace is in use with another geometry."""


class HostTier:
    """All arenas of one daemon. Loop's thread only; allocation happens in threads."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        share: float = 1.0,
        *,
        available: Callable[[Path], Available] = memory_available,
    ) -> None:
        """share: part of the budget that one namespace gets. available: what the machine has."""
        self.backend = "mmap"
        """How bytes are held, for people."""
        self._directory = directory
        self._budget = budget_bytes
        self._share = share
        self._available = available
        self._arenas: dict[bytes, Arena] = {}
        """Least recently used first."""
        self._lock = asyncio.Lock()
        self._opening: dict[bytes, asyncio.Task[Arena]] = {}
        self._stopping = threading.Event()

    @property
    def used_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.length for arena in self._arenas.values())

    @property
    def arenas(self) -> list[Arena]:
        """All arenas, least recently used first."""
        return list(self._arenas.values())

    # -- start ----------------------------------------------------------------------------------

    async def adopt(self) -> list[Arena]:
        """Maps the arenas that a former daemon left, least recently used first.

        Removed, with a line in the log: what is no arena of this version, damaged, half made,
        somebody else's, or beyond the budget (the least recently used go).
        """
        async with self._lock:
            return await asyncio.to_thread(self._adopt)

    def _adopt(self) -> list[Arena]:
        private_directory(self._directory)
        for path in sorted(self._directory.glob("*.making")):
            _discard(path, "was never finished")
        found: list[tuple[float, Path]] = []
        for path in self._directory.glob("*.arena"):
            status = path.lstat()
            if status.st_uid != os.geteuid():
                _discard(path, f"belongs to user {status.st_uid}")
            else:
                found.append((status.st_mtime, path))
        left = self._budget
        kept: list[Arena] = []
        for _, path in sorted(found, reverse=True):
            size = path.lstat().st_size
            if size > left:
                _discard(path, f"{amount(size)} are more than the budget has left")
                continue
            try:
                arena = Arena.open(path, self._tell(path))
            except CorruptHeader as exc:
                _discard(path, str(exc))
                continue
            except ArenaError as exc:
                log.error("arena.unreadable", path=str(path), error=str(exc))
                continue
            if path.name != _name(arena.namespace):
                arena.close()
                _discard(path, "its name is not its namespace's")
                continue
            left -= arena.length
            self._note_lock(arena)
            kept.append(arena)
        kept.reverse()
        self._arenas.update({arena.namespace: arena for arena in kept})
        return kept

    async def purge(self) -> int:
        """Removes all arenas instead of adopting them; returns how many."""
        async with self._lock:
            for arena in self.arenas:
                arena.close()
            self._arenas.clear()
            return await asyncio.to_thread(self._purge)

    def _purge(self) -> int:
        private_directory(self._directory)
        paths = [p for end in ("*.arena", "*.making") for p in self._directory.glob(end)]
        for path in paths:
            _discard(path, "everything is removed, as asked")
        return len(paths)

    # -- engines ----------------------------------------------------------------------------------

    async def open(
        self,
        namespace: bytes,
        geometry: Geometry,
        in_use: Callable[[bytes], bool],
        retire: Callable[[bytes], Awaitable[None]] | None = None,
    ) -> Arena:
        """The namespace's arena; a new one if there is none, which can take a while.

        To make room, arenas that are not `in_use` are removed, least recently used first; `retire`
        is awaited before, and must end all use of that arena here, without a call to this tier.
        When the caller is cancelled, the work goes on, and the next call finds it. Raises
        ArenaError (ENOSPC, ENOMEM: it doesn't fit, with the numbers) or GeometryMismatch.
        """
        task = self._opening.get(namespace)
        if task is None:
            task = asyncio.create_task(self._open(namespace, geometry, in_use, retire))
            self._opening[namespace] = task
            task.add_done_callback(lambda done: self._opened(namespace, done))
        arena = await asyncio.shield(task)
        if arena.geometry != geometry:
            raise _mismatch(arena.geometry, geometry)
        return arena

    def _opened(self, namespace: bytes, task: asyncio.Task[Arena]) -> None:
        del self._opening[namespace]
        if not task.cancelled():
            # Read, so that a failure nobody waits for any more is no lost exception.
            task.exception()

    async def _open(
        self,
        namespace: bytes,
        geometry: Geometry,
        in_use: Callable[[bytes], bool],
        retire: Callable[[bytes], Awaitable[None]] | None,
    ) -> Arena:
        async with self._lock:
            arena = self._arenas.get(namespace)
            if arena is not None and (why := _unfit(arena, geometry)) is not None:
                if in_use(namespace):
                    raise why
                log.warning("arena.unfit", path=str(arena.path), reason=str(why))
                await self._retire(namespace, retire)
                arena = None
            if arena is None:
                arena = await self._make(namespace, geometry, in_use, retire)
            # The order of use, also for the daemon after this one.
            self._arenas[namespace] = self._arenas.pop(namespace)
            os.utime(arena.path)
            return arena

    async def _make(
        self,
        namespace: bytes,
        geometry: Geometry,
        in_use: Callable[[bytes], bool],
        retire: Callable[[bytes], Awaitable[None]] | None,
    ) -> Arena:
        share = min(int(self._budget * self._share), self._budget)
        for other in list(self._arenas):
            if self._budget - self.used_bytes >= share:
                break
            if not in_use(other):
                await self._retire(other, retire)
        page = await asyncio.to_thread(self._page)
        # Whole pages: a file that was rounded up would be beyond the budget at the next start.
        room = min(share, self._budget - self.used_bytes) // page * page
        slots = Arena.fitting(geometry, room)
        if not slots or room < share // _LEAST_PART:
            raise ArenaError(
                errno.ENOSPC,
                f"no room in G2 for another namespace: of {amount(self._budget)} "
                f"{amount(self.used_bytes)} are in use by {len(self._arenas)} others, and one "
                f"block takes {amount(geometry.stride)}; a larger FOREBAY_KVBM_CPU_CACHE_GB or a "
                "smaller FOREBAY_KVBM_ARENA_SHARE would do",
            )
        path = self._directory / _name(namespace)
        arena = await asyncio.to_thread(self._create, path, namespace, geometry, slots)
        self._arenas[namespace] = arena
        return arena

    def _page(self) -> int:
        private_directory(self._directory)
        return os.statvfs(self._directory).f_bsize

    def _create(self, path: Path, namespace: bytes, geometry: Geometry, slots: int) -> Arena:
        size = Arena.size(geometry, slots)
        self._available(self._directory).check(size)
        began = time.monotonic()
        arena = Arena.create(path, namespace, geometry, slots, self._tell(path))
        self._note_lock(arena)
        log.info(
            "arena.made",
            path=str(path),
            gib=round(arena.length / GIB, 3),
            slots=slots,
            seconds=round(time.monotonic() - began, 3),
            backend=self.backend,
        )
        return arena

    async def remove(self, namespace: bytes) -> None:
        """Removes an arena that nothing here uses any more; engines keep their mapping."""
        async with self._lock:
            await self._remove(namespace)

    async def _retire(
        self, namespace: bytes, retire: Callable[[bytes], Awaitable[None]] | None
    ) -> None:
        if retire is not None:
            await retire(namespace)
        log.info("arena.removed", path=str(self._arenas[namespace].path), reason="makes room")
        await self._remove(namespace)

    async def _remove(self, namespace: bytes) -> None:
        arena = self._arenas.pop(namespace, None)
        if arena is not None:
            # Unmapped first: the last who lets go frees the memory, and `unlink` does so without
            # the GIL.
            arena.close()
            await asyncio.to_thread(arena.path.unlink, missing_ok=True)

    async def close(self) -> None:
        """Unmaps all arenas; the files stay. An arena that is being made is given up."""
        self._stopping.set()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        async with self._lock:
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    # -- in threads --------------------------------------------------------------------------------

    def _tell(self, path: Path) -> Callable[[int, int], None]:
        """Logs how far a long step is, and ends it when the daemon stops."""
        last = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal last
            if self._stopping.is_set():
                raise ArenaError(errno.EINTR, "the daemon is stopping", str(path))
            if time.monotonic() - last >= _TELL_EVERY_S:
                last = time.monotonic()
                log.info(
                    "arena.progress",
                    path=str(path),
                    percent=round(100 * done / total),
                    gib=round(total / GIB, 2),
                )

        return tell

    def _note_lock(self, arena: Arena) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
        why = arena.lock_memory()
        if not why:
            self.backend = "mmap(locked)"
            return
        if hard != resource.RLIM_INFINITY:
            why += f"; the limit RLIMIT_MEMLOCK is {hard >> 10} KiB"
        self.backend = f"mmap(not locked: {why})"
        log.warning("arena.not_locked", path=str(arena.path), reason=why)


def _name(namespace: bytes) -> str:
    return f"{namespace.hex()}.arena"


def _unfit(arena: Arena, geometry: Geometry) -> Exception | None:
    """Why no engine could use an arena that is mapped here."""
    if arena.geometry != geometry:
        return _mismatch(arena.geometry, geometry)
    if not arena.path.exists():
        return ArenaError(
            errno.ENOENT,
            "somebody has removed the arena's file while engines use it; it is made anew when "
            "they have left",
            str(arena.path),
        )
    return None


def _mismatch(had: Geometry, asked: Geometry) -> GeometryMismatch:
    return GeometryMismatch(f"the namespace is in use with {had}; not with {asked}")


def _discard(path: Path, why: str) -> None:
    log.warning("arena.discarded", path=str(path), reason=why)
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        log.error("arena.stays", path=str(path), error=str(exc))
