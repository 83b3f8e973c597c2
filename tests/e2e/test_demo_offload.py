"""`forebay demo offload` on a real engine, with the tiny model: blocks go down and come back."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)


async def test_demo_offload(tmp_path: Path, tiny_model_path: Path) -> None:
    """C10: read-back end to end; equal answers, token for token, from every tier."""
    picture = tmp_path / "offload.png"
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "services.cli", "demo", "offload", "--json"),
            *("--model", str(tiny_model_path), "--png", str(picture)),
        ],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert set(result) == {
        "offload_g1_g2_blocks",
        "offload_g2_g3_blocks",
        "onboard_g2_g1_blocks",
        "onboard_g3_g1_blocks",
        "ttft_p50_s",
        "tokens_equal",
    }
    assert result["tokens_equal"] is True
    # Five documents of some 69 blocks each went down, and some came back from each tier.
    assert result["offload_g1_g2_blocks"] >= 5 * 65
    assert result["offload_g2_g3_blocks"] > 0
    assert result["onboard_g2_g1_blocks"] > 60
    assert result["onboard_g3_g1_blocks"] > 60
    waits = result["ttft_p50_s"]
    assert 0 < waits["on"] < waits["off"], waits
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not _left_behind()


def _left_behind() -> list[Path]:
    """L7: shared memory of demonstrations that are over."""
    marks = Path("/dev/shm").glob("forebay-*/state-dir")
    return [m for m in marks if "/forebay-demo-" in m.read_text()]
