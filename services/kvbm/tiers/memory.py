"""How much memory an arena can really have: its file system, the machine, its control group."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from services.common.arena import ArenaError, amount

_RESERVE = 512 << 20
_HUGE = 2 << 20


@dataclass(frozen=True, slots=True)
class Available:
    """What can be had."""

    path: Path
    file_system: int
    """Bytes free in the folder's file system."""
    memory: int | None
    """Bytes of memory that can be used without harm; None: not known, or not what limits."""
    memory_is: str = "memory"
    """What `memory` was read from."""

    def check(self, size: int) -> None:
        """Raises ArenaError (ENOSPC, ENOMEM) when so many bytes don't fit, naming the numbers."""
        if size > self.file_system:
            raise ArenaError(
                errno.ENOSPC,
                f"{amount(size)} of G2 don't fit: the file system of {self.path} has "
                f"{amount(self.file_system)} free; a smaller FOREBAY_KVBM_CPU_CACHE_GB would "
                "do, or a larger tmpfs (mount -o remount,size=...; --shm-size for containers)",
                str(self.path),
            )
        if self.memory is not None and size > self.memory:
            raise ArenaError(
                errno.ENOMEM,
                f"{amount(size)} of G2 don't fit: {self.memory_is} has "
                f"{amount(self.memory)} to spare; a smaller FOREBAY_KVBM_CPU_CACHE_GB would "
                "do, or a higher limit",
                str(self.path),
            )


def memory_available(
    directory: Path, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Available:
    """What the machine says now. A reserve for everybody else is taken off already."""
    space = os.statvfs(directory)
    # A file system without a size, as hugetlbfs may be, says no at the allocation.
    free = space.f_bavail * space.f_frsize if space.f_blocks else sys.maxsize
    if space.f_bsize >= _HUGE:
        # hugetlbfs: its pages were set aside before.
        return Available(directory, free, None)
    rooms = [_meminfo(proc), *_limits(proc, cgroup)]
    known = [room for room in rooms if room is not None]
    if not known:
        return Available(directory, free, None)
    room, what = min(known)
    return Available(directory, free, room, what)


def _meminfo(proc: Path) -> tuple[int, str] | None:
    lines = _read(proc / "meminfo").splitlines()
    found = {
        name: int(value.split()[0]) << 10 for name, _, value in (s.partition(":") for s in lines)
    }
    if "MemAvailable" not in found or "MemTotal" not in found:
        return None
    reserve = min(_RESERVE, found["MemTotal"] // 20)
    return max(0, found["MemAvailable"] - reserve), "the machine"


def _limits(proc: Path, cgroup: Path) -> list[tuple[int, str]]:
    """Room in this process's control group and those above it (version 2, else version 1)."""
    rooms: list[tuple[int, str]] = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root, limit, use = cgroup, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, use = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        place = root / name.lstrip("/")
        for folder in (place, *place.parents):
            most, used = _read(folder / limit).strip(), _read(folder / use).strip()
            if most.isdigit() and used.isdigit():
                room = int(most) - int(used) + _reclaimable(folder)
                reserve = min(_RESERVE, int(most) // 20)
                rooms.append((max(0, room - reserve), f"the memory limit {amount(int(most))}"))
            if folder == root:
                break
    return rooms


def _reclaimable(folder: Path) -> int:
    """Bytes of page cache that the group gives up under pressure."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    """A file of the kernel's; empty when it isn't there."""
    try:
        return path.read_text()
    except OSError:
        return ""
