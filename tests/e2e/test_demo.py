"""`forebay demo routing` on real engines, with the tiny model: their start takes the time."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


async def test_demo_routing(tmp_path: Path, tiny_model_path: Path) -> None:
    picture = tmp_path / "routing.png"
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "services.cli", "demo", "routing", "--json"),
            *("--model", str(tiny_model_path), "--png", str(picture)),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert set(result) >= {"round-robin", "kv"}
    for policy, split in (("round-robin", [5, 5]), ("kv", [10])):
        run = result[policy]
        assert sorted(n for n in run["per_worker"].values() if n) == split
        for key in ("cached_tokens", "predicted_cached_tokens", "ttft_s"):
            assert len(run[key]) == 10
        for predicted, real in zip(
            run["predicted_cached_tokens"], run["cached_tokens"], strict=True
        ):
            assert abs(predicted - real) <= 32, run
        assert all(t > 0 for t in run["ttft_s"])
    # Each worker meets the prompt once: two misses under round-robin, one under kv.
    assert sum(c < 32 for c in result["round-robin"]["cached_tokens"]) == 2
    assert sum(c < 32 for c in result["kv"]["cached_tokens"]) == 1
    assert min(result["kv"]["cached_tokens"][1:]) >= 256
    assert picture.read_bytes().startswith(b"\x89PNG")
