"""A fork server and its children, as processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from services.common.forking import Forked, ForkFailed, answers, ask, exit_code
from tests.support.polling import until

SERVER = """
import os, signal, sys
from pathlib import Path
from services.common.forking import listen, serve
listener = listen(Path(sys.argv[1]))
print("listens", flush=True)
request = serve(listener)
sys.argv = list(request.command)
exec(sys.argv[1])
"""
TELL = """
import json, os, sys
fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
open(sys.argv[2], "w").write(json.dumps([os.getsid(0), os.getpgid(0), dict(os.environ), fds]))
"""
WAIT = "signal.pause()"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", SERVER, str(tmp_path / "socket")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        yield process
        process.kill()


def start(folder: Path, *command: str, env: Mapping[str, str] | None = None) -> Forked:
    with (folder / "log").open("ab") as log:
        return ask(folder / "socket", ["python", *command], env or {}, log.fileno())


def end(forked: Forked) -> int:
    forked.connection.settimeout(10)
    code = exit_code(forked.connection.recv(64))
    assert forked.connection.recv(64) == b""  # the server holds nothing of it any more
    forked.close()
    return code


def test_a_child_is_a_process_of_its_own(server: subprocess.Popen[str], tmp_path: Path) -> None:
    told = tmp_path / "told"
    other = start(tmp_path, WAIT)
    child = start(tmp_path, TELL, str(told), env={"A": "b"})
    assert end(child) == 0
    session, group, env, fds = json.loads(told.read_text())
    assert session == group == child.pid
    assert env == {"A": "b"}
    # 3 is the listing itself: nothing of the server's or of other children's is open.
    assert fds == [0, 1, 2, 3]
    os.kill(other.pid, signal.SIGTERM)
    assert end(other) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("program", "code", "log"),
    [
        ("print('out'); sys.exit(3)", 3, "out\n"),
        ("raise ValueError('this is why')", 1, "ValueError: this is why\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_its_end_and_its_output_are_told(
    server: subprocess.Popen[str], tmp_path: Path, program: str, code: int, log: str
) -> None:
    assert end(start(tmp_path, program)) == code
    assert (tmp_path / "log").read_text().endswith(log)
    assert server.poll() is None


async def test_children_die_with_the_server(server: subprocess.Popen[str], tmp_path: Path) -> None:
    children = [start(tmp_path, WAIT) for _ in range(3)]
    seen = [psutil.Process(c.pid) for c in children]
    server.kill()
    assert [end(c) for c in children] == [-signal.SIGKILL] * 3

    async def left() -> list[psutil.Process]:
        return [p for p in seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    await until(left, lambda rest: not rest, within_s=5, what="end of the children")


def test_where_no_more_processes_fit_the_others_live_on(tmp_path: Path) -> None:
    once = "import errno, os\nfork, failed = os.fork, []\n"
    once += "def full():\n    if failed: return fork()\n"
    once += "    failed.append(1); raise OSError(errno.EAGAIN, 'full')\nos.fork = full\n"
    argv = [sys.executable, "-c", once + SERVER, str(tmp_path / "socket")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(ForkFailed):
            start(tmp_path, WAIT)
        assert end(start(tmp_path, "sys.exit(7)")) == 7
        process.kill()


def send(path: Path, messages: Sequence[bytes], files: int) -> bytes:
    """What a fork server answers to this."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        socket.send_fds(connection, messages, [1] * files)
        return connection.recv(64)


@pytest.mark.parametrize(
    ("message", "files"),
    [
        (b"not JSON", 1),
        (b'{"command": "no list", "env": {}}', 1),
        (b'{"command": ["python", "pass"], "env": {}}', 0),
        (b'{"command": ["python", "pass"], "env": {}}', 2),
    ],
)
def test_what_is_no_request_costs_nothing(
    server: subprocess.Popen[str], tmp_path: Path, message: bytes, files: int
) -> None:
    assert end(start(tmp_path, "sys.exit(4)")) == 4
    held = psutil.Process(server.pid).num_fds()
    assert send(tmp_path / "socket", [message], files) == b""
    assert end(start(tmp_path, "sys.exit(5)")) == 5
    assert psutil.Process(server.pid).num_fds() == held


async def test_a_child_that_nobody_waits_for_is_ended(
    server: subprocess.Popen[str], tmp_path: Path
) -> None:
    family = psutil.Process(server.pid)
    os.kill(server.pid, signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(tmp_path / "socket"))
        touch = f"open({str(tmp_path / 'ran')!r}, 'w'); signal.pause()"
        message = json.dumps({"command": ["python", touch], "env": {}}).encode()
        socket.send_fds(connection, [message], [1])
    os.kill(server.pid, signal.SIGCONT)
    assert end(start(tmp_path, "sys.exit(6)")) == 6  # it was served before this one
    assert family.children() == []


def test_where_nobody_forks(tmp_path: Path) -> None:
    for leftover in (False, True):
        if leftover:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
                gone.bind(str(tmp_path / "socket"))
        assert not answers(tmp_path / "socket")
        with pytest.raises(ForkFailed):
            start(tmp_path, WAIT)


def test_others_may_not_ask(server: subprocess.Popen[str], tmp_path: Path) -> None:
    assert answers(tmp_path / "socket")
    assert (tmp_path / "socket").stat().st_mode & 0o077 == 0
