"""Which engines' blocks the tiers can hold. What isn't known is refused at the start, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from services.worker.errors import EngineStartError

if TYPE_CHECKING:
    from services.worker.connector.cachelayout import CacheLayout

WAY_OUT = "start the worker without it, or with another model"


def check_config(config: Any, part: str = "kvbm", *, several_ranks: bool = False) -> None:
    """Raises EngineStartError for a vLLM configuration whose blocks `part` can't carry.

    What shows only when the model's layers are known is left to `check_cache`. `several_ranks`:
    tensor parallel engines are welcome.
    """
    _refuse = partial(_refuse_for, part)
    parallel, model = config.parallel_config, config.model_config
    if config.speculative_config is not None:
        _refuse("speculative decoding")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        _refuse("context parallelism")
    if parallel.pipeline_parallel_size > 1 or (
        parallel.tensor_parallel_size > 1 and not several_ranks
    ):
        _refuse("an engine of several tensor or pipeline ranks")
    if model.is_encoder_decoder:
        _refuse("an encoder-decoder model")
    if model.is_hybrid or getattr(model, "has_inner_state", False):
        _refuse("a hybrid model (attention mixed with state-space layers)")
    if model.use_mla:
        _refuse("multi-head latent attention (MLA)")
    if getattr(config.cache_config, "calculate_kv_scales", False):
        _refuse("scales of a quantized cache that each engine measures for itself")
    window = model.get_sliding_window()
    if window:
        _refuse(f"a sliding window ({window} tokens)")


def check_cache(cache: Any) -> None:
    """Raises EngineStartError for a KV cache that isn't one group of plain full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    _refuse = partial(_refuse_for, "kvbm")
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(g.kv_cache_spec).__name__ for g in groups})) or "none"
        _refuse(f"a KV cache of {len(groups)} groups ({kinds})")
    spec = groups[0].kv_cache_spec
    if cache.hash_block_size not in (None, spec.block_size):
        _refuse(f"hashes of {cache.hash_block_size} tokens for blocks of {spec.block_size}")
    if type(spec) is not FullAttentionSpec:
        _refuse(f"a KV cache of the kind {type(spec).__name__}")
    if spec.sliding_window or spec.attention_chunk_size:
        _refuse("attention within a window")
    if spec.non_causal or spec.tokens_per_state != 1:
        _refuse("attention in which a block depends on later tokens, or holds not one token each")
    if spec.kv_quant_mode.name not in ("NONE", "FP8_PER_TENSOR"):
        _refuse(f"a cache quantized as {spec.kv_quant_mode.name}")


def in_layer_order(caches: Mapping[str, Any]) -> list[Any]:
    """The cache's tensors, each once, by the numbers in their layers' names."""
    ordered = sorted(caches.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])])
    unique = {(t.data_ptr(), tuple(t.stride())): t for _, t in ordered}
    return list(unique.values())


def check_layout(caches: Sequence[Any], blocks: int) -> CacheLayout:
    """How blocks lie in the cache. Raises EngineStartError when that isn't known."""
    from services.worker.connector.cachelayout import describe

    try:
        return describe(caches, blocks)
    except ValueError as exc:
        raise EngineStartError(f"kvbm does not know this cache's layout: {exc}; {WAY_OUT}") from exc


def _refuse_for(part: str, what: str) -> None:
    raise EngineStartError(f"{part} does not support {what}; {WAY_OUT}")
