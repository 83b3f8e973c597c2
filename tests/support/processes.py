"""A child process of a test: started, watched, killed, frozen, and never left behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL);"  # PR_SET_PDEATHSIG; survives the exec
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a service writes into its ready file."""

    id: str
    incarnation: int
    pid: int
    address: str
    events_address: str
    metrics_address: str
    instances: list[dict[str, object]] | None = None
    """Id and incarnation of each, when the process holds several."""


class Child(Protocol):
    """A process that was started; Popen is one."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None:
        """Its exit code, once it has ended."""

    def wait(self, timeout: float) -> int:
        """Its exit code; raises TimeoutExpired."""

    def send_signal(self, signum: int) -> None:
        """Nothing when it has ended."""


Starter = Callable[[Sequence[str], Mapping[str, str], BinaryIO], Child]
"""Starts a command in that environment, with that file for its output; it dies with this process
(and with the thread that started it)."""


def execute(argv: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> Child:
    """The usual starter."""
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *argv],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,  # a Ctrl-C at the terminal is pytest's business
    )


class Process:
    """One `python -m ...` with its log file; `start` again after its end is a restart in place."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        starter: Starter = execute,
    ) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env or {})
        self.log_file = folder / f"{name}.log"
        self.ready_file = folder / f"{name}.ready.json"
        self._starter = starter
        self._child: Child | None = None
        self._stopped = False

    @property
    def pid(self) -> int:
        assert self._child is not None, f"{self.name} was never started"
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it runs (also when stopped by SIGSTOP)."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Starts it; returns at once. Main thread only: it dies with the thread that starts it."""
        assert not self.alive, f"{self.name} runs already"
        self.ready_file.unlink(missing_ok=True)
        self._stopped = False
        with self.log_file.open("ab") as log:
            log.write(f"--- start {self.name} {time.time():.3f}: {self.argv}\n".encode())
            log.flush()
            self._child = self._starter(self.argv, {**os.environ, **self.env}, log)

    def ready(self) -> Ready | None:
        """Its ready file, once that is there. Fails when the process has ended instead."""
        if self.ready_file.exists():
            return Ready(**json.loads(self.ready_file.read_text()))
        if not self.alive:
            raise AssertionError(
                f"{self.name} ended with {self.exit_code} before it was ready:\n{self.log_tail()}"
            )
        return None

    def wait_ready(self, timeout_s: float = 120) -> Ready:
        """Blocks until it is ready. For fixtures; tests await `until_ready`."""
        deadline = time.monotonic() + timeout_s
        while (ready := self.ready()) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name} not ready in {timeout_s} s:\n{self.log_tail()}")
            time.sleep(0.02)
        return ready

    async def until_ready(self, timeout_s: float = 120) -> Ready:
        """Waits until it is ready."""
        async with asyncio.timeout(timeout_s):
            while (ready := self.ready()) is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        return ready

    def kill(self) -> None:
        """kill -9, and reaps it."""
        if self.alive:
            self._signal(signal.SIGKILL)
            self._wait(10)

    def terminate(self) -> None:
        """SIGTERM: asks for a drain."""
        self._signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)
        self._stopped = True

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)
        self._stopped = False

    async def until_ended(self, timeout_s: float = 60) -> int:
        """Waits for its end; its exit code."""
        async with asyncio.timeout(timeout_s):
            while (code := self.exit_code) is None:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        return code

    def wait_ended(self, timeout_s: float) -> None:
        """Blocks until its end, or for `timeout_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(timeout_s)

    def close(self) -> None:
        """Ends it whatever its state."""
        self.kill()

    def log_size(self) -> int:
        return self.log_file.stat().st_size if self.log_file.exists() else 0

    def log_text(self, start: int = 0) -> str:
        """Its log from byte `start`."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def log_tail(self, start: int = 0, lines: int = 40) -> str:
        return "\n".join(self.log_text(start).splitlines()[-lines:])

    def _signal(self, signum: int) -> None:
        assert self._child is not None
        self._child.send_signal(signum)

    def _wait(self, timeout_s: float) -> None:
        assert self._child is not None
        self._child.wait(timeout_s)
