"""What tiers can't hold is refused when the engine starts, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.settings import SettingsError
from services.worker.config import WorkerSettings
from services.worker.connector.geometry import check_cache, check_config, in_layer_order
from services.worker.errors import EngineStartError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


def config(**more: Any) -> Any:
    parallel = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    model = {"is_encoder_decoder": False, "is_hybrid": False, "use_mla": False}
    window = more.pop("window", None)
    for values in (parallel, model):
        values.update((k, more.pop(k)) for k in list(more) if k in values)
    return SimpleNamespace(
        speculative_config=more.pop("speculative_config", None),
        cache_config=SimpleNamespace(**more),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model, get_sliding_window=lambda: window),
    )


def test_plain_attention_is_taken() -> None:
    check_config(config())


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"is_hybrid": True}, "hybrid"),
        ({"use_mla": True}, "MLA"),
        ({"window": 4096}, "sliding window"),
        ({"speculative_config": object()}, "speculative"),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"tensor_parallel_size": 2}, "tensor"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"calculate_kv_scales": True}, "scales"),
    ],
)
def test_other_configurations_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    """K7, C6"""
    with pytest.raises(EngineStartError, match=named):
        check_config(config(**more))


def test_caches_of_one_plain_group_alone_are_taken() -> None:
    """C6, C7, K3: hybrid models, windows and unknown kinds of caches."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVQuantMode,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    shape: dict[str, Any] = {
        "block_size": 32,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.float32,
    }
    full = FullAttentionSpec(**shape)

    def cache(*specs: Any, **more: Any) -> KVCacheConfig:
        groups = [KVCacheGroupSpec([f"l{n}"], spec) for n, spec in enumerate(specs)]
        return KVCacheConfig(100, [], groups, **more)

    check_cache(cache(full))
    check_cache(cache(full, hash_block_size=32))
    mamba = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
    window = SlidingWindowSpec(**shape, sliding_window=128)
    for made, named in (
        (cache(full, mamba), "2 groups.*FullAttentionSpec, MambaSpec"),
        (cache(full, window), "2 groups"),
        (cache(), "0 groups"),
        (cache(mamba), "MambaSpec"),
        (cache(window), "SlidingWindowSpec"),
        (cache(MLAAttentionSpec(**{**shape, "num_kv_heads": 1})), "MLAAttentionSpec"),
        (cache(FullAttentionSpec(**shape, sliding_window=128)), "within a window"),
        (cache(FullAttentionSpec(**shape, attention_chunk_size=64)), "within a window"),
        (cache(FullAttentionSpec(**shape, non_causal=True)), "later tokens"),
        (
            cache(FullAttentionSpec(**shape, kv_quant_mode=KVQuantMode.NVFP4)),
            "quantized as NVFP4",
        ),
        (cache(full, hash_block_size=16), "hashes of 16 tokens"),
    ):
        with pytest.raises(EngineStartError, match=named):
            check_cache(made)


def test_layers_are_taken_by_their_numbers_and_once() -> None:
    """C8: two engines must agree on the order of layers, however a dictionary came about."""
    import torch

    tensors = {f"model.layers.{n}.self_attn.attn": torch.zeros(4, 8) for n in range(12)}
    shuffled = dict(sorted(tensors.items()))
    assert list(shuffled) != list(tensors)
    shuffled["model.layers.12.self_attn.attn"] = tensors["model.layers.3.self_attn.attn"]
    ordered = in_layer_order(shuffled)
    assert [t.data_ptr() for t in ordered] == [t.data_ptr() for t in tensors.values()]


def test_a_real_configuration_is_refused_before_anything_is_loaded(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    """K7, C6: and without kvbm they are none of its business."""
    from vllm.config import KVEventsConfig

    from services.worker.engines.vllm.arguments import engine_config

    model = tmp_path / "model"
    shutil.copytree(tiny_model_path, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}
    (model / "config.json").write_text(json.dumps(config))

    def configure(kvbm: str) -> Any:
        settings = WorkerSettings(model=str(model), max_model_len=1024, kvbm=kvbm)
        return engine_config(settings, (), KVEventsConfig(), {})

    assert configure("").kv_transfer_config is None
    with pytest.raises(EngineStartError, match=r"a sliding window \(128 tokens\)"):
        configure("127.0.0.1:8300")


def test_another_transfer_beside_kvbm_is_refused(tiny_model_path: Path) -> None:
    from vllm.config import KVEventsConfig

    from services.worker.engines.vllm.arguments import engine_config

    settings = WorkerSettings(
        model=str(tiny_model_path),
        kvbm="127.0.0.1:8300",
        engine_args={"kv_transfer_config": {"kv_connector": "NixlConnector"}},
    )
    with pytest.raises(SettingsError, match="kv_transfer_config"):
        engine_config(settings, (), KVEventsConfig(), {})


def test_the_connector_is_told_the_namespace_of_the_model_s_card(tiny_model_path: Path) -> None:
    """I5: one function makes both, from weights and words; other weights are another namespace."""
    from vllm.config import KVEventsConfig

    from services.worker.adapters.files import DigestCache, namespace, weights_digest
    from services.worker.engines.vllm.arguments import engine_config
    from services.worker.engines.vllm.profile import identify

    settings = WorkerSettings(
        model=str(tiny_model_path), max_model_len=1024, kvbm="127.0.0.1:8300", id="w7"
    )
    made = engine_config(settings, (), KVEventsConfig(), {})
    words = identify(made, settings)
    extra = made.kv_transfer_config.kv_connector_extra_config
    card = namespace(weights_digest(tiny_model_path, DigestCache()), words)
    assert bytes.fromhex(extra["namespace"]) == card
    assert (extra["worker"], extra["address"]) == ("w7", "127.0.0.1:8300")
    assert namespace(bytes(32), words) != card
    assert namespace(weights_digest(tiny_model_path, DigestCache()), {**words, "x": "y"}) != card
