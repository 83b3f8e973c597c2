"""Whatever tier the blocks come from, the tokens are those of a fresh computation.

In float32, with a model whose every token depends on its context, at concurrency 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.common.arena import Arena
from services.common.blocks import block_hashes
from tests.support.kvcluster import BLOCK, G2, G3, G4, Answer, KvCluster, prompt

BLOCKS = 12
BOTH = ("worker-0", "worker-1")
PROMPTS = [prompt(seed, BLOCKS) for seed in range(8)]
SOURCES = ["G1", "G2", "G3", "G4", "engine killed", "daemon killed", "both killed", "clean restart"]


def texts(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    assert not any(a.error for a in answers), answers
    assert all(len(a.tokens) == 8 for a in answers)
    return [a.tokens for a in answers]


async def fresh(kv: KvCluster) -> list[tuple[int, ...]]:
    answers = await kv.ask_all(BOTH, PROMPTS)
    assert all(a.cached == 0 for a in answers), "caches were not empty"
    found = texts(answers)
    assert len(set(found)) == len(PROMPTS), "outputs must depend on their prompts"
    return found


@pytest.mark.parametrize("source", SOURCES)
async def test_tokens_are_the_fresh_ones(kv: KvCluster, source: str) -> None:
    """C3, C10: bit-compared under concurrency, from each tier and after every restart."""
    reference = await fresh(kv)
    await kv.until_in(G2, PROMPTS, 20)
    if source not in ("G1", "engine killed", "both killed"):
        await kv.forget_g1(*BOTH)
    match source:
        case "G3":
            await kv.until_in(G3, PROMPTS, 30)
            await kv.clear(G2)
        case "G4":
            await kv.until_in(G4, PROMPTS, 60)
            await kv.clear(G2, G3)
        case "engine killed":
            kv.restart("worker-0", "worker-1")
        case "daemon killed":
            kv.restart("kvbm-0")
        case "both killed":
            kv.restart("kvbm-0", "worker-0", "worker-1")
        case "clean restart":
            kv.restart("kvbm-0", kill=False)
    await kv.attached()
    before = await kv.counter("onboard_blocks_h2d")
    again = await kv.ask_all(BOTH, PROMPTS)
    assert texts(again) == reference
    assert sum(a.cached for a in again) >= 0.9 * len(PROMPTS) * BLOCKS * BLOCK
    if source != "G1":
        assert await kv.counter("onboard_blocks_h2d") - before >= 0.9 * len(PROMPTS) * BLOCKS
    await kv.at_rest()
    assert await kv.counter("corrupt_blocks") == 0


async def test_what_one_worker_computed_is_a_hit_for_the_other(kv: KvCluster) -> None:
    """Two workers of one node share one copy."""
    first = await kv.ask("worker-0", PROMPTS[0])
    await kv.until_in(G2, PROMPTS[:1], 20)
    second = await kv.ask("worker-1", PROMPTS[0])
    assert second.tokens == first.tokens
    assert second.cached == BLOCKS * BLOCK
    stats = await kv.stats()
    assert {t.tier: t.blocks for t in stats.tiers}[G2] == BLOCKS


async def test_another_salt_is_no_hit(kv: KvCluster) -> None:
    mine = await kv.ask("worker-0", PROMPTS[0], cache_salt="a")
    await kv.forget_g1("worker-0")
    theirs = await kv.ask("worker-0", PROMPTS[0], cache_salt="b")
    assert theirs.cached == 0 and theirs.tokens == mine.tokens
    assert (await kv.ask("worker-0", PROMPTS[0], cache_salt="a")).cached > 0


async def test_without_checks_a_zeroed_block_shows(kv: KvCluster, tmp_path: Path) -> None:
    """The negative control: these tests would see a wrong block, were one served."""
    kv.replace_daemon(tmp_path, no_verify=None)
    await kv.attached()
    good = await kv.ask("worker-0", PROMPTS[0])
    await kv.until_in(G2, PROMPTS[:1], 20)
    await kv.forget_g1("worker-0")
    key = block_hashes(PROMPTS[0], BLOCK)[4]
    arena = Arena.open(kv.arenas[0])
    (slot,) = [n for n, h in enumerate(arena.headers()) if getattr(h, "key", None) == key]
    arena.payload(slot)[:] = bytes(arena.geometry.payload_bytes)
    arena.close()
    bad = await kv.ask("worker-0", PROMPTS[0])
    assert bad.cached == BLOCKS * BLOCK, "the block must have been served"
    assert bad.tokens != good.tokens
    # What engines loaded unchecked must not serve anybody else.
    await kv.forget_g1(*BOTH)
