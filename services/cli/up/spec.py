"""What the supervisor is told of a process, and what it tells of one."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class ProcessState(StrEnum):
    """Where a kept process is in its life."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    """It died; it is started again after a pause."""
    DOWN = "down"
    """It died and is not started again."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """It was stopped on purpose, or never started."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What a process said when it became ready. Addresses are host:port, empty when it has none."""

    address: str = ""
    events_address: str = ""
    metrics_address: str = ""
    incarnation: int = 0
    instances: tuple[tuple[str, int], ...] = ()
    """Id and incarnation of each worker in the process; empty: itself alone."""


Probe = Callable[[int], Awaitable[Ready | None]]
"""Asks whether the process with this pid is ready: its addresses, or None for not yet."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to keep alive."""

    name: str
    """Unique in the cluster; names its log and its instance id."""
    kind: str
    """etcd, router, kvbm, worker, gateway: what stops together."""
    command: tuple[str, ...]
    """Program and arguments. No secrets: anyone on the machine can read them."""
    probe: Probe
    """How to see that it is ready."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the supervisor's own."""
    ready_file: Path | None = None
    """Removed before each start, so that an older life's word is not taken for the new one's."""
    forked_by: Path | None = None
    """Socket of a fork server that starts it sooner; executed where that does not answer."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between restarts, in seconds: doubled each time, reset by `forget_s` of life."""

    first_s: float = 0.25
    longest_s: float = 30.0
    forget_s: float = 60.0

    def pause(self, failures: int) -> float:
        """Seconds to wait after the `failures`-th death in a row (from 1)."""
        return float(min(self.longest_s, self.first_s * 2 ** min(failures - 1, 30)))


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A kept process at one moment."""

    name: str
    kind: str
    state: ProcessState
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pid: int = 0
    """0 when it is not running."""
    start_time: int = 0
    """Start of that pid in clock ticks since boot, so that a reused pid is not taken for it."""
    ready: Ready = field(default_factory=Ready)
    """Last known; meaningful while the state is READY."""
    restarts: int = 0
    exit_code: int | None = None
    """Of the last life that ended; negative is the signal that killed it."""
    detail: str = ""
    """Why it is in this state, for people."""
    log: str = ""


def file_probe(path: Path) -> Probe:
    """Ready when the ready file is there and speaks of this very pid."""

    async def probe(pid: int) -> Ready | None:
        return read_ready(path, pid)

    return probe


def read_ready(path: Path, pid: int) -> Ready | None:
    """What the process `pid` wrote into its ready file; None when there is nothing of it yet."""
    try:
        said = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    if not isinstance(said, dict) or said.get("pid") != pid:
        return None
    return Ready(
        address=str(said.get("address", "")),
        events_address=str(said.get("events_address", "")),
        metrics_address=str(said.get("metrics_address", "")),
        incarnation=int(said.get("incarnation", 0)),
        instances=tuple(
            (str(i["id"]), int(i["incarnation"]))
            for i in said.get("instances", ())
            if isinstance(i, dict) and "id" in i and "incarnation" in i
        ),
    )


def exit_text(code: int) -> str:
    """An exit code for people: "exit code 2", "killed by signal 9"."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def tail(path: Path, lines: int = 15) -> tuple[str, ...]:
    """The last lines of a log, at most 64 KiB of it; empty when it can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65_536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-lines:])
