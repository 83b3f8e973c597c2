"""The routing demonstration's published form and picture, without a cluster."""

from pathlib import Path

import pytest

from services.cli.adapters.http import ChatAnswer
from services.cli.demo.picture import draw
from services.cli.demo.routing import Run
from services.cli.errors import CliError


def answer(worker: str, cached: int, ttft_s: float) -> ChatAnswer:
    return ChatAnswer(
        text="x",
        worker=worker,
        prompt_tokens=677,
        completion_tokens=8,
        cached_tokens=cached,
        predicted_cached_tokens=cached + 1,
        ttft_s=ttft_s,
    )


def test_json_is_the_published_form() -> None:
    run = Run(("w0", "w1"), (answer("w0", 0, 1.23456), answer("w0", 672, 0.1)))
    assert run.to_json() == {
        "per_worker": {"w0": 2, "w1": 0},  # one that served nothing is named too
        "cached_tokens": [0, 672],
        "predicted_cached_tokens": [1, 673],
        "ttft_s": [1.2346, 0.1],
    }


def test_picture(tmp_path: Path) -> None:
    runs = {"round-robin": [answer("w0", 0, 1.0), answer("w1", 0, 1.1)], "kv": [answer("w0", 0, 1)]}
    draw(runs, "m", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(CliError, match="can't be written"):
        draw(runs, "m", tmp_path / "absent" / "p.png")
