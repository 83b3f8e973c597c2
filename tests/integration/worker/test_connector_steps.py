"""Steps that compute more blocks than usual, on the real engine and a real daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models import default_cache_dir, tiny_model
from tests.support.tiers import BLOCK, Node, keys, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


async def test_a_step_of_many_blocks_is_saved_whole_though_no_step_follows(tmp_path: Path) -> None:
    """One token is the answer of every prefill worker: what that step passes over is lost."""
    node = Node(tmp_path, tiny_model(default_cache_dir()), "--cpu-cache-gb", "0.5")
    arguments = json.dumps({"max_num_batched_tokens": 4096})
    flags = ("--max-model-len", "4096", "--engine-args", arguments)
    async with node.running(), node.worker("a", *flags, blocks=600).running() as worker:
        # Slots are granted by the time that this one is stored; its steps give time for that.
        first = prompt(2 * BLOCK + 1, "first")
        await worker.ask(first, 100)
        await node.stored(keys(first))
        tokens = prompt(120 * BLOCK + 1, "long")
        await worker.ask(tokens, 1)
        await node.stored(keys(tokens))
        assert await worker.blocks("skipped") == 0
