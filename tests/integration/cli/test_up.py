"""A whole `forebay up` with tiny children in the services' place: detach, status, deaths, down.

The real services are met in tests/e2e; here only what the supervisor promises is looked at. etcd is
the real one.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.adapters.http import etcd_healthy
from services.cli.errors import PortTaken, StartFailed, StateError
from services.cli.up import daemon, plan, state
from services.cli.up.caches import arena_dir
from services.cli.up.down import bring_down
from services.cli.up.options import UpOptions
from services.cli.up.process import ProcessRef, alive, wait_gone
from services.cli.up.run import Cluster, StopRequests, run_cluster
from services.cli.up.spec import ProcessState, ProcessView
from services.cli.up.state import ClusterState, Phase
from services.cli.up.view import Reporter


class Quiet:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.views: list[ProcessView] = []
        self.notes: list[str] = []

    def change(self, view: ProcessView) -> None:
        self.views.append(view)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def workers(self, rows: object) -> None:
        pass

    def tiers(self, rows: object) -> None:
        pass

    def close(self) -> None:
        pass


_: type[Reporter] = Quiet

FAKE_SERVICE = '''
"""Stands where a service would: says ready, answers /ready and the router's ListWorkers, forks."""
import json, os, sys, threading
flags = dict(f[2:].split("=", 1) for f in sys.argv[1:] if "=" in f)
kind = flags["id"].split("-")[0]
if os.environ.get("FAIL") == kind:
    print("cannot go on", file=sys.stderr)
    sys.exit(1)
address = ""
if kind == "gateway":
    from http.server import BaseHTTPRequestHandler, HTTPServer
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
        def log_message(self, *args): pass
    server = HTTPServer(("127.0.0.1", int(flags["port"])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
if kind == "router":
    from concurrent import futures
    from pathlib import Path
    import grpc
    from forebay.router.v1 import router_pb2 as pb, router_pb2_grpc
    from forebay.common.v1 import common_pb2
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    class Router(router_pb2_grpc.RouterServiceServicer):
        def ListWorkers(self, request, context):
            found = [json.loads(p.read_text()) for p in
                     Path(flags["ready-file"]).parent.glob("worker-*.json")]
            return pb.ListWorkersResponse(router_id="router-0", policy="kv", workers=[
                pb.WorkerView(worker=common_pb2.Holder(id=w["id"], incarnation=w["incarnation"]),
                              state=pb.WORKER_STATE_READY) for w in found])
    server = grpc.server(futures.ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
if kind == "forkserver":
    from pathlib import Path
    from services.common.forking import listen, serve
    listener = listen(Path(address := flags["socket"]))
said = {"id": flags["id"], "pid": os.getpid(), "address": address, "incarnation": os.getpid()}
path = flags["ready-file"]
with open(path + ".new", "w") as file:
    json.dump(said, file)
os.replace(path + ".new", path)
if kind == "forkserver":
    request = serve(listener)
    os.execve(request.command[0], request.command, request.env)
import signal
signal.pause()
'''


@pytest.fixture
def fakes(tmp_path: Path) -> None:
    """An interpreter that runs the fake, whatever service it is asked for."""
    script = tmp_path / "fake_service.py"
    script.write_text(FAKE_SERVICE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3; exec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)


def options(tmp_path: Path, **changes: object) -> UpOptions:
    base: dict[str, object] = {
        "state_dir": str(tmp_path / "state"),
        "model": "/m",
        "served_model_name": "m",
        "auto_ports": True,
        "python": str(tmp_path / "python"),
        "drain_timeout_s": 1.0,
        "start_timeout_s": 40.0,
        "cpu_cache_dir": str(tmp_path / "arena"),
    }
    return UpOptions(**{**base, **changes})  # type: ignore[arg-type]


def lives(found: ClusterState) -> list[ProcessRef]:
    return [found.supervisor, *(ProcessRef(p.pid, p.start_time) for p in found.processes)]


async def test_own_etcd_starts_and_stops(tmp_path: Path) -> None:
    from services.cli.up.supervisor import supervise

    ports = plan.plan_ports(options(tmp_path))
    async with supervise(tmp_path) as supervisor:
        supervisor.start(plan.etcd_spec(ports, tmp_path))
        await supervisor.wait_ready(["etcd"], 30)
        address = supervisor.processes[0].ready.address
        assert address == f"127.0.0.1:{ports.etcd}"
        assert await etcd_healthy(address)
        await supervisor.stop(["etcd"], 10)
        assert not await etcd_healthy(address)


async def test_up_serves_and_stops_in_order(tmp_path: Path, fakes: None) -> None:
    reporter, seen = Quiet(), []

    async def serve(cluster: Cluster) -> None:
        seen.append(cluster.state)
        on_disk = state.load(tmp_path / "state")
        assert on_disk == cluster.state

    await run_cluster(options(tmp_path), reporter, StopRequests(), serve)
    during = seen[0]
    assert during.phase is Phase.READY
    assert [p.name for p in during.processes] == [
        "etcd", "forkserver-0", "router-0", "kvbm-0", "worker-0", "worker-1", "gateway-0",
    ]  # fmt: skip
    assert all(p.state is ProcessState.READY for p in during.processes)
    after = state.load(tmp_path / "state")
    assert after is not None and after.phase is Phase.STOPPED
    assert not any(alive(r) for r in lives(during)[1:])
    stopped = [v.name for v in reporter.views if v.state is ProcessState.STOPPED]
    assert stopped[:2] == ["gateway-0", "router-0"]
    assert stopped[-3:] == ["forkserver-0", "kvbm-0", "etcd"]
    forked = [(tmp_path / "state" / "logs" / f"worker-{i}.log").read_text() for i in (0, 1)]
    assert forked == ["", ""]  # else it would say that it starts by itself


def test_cached_blocks_outlive_the_cluster_until_purged(tmp_path: Path, fakes: None) -> None:
    directory = tmp_path / "state"
    own = arena_dir(directory)
    given = options(tmp_path, cpu_cache_dir="", cpu_cache_gb=0.05, disk_cache_gb=0.05)
    try:
        daemon.start_daemon(given, Quiet())
        (own / "arena").write_text("G2")  # the folder is there before the daemon needs it
        (directory / "kvbm").mkdir()
        (directory / "kvbm" / "blocks").write_text("G3")
        assert bring_down(directory, lambda text: None)
        assert (own / "arena").exists() and (directory / "kvbm" / "blocks").exists()
        told: list[str] = []
        assert not bring_down(directory, told.append, purge=True)  # nothing ran any more
        assert len(told) == 2
        assert not own.exists() and not (directory / "kvbm").exists()
    finally:
        shutil.rmtree(own, ignore_errors=True)


async def test_a_dead_kvbm_is_started_again(tmp_path: Path, fakes: None) -> None:
    """R: kill -9 of the daemon: the supervisor brings it back; its workers go on."""

    async def serve(cluster: Cluster) -> None:
        (first,) = cluster.state.of_kind("kvbm")
        workers = [w.pid for w in cluster.state.of_kind("worker")]
        os.kill(first.pid, signal.SIGKILL)
        again = await asyncio.to_thread(
            _until,
            tmp_path / "state",
            lambda p: p.kind == "kvbm" and p.pid != first.pid and p.state is ProcessState.READY,
        )
        assert again.restarts == 1
        assert [w.pid for w in cluster.state.of_kind("worker")] == workers

    await run_cluster(options(tmp_path), Quiet(), StopRequests(), serve)


async def test_a_stop_while_starting_ends_it(tmp_path: Path, fakes: None) -> None:
    stop, reporter = StopRequests(), Quiet()

    class Impatient(Quiet):
        def change(self, view: ProcessView) -> None:
            super().change(view)
            if view.name == "router-0" and view.pid and not stop.asked.is_set():
                stop.ask()

    async def serve(cluster: Cluster) -> None:
        raise AssertionError("it must not come to serving")

    reporter = Impatient()
    await run_cluster(options(tmp_path), reporter, stop, serve)
    assert not any(v.pid for v in {v.name: v for v in reporter.views}.values())


async def test_a_failed_start_leaves_nothing(
    tmp_path: Path, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "worker")
    reporter = Quiet()

    async def serve(cluster: Cluster) -> None:
        raise AssertionError("it must not come to serving")

    with pytest.raises(StartFailed) as caught:
        await run_cluster(options(tmp_path), reporter, StopRequests(), serve)
    assert caught.value.process.startswith("worker-")
    assert caught.value.tail == ("cannot go on",)
    after = state.load(tmp_path / "state")
    assert after is not None and after.phase is Phase.FAILED
    assert not any(p.pid for p in after.processes)


async def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path, fakes: None) -> None:
    reporter = Quiet()

    async def serve(cluster: Cluster) -> None:
        raise AssertionError("it must not come to serving")

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        given = options(tmp_path, auto_ports=False, gateway_port=server.getsockname()[1])
        with pytest.raises(PortTaken, match=f"pid {os.getpid()}"):
            await run_cluster(given, reporter, StopRequests(), serve)
    assert reporter.views == []


def test_detach_kill_revive_status_down(tmp_path: Path, fakes: None) -> None:
    reporter = Quiet()
    given = options(tmp_path, restart=False)
    directory = tmp_path / "state"
    daemon.start_daemon(given, reporter)
    try:
        found = state.load(directory)
        assert found is not None and found.phase is Phase.READY
        assert all(alive(r) for r in lives(found))
        assert {v.name for v in reporter.views if v.state is ProcessState.READY} == {
            "etcd", "forkserver-0", "router-0", "kvbm-0", "worker-0", "worker-1", "gateway-0",
        }  # fmt: skip
        with pytest.raises(StateError, match="already running"):
            daemon.start_daemon(given, Quiet())

        victim = found.of_kind("worker")[0]
        os.kill(victim.pid, signal.SIGKILL)
        down = _until(directory, lambda p: p.name == "worker-0" and p.state is ProcessState.DOWN)
        assert down.exit_code == -9
        text = _status(directory)
        assert text["ok"] is False
        by_name = {p["name"]: p for p in text["processes"]}
        assert by_name["worker-0"]["state"] == "down" and by_name["etcd"]["serving"] is True
        assert by_name["forkserver-0"]["serving"] is True
        assert by_name["gateway-0"]["serving"] is True

        os.kill(found.supervisor.pid, signal.SIGHUP)
        again = _until(directory, lambda p: p.name == "worker-0" and p.state is ProcessState.READY)
        assert again.pid != victim.pid
    finally:
        assert bring_down(directory, lambda text: None, timeout_s=30)
    assert not any(alive(r) for r in lives(found))
    after = state.load(directory)
    assert after is not None and after.phase is Phase.STOPPED
    assert not bring_down(directory, lambda text: None)


def test_a_killed_daemon_takes_its_processes_along(tmp_path: Path, fakes: None) -> None:
    directory = tmp_path / "state"
    daemon.start_daemon(options(tmp_path), Quiet())
    found = state.load(directory)
    assert found is not None
    os.kill(found.supervisor.pid, signal.SIGKILL)
    assert all(wait_gone(r, 10) for r in lives(found))
    bring_down(directory, lambda text: None)
    daemon.start_daemon(options(tmp_path), Quiet())  # and the next one starts
    assert bring_down(directory, lambda text: None, timeout_s=30)


def test_detach_tells_why_it_failed(
    tmp_path: Path, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "gateway")
    with pytest.raises(StartFailed, match="gateway-0 ended before it was ready") as caught:
        daemon.start_daemon(options(tmp_path), Quiet())
    assert caught.value.tail == ("cannot go on",)


def test_down_by_force_does_not_wait(tmp_path: Path, fakes: None) -> None:
    directory = tmp_path / "state"
    daemon.start_daemon(options(tmp_path, drain_timeout_s=300.0), Quiet())
    found = state.load(directory)
    assert found is not None
    for worker in found.of_kind("worker"):
        os.kill(worker.pid, signal.SIGSTOP)  # it can't follow a SIGTERM
    assert bring_down(directory, lambda text: None, force=True)
    assert not any(alive(r) for r in lives(found))


def _status(directory: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "status", "--json",
         "--state-dir", str(directory)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def _until(directory: Path, wanted: object, timeout_s: float = 20) -> ProcessView:
    """The first process in cluster.json that is as wanted."""

    async def look() -> ProcessView:
        async with asyncio.timeout(timeout_s):
            while True:
                found = state.load(directory)
                for view in found.processes if found else ():
                    if wanted(view):  # type: ignore[operator]
                        return view
                await asyncio.sleep(0.02)

    return asyncio.run(look())


FOREGROUND = """
import sys
from services.cli.up.command import run_up
from services.cli.up.options import UpOptions
run_up(UpOptions.from_json(sys.argv[1].encode()), detach=False, question="")
"""


def _foreground(given: UpOptions) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FOREGROUND, given.to_json().decode()],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "Ctrl-C stops it" in line:
            return process
    raise AssertionError("it ended before it served")


def test_ctrl_c_stops_all_in_order(tmp_path: Path, fakes: None) -> None:
    process = _foreground(options(tmp_path))
    found = state.load(tmp_path / "state")
    assert found is not None
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in rest
    order = [line.split()[0] for line in rest.splitlines() if " stopped" in line]
    assert order[0] == "gateway-0" and order[-2:] == ["kvbm-0", "etcd"] and len(order) == 7
    assert not any(alive(r) for r in lives(found))


def test_a_second_ctrl_c_kills(tmp_path: Path, fakes: None) -> None:
    process = _foreground(options(tmp_path, drain_timeout_s=300.0))
    found = state.load(tmp_path / "state")
    assert found is not None
    os.kill(found.of_kind("gateway")[0].pid, signal.SIGSTOP)  # it won't follow the first
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    for line in process.stdout:
        if "stopping" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert not any(alive(r) for r in lives(found))
