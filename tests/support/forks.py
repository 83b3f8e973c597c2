"""The tests' fork server: workers on real vLLM without the 15 seconds that its import takes.

One for all tests, started by the first that needs it. A worker is the same process either way;
tests/integration/worker/test_process.py starts them by themselves.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from services.common.forking import Forked, ask, exit_code
from tests.models import default_cache_dir, tiny_model
from tests.support.processes import Process


def fork(argv: Sequence[str], env: Mapping[str, str], log: BinaryIO) -> ForkedProcess:
    """Starts a worker by the fork server. Blocks for its import when it is the first."""
    return ForkedProcess(ask(fork_server(), argv, env, log.fileno()))


class ForkedProcess:
    """Implements Child."""

    def __init__(self, forked: Forked) -> None:
        self.pid = forked.pid
        self._forked = forked
        self._code: int | None = None

    def poll(self) -> int | None:
        """See Child."""
        if self._code is None and select.select([self._forked.connection], [], [], 0)[0]:
            self._code = exit_code(self._forked.connection.recv(64))
            self._forked.close()
        return self._code

    def wait(self, timeout: float) -> int:
        """See Child."""
        if self._code is None:
            select.select([self._forked.connection], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return code

    def send_signal(self, signum: int) -> None:
        """See Child."""
        if self.poll() is None:
            os.kill(self.pid, signum)


_server: Process | None = None


def fork_server() -> Path:
    """Its socket. Main thread only."""
    global _server
    if _server is None:
        folder = Path(tempfile.mkdtemp(prefix="forks-"))
        argv = [sys.executable, "-m", "services.worker.forkserver"]
        argv += ["--model", str(tiny_model(default_cache_dir()))]
        _server = Process("forkserver", argv, folder)
        _server.argv += ["--socket", str(folder / "socket")]
        _server.argv += ["--ready-file", str(_server.ready_file)]
    if not _server.alive:
        _server.start()
        _server.wait_ready(120)
    return Path(_server.wait_ready().address)
