"""Where a cluster's kvbm keeps blocks, and how much of that fits on this machine.

A small machine gets smaller caches and a word about it, never a failed start. Folders that `up`
chose itself are named after the state directory; a cluster finds its blocks there again, and
`forebay down --purge` removes them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.cli.errors import UsageError
from services.cli.up.options import UpOptions

GIB = 1 << 30
DEFAULT_CPU_GB = 0.5
DEFAULT_DISK_GB = 1.0
_LEAST_GB = 1 / 32
"""Less than this holds no prompt worth keeping."""
_SHM = Path("/dev/shm")
_TMPFS_SHARE = 0.9
_MEMORY_SHARE = 0.5
_UNASKED_SHARE = 0.25
_DISK_FLOOR_GB = 1.0
"""As the daemon's own disk_free_gb: what it leaves free whatever it was granted."""
_MARK = "state-dir"
_SOCKET_MAX = 100
"""Paths of Unix sockets end at 107 bytes."""

Room = Callable[[Path], float]
"""GiB that may be used in a folder (it need not exist yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """The caches of one cluster. Folders are absolute."""

    socket: str
    """Unix socket on which the daemon serves the cluster's workers."""
    cpu_gb: float
    cpu_dir: str
    own_cpu_dir: bool = True
    """Whether we chose the folder, and may remove it."""
    disk_gb: float = 0.0
    """0: no G3."""
    disk_dir: str = ""
    own_disk_dir: bool = True


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What is to be had: no caches where not even a small one fits. `notes`: what to tell."""

    caches: Caches | None
    notes: tuple[str, ...] = ()


def plan_caches(
    options: UpOptions,
    *,
    environ: Mapping[str, str] | None = None,
    memory_room: Room | None = None,
    disk_room: Room | None = None,
) -> CachePlan:
    """The caches that `options` ask for, as far as they fit.

    A setting is the option, else the variable FOREBAY_KVBM_*, else the [kvbm] table of the settings
    file, else a small default. Raises UsageError for one that is not a number.
    """
    if not options.kvbm or options.simulated:
        return CachePlan(None)
    given = _Given(options, os.environ if environ is None else environ)
    state_dir = Path(options.state_dir)
    cpu_dir = options.cpu_cache_dir or given.text("cpu_cache_dir")
    cpu_gb = given.number("cpu_cache_gb", options.cpu_cache_gb)
    own_cpu, own_disk = not cpu_dir, False
    cpu_dir = cpu_dir or str(arena_dir(state_dir))
    notes = []

    room = (memory_room or memory_room_gb)(Path(cpu_dir))
    if cpu_gb is None:  # nobody asked: the engines need their memory more
        cpu_gb = max(_LEAST_GB, min(DEFAULT_CPU_GB, room * _UNASKED_SHARE))
    if room < cpu_gb:
        if room < _LEAST_GB:
            note = f"no room for a block cache in {cpu_dir}: kvbm is not started"
            return CachePlan(None, (note,))
        notes.append(
            f"G2 gets {room:.2f} GiB instead of {cpu_gb:g}: {cpu_dir} and this machine's memory "
            "have no room for more"
        )
        cpu_gb = room

    disk_gb = given.number("disk_cache_gb", options.disk_cache_gb)
    if disk_gb is None:
        disk_gb = DEFAULT_DISK_GB
    disk_dir = options.disk_cache_dir or given.text("disk_cache_dir")
    if disk_gb > 0:
        own_disk = not disk_dir
        disk_dir = disk_dir or str(state_dir / "kvbm")
        room = (disk_room or disk_room_gb)(Path(disk_dir))
        if room < _LEAST_GB:
            notes.append(f"no disk cache (G3): the disk of {disk_dir} is full")
            disk_gb = 0.0
        elif room < disk_gb:
            notes.append(
                f"G3 gets {room:.2f} GiB instead of {disk_gb:g}: {disk_dir} is nearly full"
            )
            disk_gb = room
    return CachePlan(
        Caches(
            socket=str(socket_path(state_dir, "kvbm-0")),
            cpu_gb=round(cpu_gb, 6),
            cpu_dir=_absolute(cpu_dir),
            own_cpu_dir=own_cpu,
            disk_gb=round(disk_gb, 6),
            disk_dir=_absolute(disk_dir) if disk_gb > 0 else "",
            own_disk_dir=own_disk,
        ),
        tuple(notes),
    )


class _Given:
    """What was said of the daemon outside the command line."""

    def __init__(self, options: UpOptions, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._table: Mapping[str, object] = {}
        path = options.config or environ.get("FOREBAY_CONFIG", "")
        # A file that can't be read is the services' business: they say what is wrong with it.
        with contextlib.suppress(OSError, tomllib.TOMLDecodeError):
            if path:
                self._table = tomllib.loads(Path(path).read_text()).get("kvbm", {})

    def text(self, name: str) -> str:
        """A setting as text; empty when it was not given."""
        value = self._environ.get(f"FOREBAY_KVBM_{name.upper()}") or self._table.get(name, "")
        return str(value)

    def number(self, name: str, option: float | None) -> float | None:
        """A number of GiB; None when it was not given."""
        if option is not None:
            return option
        text = self.text(name)
        try:
            return float(text) if text else None
        except ValueError:
            raise UsageError(
                f"FOREBAY_KVBM_{name.upper()} is {text!r}; it must be a number of GiB"
            ) from None


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _digest(state_dir: Path) -> str:
    return hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:12]


def arena_dir(state_dir: Path) -> Path:
    """Folder of the arenas of the cluster in `state_dir`: in memory if there is such a place."""
    root = _SHM if _SHM.is_dir() else Path(tempfile.gettempdir())
    return root / f"forebay-{os.getuid()}-{_digest(state_dir)}"


def socket_path(state_dir: Path, name: str) -> Path:
    """A process's Unix socket: in the state directory, or in a short place if that is too long."""
    path = state_dir / "run" / f"{name}.sock"
    if len(os.fsencode(path)) <= _SOCKET_MAX:
        return path
    return Path(tempfile.gettempdir()) / f"forebay-{os.getuid()}-{_digest(state_dir)}-{name}.sock"


def memory_room_gb(folder: Path) -> float:
    """GiB that an arena in `folder` may take: most of the file system, half of free memory.

    What older arenas there take counts as room: they are adopted or removed.
    """
    held = _held_bytes(folder)
    free = [(_free_bytes(folder) * _TMPFS_SHARE) + held]
    if (available := available_memory_bytes()) is not None:
        free.append(available * _MEMORY_SHARE + held)
    return min(free) / GIB


def disk_room_gb(folder: Path) -> float:
    """GiB that blocks in `folder` may take, beyond what the disk must keep free."""
    return (_free_bytes(folder) + _held_bytes(folder)) / GIB - _DISK_FLOOR_GB


def _free_bytes(folder: Path) -> int:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def _held_bytes(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total


def available_memory_bytes() -> int | None:
    """Memory that processes may still take, by the kernel and by our control group."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit = int((group / "memory.max").read_text())
        found.append(max(0, limit - int((group / "memory.current").read_text())))
    return min(found, default=None)


def mark(caches: Caches, state_dir: Path) -> None:
    """Makes our own arena folder and notes there whose it is. Raises OSError."""
    if caches.own_cpu_dir:
        folder = Path(caches.cpu_dir)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to somebody else", str(folder))
        (folder / _MARK).write_text(f"{state_dir}\n")


def purge(caches: Caches, note: Callable[[str], None]) -> None:
    """Removes the blocks of a cluster that is stopped; folders that we didn't choose stay."""
    for folder, own in (
        (caches.cpu_dir, caches.own_cpu_dir),
        (caches.disk_dir, caches.own_disk_dir),
    ):
        if not folder or not Path(folder).exists():
            continue
        if own:
            shutil.rmtree(folder, ignore_errors=True)
            note(f"removed the cached blocks in {folder}")
        else:
            note(f"{folder} was not chosen by `forebay up` and stays; remove it yourself")


def sweep_orphans(note: Callable[[str], None], root: Path | None = None) -> int:
    """Removes arenas whose state directory is gone: nobody could find them again."""
    root = root or arena_dir(Path("/")).parent
    swept = 0
    for folder in root.glob(f"forebay-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if not Path((folder / _MARK).read_text().rstrip("\n")).exists():
                shutil.rmtree(folder)
                note(f"removed {folder}: the cluster whose blocks it held is gone")
                swept += 1
    return swept
