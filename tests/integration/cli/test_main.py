"""The command line's surface: exit codes, messages instead of tracebacks, the settings file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def forebay(*args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "services.cli", *args],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **env},
    )


def test_version_and_help(tmp_path: Path) -> None:
    version = forebay("--version", cwd=tmp_path)
    assert version.returncode == 0 and re.fullmatch(r"forebay \d+\.\d+\.\d+\n", version.stdout)
    text = forebay("up", "--help", cwd=tmp_path).stdout
    for word in ("--workers", "--gateway-port", "8000", "2379", "FOREBAY_UP_<OPTION>", "SIGHUP"):
        assert word in text


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("status",), 1, "no cluster in"),
        (("up", "--policy", "best"), 2, "--policy is 'best'"),
        (("up", "--engine-args", "{"), 2, "--engine-args is not JSON"),
        (("up", "--workers", "0"), 2, "--workers"),
        (("up", "--model", "./nothing"), 1, "no such folder"),
        (("up", "--config", "absent.toml"), 2, "can't be read"),
        (("model", "--name", "nothing"), 1, "no such folder"),
        (("frobnicate",), 2, "frobnicate"),
    ],
)
def test_mistakes_end_with_a_line_and_a_code(
    tmp_path: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    done = forebay(*args, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_down_without_a_cluster_is_no_error(tmp_path: Path) -> None:
    done = forebay("down", cwd=tmp_path)
    assert done.returncode == 0 and "nothing runs" in done.stderr


def test_settings_file_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text('[up]\npolicy = "worst"\nkv-cache-gb = 0.5\n')
    done = forebay("up", "--config", "f.toml", cwd=tmp_path)
    assert done.returncode == 2 and "--policy is 'worst'" in done.stderr
    done = forebay("up", "--config", "f.toml", "--policy", "best", cwd=tmp_path)
    assert "--policy is 'best'" in done.stderr
    done = forebay("up", "--config", "f.toml", cwd=tmp_path, FOREBAY_UP_POLICY="odd")
    assert "--policy is 'odd'" in done.stderr
    (tmp_path / "f.toml").write_text("[up]\nworkerz = 3\n")
    done = forebay("up", "--config", "f.toml", cwd=tmp_path)
    assert done.returncode == 2 and "unknown settings: workerz" in done.stderr
