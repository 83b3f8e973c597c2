"""The lock of processes that write into arenas for a daemon, be it alive or dead.

Agents that read from peers hold it, shared, for as long as they live: the kernel drops it after
their last thread. A daemon that starts takes over no slot before all of them are gone.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

_NAME = "readers.lock"
_POLL_S = 0.02


def held_by_child(folder: Path) -> int:
    """A descriptor that holds the lock, for a child to inherit; the caller closes its own."""
    fd = _open(folder)
    try:
        # Nobody but a daemon that starts, which is over, locks it exclusively.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd


def wait_for_end(folder: Path, wait_s: float) -> None:
    """Returns when nobody holds it. Blocks; raises TimeoutError when that takes longer."""
    until = time.monotonic() + wait_s
    fd = _open(folder)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"an agent of a former daemon still runs that may write into {folder}; "
                        "end it (nixl_peer_helper.py), or choose another folder"
                    ) from exc
                time.sleep(_POLL_S)
            else:
                return
    finally:
        os.close(fd)


def _open(folder: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(folder / _NAME, flags, 0o600)
