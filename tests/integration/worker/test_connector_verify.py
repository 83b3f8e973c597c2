"""The negative control: with checks off a bad block reaches the text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiers import BLOCK, Node, keys, prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


async def test_a_zeroed_block_shows_in_the_text_when_nobody_looks(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    node = Node(tmp_path, tiny_model_path, "--no-verify")
    p = prompt(10 * BLOCK + 5, "control")
    async with node.running(), node.worker("a").running() as worker:
        fresh = await worker.ask(p, 16)
        await node.stored(keys(p))
        await worker.reset()
        assert (await worker.ask(p, 16)).tokens == fresh.tokens
        arena, slot = node.slots()[keys(p)[5]]
        payload = arena.payload(slot)
        payload[:] = bytes(len(payload))
        await worker.reset()
        bad = await worker.ask(p, 16)
        assert bad.cached == 10 * BLOCK
        assert bad.tokens != fresh.tokens
