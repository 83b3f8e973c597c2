"""The lock that says an engine's process lives. Held by the process, tested by the node's daemon.

The kernel drops it when the process has ended, after its last thread can write no more; across
containers, and whatever becomes of process ids. It says nothing about progress: a stopped process
holds its lock.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from pathlib import Path
from typing import Self


class OwnerLockError(OSError):
    """The lock can't be had: the file is gone or somebody else's. Attaching anew gives another."""


class OwnerLock:
    """An exclusive flock, held from construction until `close` or the end of this process.

    Children made by fork don't keep it, nor do programs started by exec.
    """

    def __init__(self, path: Path, wait_s: float = 2.0) -> None:
        """Takes the lock; waits, as the daemon holds it while it looks. Raises OwnerLockError."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            raise OwnerLockError(exc.errno or 0, f"can't open: {exc.strerror}", str(path)) from exc
        try:
            self._take(time.monotonic() + wait_s)
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def _take(self, until: float) -> None:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as exc:
                if time.monotonic() >= until:
                    raise OwnerLockError(
                        exc.errno or 0, "another process holds it", str(self.path)
                    ) from exc
                time.sleep(0.001)
        # Locked, but is it still the file that the daemon looks at?
        try:
            same = os.path.samestat(os.fstat(self._fd), os.stat(self.path))
        except FileNotFoundError:
            same = False
        if not same:
            raise OwnerLockError(0, "the daemon has given it up", str(self.path))

    @property
    def held(self) -> bool:
        """Whether it is held."""
        return self._fd >= 0

    def close(self) -> None:
        """Gives the lock back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_held: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A copy of the descriptor in a child would keep the lock after its parent's death.
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_drop_in_child)
