"""The supervisor over real child processes: ready, restart, stop, and never an orphan."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from services.cli.errors import StartFailed
from services.cli.up.process import ProcessRef, alive, find, wait_gone
from services.cli.up.spec import Backoff, ProcessSpec, ProcessState, ProcessView, file_probe
from services.cli.up.supervisor import Supervisor, supervise

CHILD = """
import json, os, signal, sys, time
path, mode = sys.argv[1], sys.argv[2]
print("hello from", mode, flush=True)
if mode == "fails":
    print("this is why", flush=True)
    sys.exit(3)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "family":
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("child", child.pid, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode != "never":
    with open(path + ".new", "w") as file:
        json.dump({"pid": os.getpid(), "address": "h:1", "incarnation": os.getpid()}, file)
    os.replace(path + ".new", path)
time.sleep(60)
"""
QUICK = Backoff(first_s=0.01, longest_s=0.05)


def spec(folder: Path, name: str = "a", mode: str = "serves", kind: str = "k") -> ProcessSpec:
    ready = folder / f"{name}.json"
    return ProcessSpec(
        name=name,
        kind=kind,
        command=(sys.executable, "-c", CHILD, str(ready), mode),
        probe=file_probe(ready),
        ready_file=ready,
    )


class Seen:
    """Every change, and a way to wait for one."""

    def __init__(self) -> None:
        self.views: list[ProcessView] = []
        self._changed = asyncio.Event()

    def __call__(self, view: ProcessView) -> None:
        self.views.append(view)
        self._changed.set()

    async def until(self, wanted: Callable[[ProcessView], bool]) -> ProcessView:
        async with asyncio.timeout(20):
            while True:
                for view in self.views:
                    if wanted(view):
                        return view
                self._changed.clear()
                await self._changed.wait()

    def states(self, name: str) -> list[ProcessState]:
        states = [v.state for v in self.views if v.name == name]
        return [s for i, s in enumerate(states) if i == 0 or states[i - 1] is not s]


def ref(supervisor: Supervisor, name: str) -> ProcessRef:
    view = next(v for v in supervisor.processes if v.name == name)
    return ProcessRef(view.pid, view.start_time)


async def test_what_dies_is_started_again(tmp_path: Path) -> None:
    seen = Seen()
    async with supervise(tmp_path, backoff=QUICK, on_change=seen) as supervisor:
        supervisor.start(spec(tmp_path))
        await supervisor.wait_ready(["a"], 20)
        first = ref(supervisor, "a")
        os.kill(first.pid, signal.SIGKILL)
        again = await seen.until(lambda v: v.state is ProcessState.READY and v.pid != first.pid)
        assert again.restarts == 1 and again.ready.incarnation == again.pid
        assert "killed by signal 9" in next(
            v.detail for v in seen.views if v.state is ProcessState.BACKOFF
        )
        second = ref(supervisor, "a")
        await supervisor.stop(["a"], 10)
        assert supervisor.processes[0].state is ProcessState.STOPPED
        assert not alive(second)
    assert (tmp_path / "a.log").read_text() == "hello from serves\n" * 2


FORKS = """
import os, sys, time
from pathlib import Path
from services.common.forking import listen, serve
listener = listen(Path(sys.argv[1]))
print("listens", flush=True)
request = serve(listener)
print("forked", flush=True)
os.execv(request.command[0], request.command)
"""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The socket of a fork server, and its process."""
    argv = [sys.executable, "-c", FORKS, str(tmp_path / "forks")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listens\n"
        yield tmp_path / "forks", server
        server.kill()


async def test_what_is_forked_is_kept_alike_and_executed_where_nobody_forks(
    tmp_path: Path, forks: tuple[Path, subprocess.Popen[str]]
) -> None:
    seen = Seen()
    socket, server = forks
    async with supervise(tmp_path, backoff=QUICK, on_change=seen) as supervisor:
        supervisor.start(replace(spec(tmp_path), forked_by=socket))
        await supervisor.wait_ready(["a"], 20)
        first = ref(supervisor, "a")
        os.kill(first.pid, signal.SIGKILL)
        again = await seen.until(lambda v: v.state is ProcessState.READY and v.restarts == 1)
        assert os.getpgid(again.pid) == again.pid != first.pid
        server.kill()  # and with it what it has forked
        last = await seen.until(lambda v: v.state is ProcessState.READY and v.restarts == 2)
        assert psutil.Process(last.pid).ppid() == os.getpid()
        await supervisor.stop(["a"], 10)
    log = (tmp_path / "a.log").read_text()
    assert log.startswith("forked\nhello from serves\n" * 2 + "forebay: no fork server (")
    assert log.endswith("); a starts by itself\nhello from serves\n")


async def test_without_restart_it_stays_down_until_asked(tmp_path: Path) -> None:
    seen = Seen()
    async with supervise(tmp_path, restart=False, on_change=seen) as supervisor:
        supervisor.start(spec(tmp_path))
        await supervisor.wait_ready(["a"], 20)
        first = ref(supervisor, "a")
        os.kill(first.pid, signal.SIGKILL)
        down = await seen.until(lambda v: v.state is ProcessState.DOWN)
        assert down.pid == 0 and down.exit_code == -9
        assert supervisor.start_what_is_down() == ("a",)
        await supervisor.wait_ready(["a"], 20)
        assert ref(supervisor, "a") != first
        assert supervisor.start_what_is_down() == ()


async def test_a_failed_start_tells_why(tmp_path: Path) -> None:
    async with supervise(tmp_path, backoff=QUICK) as supervisor:
        supervisor.start(spec(tmp_path, "good"))
        supervisor.start(spec(tmp_path, "bad", "fails"))
        with pytest.raises(StartFailed, match="bad ended before it was ready") as caught:
            await supervisor.wait_ready(["good", "bad"], 20)
    assert "exit code 3" in caught.value.message
    assert caught.value.tail == ("hello from fails", "this is why")
    assert caught.value.process == "bad"


async def test_one_that_never_gets_ready_is_named(tmp_path: Path) -> None:
    async with supervise(tmp_path) as supervisor:
        supervisor.start(spec(tmp_path, mode="never"))
        with pytest.raises(StartFailed, match=r"a was not ready within 0\.3 s"):
            await supervisor.wait_ready(["a"], 0.3)


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    absent = ProcessSpec("a", "k", ("/no/such/program",), file_probe(tmp_path / "x"))
    async with supervise(tmp_path) as supervisor:
        supervisor.start(absent)
        with pytest.raises(StartFailed) as caught:
            await supervisor.wait_ready(["a"], 20)
    assert "can't run /no/such/program" in caught.value.tail[-1]


async def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path: Path) -> None:
    async with supervise(tmp_path) as supervisor:
        supervisor.start(spec(tmp_path, mode="family"))
        await supervisor.wait_ready(["a"], 20)
        child = find(int((tmp_path / "a.log").read_text().split()[-1]))
        assert child is not None
        await supervisor.stop(["a"], 0.1)
        assert supervisor.processes[0].exit_code == -signal.SIGKILL
        assert await asyncio.to_thread(wait_gone, child, 10)


async def test_kinds_stop_one_after_the_other(tmp_path: Path) -> None:
    seen = Seen()
    async with supervise(tmp_path, on_change=seen) as supervisor:
        for name, kind in (("db", "etcd"), ("w0", "worker"), ("w1", "worker"), ("g", "gateway")):
            supervisor.start(spec(tmp_path, name, kind=kind))
        await supervisor.wait_ready(["db", "w0", "w1", "g"], 20)
        await supervisor.stop_kinds(("gateway", "worker", "etcd"), 10)
    stopped = [v.name for v in seen.views if v.state is ProcessState.STOPPED]
    assert stopped[0] == "g" and set(stopped[1:3]) == {"w0", "w1"} and stopped[3] == "db"


async def test_stopped_while_starting(tmp_path: Path) -> None:
    async with supervise(tmp_path) as supervisor:
        supervisor.start(spec(tmp_path, mode="never"))
        await supervisor.stop(["a"], 10)  # before its task had a turn
        assert supervisor.processes[0].state is ProcessState.STOPPED
        supervisor.start(spec(tmp_path, mode="serves"))
        await asyncio.sleep(0)  # its task has begun, the process is being made
        await supervisor.stop(["a"], 10)
        assert supervisor.processes[0].state is ProcessState.STOPPED
        supervisor.start(spec(tmp_path, mode="serves"))
        await supervisor.wait_ready(["a"], 20)


async def test_stopped_while_waiting_to_restart(tmp_path: Path) -> None:
    seen = Seen()
    slow = Backoff(first_s=60)
    async with supervise(tmp_path, backoff=slow, on_change=seen) as supervisor:
        supervisor.start(spec(tmp_path))
        await supervisor.wait_ready(["a"], 20)
        os.kill(ref(supervisor, "a").pid, signal.SIGKILL)
        await seen.until(lambda v: v.state is ProcessState.BACKOFF)
        async with asyncio.timeout(5):
            await supervisor.stop(["a"], 10)
        assert seen.states("a")[-2:] == [ProcessState.BACKOFF, ProcessState.STOPPED]


async def test_the_end_takes_everything_along(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        async with supervise(tmp_path) as supervisor:
            supervisor.start(spec(tmp_path, mode="stubborn"))
            await supervisor.wait_ready(["a"], 20)
            left = ref(supervisor, "a")
            raise RuntimeError("boom")
    assert not alive(left)


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from services.cli.up.spec import ProcessSpec, file_probe
from services.cli.up.supervisor import supervise
async def main():
    folder = Path(sys.argv[1])
    ready = folder / "a.json"
    spec = ProcessSpec("a", "k", (sys.executable, "-c", sys.argv[3], str(ready), "stubborn"),
                       file_probe(ready), ready_file=ready)
    async with supervise(folder) as supervisor:
        supervisor.start(spec)
        await supervisor.wait_ready(["a"], 20)
        print(supervisor.processes[0].pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def test_a_killed_supervisor_leaves_no_orphans(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), str(root), CHILD],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    with parent.stdout as said:
        child = find(int(said.readline()))
    assert child is not None
    parent.kill()
    parent.wait()
    assert wait_gone(child, 10)
