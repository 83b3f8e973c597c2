"""Settings of a worker. Nobody else reads them from outside."""

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import NoDecode

from services.common.cards import Role
from services.common.settings import ServiceSettings, settings_config
from services.worker.engines.sim.core.faults import Fault, faults_from
from services.worker.engines.sim.core.published import DEFAULT as DEFAULT_SIM_PROFILE


def _json_object(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value or "{}")
    except ValueError as exc:
        raise ValueError(f'must be a JSON object such as {{"max_num_seqs": 16}}: {exc}') from exc
    if not isinstance(read, dict):
        raise ValueError(f"must be a JSON object, not a JSON {type(read).__name__}")
    return read


def _pairs(value: object) -> object:
    if not isinstance(value, str):
        return value
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in value.split(","))):
        name, equals, rest = part.partition("=")
        if not equals or not name.strip() or not rest.strip():
            raise ValueError(f"must be name=value pairs with commas between; {part!r} is not one")
        pairs[name.strip()] = rest.strip()
    return pairs


def _json_list(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        read = json.loads(value or "[]")
    except ValueError as exc:
        raise ValueError(f'must be a JSON list such as [{{"kind": "stall"}}]: {exc}') from exc
    if not isinstance(read, list):
        raise ValueError(f"must be a JSON list, not a JSON {type(read).__name__}")
    return read


JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_json_object)]
"""A JSON object in one string, or a TOML table."""
JsonList = Annotated[tuple[Any, ...], NoDecode, BeforeValidator(_json_list)]
"""A JSON list in one string, or a TOML array."""
Pairs = Annotated[dict[str, str], NoDecode, BeforeValidator(_pairs)]
"""`name=value,name=value` in one string, or a TOML table."""


class WorkerSettings(ServiceSettings):
    """What a worker can be told."""

    model_config = settings_config("worker")
    service: ClassVar[str] = "worker"

    model: str = Field(min_length=1)
    """Folder of the model, or its id on a hub. Required."""
    served_model_name: str = ""
    """Name by which clients ask for the model; empty: the last part of `model`."""
    port: int = Field(default=8200, ge=0, le=65535)
    """gRPC port; 0 picks a free one."""
    events_port: int = Field(default=8201, ge=0, le=65535)
    """Port of the event stream (ZMQ PUB); 0 picks a free one."""
    metrics_port: int = Field(default=8202, ge=0, le=65535)
    """Port of /metrics; 0 picks a free one."""
    labels: Pairs = Field(default_factory=dict)
    """Free labels for routing constraints, name=value with commas between."""
    role: Role = Role.BOTH
    """Routing label: both, prefill or decode. SetRole changes it while the worker runs."""
    transfer: Literal["auto", "nixl", "off"] = "auto"
    """How other workers can take KV from its engine: nixl, off, or auto: nixl if `role` needs it.

    Only with nixl can `role` be changed later. NIXL's traffic is neither encrypted nor checked for
    who sends it: keep it within a network that you trust.
    """
    transfer_port: int = Field(default=0, ge=0, le=65535)
    """Port by which other workers ask its engine for NIXL metadata; 0 picks a free one."""
    transfer_timeout_s: float = Field(default=2.0, gt=0)
    """Longest transfer of a prompt's KV, in seconds; then it is ended, and the prompt computed."""
    transfer_lease_s: float = Field(default=12.0, ge=6)
    """Seconds that KV of a prefill waits to be taken; longer while its taker is heard."""
    dtype: str = "auto"
    """Number format: auto (the model's own; float32 on x86 without AVX-512), bfloat16 ..."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """GiB of KV cache (G1). Absent: a few requests of full length (CPU), or the engine's choice."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus output in tokens; absent: the model's own."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine's kernels. 1 is best when several workers share a few cores."""
    engine: Literal["vllm", "sim"] = "vllm"
    """vllm, or sim: a simulator without weights, for tests of scale. Its text is no model's."""
    engine_mode: Literal["auto", "inprocess", "async"] = "auto"
    """inprocess (in this process), async (in its own), or auto: inprocess on CPU, async on GPU."""
    engine_args: JsonObject = Field(default_factory=dict)
    """Any vLLM engine argument by name, as a JSON object; wins over all settings above.

    A simulator knows block_size, num_gpu_blocks_override, max_num_batched_tokens, max_num_seqs.
    """
    engine_log_level: str = "warning"
    """Level of the engine's own log lines: debug, info, warning or error."""
    adapters: Pairs = Field(default_factory=dict)
    """LoRA adapters to serve, name=folder with commas between."""
    adapter_root: str = ""
    """Folder of links by content digest, from which adapters are loaded; equal on all nodes.

    (The path is part of the block hash.) Empty: forebay-<uid>/adapters in the temporary folder.
    """
    kvbm: str = ""
    """The node's kvbm, host:port or unix:/path: loads and saves KV blocks there; empty: none."""
    kvbm_timeout_s: float = Field(default=0.25, gt=0)
    """Longest wait for kvbm's answer to a look-up, in seconds; then the request goes on without."""
    max_requests: int = Field(default=2048, ge=1)
    """Most requests waiting and running at once; more are refused with RESOURCE_EXHAUSTED."""
    backlog_tokens: int = Field(default=16384, ge=1)
    """Numbers (tokens, logprobs) of a request that may wait for a slow gateway; then it ends."""
    watchdog_s: float = Field(default=60.0, gt=0)
    """Seconds without a finished step, while there are requests, until it says NOT_SERVING."""
    load_report_interval_s: float = Field(default=0.03, ge=0)
    """Least time between two load reports, in seconds; the last state is always reported."""
    digest_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between digests of all blocks held, by which routers check what they know."""

    sim_workers: int = Field(default=1, ge=1, le=4096)
    """Simulated workers of this process; several are named `id`.0, `id`.1 ..., on free ports."""
    sim_profile: str = DEFAULT_SIM_PROFILE
    """Whose speed is simulated: GPU/MODEL by published figures, or a .toml file of one's own."""
    sim_speedup: float = Field(default=1.0, gt=0, le=10_000)
    """How many times as fast as its profile a simulated engine runs."""
    sim_output_tokens: int = Field(default=256, ge=0)
    """Mean length of a simulated answer that nothing else ends, in tokens; 0: it does not end."""
    sim_coalesce_ms: float = Field(default=0.0, ge=0, le=1000)
    """Simulated decode steps are told together over so many milliseconds, which costs less CPU."""
    sim_fill_blocks: int = Field(default=0, ge=0)
    """Blocks that each simulated worker holds from its start on; no prompt ever hits them."""
    sim_fill_first: int = Field(default=0, ge=0)
    """Number of the first worker, when these documents are shared with other processes."""
    sim_faults: JsonList = ()
    """Faults of simulated workers: a JSON list of objects with kind (stall, slow, die, drop, lie),

    at_s, for_s, factor (of slow), share (of drop and lie), workers (numbers from 0; absent: all).
    """

    @property
    def transfers(self) -> bool:
        """Whether its engine hands KV to others, and takes theirs."""
        return self.transfer == "nixl" or (self.transfer == "auto" and self.role is not Role.BOTH)

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.transfer == "off" and self.role is not Role.BOTH:
            raise ValueError(f"role {self.role} needs transfer nixl (or auto)")
        return self

    @property
    def faults(self) -> tuple[Fault, ...]:
        """`sim_faults`, read."""
        return faults_from(self.sim_faults)

    @field_validator("sim_faults")
    @classmethod
    def _faults(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        faults_from(value)
        return value

    @field_validator("kvbm")
    @classmethod
    def _kvbm(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if value and not (value.startswith("unix:/") or (colon and host and port.isdigit())):
            raise ValueError("must be host:port, or unix:/path")
        return value

    @property
    def name(self) -> str:
        """The name under which the model is served."""
        return self.served_model_name or Path(self.model).name

    @field_validator("engine_log_level", "log_level")
    @classmethod
    def _level(cls, value: str) -> str:
        if value.lower() not in ("debug", "info", "warning", "error"):
            raise ValueError("must be debug, info, warning or error")
        return value.lower()
