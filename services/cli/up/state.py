"""The state directory: cluster.json with every address and pid, one lock, logs, etcd's data.

Layout: cluster.json, lock, logs/NAME.log, run/NAME.json (what each process said when ready), etcd/,
kvbm/ (blocks on disk; they stay when the cluster stops).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from services.cli.errors import StateError
from services.cli.up.caches import Caches
from services.cli.up.process import ProcessRef, alive
from services.cli.up.spec import ProcessView


class Phase(StrEnum):
    """Where a cluster is in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """All that other commands must know of a cluster: what cluster.json holds."""

    phase: Phase
    supervisor: ProcessRef
    gateway_url: str
    """Where clients go, without /v1."""
    model: str
    """Name by which clients ask for the model."""
    model_path: str
    policy: str
    etcd_endpoints: str
    """host:port, comma-separated."""
    own_etcd: bool
    api_keys_file: str = ""
    caches: Caches | None = None
    """Where its kvbm keeps blocks; None without one."""
    restart: bool = True
    started_unix_s: float = 0.0
    processes: tuple[ProcessView, ...] = ()
    version: int = 1

    def of_kind(self, kind: str) -> tuple[ProcessView, ...]:
        """The processes of one kind."""
        return tuple(p for p in self.processes if p.kind == kind)

    def supervised(self) -> bool:
        """Whether its supervisor is alive."""
        return alive(self.supervisor)


def cluster_file(state_dir: Path) -> Path:
    """Path of cluster.json."""
    return state_dir / "cluster.json"


def save(state_dir: Path, state: ClusterState) -> None:
    """Writes cluster.json atomically, for this user alone."""
    path = cluster_file(state_dir)
    scratch = path.with_name(f".cluster.json.{os.getpid()}")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    scratch.chmod(0o600)
    scratch.replace(path)


def load(state_dir: Path) -> ClusterState | None:
    """The cluster of a state directory; None when there never was one. Raises StateError."""
    path = cluster_file(state_dir)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as exc:
        raise StateError(
            f"{path} can't be read: {exc}",
            hint="If no cluster runs there, remove that file.",
        ) from exc


def prepare(state_dir: Path) -> None:
    """Makes the directories; keeps one older generation of each log."""
    try:
        for name in ("logs", "run"):
            (state_dir / name).mkdir(parents=True, exist_ok=True)
        for log in (state_dir / "logs").glob("*.log"):
            if log.name != "supervisor.log":  # the daemon is writing to it
                log.replace(log.with_suffix(".log.1"))
    except OSError as exc:
        raise StateError(
            f"the state directory {state_dir} can't be used: {exc.strerror}",
            hint="Choose another with --state-dir.",
        ) from exc


@contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Holds the directory's lock; the kernel frees it when this process dies. Raises StateError."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        file = (state_dir / "lock").open("a")
    except OSError as exc:
        raise StateError(
            f"the state directory {state_dir} can't be used: {exc.strerror}",
            hint="Choose another with --state-dir.",
        ) from exc
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            state = load(state_dir)
            who = f" (supervisor pid {state.supervisor.pid})" if state else ""
            raise StateError(
                f"a cluster is already running in {state_dir}{who}",
                hint="Stop it with `forebay down`, or choose another directory with --state-dir.",
            ) from exc
        yield
