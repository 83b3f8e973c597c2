"""Processes by pid, safely: pids are reused, so one counts only with its process's start time."""

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessRef:
    """One life of one process: its pid, and its start in clock ticks since boot."""

    pid: int
    start_time: int


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; empty when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return text.rpartition(")")[2].split()


def find(pid: int) -> ProcessRef | None:
    """The process that has this pid now; None when there is none, or only its zombie."""
    fields = _stat(pid)
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return ProcessRef(pid, int(fields[19]))


def alive(ref: ProcessRef) -> bool:
    """Whether that very process is still running (a zombie is not)."""
    return find(ref.pid) == ref


def send(ref: ProcessRef, signum: int, *, group: bool = False) -> bool:
    """Signals that very process, never another that got its pid; False when it is gone.

    `group` signals its whole process group as well, if it leads one.
    """
    try:
        handle = os.pidfd_open(ref.pid)
    except (ProcessLookupError, PermissionError):
        return False
    try:
        # The handle pins the process: if the start time is right now, no other can take its place.
        if not alive(ref):
            return False
        if group and os.getpgid(ref.pid) == ref.pid:
            os.killpg(ref.pid, signum)
        else:
            signal.pidfd_send_signal(handle, signum)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def wait_gone(ref: ProcessRef, timeout_s: float) -> bool:
    """Blocks until that process is gone, at most `timeout_s`; True when it is."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(ref.pid)
        try:
            if not alive(ref):
                return True
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)
    return not alive(ref)


def end(ref: ProcessRef, grace_s: float) -> bool:
    """SIGTERM, then after `grace_s` SIGKILL to it and its group; True when it is gone."""
    if not send(ref, signal.SIGTERM):
        return not alive(ref)
    if wait_gone(ref, grace_s):
        return True
    send(ref, signal.SIGKILL, group=True)
    return wait_gone(ref, 5.0)


def command_line(pid: int) -> str:
    """The command line of a process, for people; empty when it can't be read."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return " ".join(raw.replace(b"\0", b" ").decode(errors="replace").split())
