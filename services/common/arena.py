"""The arena: one file of equal slots for KV blocks, which daemon and engines map together.

    page 0      file header: what the slots are (namespace, geometry, count)
    headers     one SlotHeader of 256 bytes a slot; only the daemon writes them
    payloads    one block a slot, all ranks' shards one after the other, page-aligned

Slot headers are the only truth about the bytes behind them: a new daemon reads them and goes on.
The same headers stand before blocks on disk and in objects. Not a store: nothing here decides what
goes where, or waits.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from services.common.slots import (
    HEADER_BYTES,
    MAX_RANKS,
    NO_KEY,
    CorruptHeader,
    SlotHeader,
    SlotState,
    checksum,
    is_block,
)

__all__ = [
    "HEADER_BYTES",
    "MAX_RANKS",
    "NO_KEY",
    "PAGE",
    "Arena",
    "ArenaError",
    "CorruptHeader",
    "Geometry",
    "SlotHeader",
    "SlotState",
    "amount",
    "checksum",
]

PAGE = 4096
_MAGIC = b"FBARENA1"
_FILE = struct.Struct("<8s32sQQQQQQ")
"""Magic, namespace, shard bytes, ranks, slots, block size, file bytes, length of the layout."""
_CHECK = struct.Struct("<Q")
_CHUNK = 1 << 30
"""Bytes that are allocated in one system call, so that progress can be told."""
_PIECE = 16 << 20
"""Bytes that are mapped or locked in one system call. Meanwhile the process's other threads can't
map memory, not even for a `malloc`: longer, and the daemon would seem dead."""
_MADV_POPULATE_WRITE = 23

Progress = Callable[[int, int], None]
"""Hears of (bytes done, bytes in all) of a long step, in the step's thread; may raise to end it."""


class ArenaError(OSError):
    """An arena can't be made or mapped; says why and what would help."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a block's bytes are made up. `layout`: the engine's cache in words, opaque here."""

    block_size: int
    """Tokens in a block."""
    shard_bytes: int
    """Bytes of one rank's part."""
    ranks: int = 1
    layout: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ValueError(f"ranks must be from 1 to {MAX_RANKS}, not {self.ranks}")
        if self.block_size < 1 or self.shard_bytes < 1:
            raise ValueError("block size and shard bytes must be at least 1")

    @property
    def payload_bytes(self) -> int:
        """Bytes of a block, all ranks together."""
        return self.shard_bytes * self.ranks

    @property
    def stride(self) -> int:
        """Bytes from one payload to the next: whole pages, for direct I/O."""
        return -(-self.payload_bytes // PAGE) * PAGE


class Arena:
    """A mapped arena file. Thread-safe as far as callers keep to slots that are theirs."""

    def __init__(
        self, path: Path, fd: int, namespace: bytes, geometry: Geometry, slots: int, length: int
    ) -> None:
        self.path = path
        self.namespace = namespace
        self.geometry = geometry
        self.slots = slots
        self.length = length
        """Bytes of the file, all of them mapped."""
        self.closed = False
        self._headers_at = PAGE
        self._payloads_at = PAGE + _pages(slots * HEADER_BYTES)
        self._map = mmap.mmap(fd, length, flags=mmap.MAP_SHARED)
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """Where the file is mapped in this process. Nothing but the caller keeps users of it from
        outliving `close`; views (`payload`, arrays over it) keep the mapping alive themselves."""

    @staticmethod
    def size(geometry: Geometry, slots: int) -> int:
        """Bytes of a file with that many slots."""
        return PAGE + _pages(slots * HEADER_BYTES) + slots * geometry.stride

    @staticmethod
    def fitting(geometry: Geometry, room: int) -> int:
        """How many slots a file of at most `room` bytes has; 0 when not even one fits."""
        slots = max(0, room - PAGE) // (geometry.stride + HEADER_BYTES)
        while slots and Arena.size(geometry, slots) > room:
            slots -= 1
        return slots

    @classmethod
    def create(
        cls,
        path: Path,
        namespace: bytes,
        geometry: Geometry,
        slots: int,
        progress: Progress | None = None,
    ) -> Self:
        """Makes the file, allocates every byte of it, and maps it; all slots are FREE.

        It appears under its name only when it is whole. Takes a second for every few GiB, outside
        the GIL. Raises ArenaError when there is no room, and whatever `progress` raises; then
        nothing is left behind.
        """
        if len(namespace) != 32 or slots < 1:
            raise ValueError("a namespace has 32 bytes, and an arena at least one slot")
        temporary = path.with_suffix(".making")
        layout = geometry.layout.encode()
        if _FILE.size + len(layout) + _CHECK.size > PAGE:
            raise ValueError("the layout's words are too long for the file's header")
        size = cls.size(geometry, slots)
        tell = progress or (lambda done, total: None)
        arena: Self | None = None
        fd = -1
        try:
            # Never opened for truncation: somebody may still have an older one mapped.
            temporary.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(temporary, flags, 0o660)
            # Whole pages of the file system: on hugetlbfs these are larger, and nothing else maps.
            space = os.fstatvfs(fd)
            length = _pages(size, space.f_bsize)
            if space.f_blocks and length > space.f_bavail * space.f_frsize:
                # At once, and not when all that is left has been taken. (No blocks: no bound known,
                # as on hugetlbfs without one.)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            # Never sparse: a hole that can't be filled later is a SIGBUS in whoever touches it.
            for at in range(0, length, _CHUNK):
                os.posix_fallocate(fd, at, min(_CHUNK, length - at))
                tell(min(at + _CHUNK, length) // 2, length)
            arena = cls(path, fd, namespace, geometry, slots, length)
            head = _FILE.pack(
                _MAGIC,
                namespace,
                geometry.shard_bytes,
                geometry.ranks,
                slots,
                geometry.block_size,
                length,
                len(layout),
            )
            head += layout
            head += _CHECK.pack(checksum(head))
            # By the mapping, not by `write`, which hugetlbfs hasn't.
            arena._view[: len(head)] = head
            arena._populate(lambda done, total: tell((length + done) // 2, length))
            os.rename(temporary, path)
        except BaseException as exc:
            if arena is not None:
                arena.close()
            if fd >= 0:
                temporary.unlink(missing_ok=True)
            if isinstance(exc, OSError) and not isinstance(exc, ArenaError):
                raise ArenaError(
                    exc.errno or 0,
                    f"can't make an arena of {amount(size)}: {exc.strerror or exc}",
                    str(path),
                ) from exc
            raise
        finally:
            if fd >= 0:
                os.close(fd)
        return arena

    @classmethod
    def open(cls, path: Path, progress: Progress | None = None) -> Self:
        """Maps an arena that is there. Raises ArenaError, or CorruptHeader for what is none."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            raise ArenaError(exc.errno or 0, f"can't open: {exc.strerror}", str(path)) from exc
        try:
            namespace, geometry, slots, length = _read_head(path, fd)
            arena = cls(path, fd, namespace, geometry, slots, length)
        except OSError as exc:
            raise ArenaError(exc.errno or 0, f"can't map: {exc.strerror}", str(path)) from exc
        finally:
            os.close(fd)
        try:
            arena._populate(progress or (lambda done, total: None))
        except BaseException:
            arena.close()
            raise
        return arena

    def _populate(self, tell: Progress) -> None:
        """Maps all pages now: fault by fault, in the midst of a copy, is a hundred times slower.

        Contents stay. By ctypes and not by mmap's own functions, which would hold the GIL.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        for at in range(0, self.length, _PIECE):
            piece = min(_PIECE, self.length - at)
            where, length = ctypes.c_void_p(self.address + at), ctypes.c_size_t(piece)
            if libc.madvise(where, length, _MADV_POPULATE_WRITE):
                # A kernel before 5.14. Reading every byte maps the pages as well.
                checksum(self._view[at : at + piece])
            tell(at + piece, self.length)

    def _header_at(self, slot: int) -> int:
        return self._headers_at + self._checked(slot) * HEADER_BYTES

    def _payload_at(self, slot: int) -> int:
        return self._payloads_at + self._checked(slot) * self.geometry.stride

    def _checked(self, slot: int) -> int:
        """The slot's number, which must be one: others would be some other slot's bytes."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        return slot

    def header(self, slot: int) -> SlotHeader:
        """The slot's header. Raises CorruptHeader."""
        at = self._header_at(slot)
        return SlotHeader.unpack(self._view[at : at + HEADER_BYTES], self.namespace)

    def holds(self, slot: int, generation: int, key: bytes) -> bool:
        """Whether the slot holds just this block whole, by its header now. Readers ask after their
        copy: what was sealed then under this generation was so when the copy began.
        """
        at = self._header_at(slot)
        return is_block(
            bytes(self._view[at : at + HEADER_BYTES]),
            self.namespace,
            generation,
            key,
            self.geometry.ranks,
            self.geometry.payload_bytes,
        )

    def write_header(self, slot: int, header: SlotHeader) -> None:
        """Writes a header. Who reads it half-written finds it corrupt, which is a miss."""
        at = self._header_at(slot)
        self._view[at : at + HEADER_BYTES] = header.pack(self.namespace)

    def headers(self) -> Iterator[SlotHeader | CorruptHeader]:
        """All headers in slot order; a corrupt one as the error."""
        for slot in range(self.slots):
            try:
                yield self.header(slot)
            except CorruptHeader as exc:
                yield exc

    def payload(self, slot: int) -> memoryview:
        """A block's bytes, all ranks together, writable."""
        at = self._payload_at(slot)
        return self._view[at : at + self.geometry.payload_bytes]

    def shard(self, slot: int, rank: int) -> memoryview:
        """One rank's bytes of a block, writable."""
        if not 0 <= rank < self.geometry.ranks:
            raise IndexError(f"rank {rank} of {self.geometry.ranks}")
        at = self._payload_at(slot) + rank * self.geometry.shard_bytes
        return self._view[at : at + self.geometry.shard_bytes]

    def payload_address(self, slot: int) -> int:
        """Where a block's bytes lie in this process; page-aligned."""
        return self.address + self._payload_at(slot)

    def checksums(self, slot: int) -> tuple[int, ...]:
        """What each shard's checksum is now, by its bytes."""
        return tuple(checksum(self.shard(slot, rank)) for rank in range(self.geometry.ranks))

    def lock_memory(self) -> str:
        """Keeps the pages from being swapped out; empty, or why that can't be had."""
        libc = ctypes.CDLL(None, use_errno=True)
        for at in range(0, self.length, _PIECE):
            piece = ctypes.c_size_t(min(_PIECE, self.length - at))
            if libc.mlock(ctypes.c_void_p(self.address + at), piece):
                why = os.strerror(ctypes.get_errno())
                libc.munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.length))
                return why
        return ""

    def close(self) -> None:
        """Unmaps it, unless views still look at it: then the last of them does. Idempotent.

        The file stays. Whoever uses `address` must have ended before.
        """
        if self.closed:
            return
        self.closed = True
        self._view.release()
        try:
            self._map.close()
        except BufferError:
            # A view of some caller's. The mapping goes with it: this was the only other name.
            del self._map


def amount(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.2f} MiB"


def _pages(length: int, page: int = PAGE) -> int:
    return -(-length // page) * page


def _read_head(path: Path, fd: int) -> tuple[bytes, Geometry, int, int]:
    """Namespace, geometry, slots and length by the file's header. Raises CorruptHeader."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptHeader(f"{path} is not a file")
    raw = os.pread(fd, PAGE, 0)
    if len(raw) < PAGE or raw[: len(_MAGIC)] != _MAGIC:
        raise CorruptHeader(f"{path} is not an arena of this version")
    _, namespace, shard, ranks, slots, block_size, length, words = _FILE.unpack_from(raw)
    end = _FILE.size + words
    if end + _CHECK.size > PAGE or _CHECK.unpack_from(raw, end)[0] != checksum(raw[:end]):
        raise CorruptHeader(f"the header of {path} is damaged")
    try:
        geometry = Geometry(block_size, shard, ranks, raw[_FILE.size : end].decode())
    except ValueError as exc:
        raise CorruptHeader(f"the header of {path} makes no sense: {exc}") from exc
    # Shorter than mapped is a SIGBUS in whoever touches what is missing.
    if status.st_size != length or length < Arena.size(geometry, slots):
        raise CorruptHeader(f"{path} has another length than its header says")
    return namespace, geometry, slots, length
