"""The command line's surface: exit codes, messages instead of tracebacks, the settings file."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.traces import made_trace, write_trace


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
        (("bench", "router", "--trace", "absent.jsonl"), 2, "absent.jsonl can't be read"),
        (("bench", "router", "--trace", "x", "--policy", "best"), 2, "no policy 'best'"),
        (("bench", "router", "--trace", "x", "--policy", "kv:2"), 2, "takes a weight"),
        (("bench", "router", "--trace", "x", "--model", "real"), 2, "simple or engine"),
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


def test_bench_router_prints_a_row_for_each_policy_and_trace(tmp_path: Path) -> None:
    made = made_trace(5, sessions=25)
    write_trace(made, tmp_path / "a.jsonl")
    write_trace(made[:30], tmp_path / "b.jsonl")
    common = ("--workers", "3", "--capacity-blocks", "100")
    args = ("bench", "router", "--trace", "a.jsonl", "b.jsonl", "--policy", "kv,dynamo:4", *common)
    done = forebay(*args, "--replicas", "2", "--event-lag", "0.1", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(r["policy"], r["trace"]) for r in rows] == [
        ("kv", "a.jsonl"),
        ("dynamo:4", "a.jsonl"),
        ("kv", "b.jsonl"),
        ("dynamo:4", "b.jsonl"),
    ]
    first = rows[0]
    assert first["decisions"] == len(made) and first["decision_us"] > 0
    assert 0 < first["hit_ratio"] < 1 and first["pooled_hit_ratio"] > 0
    assert 0 < first["ttft_s"]["p50"] <= first["ttft_s"]["p90"] <= first["ttft_s"]["p99"]
    assert first["itl_p99_s"] == 0.02 and first["imbalance"] >= 1
    assert not list(tmp_path.glob("*.png"))


def test_bench_router_shows_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    write_trace(made_trace(5, sessions=20), tmp_path / "a.jsonl")
    args = ("--trace", "a.jsonl", "--policy", "kv,ref lmetric", "--think-time", "--jitter", "1")
    done = forebay("bench", "router", *args, "--png", "shown.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "a.jsonl" in done.stdout and "ref lmetric" in done.stdout
    assert (tmp_path / "shown.png").read_bytes().startswith(b"\x89PNG")


def test_bench_router_on_the_simulators_engine(tmp_path: Path) -> None:
    write_trace(made_trace(5, sessions=20), tmp_path / "a.jsonl")
    args = ("bench", "router", "--trace", "a.jsonl", "--policy", "kv", "--model", "engine")
    done = forebay(*args, "--capacity-blocks", "300", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["hit_ratio"] > 0.2 and 0.001 < row["itl_p99_s"] < 1
    done = forebay(*args, "--capacity-blocks", "2", cwd=tmp_path)
    assert done.returncode == 1 and "fits no worker" in done.stderr
