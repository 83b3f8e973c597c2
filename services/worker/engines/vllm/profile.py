"""What a configured vLLM serves, in the port's terms, and the engine's own block hash at work."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from services.common.cards import Adapter, HashVector
from services.worker.adapters.files import DigestCache, namespace, weights_digest
from services.worker.config import WorkerSettings
from services.worker.connector.transfer import WAY
from services.worker.engines.port import EngineProfile
from services.worker.errors import EngineStartError

VECTOR_SALT = "forebay"


def engine_profile(
    config: VllmConfig,
    primary_eos: int | None,
    adapters: Sequence[Adapter],
    identity: Mapping[str, str],
) -> EngineProfile:
    """The profile of a started engine: its configuration must hold the number of blocks already.

    `identity` is that of the configuration as it was before the start (`identify`).
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    vocab_size = model.get_vocab_size()
    blocks = cache.num_gpu_blocks or 0
    return EngineProfile(
        engine=f"vllm {vllm.__version__}",
        model_dir=model_folder(model.model, model.revision),
        block_size=cache.block_size,
        # One block of each rank is a placeholder that holds nothing.
        total_blocks=max(0, blocks - parallel.data_parallel_size),
        max_model_len=model.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=_eos(primary_eos, model.try_get_generation_config()),
        max_logprobs=vocab_size if model.max_logprobs == -1 else model.max_logprobs,
        hash_vector=hash_vector(config, vocab_size),
        identity=identity,
        adapters=tuple(adapters),
        dp_size=parallel.data_parallel_size,
        transfer=WAY if takes_transfers(config) else "",
    )


def takes_transfers(config: VllmConfig) -> bool:
    """Whether the engine was configured to hand its KV to others."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector in (
        "ForebayTransfer",
        "ForebayConnectors",
    )


def _eos(primary: int | None, generation_config: dict[str, Any]) -> tuple[int, ...]:
    stated = generation_config.get("eos_token_id")
    ids = [stated] if isinstance(stated, int) else list(stated or ())
    return tuple(dict.fromkeys(i for i in (primary, *ids) if i is not None))


def model_folder(model: str, revision: str | None, *, fetch: bool = False) -> Path:
    """The local folder of a model: itself, or its snapshot in the hub's cache.

    `fetch`: whether it is brought there if need be. Raises EngineStartError when it can't be had.
    """
    if Path(model).exists():
        return Path(model).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=not fetch))
    except (OSError, ValueError) as exc:
        raise EngineStartError(f"--model {model}: its files can't be had: {exc}") from exc


def identify(config: VllmConfig, settings: WorkerSettings) -> dict[str, str]:
    """What gives KV bytes their meaning beside the weights, as words; before the engine starts.

    The connector to kvbm, if there is one, is told the namespace that the model's card will have.
    Raises EngineStartError when the model's files can't be had.
    """
    words = identity(config)
    if (transfer := config.kv_transfer_config) is not None and settings.kvbm:
        folder = model_folder(config.model_config.model, config.model_config.revision, fetch=True)
        of_tiers = transfer.kv_connector_extra_config
        for child in of_tiers.get("connectors", ()):
            if child["kv_connector"] == "ForebayConnector":
                of_tiers = child.setdefault("kv_connector_extra_config", {})
        of_tiers.update(
            address=settings.kvbm,
            namespace=namespace(weights_digest(folder, DigestCache()), words).hex(),
            worker=settings.id,
            model=settings.name,
            timeout_s=settings.kvbm_timeout_s,
        )
    return words


def identity(config: VllmConfig) -> dict[str, str]:
    """What gives KV bytes their meaning beside the weights, as words.

    How vLLM lays blocks out shows when its cache is there: kvbm keeps that with the namespace, and
    refuses another.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    words = {
        "engine": "vllm",
        "version": vllm.__version__,
        "dtype": str(model.dtype),
        "kv_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "block_size": str(cache.block_size),
        "layout": f"{cache.kv_cache_layout} {os.environ.get('VLLM_KV_CACHE_LAYOUT', '')}".strip(),
        "attention": str(config.attention_config.backend),
        "overrides": str(model.hf_overrides),
        "tp": str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
        "max_model_len_rope": str(getattr(model.hf_text_config, "rope_parameters", None)),
        "device": current_platform.device_type,
    }
    if current_platform.is_cpu():
        # A CPU packs KV for its instruction set: opaque to any other.
        words["isa"] = str(torch.backends.cpu.get_cpu_capability())
        words["machine"] = str(current_platform.get_cpu_architecture())
    return words


def hash_vector(config: VllmConfig, vocab_size: int) -> HashVector:
    """A worked example by the engine's own hash function, salted, of two full blocks."""
    size = config.cache_config.block_size
    token_ids = [(i * 7919 + 1) % vocab_size for i in range(2 * size)]
    function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(function)
    request = Request(
        request_id="hash-vector",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=VECTOR_SALT,
        block_hasher=get_request_block_hasher(size, function),
    )
    return HashVector(tuple(token_ids), VECTOR_SALT, tuple(bytes(h) for h in request.block_hashes))
