"""A whole cluster of real processes on this machine: etcd, routers, gateways, workers with vLLM.

`Cluster.heal` puts everything back that a test has killed or stopped, so that all tests can share
one cluster: starting an engine is what costs time.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tests.support.forks import fork
from tests.support.netns import Host
from tests.support.processes import Process, Ready, execute

MODEL = "org/tiny"
"""Name under which the tiny model is served: with a slash, as real names have one."""

SEQUENCES = 16
"""Requests that an engine takes into its batch; more wait."""
WORKER_FLAGS: dict[str, object] = {
    "dtype": "float32",
    "kv_cache_gb": 0.125,
    "max_model_len": 4096,
    "engine_args": json.dumps({"max_num_seqs": SEQUENCES}),
}
ETCD_LEASE_S = 3.0
"""Lease of all processes: shorter than in production, so that tests see leases expire."""


class EtcdServer(Protocol):
    """What a cluster needs of an etcd."""

    @property
    def endpoint(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    def start(self) -> None: ...


class Cluster:
    """Processes by name, and the ways to start more of them."""

    def __init__(
        self, folder: Path, etcd: EtcdServer, model: Path, otlp_endpoint: str = ""
    ) -> None:
        self.folder = folder
        self.etcd = etcd
        self.model = model
        self.otlp_endpoint = otlp_endpoint
        self.processes: dict[str, Process] = {}
        self._permanent: set[str] = set()

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def start(self, module: str, name: str, at: Host | None = None, /, **flags: object) -> Process:
        """Starts `python -m <module>`; flags as keyword arguments, ports free ones.

        `at`: on that host of two, reached by the network of control.
        """
        if at is None:
            real = module == "services.worker" and flags.get("engine") != "sim"
            argv = self._argv(module, name, flags)
            process = Process(name, argv, self.folder, starter=fork if real else execute)
        else:
            argv = at.argv(self._argv(module, name, flags | {"host": at.control}))
            process = Process(name, argv, self.folder, at.env)
        assert name not in self.processes, name
        self.processes[name] = process
        process.start()
        return process

    def start_router(self, name: str = "router-0", **flags: object) -> Process:
        return self.start("services.router", name, **({"policy": "kv"} | flags))

    def start_gateway(self, name: str = "gateway-0", **flags: object) -> Process:
        return self.start("services.gateway", name, **flags)

    def start_worker(self, name: str, at: Host | None = None, /, **flags: object) -> Process:
        basic: dict[str, object] = {
            "model": self.model,
            "served_model_name": MODEL,
            "events_port": 0,
            **WORKER_FLAGS,
        }
        return self.start("services.worker", name, at, **(basic | flags))

    def keep(self, *names: str) -> None:
        """Names the processes that `heal` restores; all others it ends."""
        self._permanent.update(names)

    @property
    def workers(self) -> list[str]:
        """Names of the permanent workers."""
        return sorted(n for n in self._permanent if n.startswith("worker-"))

    def ready(self, name: str) -> Ready:
        """Addresses of a process that is ready."""
        ready = self.processes[name].ready()
        assert ready is not None, f"{name} is not ready"
        return ready

    def url(self, gateway: str = "gateway-0") -> str:
        """Base address of a gateway, without /v1."""
        return f"http://{self.ready(gateway).address}"

    def logs_from_now(self) -> Callable[[], list[tuple[str, str]]]:
        """Gives what the processes have logged since now, by title: for a failed test's report."""
        starts = {name: process.log_size() for name, process in self.processes.items()}
        return lambda: [
            (f"log of {n}", text)
            for n, p in self.processes.items()
            if (text := p.log_tail(starts.get(n, 0)))
        ]

    def heal(self, timeout_s: float = 120) -> list[str]:
        """Ends what is not permanent, restarts and continues what is; names of those restarted."""
        for name in [n for n in self.processes if n not in self._permanent]:
            self.processes.pop(name).close()
        if not self.etcd.alive:
            self.etcd.start()
        restarted = []
        for name in self._permanent:
            process = self.processes[name]
            if process.alive:
                process.thaw()
            else:
                process.start()
                restarted.append(name)
        for name in self._permanent:
            self.processes[name].wait_ready(timeout_s)
        return restarted

    def forget(self, name: str) -> None:
        """Ends a process for good, permanent or not; it says goodbye."""
        self._permanent.discard(name)
        process = self.processes.pop(name)
        if process.alive:
            process.terminate()
            process.wait_ended(10)
        process.close()

    def close(self) -> None:
        for process in self.processes.values():
            process.close()

    def _argv(self, module: str, name: str, flags: dict[str, object]) -> list[str]:
        all_flags: dict[str, object] = {
            "id": name,
            "host": "127.0.0.1",
            "port": 0,
            "metrics_port": 0,
            "etcd_endpoints": self.etcd.endpoint,
            "lease_ttl_s": ETCD_LEASE_S,
            "drain_timeout_s": 30,
            "ready_file": self.folder / f"{name}.ready.json",
        }
        if self.otlp_endpoint:
            all_flags["otlp_endpoint"] = self.otlp_endpoint
        all_flags |= flags
        argv = [sys.executable, "-m", module]
        for key, value in all_flags.items():
            argv.append(f"--{key.replace('_', '-')}")
            if value is not None:  # a switch
                argv.append(str(value))
        return argv


@contextmanager
def open_cluster(
    folder: Path,
    etcd: EtcdServer,
    model: Path,
    *,
    workers: int = 2,
    otlp_endpoint: str = "",
) -> Iterator[Cluster]:
    """A ready cluster of one router, one gateway and `workers` workers, all of them permanent."""
    cluster = Cluster(folder, etcd, model, otlp_endpoint)
    try:
        names = [f"worker-{i}" for i in range(workers)]
        for name in names:
            cluster.start_worker(name)
        cluster.start_router("router-0")
        cluster.start_gateway("gateway-0")
        cluster.keep("router-0", "gateway-0", *names)
        started = time.monotonic()
        for process in cluster.processes.values():
            process.wait_ready(max(1.0, 180 - (time.monotonic() - started)))
        yield cluster
    finally:
        cluster.close()
