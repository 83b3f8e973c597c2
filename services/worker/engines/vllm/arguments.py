"""Settings -> vLLM's engine configuration, with defaults that suit a CPU."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import vllm
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMClientError
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext

from services.common.cards import Adapter
from services.common.net import advertised_host
from services.common.settings import SettingsError
from services.common.telemetry.logging import get_logger
from services.worker.config import WorkerSettings
from services.worker.connector.geometry import check_config
from services.worker.errors import EngineStartError

log = get_logger(__name__)
OURS = ("model", "served_model_name", "prefix_caching_hash_algo", "kv_events_config")
CONNECTOR = "services.worker.connector"
TRANSFER = "services.worker.connector.transfer"
"""Arguments that the worker sets itself: others rely on their values."""

CPU_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "block_size": 32,
    # Short steps: an abort takes effect at a step's end, and a prefill chunk delays every decode.
    "max_num_batched_tokens": 256,
    "max_num_seqs": 32,
}
DEFAULT_KV_BYTES = 512 << 20
"""KV cache on a CPU when nothing else is said, unless one request of full length needs more."""
DEFAULT_FULL_REQUESTS = 4
"""... or fewer bytes, if this many requests of full length fit into them."""


def check_model(settings: WorkerSettings) -> None:
    """Raises EngineStartError when `model` names a local folder that holds no model."""
    path = Path(settings.model)
    if path.exists():
        if not (path / "config.json").is_file():
            raise EngineStartError(f"--model {settings.model}: there is no config.json in it")
    elif path.is_absolute() or settings.model.startswith("."):
        raise EngineStartError(f"--model {settings.model}: there is no such folder")


def engine_config(
    settings: WorkerSettings,
    adapters: Sequence[Adapter],
    events: KVEventsConfig,
    extra: Mapping[str, Any],
) -> VllmConfig:
    """vLLM's configuration. Raises SettingsError or EngineStartError."""
    check_model(settings)
    known = {f.name for f in dataclasses.fields(EngineArgs)}
    for name in settings.engine_args:
        if name in OURS:
            raise SettingsError(f"engine_args: {name!r} is set by the worker and can't be given")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise SettingsError(
                f"engine_args: vLLM {vllm.__version__} has no argument {name!r}{hint}"
            )
    cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        **(CPU_DEFAULTS if cpu else {}),
        **extra,
        "use_tqdm_on_load": False,
        "scheduling_policy": "priority",
        "dtype": _dtype(settings) if cpu else settings.dtype,
        **({"max_model_len": settings.max_model_len} if settings.max_model_len else {}),
        **_lora(adapters),
        **settings.engine_args,
        "model": settings.model,
        "prefix_caching_hash_algo": "sha256_cbor",
        "kv_events_config": events,
    }
    if settings.kvbm or settings.transfers:
        if "kv_transfer_config" in settings.engine_args:
            raise SettingsError(
                "engine_args: 'kv_transfer_config' can't be given beside --kvbm or --transfer"
            )
        arguments["kv_transfer_config"] = connectors(settings, cpu)
    if settings.kv_cache_gb is not None:
        arguments.setdefault("kv_cache_memory_bytes", int(settings.kv_cache_gb * (1 << 30)))
    if cpu:
        _look_at_models_here()
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    except (ValueError, TypeError, OSError, NotImplementedError, VLLMClientError) as exc:
        raise EngineStartError(f"vLLM refuses its configuration: {exc}") from exc
    if settings.kvbm:
        check_config(config, "kvbm")
    if settings.transfers:
        check_config(config, "transfer", several_ranks=True)
    if not config.cache_config.enable_prefix_caching:
        raise SettingsError("engine_args: prefix caching can't be turned off")
    if cpu and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _default_kv_bytes(config)
    return config


def _look_at_models_here() -> None:
    """Has vLLM look at a model's class in this process.

    At the first start of each kind of model it does so in one of its own, which imports all of vLLM
    again (20 s), lest CUDA be initialised here. Without CUDA there is nothing to be spared.
    """
    registry._run_in_subprocess = lambda look: look()  # noqa: SLF001 - it has no other switch


def connectors(settings: WorkerSettings, cpu: bool) -> KVTransferConfig:
    """vLLM's configuration of our connectors: transfers, tiers, or both in one."""
    policy = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    tiers = {"kv_connector": "ForebayConnector", "kv_connector_module_path": CONNECTOR, **policy}
    transfer = {
        "kv_connector": "ForebayTransfer",
        "kv_connector_module_path": TRANSFER,
        "kv_connector_extra_config": {
            "backends": ["UCX"],
            "kv_lease_duration": math.ceil(settings.transfer_lease_s),
            "timeout_s": settings.transfer_timeout_s,
            "advertise_host": advertised_host(settings.host, settings.advertise_host),
            **({"num_threads": 0} if cpu else {}),
        },
        **({"kv_buffer_device": "cpu"} if cpu else {}),
        **policy,
    }
    if not settings.transfers:
        return KVTransferConfig(**tiers)
    if not settings.kvbm:
        return KVTransferConfig(**transfer)
    return KVTransferConfig(
        kv_connector="ForebayConnectors",
        kv_connector_module_path=TRANSFER,
        kv_connector_extra_config={"connectors": [transfer, tiers]},
        **policy,
    )


def _dtype(settings: WorkerSettings) -> str:
    """The number format to ask for on a CPU.

    x86 without AVX-512 has no arithmetic in 16 bits: there a prompt takes several times as long in
    bfloat16 as in float32. So "auto" is float32 there, if the model is not quantized and its
    weights leave room for twice their size.
    """
    folder = Path(settings.model)
    lacking = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    if settings.dtype != "auto" or not lacking or platform.machine() not in ("x86_64", "AMD64"):
        return settings.dtype
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) if folder.is_dir() else {}
    small = 0 < 4 * weights < psutil.virtual_memory().total
    if not small or "quantization_config" in config or "quantization" in settings.engine_args:
        return settings.dtype
    log.info("this CPU is slow in 16 bits; the engine computes in float32")
    return "float32"


def _lora(adapters: Sequence[Adapter]) -> dict[str, Any]:
    if not adapters:
        return {}
    ranks = [_rank(Path(a.path)) for a in adapters]
    # vLLM takes only these ranks.
    allowed = (8, 16, 32, 64, 128, 256, 320, 512)
    return {
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": next((r for r in allowed if r >= max(ranks)), max(ranks)),
    }


def _rank(folder: Path) -> int:
    return int(json.loads((folder / "adapter_config.json").read_text()).get("r", 16))


def _default_kv_bytes(config: VllmConfig) -> int:
    model, parallel = config.model_config, config.parallel_config
    block_size = config.cache_config.block_size
    dtype = config.cache_config.cache_dtype
    width = model.dtype.itemsize if dtype in ("auto", "bfloat16", "float16") else 1
    values = 2 * model.get_num_kv_heads(parallel) * model.get_head_size()
    block_bytes = values * width * model.get_num_layers(parallel) * block_size
    # One block is vLLM's placeholder; a few more let a full request start beside another's tail.
    one_request = math.ceil(model.max_model_len / block_size) + 8
    return int(
        max(
            one_request * block_bytes,
            min(DEFAULT_FULL_REQUESTS * one_request * block_bytes, DEFAULT_KV_BYTES),
        )
    )
