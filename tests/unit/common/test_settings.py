"""Settings: who wins, what is refused and how it is said, what is never shown."""

import os
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from services.common.settings import ServiceSettings, SettingsError, StrList, settings_config


class ToySettings(ServiceSettings):
    """A service of its own."""

    model_config = settings_config("toy")
    service: ClassVar[str] = "toy"
    port: int = Field(default=1, ge=0, le=65535)
    """A port."""
    words: StrList = ()
    """Some words."""
    fast: bool = False
    """A switch."""


class NeedySettings(ToySettings):
    """One setting must be given."""

    model: str
    """Required."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("FOREBAY_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "forebay.toml"
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    return file


def test_defaults_are_loopback_and_local_etcd() -> None:
    settings = ToySettings.load()
    assert settings.host == "127.0.0.1"
    assert settings.etcd_endpoints == ("127.0.0.1:2379",)


def test_flags_win_over_environment_and_environment_over_file(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text('[toy]\nport = 5\nwords = ["a", "b"]\n[shared]\ncluster = "file"\n')
    assert ToySettings.load([]).port == 5
    monkeypatch.setenv("FOREBAY_TOY_PORT", "6")
    assert ToySettings.load([]).port == 6
    settings = ToySettings.load(["--port", "7"])
    assert (settings.port, settings.words, settings.cluster) == (7, ("a", "b"), "file")


def test_shared_variables_serve_all_services_and_yield_to_the_service_s_own(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file.write_text('[shared]\netcd_endpoints = ["f:1"]\n')
    assert ToySettings.load([]).etcd_endpoints == ("f:1",)
    monkeypatch.setenv("FOREBAY_ETCD_ENDPOINTS", "a:1, b:2")
    assert ToySettings.load([]).etcd_endpoints == ("a:1", "b:2")
    assert ToySettings.load().etcd_endpoints == ("a:1", "b:2")
    monkeypatch.setenv("FOREBAY_TOY_ETCD_ENDPOINTS", "c:3")
    assert ToySettings.load([]).etcd_endpoints == ("c:3",)
    assert ToySettings.load(["--etcd-endpoints", "d:4"]).etcd_endpoints == ("d:4",)


def test_a_service_s_own_setting_has_no_shared_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_PORT", "9")
    assert ToySettings.load([]).port == 1


def test_switches() -> None:
    assert ToySettings.load(["--fast"]).fast
    assert not ToySettings.load(["--no-fast"]).fast


def test_a_bad_value_names_the_setting_its_value_and_what_would_be_right() -> None:
    with pytest.raises(SettingsError) as caught:
        ToySettings.load(["--port", "99999", "--lease-ttl-s", "soon"])
    said = caught.value.message
    assert "--port, FOREBAY_TOY_PORT) is '99999'" in said and "65535" in said
    assert "--lease-ttl-s, FOREBAY_TOY_LEASE_TTL_S, FOREBAY_LEASE_TTL_S) is 'soon'" in said


def test_a_missing_value_is_named() -> None:
    with pytest.raises(SettingsError, match=r"model \(--model, FOREBAY_TOY_MODEL\) is required"):
        NeedySettings.load([])


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--etcd-endpoints", "localhost", "host:port"),
        ("--etcd-endpoints", ",", "at least one"),
        ("--cluster", "a/b", "letters, digits"),
        ("--id", "a b", "letters, digits"),
        ("--log-level", "loud", "'debug'"),
        ("--log-format", "xml", "'json'"),
        ("--etcd-ca-file", "/no/such/file", "PEM file"),
        ("--drain-timeout-s", "-1", "greater than or equal to 0"),
        ("--cluster", "", "must not be empty"),
        ("--etcd-cert-file", "/dev/null", "given together"),
        ("--etcd-password", "hunter2", "etcd_user"),
    ],
)
def test_refused_values(flag: str, value: str, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        ToySettings.load([flag, value])
    assert words in caught.value.message
    assert flag[2:].replace("-", "_") in caught.value.message


@pytest.mark.parametrize(
    "argv",
    [
        ["--etcd-password", "hunter2", "--port", "-1"],
        ["--etcd-password", "hunter2"],
        ["--etcd-password", "hunter2", "--etcd-user", "u", "--etcd-key-file", "/dev/null"],
    ],
)
def test_secrets_are_never_shown(argv: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        ToySettings.load(argv)
    assert "hunter2" not in caught.value.message
    settings = ToySettings.load(["--etcd-user", "u", "--etcd-password", "hunter2"])
    assert settings.etcd_password == "hunter2"
    assert "hunter2" not in repr(settings) + str(settings)


def test_kubernetes_service_variables_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TOY_PORT", "tcp://10.0.0.1:8100")
    with pytest.raises(SettingsError, match="enableServiceLinks"):
        ToySettings.load([])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[toy]\nprot = 5\n", r"\[toy\].*no setting 'prot'"),
        ("[shared]\nport = 5\n", r"\[shared\].*no setting 'port'"),
        ("toy = 3\n", "must be a table"),
        ("[toy\n", "not TOML"),
        ("[toy]\nport = 'x'\n", "FOREBAY_TOY_PORT"),
    ],
)
def test_a_bad_file_is_explained(config_file: Path, text: str, words: str) -> None:
    config_file.write_text(text)
    with pytest.raises(SettingsError, match=words):
        ToySettings.load([])


def test_a_missing_file_is_named(config_file: Path) -> None:
    with pytest.raises(SettingsError, match=r"forebay\.toml.*No such file"):
        ToySettings.load([])


def test_load_or_exit_prints_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ToySettings.load_or_exit(["--port", "x"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("forebay toy: port (--port")


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        ToySettings.load(["--prot", "1"])
    assert caught.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_help_shows_the_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ToySettings.load(["--help"])
    assert "Seconds after which etcd forgets" in capsys.readouterr().out


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ToySettings.load().port = 5


def test_advertised_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "machine")
    assert ToySettings.load([]).advertised(80) == "127.0.0.1:80"
    assert ToySettings.load(["--host", "0.0.0.0"]).advertised(80) == "machine:80"
    assert ToySettings.load(["--host", "::1"]).advertised(80) == "[::1]:80"
    named = ToySettings.load(["--host", "0.0.0.0", "--advertise-host", "w1.example"])
    assert named.advertised(80) == "w1.example:80"
