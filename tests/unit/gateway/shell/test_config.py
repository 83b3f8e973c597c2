"""Settings: every field has words, wrong values name themselves."""

import pytest

from services.common.settings import SettingsError
from services.gateway.config import GatewaySettings


def test_defaults() -> None:
    settings = GatewaySettings.load()
    assert (settings.port, settings.metrics_port) == (8000, 8001)
    assert settings.max_body_bytes == 32 << 20 and settings.sse_keep_alive_s == 0


def test_every_setting_is_described() -> None:
    for name in GatewaySettings.model_fields:
        assert GatewaySettings.model_fields[name].description, name


def test_flags_and_lists() -> None:
    argv = ["--port", "0", "--cors-origins", "https://a, https://b", "--max-migrations", "0"]
    settings = GatewaySettings.load(argv)
    assert settings.cors_origins == ("https://a", "https://b") and settings.max_migrations == 0


def test_wrong_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_GATEWAY_MAX_BODY_BYTES", "many")
    with pytest.raises(
        SettingsError, match=r"max_body_bytes.*FOREBAY_GATEWAY_MAX_BODY_BYTES.*many"
    ):
        GatewaySettings.load()
