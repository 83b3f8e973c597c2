"""Pids are reused: only the very process that was meant may be signalled."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.cli.up.process import ProcessRef, alive, end, find, send, wait_gone

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN);" + SLEEPER


def start(code: str) -> tuple[subprocess.Popen[str], ProcessRef]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    ref = find(process.pid)
    assert ref is not None
    return process, ref


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessRef]]:
    process, ref = start(SLEEPER)
    yield process, ref
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_reused_pid_is_left_alone(child: tuple[subprocess.Popen[str], ProcessRef]) -> None:
    process, ref = child
    older = replace(ref, start_time=ref.start_time - 1)
    assert not alive(older)
    assert not send(older, signal.SIGKILL)
    assert not send(older, signal.SIGKILL, group=True)
    assert end(older, 1.0)
    assert process.poll() is None


def test_the_right_one_is_ended(child: tuple[subprocess.Popen[str], ProcessRef]) -> None:
    process, ref = child
    assert alive(ref)
    assert end(ref, 10.0)
    assert process.wait() == -signal.SIGTERM
    assert find(ref.pid) is None
    assert wait_gone(ref, 0.0)


def test_one_that_ignores_sigterm_is_killed() -> None:
    process, ref = start(STUBBORN)
    assert end(ref, 0.1)
    assert process.wait() == -signal.SIGKILL
    assert process.stdout is not None
    process.stdout.close()


def test_a_zombie_is_gone(child: tuple[subprocess.Popen[str], ProcessRef]) -> None:
    process, ref = child
    process.kill()
    assert wait_gone(ref, 10.0)  # not yet waited for by its parent
    assert not alive(ref)
