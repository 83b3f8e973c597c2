"""Who may write into slots, and whether they live: one lock file an attachment.

An engine's process locks its file and keeps it locked; a free lock means that it has ended,
and with it its writes. No deadline says so: a stopped engine keeps what it was granted. Not a
registry of attachments: what they own is the catalog's.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.common.settings import SettingsError

log = structlog.get_logger(__name__)

_NAME = re.compile(r"([0-9a-f]{16})\.lock")
_SETTING = "FOREBAY_KVBM_CPU_CACHE_DIR"


@dataclass(slots=True)
class _Owner:
    fd: int
    """Our own descriptor: testing it works on even when somebody removes the file."""
    since: float
    seen: bool = False
    """It was locked at least once."""
    dead: bool = False


def private_directory(path: Path) -> None:
    """Makes the folder, or makes sure that nobody else could have put anything into it.

    Raises SettingsError: it can't be made, isn't a folder, or is open to others.
    """
    try:
        path.mkdir(mode=0o770, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as exc:
        raise SettingsError(
            f"{_SETTING}={path}: {exc.strerror}; must be a writable folder"
        ) from exc
    if not stat.S_ISDIR(status.st_mode):
        raise SettingsError(f"{_SETTING}={path}: must be a folder itself, not a link to one")
    if status.st_uid not in (os.geteuid(), 0):
        raise SettingsError(
            f"{_SETTING}={path}: belongs to user {status.st_uid}, who could read and change all "
            f"blocks; must belong to user {os.geteuid()}"
        )
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise SettingsError(f"{_SETTING}={path}: every user may write to it; must be 0770 or less")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise SettingsError(f"{_SETTING}={path}: must be writable for user {os.geteuid()}")


class Owners:
    """The attachments of one arena folder. Loop's thread only; nothing here blocks."""

    def __init__(
        self,
        directory: Path,
        *,
        grace_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the folder for this daemon, and over what a former one left.

        grace_s: time in which a new owner must lock its file. Raises SettingsError: another daemon
        uses the folder, or it isn't a safe place.
        """
        private_directory(directory)
        self._grace_s = grace_s
        self._clock = clock
        self._owners: dict[int, _Owner] = {}
        self._lock = _take_directory(directory)
        self._folder = directory / "owners"
        try:
            private_directory(self._folder)
            self._adopt()
        except BaseException:
            os.close(self._lock)
            raise

    def _adopt(self) -> None:
        for path in sorted(self._folder.iterdir()):
            name = _NAME.fullmatch(path.name)
            try:
                if name is None:
                    raise OSError(0, "not a lock file")
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as exc:
                log.warning("owner.stray", path=str(path), error=exc.strerror)
                continue
            owner = int(name[1], 16)
            # Who had not locked by now holds no grants and will be told to attach anew.
            self._owners[owner] = found = _Owner(fd, self._clock(), seen=True)
            if not _is_locked(fd):
                found.dead = True

    def new(self) -> tuple[int, Path]:
        """A new owner: its random id and the file that it must lock. Raises OSError."""
        while True:
            owner = secrets.randbits(64)
            # 0 is the daemon itself.
            if owner and owner not in self._owners:
                break
        path = self._path(owner)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._owners[owner] = _Owner(os.open(path, flags, 0o660), self._clock())
        return owner, path

    def locked(self, owner: int) -> bool:
        """Whether the owner holds its lock now; only then may it be granted anything."""
        known = self._owners.get(owner)
        return known is not None and self._test(known)

    def dead(self, owner: int) -> bool:
        """Whether the owner's process has ended, or never came: it writes no more. Final."""
        known = self._owners.get(owner)
        if known is None:
            return True
        if not self._test(known) and (known.seen or self._clock() - known.since >= self._grace_s):
            known.dead = True
        return known.dead

    def _test(self, known: _Owner) -> bool:
        if known.dead:
            return False
        if _is_locked(known.fd):
            known.seen = True
            return True
        return False

    def forget(self, owner: int) -> None:
        """Removes the owner and its file: it was detached, or is dead. Idempotent."""
        known = self._owners.pop(owner, None)
        if known is not None:
            os.close(known.fd)
        self._path(owner).unlink(missing_ok=True)

    def known(self) -> list[int]:
        """All owners that weren't forgotten, dead or alive, also those of a former daemon."""
        return list(self._owners)

    def close(self) -> None:
        """Gives the folder back. Files stay for the next daemon. Idempotent."""
        for known in self._owners.values():
            os.close(known.fd)
        self._owners.clear()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _path(self, owner: int) -> Path:
        return self._folder / f"{owner:016x}.lock"


def _is_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _take_directory(directory: Path) -> int:
    """The descriptor whose lock makes the folder ours. Raises SettingsError."""
    path = directory / "daemon.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o660)
    except OSError as exc:
        raise SettingsError(f"{_SETTING}={directory}: can't open {path}: {exc.strerror}") from exc
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(fd)
        raise SettingsError(
            f"{_SETTING}={directory}: another kvbm daemon uses this folder; each daemon must have "
            "its own (and one daemon serves all workers of a node)"
        ) from exc
    return fd
