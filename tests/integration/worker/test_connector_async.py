"""Two engines on one daemon, one of them in a process of its own: what they share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.models import default_cache_dir, tiny_model
from tests.support.tiers import BLOCK, Node, Worker, keys, prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="module"),
]
LENGTH = 10 * BLOCK + 5


@dataclass
class Rig:
    node: Node
    a: Worker
    b: Worker


@asynccontextmanager
async def both(*workers: Worker) -> AsyncIterator[tuple[Worker, ...]]:
    """Started together: each takes a while."""
    contexts = [worker.running() for worker in workers]
    await asyncio.gather(*(c.__aenter__() for c in contexts))
    try:
        yield workers
    finally:
        for context in contexts:
            await context.__aexit__(None, None, None)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("tiers")
    node = Node(folder, tiny_model(default_cache_dir()))
    a = node.worker("a")
    b = node.worker("b", "--engine-mode", "async")
    async with node.running(), both(a, b):
        yield Rig(node, a, b)


async def test_two_workers_share_one_copy(rig: Rig) -> None:
    """What A computed is a G2 hit for B, also from an engine in a process of its own."""
    p = prompt(LENGTH, "share")
    fresh = await rig.a.ask(p)
    assert fresh.cached == 0
    await rig.node.stored(keys(p))
    hit = await rig.b.ask(p)
    assert (hit.tokens, hit.cached) == (fresh.tokens, 10 * BLOCK)
    q = prompt(LENGTH, "back")
    fresh = await rig.b.ask(q)
    await rig.node.stored(keys(q))
    hit = await rig.a.ask(q)
    assert (hit.tokens, hit.cached) == (fresh.tokens, 10 * BLOCK)
    stats = await rig.node.stats()
    assert sorted(stats.namespaces[0].workers) == ["a", "b"]
    assert await rig.b.blocks("loaded") == await rig.a.blocks("loaded") == 10


async def test_a_bad_block_in_an_engine_of_its_own_process(rig: Rig) -> None:
    """C1, and true counts across the process boundary."""
    p = prompt(LENGTH, "bad async")
    fresh = await rig.a.ask(p)
    await rig.node.stored(keys(p))
    rig.node.damage(keys(p)[3], random.Random(2))
    answer = await rig.b.ask(p)
    assert (answer.tokens, answer.cached) == (fresh.tokens, 3 * BLOCK)
    assert await rig.b.blocks("bad") == 1
