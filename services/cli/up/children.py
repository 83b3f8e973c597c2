"""Starts a supervisor's children: by executing their command, or by a fork server.

Either way a child leads a process group of its own, writes to its log, and dies with the supervisor
(a forked one with the fork server, which is the supervisor's child).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import BinaryIO, Protocol

from services.cli.config import child_environment
from services.cli.up import launch
from services.cli.up.spec import ProcessSpec
from services.common.forking import Forked, ForkFailed, ask, exit_code


class Child(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its process id, which is its group's, too."""

    async def wait(self) -> int:
        """Its exit code, when it has ended; below zero the signal that ended it."""


async def start(spec: ProcessSpec, log: BinaryIO) -> Child:
    """Starts one life of a process.

    Without an answer of its fork server it is executed: that takes longer, and is the same.
    """
    env = child_environment(spec.env)
    if spec.forked_by is not None:
        try:
            forked = await asyncio.to_thread(ask, spec.forked_by, spec.command, env, log.fileno())
        except ForkFailed as exc:
            log.write(f"forebay: no fork server ({exc}); {spec.name} starts by itself\n".encode())
            log.flush()
        else:
            return _Forked(forked)
    return await _execute(spec, env, log)


async def _execute(spec: ProcessSpec, env: Mapping[str, str], log: BinaryIO) -> Child:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        launch.__file__,
        str(os.getpid()),
        *spec.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        start_new_session=True,
    )


class _Forked:
    """Implements Child."""

    def __init__(self, forked: Forked) -> None:
        self.pid = forked.pid
        self._forked = forked
        self._code: int | None = None

    async def wait(self) -> int:
        """See Child."""
        if self._code is None:
            loop = asyncio.get_running_loop()
            self._code = exit_code(await loop.sock_recv(self._forked.connection, 64))
            self._forked.close()
        return self._code
