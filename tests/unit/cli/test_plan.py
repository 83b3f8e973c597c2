"""From options to processes: ports, flags, and what must not be on a command line."""

import json
import random
from pathlib import Path

import pytest

from services.cli.errors import UsageError
from services.cli.up.caches import Caches
from services.cli.up.options import UpOptions
from services.cli.up.plan import STOP_ORDER, etcd_spec, plan_ports, service_specs
from services.cli.up.spec import ProcessSpec


def options(**changes: object) -> UpOptions:
    base = {"state_dir": "/state", "model": "/models/m", "served_model_name": "m"}
    return UpOptions(**{**base, **changes})  # type: ignore[arg-type]


def by_name(given: UpOptions, caches: Caches | None = None) -> dict[str, ProcessSpec]:
    return {s.name: s for s in service_specs(given, plan_ports(given), caches)}


def test_default_ports_are_the_documented_ones() -> None:
    ports = plan_ports(options(workers=3, routers=2))
    assert (ports.gateway, ports.gateway_metrics) == (8000, 8001)
    assert ports.routers == ((8100, 8101), (8110, 8111))
    assert ports.workers == ((8200, 8201, 8202), (8210, 8211, 8212), (8220, 8221, 8222))
    assert (ports.etcd, ports.etcd_peer) == (2379, 2380)
    flags = {use.port: use.flag for use in ports.uses("127.0.0.1")}
    assert flags[8211] == "--worker-port" and flags[2380] == "--etcd-port"
    assert ports.kvbm == (8300, 8301, 6880)  # where dashboards of other block managers look too
    assert flags[6880] == "--kvbm-metrics-port"
    assert len(flags) == 2 + 4 + 9 + 3 + 2
    assert 6880 not in {u.port for u in plan_ports(options(kvbm=False)).uses("127.0.0.1")}


def test_ports_that_collide_are_refused() -> None:
    with pytest.raises(UsageError, match="port 8110 would be used twice"):
        plan_ports(options(routers=2, worker_port=8110))
    with pytest.raises(UsageError, match="not in 1 to 65535"):
        plan_ports(options(worker_port=65534))


def test_auto_ports_leave_the_choice_to_the_processes() -> None:
    ports = plan_ports(options(auto_ports=True), random.Random(3))
    assert ports.workers == ((0, 0, 0),) * 2
    assert len({ports.gateway, ports.etcd, ports.etcd_peer}) == 3
    assert 0 not in (ports.gateway, ports.etcd)
    assert {use.port for use in ports.uses("127.0.0.1")} == {
        ports.gateway,
        ports.etcd,
        ports.etcd_peer,
    }


def test_somebody_elses_etcd_needs_no_port() -> None:
    ports = plan_ports(options(etcd="there:2379"))
    assert ports.etcd == 0
    worker = by_name(options(etcd="there:2379"))["worker-0"]
    assert "--etcd-endpoints=there:2379" in worker.command


def test_commands_carry_what_was_asked_for() -> None:
    specs = by_name(
        options(
            float32=True,
            kv_cache_gb=0.5,
            max_model_len=2048,
            engine_args='{"max_num_seqs": 4}',
            adapters="a=/x",
            policy="random",
            host="0.0.0.0",
            config="/c.toml",
            otlp_endpoint="http://o:4317",
        )
    )
    assert list(specs) == ["forkserver-0", "router-0", "worker-0", "worker-1", "gateway-0"]
    worker = specs["worker-1"].command
    assert worker[1:4] == ("-P", "-m", "services.worker")
    for flag in (
        "--id=worker-1",
        "--model=/models/m",
        "--served-model-name=m",
        "--port=8210",
        "--events-port=8211",
        "--metrics-port=8212",
        "--dtype=float32",
        "--kv-cache-gb=0.5",
        "--max-model-len=2048",
        '--engine-args={"max_num_seqs": 4}',
        "--adapters=a=/x",
        "--ready-file=/state/run/worker-1.json",
        "--etcd-endpoints=127.0.0.1:2379",
        "--host=127.0.0.1",  # only the gateway leaves loopback
    ):
        assert flag in worker, flag
    assert "--host=0.0.0.0" in specs["gateway-0"].command
    assert "--host=127.0.0.1" in specs["router-0"].command
    assert "--policy=random" in specs["router-0"].command
    assert all(s.env["FOREBAY_CONFIG"] == "/c.toml" for s in specs.values())
    assert all(s.env["FOREBAY_OTLP_ENDPOINT"] == "http://o:4317" for s in specs.values())


def test_the_kvbm_comes_before_its_workers_and_both_know_its_socket() -> None:
    caches = Caches(socket="/s/k.sock", cpu_gb=0.5, cpu_dir="/a", disk_gb=1.0, disk_dir="/d")
    given = options(remote_url="s3://bucket/p", remote_endpoint="http://s:1", config="/c.toml")
    specs = by_name(given, caches)
    names = ["forkserver-0", "router-0", "kvbm-0", "worker-0", "worker-1", "gateway-0"]
    assert list(specs) == names
    for flag in (
        "--id=kvbm-0",
        "--host=127.0.0.1",
        "--port=8300",
        "--events-port=8301",
        "--metrics-port=6880",
        "--socket=/s/k.sock",
        "--cpu-cache-gb=0.5",
        "--cpu-cache-dir=/a",
        "--disk-cache-gb=1",
        "--disk-cache-dir=/d",
        "--remote-url=s3://bucket/p",
        "--remote-endpoint=http://s:1",
        "--ready-file=/state/run/kvbm-0.json",
    ):
        assert flag in specs["kvbm-0"].command, flag
    assert specs["kvbm-0"].env["FOREBAY_CONFIG"] == "/c.toml"
    assert "--kvbm=unix:/s/k.sock" in specs["worker-1"].command
    without = by_name(given)
    assert "kvbm-0" not in without
    assert not [f for f in without["worker-0"].command if f.startswith("--kvbm")]
    places = [STOP_ORDER.index(kind) for kind in ("worker", "forkserver", "kvbm", "etcd")]
    assert places == sorted(places)


def test_several_workers_are_forked_from_one_that_imported_by_their_settings() -> None:
    specs = by_name(options(engine_args='{"max_num_seqs": 4}'))
    server, worker = specs["forkserver-0"], specs["worker-1"]
    assert server.command[1:4] == ("-P", "-m", "services.worker.forkserver")
    assert f"--socket={worker.forked_by}" in server.command
    assert "--model=/models/m" in server.command
    assert '--engine-args={"max_num_seqs": 4}' in server.command
    assert server.env == worker.env and server.forked_by is None
    assert specs["router-0"].forked_by is specs["gateway-0"].forked_by is None


def test_who_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "forkserver-0" in by_name(options(workers=1, fork_workers=True))
    for given in (
        options(workers=1),
        options(fork_workers=False),
        options(engine="sim", workers=3),
    ):
        specs = by_name(given)
        assert "forkserver-0" not in specs
        assert all(s.forked_by is None for s in specs.values())
    with pytest.raises(UsageError, match="--fork-workers needs real engines"):
        options(engine="sim", fork_workers=True)
    monkeypatch.setattr("services.cli.up.plan._GPUS", (Path(__file__),))
    assert "forkserver-0" not in by_name(options())


def test_what_was_not_asked_for_stays_the_services_own() -> None:
    worker = by_name(options())["worker-0"].command
    assert not [f for f in worker if f.startswith(("--dtype", "--kv", "--max", "--engine", "--ad"))]


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(9)))
    monkeypatch.delenv("FOREBAY_WORKER_THREADS", raising=False)
    assert by_name(options())["worker-0"].env["FOREBAY_WORKER_THREADS"] == "4"
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert by_name(options())["worker-0"].env["FOREBAY_WORKER_THREADS"] == "1"
    monkeypatch.setenv("FOREBAY_WORKER_THREADS", "3")
    assert "FOREBAY_WORKER_THREADS" not in by_name(options())["worker-0"].env


def test_etcd_stays_on_loopback(tmp_path: object) -> None:
    command = etcd_spec(plan_ports(options(host="0.0.0.0")), Path("/state")).command
    assert "--listen-client-urls=http://127.0.0.1:2379" in command
    assert "--data-dir=/state/etcd" in command


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"policy": "best"}, "--policy is 'best'"),
        ({"workers": 0}, "at least 1"),
        ({"cpu_cache_gb": 0.0}, "without any caches: --no-kvbm"),
        ({"disk_cache_gb": -1.0}, "--disk-cache-gb is -1"),
        ({"engine_args": "{"}, "--engine-args is not JSON"),
        ({"engine_args": "[1]"}, "must be a JSON object, not list"),
    ],
)
def test_wrong_options_name_the_flag(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options(**wrong)


def test_options_survive_the_way_to_the_daemon() -> None:
    given = options(kv_cache_gb=0.25, restart=False, adapters="a=/x")
    assert UpOptions.from_json(given.to_json()) == given
    assert json.loads(given.to_json())["restart"] is False


def test_simulated_workers_share_a_process_and_have_no_caches() -> None:
    simulated = options(engine="sim", workers=200, sim_speedup=2, sim_faults='[{"kind": "die"}]')
    ports = plan_ports(simulated)
    assert (ports.workers, ports.kvbm) == (((0, 0, 8202),), (0, 0, 0))
    specs = by_name(simulated)
    assert {s.kind for s in specs.values()} == {"router", "worker", "gateway"}
    command = specs["worker-0"].command
    for flag in ("--engine=sim", "--sim-workers=200", "--sim-speedup=2", "--id=worker-0"):
        assert flag in command
    assert '--sim-faults=[{"kind": "die"}]' in command
    assert not any(f.startswith("--sim-profile") for f in command)
    assert plan_ports(options(engine="sim", workers=1)).workers == ((8200, 8201, 8202),)
    assert not any("sim" in f for f in by_name(options())["worker-0"].command)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "tpu"},
        {"sim_speedup": 2.0},
        {"sim_profile": "h100/llama-3.1-8b"},
        {"engine": "sim", "float32": True},
        {"engine": "sim", "kv_cache_gb": 1.0},
    ],
)
def test_options_that_mean_nothing_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"--(engine|sim-profile|float32)"):
        options(**changes)


def test_roles_go_to_the_first_workers() -> None:
    specs = by_name(options(workers=4, prefill=1, decode=2))
    roles = [
        next(flag for flag in specs[f"worker-{i}"].command if flag.startswith("--role="))
        for i in range(4)
    ]
    assert roles == ["--role=prefill", "--role=decode", "--role=decode", "--role=both"]
    assert all("--transfer=nixl" in specs[f"worker-{i}"].command for i in range(4))
    plain = by_name(options(workers=1))["worker-0"].command
    assert not any(flag.startswith(("--role", "--transfer")) for flag in plain)


def test_prefill_alone_serves_nobody() -> None:
    with pytest.raises(UsageError, match="--prefill needs workers that decode"):
        options(workers=2, prefill=2)
    with pytest.raises(UsageError, match="need real engines"):
        options(engine="sim", planner=True)


def test_a_planner_stops_first_and_has_ports() -> None:
    given = options(planner=True)
    assert {8400, 8401} <= {use.port for use in plan_ports(given).uses("127.0.0.1")}
    specs = by_name(given)
    assert "--port=8400" in specs["planner-0"].command
    assert "--transfer=nixl" in specs["worker-0"].command
    assert STOP_ORDER[0] == "planner"
    assert "planner-0" not in by_name(options())
