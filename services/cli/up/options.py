"""What `forebay up` was asked for, model and paths resolved. Travels to the daemon as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

from services.cli.errors import UsageError
from services.common.cards import Role
from services.router.core.policies import PolicyName

POLICIES = tuple(PolicyName)
"""Placement policies that a router knows."""
ENGINES = ("vllm", "sim")
"""Engines that a worker knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """A cluster on this machine. Fields that are None or empty leave the services' own defaults."""

    state_dir: str
    """Absolute directory for addresses, logs, and etcd's data."""
    model: str
    """Absolute directory of a model, or a hub id."""
    served_model_name: str
    """Name by which clients ask for it."""
    workers: int = 2
    """Number of workers, each with one engine, those with roles included."""
    prefill: int = 0
    """How many of them only prefill for the others."""
    decode: int = 0
    """How many of them decode, and prefill only what is not worth handing over."""
    transfer: bool = False
    """Whether workers can hand KV to each other, so that roles can change later."""
    planner: bool = False
    """Whether to start a planner, which changes roles so that its targets are kept."""
    planner_port: int = 8400
    """The planner's port; its metrics are on the next one."""
    routers: int = 1
    """Number of routers; the gateway uses any."""
    policy: str = "kv"
    """How routers place requests: one of POLICIES."""
    host: str = "127.0.0.1"
    """Address the gateway listens on. All others stay on loopback: they ask nobody for a key."""
    gateway_port: int = 8000
    """The gateway's port; its metrics are on the next one."""
    router_port: int = 8100
    """The first router's port, metrics on the next one; router i is 10*i further on."""
    worker_port: int = 8200
    """The first worker's port, events and metrics on the next two; worker i is 10*i further on."""
    etcd_port: int = 2379
    """Port of our own etcd for clients; the next one is for its peers."""
    auto_ports: bool = False
    """Free ports instead of those above."""
    kvbm: bool = True
    """Whether to start a kvbm: block caches below the engines' own memory, shared by workers."""
    cpu_cache_gb: float | None = None
    """Host memory for blocks (G2) in GiB; None: as FOREBAY_KVBM_CPU_CACHE_GB says, or a little."""
    cpu_cache_dir: str = ""
    """Folder in memory for G2; empty: one named after the state directory, in /dev/shm."""
    disk_cache_gb: float | None = None
    """Disk for blocks (G3) in GiB; 0: none; None as above."""
    disk_cache_dir: str = ""
    """Folder for G3; empty: in the state directory."""
    remote_url: str = ""
    """Remote storage for blocks (G4): s3://bucket/prefix or file:///folder; empty: none."""
    remote_endpoint: str = ""
    """Address of an S3 server other than AWS."""
    kvbm_port: int = 8300
    """The kvbm's port; its events are on the next one."""
    kvbm_metrics_port: int = 6880
    """Port of the kvbm's metrics."""
    etcd: str = ""
    """Endpoints (host:port, comma-separated) of an etcd to use; empty: start our own."""
    float32: bool = False
    """Engines compute in float32: slower, and the same greedy text whatever the batch."""
    kv_cache_gb: float | None = None
    """KV cache (G1) of each engine in GiB."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens."""
    engine_args: str = ""
    """Further engine arguments by name, a JSON object."""
    engine: str = "vllm"
    """vllm, or sim: simulated workers, all in one process, without block caches below them."""
    sim_profile: str = ""
    """Whose speed simulated engines have; empty: the worker's own default."""
    sim_speedup: float = 1.0
    """How many times as fast as that they run."""
    sim_faults: str = ""
    """Faults of simulated workers, a JSON list."""
    adapters: str = ""
    """LoRA adapters to serve: NAME=FOLDER, comma-separated."""
    api_keys_file: str = ""
    """The gateway's file of API keys and tenants; empty: no keys asked."""
    otlp_endpoint: str = ""
    """OTLP/gRPC collector for traces; empty: none."""
    config: str = ""
    """Settings file for the services: TOML with [shared], [gateway], [router], [worker], [kvbm]."""
    python: str = ""
    """Interpreter that runs the services; empty: the one that runs us."""
    fork_workers: bool | None = None
    """Whether one process imports vLLM for all workers, which are forked from it and so start
    sooner; None: with several workers on CPUs.
    """
    restart: bool = True
    """Whether what dies is started again."""
    start_timeout_s: float = 300.0
    """Longest wait for everything to be ready, in seconds."""
    drain_timeout_s: float = 10.0
    """Longest wait for running requests when stopping, in seconds."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(
                f"--policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}"
            )
        if self.engine not in ENGINES:
            raise UsageError(f"--engine is {self.engine!r}; it must be one of {', '.join(ENGINES)}")
        if not self.simulated and (self.sim_profile or self.sim_faults or self.sim_speedup != 1):
            raise UsageError("--sim-profile, --sim-speedup and --sim-faults need --engine sim")
        if self.simulated and (self.float32 or self.kv_cache_gb is not None):
            raise UsageError(
                "--float32 and --kv-cache-gb mean nothing to --engine sim, which computes nothing"
            )
        if self.simulated and self.fork_workers:
            raise UsageError("--fork-workers needs real engines; simulated ones import none")
        if self.workers < 1 or self.routers < 1:
            raise UsageError("--workers and --routers must be at least 1")
        if self.prefill and self.workers == self.prefill:
            raise UsageError(
                "--prefill needs workers that decode: give --decode, or --workers of both roles"
            )
        if self.simulated and self.apart:
            raise UsageError("--prefill, --decode, --transfer and --planner need real engines")
        for flag, gib in (("cpu", self.cpu_cache_gb), ("disk", self.disk_cache_gb)):
            if gib is not None and (gib < 0 or (flag == "cpu" and gib == 0)):
                raise UsageError(
                    f"--{flag}-cache-gb is {gib:g}; it must be a size in GiB"
                    + (" (without any caches: --no-kvbm)" if flag == "cpu" else "")
                )
        if self.engine_args:
            try:
                parsed = json.loads(self.engine_args)
            except json.JSONDecodeError as exc:
                raise UsageError(f"--engine-args is not JSON: {exc}") from exc
            if not isinstance(parsed, dict):
                raise UsageError(
                    f"--engine-args must be a JSON object, not {type(parsed).__name__}; "
                    "for example '{\"max_num_seqs\": 16}'"
                )

    @property
    def apart(self) -> bool:
        """Whether workers can hand KV to each other."""
        return bool(self.transfer or self.prefill or self.decode or self.planner)

    def role(self, number: int) -> Role:
        """Role of the worker of that number, from 0."""
        if number < self.prefill:
            return Role.PREFILL
        return Role.DECODE if number < self.prefill + self.decode else Role.BOTH

    @property
    def simulated(self) -> bool:
        """Whether the workers are simulators."""
        return self.engine == "sim"

    def to_json(self) -> bytes:
        """The form in which it travels."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes) -> UpOptions:
        """From `to_json`."""
        return msgspec.json.decode(text, type=cls)
