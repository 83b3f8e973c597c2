"""One namespace's files on disk. Synchronous: whoever calls it does so in a thread.

    space.json              what the slots are; another one's content means: not ours, remove
    segment-0000.data       payloads, one a slot, `geometry.stride` apart, allocated beforehand
    segment-0000.headers    one SlotHeader a slot

A segment exists when its headers file does: that one is made last, and appears whole. So a kill at
any instant leaves files that are adopted or removed as a whole, never half of a segment.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from services.common.arena import HEADER_BYTES, PAGE, Geometry
from services.kvbm.movers.plain import close_file

_VERSION = 1
_HEAD = "space.json"
_SEGMENT = re.compile(r"segment-(\d{4,})\.headers")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")
_ZEROS = bytes(1 << 20)


@dataclass(frozen=True, slots=True)
class Segment:
    """Some of the slots: those from `first` on."""

    number: int
    first: int
    slots: int
    data: int
    """Descriptor of the payloads."""
    headers: int
    """Descriptor of the headers."""
    path: Path
    """Of the headers."""


class SpaceFiles:
    """The open files of one namespace."""

    def __init__(
        self, path: Path, namespace: bytes, geometry: Geometry, direct: bool, head: bytes
    ) -> None:
        self.path = path
        self.namespace = namespace
        self.segments: list[Segment] = []
        self.zero_filled = 0
        """Bytes written only because the file system can't allocate without."""
        self._geometry = geometry
        self._direct = direct
        self._head = head
        self._firsts: list[int] = []

    @property
    def slots(self) -> int:
        """Slots in all segments."""
        return self._firsts[-1] + self.segments[-1].slots if self.segments else 0

    @classmethod
    def adopt(cls, path: Path, namespace: bytes, geometry: Geometry, direct: bool) -> Self:
        """Opens what is there; makes the folder when there is none.

        What can't be used is removed: another version's or geometry's files, halves of segments.
        Raises OSError.
        """
        head = {"version": _VERSION, "namespace": namespace.hex(), "geometry": asdict(geometry)}
        files = cls(path, namespace, geometry, direct, json.dumps(head).encode())
        if path.exists() and _read_head(path) != head:
            shutil.rmtree(path)
        files._make_folder()
        try:
            numbers = sorted(
                int(found[1]) for name in os.listdir(path) if (found := _SEGMENT.fullmatch(name))
            )
            for number in numbers:
                files._adopt(number)
            files._sweep()
            files.used_now()
        except BaseException:
            files.close()
            raise
        return files

    def add(self, slots: int) -> None:
        """A new segment, allocated in full. Raises OSError, and then nothing of it is left."""
        number = self.segments[-1].number + 1 if self.segments else 0
        self._append(number, slots, self._make(number, slots))

    def place(self, slot: int) -> tuple[Segment, int]:
        """The segment with a slot, and the slot's number in it."""
        segment = self.segments[bisect_right(self._firsts, slot) - 1]
        return segment, slot - segment.first

    def read_headers(self) -> list[bytes]:
        """Each segment's headers, raw. Raises OSError."""
        return [os.pread(item.headers, item.slots * HEADER_BYTES, 0) for item in self.segments]

    def drop_last(self) -> None:
        """Removes the last segment and its blocks. Raises OSError."""
        segment = self.segments.pop()
        self._firsts.pop()
        close_file(segment.data)
        close_file(segment.headers)
        # The headers first: without them there is no segment.
        for path in reversed(self._paths(segment.number)):
            path.unlink(missing_ok=True)

    def restore(self) -> list[Segment]:
        """Makes segments anew whose files were deleted, empty, under the same descriptors.

        Returns them. Raises OSError.
        """
        self._make_folder()
        lost = [item for item in self.segments if not self._is_there(item)]
        for segment in lost:
            made = self._make(segment.number, segment.slots)
            for old, new in zip((segment.data, segment.headers), made, strict=True):
                os.dup2(new, old, inheritable=False)
                close_file(new)
        return lost

    def used_now(self) -> None:
        """Notes that the namespace is in use. Raises OSError."""
        os.utime(self.path / _HEAD)

    def close(self) -> None:
        """Closes the files; nothing may be under way in them."""
        for segment in self.segments:
            close_file(segment.data)
            close_file(segment.headers)
        self.segments.clear()
        self._firsts.clear()

    def _paths(self, number: int) -> tuple[Path, Path]:
        name = f"segment-{number:04d}"
        return self.path / f"{name}.data", self.path / f"{name}.headers"

    def _adopt(self, number: int) -> None:
        data, headers = self._paths(number)
        slots = headers.stat().st_size // HEADER_BYTES
        whole = data.exists() and data.stat().st_size >= slots * self._geometry.stride
        if whole and slots:
            self._append(number, slots, self._open(number))
            return
        # The headers first: without them there is no segment.
        headers.unlink()
        data.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Removes what a start that was killed has left."""
        known = {_HEAD}
        for segment in self.segments:
            known.update(path.name for path in self._paths(segment.number))
        for name in os.listdir(self.path):
            if name not in known:
                (self.path / name).unlink(missing_ok=True)

    def _append(self, number: int, slots: int, opened: tuple[int, int]) -> None:
        first = self.slots
        self._firsts.append(first)
        self.segments.append(Segment(number, first, slots, *opened, self._paths(number)[1]))

    def _make_folder(self) -> None:
        if not (self.path / _HEAD).exists():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_whole(self.path / _HEAD, self._head)

    def _make(self, number: int, slots: int) -> tuple[int, int]:
        """Makes a segment's files and opens them."""
        data, headers = self._paths(number)
        try:
            self._allocate(data, slots * self._geometry.stride)
            _write_whole(headers, bytes(slots * HEADER_BYTES))
            return self._open(number)
        except OSError:
            for path in (headers, data):
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise

    def _open(self, number: int) -> tuple[int, int]:
        """Descriptors of a segment's payloads and headers."""
        data_path, headers_path = self._paths(number)
        flags = os.O_RDWR | os.O_CLOEXEC
        data = os.open(data_path, flags | (os.O_DIRECT if self._direct else 0))
        try:
            return data, os.open(headers_path, flags)
        except OSError:
            close_file(data)
            raise

    def _is_there(self, segment: Segment) -> bool:
        data, headers = self._paths(segment.number)
        return same_file(data, segment.data) and same_file(headers, segment.headers)

    def _allocate(self, path: Path, size: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if fallocate(fd, size):
                return
            # A sparse file would take the space later, when nobody can say no any more.
            for at in range(0, size, len(_ZEROS)):
                count = min(len(_ZEROS), size - at)
                if os.pwrite(fd, _ZEROS[:count], at) != count:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.zero_filled += count
        finally:
            close_file(fd)


def same_file(path: Path, fd: int) -> bool:
    """Whether an open file is still the one under a name. Raises OSError."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)


def check_linked(segment: Segment) -> None:
    """Raises OSError when a later start would not find what is stored here: files were deleted."""
    data = segment.path.with_suffix(".data")
    if not (same_file(segment.path, segment.headers) and same_file(data, segment.data)):
        raise FileNotFoundError(errno.ENOENT, "its files were deleted", str(segment.path))


def fallocate(fd: int, size: int) -> bool:
    """Allocates without writing; False where the file system can't. Raises OSError.

    Not os.posix_fallocate: the C library's stand-in for it writes a byte into every block, unasked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Namespace:
    """One namespace's folder as found."""

    namespace: bytes
    bytes: int
    used_s: float
    """Unix time of its last use."""


def namespaces(folder: Path) -> list[Namespace]:
    """The namespaces in a tier's folder, least recently used first. Raises OSError."""
    found: list[Namespace] = []
    for name in os.listdir(folder):
        if not _NAMESPACE.fullmatch(name) or not (folder / name).is_dir():
            continue
        size = PAGE + sum(item.stat().st_size for item in (folder / name).glob("segment-*"))
        try:
            used = (folder / name / _HEAD).stat().st_mtime
        except FileNotFoundError:
            used = 0.0
        found.append(Namespace(bytes.fromhex(name), size, used))
    return sorted(found, key=lambda item: item.used_s)


def remove(folder: Path, namespace: bytes) -> None:
    """Removes a namespace's files; a kill in between leaves what the next start can tell apart."""
    path = folder / namespace.hex()
    # Without its head the folder is nobody's.
    (path / _HEAD).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _read_head(path: Path) -> object:
    try:
        return json.loads((path / _HEAD).read_bytes())
    except (OSError, ValueError):
        return None


def _write_whole(path: Path, content: bytes) -> None:
    """A file that appears with all its content, or not at all."""
    scratch = path.with_suffix(".making")
    scratch.write_bytes(content)
    scratch.chmod(0o600)
    scratch.rename(path)
