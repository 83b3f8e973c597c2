"""Start, ready file, drain, forced end: in a real process with real signals."""

import asyncio
import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.common.lifecycle import FILES, Lifecycle, Phase

ROOT = Path(__file__).parents[3]


class Toy:
    """The running toy service."""

    def __init__(self, mode: str, ready_file: Path) -> None:
        self.ready_file = ready_file
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.common.toy_service", mode, str(ready_file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Callable[[str], Toy]]:
    started: list[Toy] = []

    def start(mode: str) -> Toy:
        started.append(Toy(mode, tmp_path / "ready.json"))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.communicate()


def test_ready_file_and_drain(toy: Callable[[str], Toy]) -> None:
    service = toy("plain")
    assert service.line() == "ready uvloop"
    assert json.loads(service.ready_file.read_text()) == {
        "id": "toy",
        "incarnation": 5,
        "pid": service.process.pid,
        "address": "h:1",
        "events_address": "tcp://h:2",
        "metrics_address": "h:3",
    }
    assert list(service.ready_file.parent.iterdir()) == [service.ready_file]
    service.process.send_signal(signal.SIGTERM)
    code, out, err = service.end()
    assert (code, out.split()) == (0, ["draining", "drained"])
    assert [json.loads(line)["event"] for line in err.splitlines()] == ["ready", "asked to stop"]


@pytest.mark.parametrize(("first", "second"), [("SIGTERM", "SIGTERM"), ("SIGINT", "SIGTERM")])
def test_a_second_signal_forces(toy: Callable[[str], Toy], first: str, second: str) -> None:
    service = toy("hangs")
    service.line()
    service.process.send_signal(signal.Signals[first])
    assert service.line() == "draining"
    assert service.process.poll() is None
    service.process.send_signal(signal.Signals[second])
    code, out, err = service.end()
    assert code == 128 + signal.Signals[second]
    assert "drained" not in out and "forced to stop" in err


def test_an_error_of_ours_is_a_message_and_exit_code_1(toy: Callable[[str], Toy]) -> None:
    service = toy("fails")
    code, _, err = service.end()
    assert code == 1
    assert "forebay: the toy port is taken" in err.splitlines()
    assert "Traceback" not in err
    assert '"reason": "PORT_TAKEN"' in err


async def test_stop_before_ready_is_not_undone_by_ready() -> None:
    life = Lifecycle()
    life.stop()
    life.ready()
    assert life.phase is Phase.DRAINING and life.stopping
    await life.wait_stop()


async def test_these_tests_run_on_uvloop() -> None:
    assert type(asyncio.get_running_loop()).__module__ == "uvloop"


def test_the_soft_limit_of_open_files_is_raised(toy: Callable[[str], Toy]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        service = toy("plain")
        assert service.line() == "ready uvloop"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    now, _ = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    assert now == (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard))
