"""A fork server: processes that start from one which has imported already.

`serve` answers requests on a Unix socket by forking; in the child it returns what was asked for,
and the caller becomes that program. `ask` is the other side. A request carries a command, its
whole environment and the file for its output. The server tells the child's pid at once, and its
exit code when it ends, on the same connection. Children die with the server, however it dies:
whoever asked then reads the end of the connection, which `exit_code` takes for a SIGKILL.

The server must have one thread, or a lock that another one holds stays locked in the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

_MOST_BYTES = 2**20
"""Longest request; the kernel's own limit for a message is lower."""
_ANSWER_S = 30.0
"""Longest wait for a fork: the server may be in the midst of several."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What a process is to become."""

    command: tuple[str, ...]
    """Program and arguments, as if it were to be executed."""
    env: Mapping[str, str]
    """All of its environment."""


@dataclass(slots=True)
class Forked:
    """A process that a fork server has started for us. It is not our child."""

    pid: int
    connection: socket.socket = field(repr=False)
    """One message comes: its exit code. Non-blocking."""

    def close(self) -> None:
        """Stops listening for its end; the process goes on."""
        self.connection.close()


class ForkFailed(Exception):
    """There is no fork server at that address, or it gave no process."""


def ask(path: Path, command: Sequence[str], env: Mapping[str, str], output: int) -> Forked:
    """Has the fork server at `path` start a process whose stdout and stderr is the file `output`.

    Blocks for the time of a fork. Raises ForkFailed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(path))
        said = msgspec.json.encode(Request(tuple(command), env))
        socket.send_fds(connection, [said], [output])
        pid = connection.recv(64)
        if not pid:
            raise ForkFailed("it ended, or refused")
        connection.setblocking(False)
        return Forked(int(pid), connection)
    except BaseException as exc:
        connection.close()
        if isinstance(exc, OSError):
            raise ForkFailed(exc.strerror or str(exc)) from exc
        raise


def answers(path: Path) -> bool:
    """Whether a fork server accepts requests at `path`. Blocks for a moment."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def exit_code(message: bytes) -> int:
    """What came over a process's connection: its exit code; below zero the signal that ended it."""
    return int(message) if message else -signal.SIGKILL


def listen(path: Path) -> socket.socket:
    """A socket at `path` for requests of this user's own processes. Raises OSError."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o077)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(64)
    return listener


def threads() -> int:
    """Threads of this process, those of native libraries too."""
    return len(os.listdir("/proc/self/task"))


def serve(listener: socket.socket) -> Request:
    """Forks on request until a signal ends the process; returns in each child, and only there."""
    gc.collect()
    gc.freeze()  # else the first collection in each child would copy what all of them share
    return _Server(listener).run()


class _Server:
    """The loop that accepts, forks and reaps. One thread."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._children: dict[int, socket.socket] = {}
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._pid = os.getpid()

    def run(self) -> Request:
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing wakes the loop
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # This kind holds no descriptor that children would get.
        with selectors.SelectSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._awake, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if self._awake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._awake, 4096)
                    self._reap()
                if self._listener.fileno() in ready and (request := self._accept()) is not None:
                    return request

    def _accept(self) -> Request | None:
        """Serves one request; not None in the child."""
        connection, _ = self._listener.accept()
        connection.settimeout(1.0)
        outputs: list[int] = []
        try:
            said, outputs, _, _ = socket.recv_fds(connection, _MOST_BYTES, 4)
            request = msgspec.json.decode(said, type=Request)
            if len(outputs) != 1:
                raise ValueError("a request comes with one file")
            pid = os.fork()
        except (OSError, ValueError):  # no request, or no room for a process
            for output in outputs:
                os.close(output)
            connection.close()
            return None
        if not pid:
            connection.close()
            self._become(request, outputs[0])
            return request
        os.close(outputs[0])
        self._children[pid] = connection
        try:
            connection.send(str(pid).encode())
        except OSError:  # who asked has gone
            os.kill(pid, signal.SIGKILL)
        return None

    def _become(self, request: Request, output: int) -> None:
        """Makes the child a process of its own, as if it had been executed."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != self._pid:  # it died before we were tied to it
            os._exit(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in {nothing, output, self._awake, self._wake} - {0, 1, 2}:
            os.close(fd)
        self._listener.close()
        for connection in self._children.values():
            connection.close()
        os.environ.clear()
        os.environ.update(request.env)

    def _reap(self) -> None:
        """Tells of all children that have ended."""
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self._children.pop(pid, None)
            if connection is not None:
                with contextlib.suppress(OSError), connection:
                    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
