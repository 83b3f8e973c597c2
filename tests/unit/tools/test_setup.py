"""The set-up hands uv what pip's configuration says, and skips what is installed already."""

import sys
from pathlib import Path

import pytest

from tools.setup import Environment, PipConfig, uv_environment


def _config(**values: str) -> PipConfig:
    return PipConfig({k.replace("_", "-"): tuple(v.split()) for k, v in values.items()})


def test_pip_is_asked_and_a_variable_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nfind-links = /a\n  /b\ncert = /ca.pem\n[install]\ncert = /own.pem\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_CERT", raising=False)
    config = PipConfig.read(Path(sys.executable))
    assert (config.all("find-links"), config.one("cert")) == (("/a", "/b"), "/own.pem")
    monkeypatch.setenv("PIP_FIND_LINKS", "/c")
    assert PipConfig.read(Path(sys.executable)).all("find-links") == ("/c",)


def test_uv_looks_where_pip_looks(tmp_path: Path) -> None:
    wheels, index = tmp_path / "wheels", tmp_path / "simple"
    wheels.mkdir()
    index.mkdir()
    env = uv_environment(
        _config(
            find_links=f"{wheels} {tmp_path / 'gone'}",
            extra_index_url=f"file://{index} http://127.0.0.1:9/simple",
            index_url="https://index.example/simple",
            cert="/ca.pem",
        ),
        {},
    )
    assert env["UV_FIND_LINKS"] == str(wheels)  # uv ends with an error over one that isn't there
    assert env["UV_INDEX"] == f"file://{index}"
    assert env["UV_DEFAULT_INDEX"] == "https://index.example/simple"
    assert env["SSL_CERT_FILE"] == "/ca.pem"


def test_what_the_user_told_uv_stands() -> None:
    env = uv_environment(_config(cert="/ca.pem"), {"SSL_CERT_FILE": "/mine.pem"})
    assert env["SSL_CERT_FILE"] == "/mine.pem"


def test_a_stamp_is_for_one_wording_in_one_place(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("a==1\n")
    venv = Environment(tmp_path / "venv")
    venv.path.mkdir()
    assert not venv.has(lock)
    venv.stamp(lock)
    assert venv.has(lock)
    lock.write_text("a==2\n")
    assert not venv.has(lock)
    venv.stamp(lock)
    moved = Environment(tmp_path / "moved")
    venv.path.rename(moved.path)
    assert not moved.has(lock)
