"""The state directory: cluster.json there and back, one owner at a time, no stranger hurt."""

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from services.cli.errors import StateError
from services.cli.up import state
from services.cli.up.down import bring_down, sweep
from services.cli.up.process import ProcessRef, find
from services.cli.up.spec import ProcessState, ProcessView, Ready
from services.cli.up.state import ClusterState, Phase

GONE = ProcessRef(2**22 + 1, 1)
"""A process that can't be: beyond the largest pid."""


def cluster(**changes: object) -> ClusterState:
    return replace(
        ClusterState(
            phase=Phase.READY,
            supervisor=GONE,
            gateway_url="http://127.0.0.1:8000",
            model="m",
            model_path="/m",
            policy="kv",
            etcd_endpoints="127.0.0.1:2379",
            own_etcd=True,
            processes=(
                ProcessView(
                    "worker-0",
                    "worker",
                    ProcessState.READY,
                    command=("python", "-m", "x"),
                    pid=1,
                    start_time=2,
                    ready=Ready("127.0.0.1:8200", "tcp://127.0.0.1:8201", "", 2**63 + 5),
                ),
            ),
        ),
        **changes,  # type: ignore[arg-type]
    )


def test_round_trip(tmp_path: Path) -> None:
    assert state.load(tmp_path) is None
    state.save(tmp_path, cluster())
    assert state.load(tmp_path) == cluster()
    assert stat.S_IMODE(state.cluster_file(tmp_path).stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.json"]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    state.cluster_file(tmp_path).write_text("{")
    with pytest.raises(StateError, match=r"cluster\.json can't be read"):
        state.load(tmp_path)


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    state.save(tmp_path, cluster())
    with (
        state.locked(tmp_path),
        pytest.raises(StateError, match=f"pid {GONE.pid}") as caught,
        state.locked(tmp_path),
    ):
        pass
    assert "forebay down" in caught.value.hint
    with state.locked(tmp_path):
        pass


def test_older_logs_are_kept_once(tmp_path: Path) -> None:
    state.prepare(tmp_path)
    (tmp_path / "logs" / "worker-0.log").write_text("old")
    (tmp_path / "logs" / "supervisor.log").write_text("being written")
    state.prepare(tmp_path)
    assert (tmp_path / "logs" / "worker-0.log.1").read_text() == "old"
    assert not (tmp_path / "logs" / "worker-0.log").exists()
    assert (tmp_path / "logs" / "supervisor.log").exists()


def test_a_state_dir_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="can't be used"), state.locked(tmp_path / "file" / "x"):
        pass


def test_nothing_to_bring_down(tmp_path: Path) -> None:
    assert not bring_down(tmp_path, lambda text: None)
    state.save(tmp_path, cluster())
    assert not bring_down(tmp_path, lambda text: None)
    found = state.load(tmp_path)
    assert found is not None and found.phase is Phase.STOPPED


def test_leftovers_are_ended_and_strangers_are_not(tmp_path: Path) -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    ours, stranger = subprocess.Popen(sleeper), subprocess.Popen(sleeper)
    try:
        refs = [find(p.pid) for p in (ours, stranger)]
        assert refs[0] is not None and refs[1] is not None
        views = (
            ProcessView("worker-0", "worker", ProcessState.READY, pid=ours.pid,
                        start_time=refs[0].start_time),
            # The same pid, but of an older process: somebody else has that pid now.
            ProcessView("worker-1", "worker", ProcessState.READY, pid=stranger.pid,
                        start_time=refs[1].start_time - 1),
        )  # fmt: skip
        state.save(tmp_path, cluster(processes=views))
        notes: list[str] = []
        assert sweep(tmp_path, notes.append) == 1
        assert ours.wait(10) != 0
        assert stranger.poll() is None
        assert len(notes) == 1 and "worker-0" in notes[0]
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait()


def test_a_living_supervisors_processes_are_not_swept(tmp_path: Path) -> None:
    me = find(os.getpid())
    assert me is not None
    view = ProcessView("w", "worker", ProcessState.READY, pid=me.pid, start_time=me.start_time)
    state.save(tmp_path, cluster(supervisor=me, processes=(view,)))
    assert sweep(tmp_path, lambda text: None) == 0
