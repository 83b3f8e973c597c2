"""The worker's settings."""

import pytest

from services.common.settings import SettingsError
from services.worker.config import WorkerSettings


def load(*flags: str) -> WorkerSettings:
    return WorkerSettings.load(["--model", "/models/org/tiny", *flags])


def test_defaults() -> None:
    settings = load()
    assert (settings.port, settings.events_port, settings.metrics_port) == (8200, 8201, 8202)
    assert settings.name == "tiny"
    assert load("--served-model-name", "org/x").name == "org/x"
    assert settings.engine_args == {}
    assert settings.host == "127.0.0.1"


def test_lists_and_objects_on_the_command_line() -> None:
    settings = load(
        "--engine-args",
        '{"max_num_seqs": 16, "compilation_config": {"mode": 0}}',
        "--labels",
        "zone=a, gpu=h200",
        "--adapters",
        "one=/a,two=/b=c",
    )
    assert settings.engine_args == {"max_num_seqs": 16, "compilation_config": {"mode": 0}}
    assert settings.labels == {"zone": "a", "gpu": "h200"}
    assert settings.adapters == {"one": "/a", "two": "/b=c"}


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_WORKER_ENGINE_ARGS", '{"seed": 3}')
    monkeypatch.setenv("FOREBAY_WORKER_MODEL", "m")
    settings = WorkerSettings.load([])
    assert settings.engine_args == {"seed": 3}
    assert settings.model == "m"


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--engine-args", "{"), "engine_args"),
        (("--engine-args", "[1]"), "engine_args"),
        (("--labels", "zone"), "labels"),
        (("--adapters", "=x"), "adapters"),
        (("--kv-cache-gb", "0"), "kv_cache_gb"),
        (("--engine-mode", "fast"), "engine_mode"),
        (("--engine-log-level", "loud"), "engine_log_level"),
        (("--port", "70000"), "port"),
        (("--engine", "tpu"), "engine"),
        (("--sim-workers", "0"), "sim_workers"),
        (("--sim-speedup", "0"), "sim_speedup"),
        (("--sim-faults", "{}"), "sim_faults"),
        (("--sim-faults", '[{"kind": "explode"}]'), "sim_faults.*explode"),
    ],
)
def test_bad_values_name_the_setting(flags: tuple[str, ...], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        load(*flags)


def test_a_model_is_required() -> None:
    with pytest.raises(SettingsError, match="model"):
        WorkerSettings.load([])
