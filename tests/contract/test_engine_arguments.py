"""How settings become vLLM's configuration. Imports vLLM, starts no engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.settings import SettingsError
from services.worker.config import WorkerSettings
from services.worker.errors import EngineStartError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def arguments() -> Any:
    from services.worker.engines.vllm import arguments

    return arguments


def settings(model: Path, **more: Any) -> WorkerSettings:
    return WorkerSettings(model=str(model), **more)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.fixture
def quantized(tiny_model_path: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "quantized"
    shutil.copytree(tiny_model_path, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    return folder


def test_a_cpu_without_16_bit_arithmetic_computes_in_float32(
    arguments: Any, avx2: None, tiny_model_path: Path, quantized: Path
) -> None:
    assert arguments._dtype(settings(tiny_model_path)) == "float32"
    assert arguments._dtype(settings(tiny_model_path, dtype="bfloat16")) == "bfloat16"
    assert arguments._dtype(settings(quantized)) == "auto"
    assert arguments._dtype(settings(Path("org/hub-model"))) == "auto"


def test_other_cpus_use_the_model_s_own_format(
    arguments: Any, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    assert arguments._dtype(settings(tiny_model_path)) == "auto"
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert arguments._dtype(settings(tiny_model_path)) == "auto"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"max_num_seq": 3}, "did you mean 'max_num_seqs'"),
        ({"prefix_caching_hash_algo": "sha256"}, "set by the worker"),
        ({"model": "other"}, "set by the worker"),
    ],
)
def test_wrong_engine_arguments_are_named(
    arguments: Any, tiny_model_path: Path, given: dict[str, Any], word: str
) -> None:
    with pytest.raises(SettingsError, match=word):
        arguments.engine_config(settings(tiny_model_path, engine_args=given), [], None, {})


def test_no_model_is_named(arguments: Any, tmp_path: Path) -> None:
    for model, word in ((tmp_path, "no config.json"), (tmp_path / "no", "no such folder")):
        with pytest.raises(EngineStartError, match=word):
            arguments.engine_config(settings(model), [], None, {})


def test_a_model_s_first_start_needs_no_second_import_of_vllm(
    arguments: Any, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import KVEventsConfig
    from vllm.model_executor.models import registry

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("vLLM looks at the model in another process")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # where it notes what it has seen
    monkeypatch.setattr(registry.subprocess, "run", refused)
    registry._try_inspect_model_cls.cache_clear()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    config = arguments.engine_config(settings(tiny_model_path), [], events, {})
    assert config.model_config.architecture == "Qwen3ForCausalLM"
    assert list((tmp_path / "modelinfos").iterdir())
