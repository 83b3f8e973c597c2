"""Two engines on one daemon, one in a process of its own: what they share, and deaths."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from services.common.blocks import HashedAdapter
from tests.models import default_cache_dir, tiny_adapter, tiny_model
from tests.support.polling import until
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
    adapter: Path


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
    adapter = tiny_adapter(folder / "adapter")
    node = Node(folder, tiny_model(default_cache_dir()), "--arena-share", "0.4")
    a = node.worker("a", "--adapters", f"twist={adapter}")
    b = node.worker("b", "--engine-mode", "async")
    async with node.running(), both(a, b):
        yield Rig(node, a, b, adapter)


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


async def test_a_killed_daemon_fails_nobody_and_its_successor_is_used(rig: Rig) -> None:
    """K1 (crash): requests go on without tiers; blocks are adopted; engines attach anew."""
    prompts = [prompt(LENGTH, ("daemon", n)) for n in range(6)]
    fresh = []
    for p in prompts:
        fresh.append((await rig.a.ask(p, 24)).tokens)
        await rig.node.stored(keys(p))
    workers = [rig.a, rig.b]
    for kill_after_s in (0.0, 0.05, 0.15):
        await asyncio.gather(*(w.reset() for w in workers))
        asked = [asyncio.create_task(w.ask(p, 24)) for p in prompts for w in workers]
        await asyncio.sleep(kill_after_s)
        rig.node.daemon.kill()
        answers = await asyncio.gather(*asked)
        assert [a.tokens for a in answers] == [t for t in fresh for _ in workers]
        # Away: the same again, from nothing.
        await asyncio.gather(*(w.reset() for w in workers))
        assert (await rig.b.ask(prompts[0], 24)).tokens == fresh[0]
        rig.node.daemon.start()
        await rig.node.daemon.until_ready(60)
        new = prompt(LENGTH, ("after", kill_after_s))
        expected = (await rig.a.ask(new)).tokens

        async def saved(new: list[int] = new) -> bool:
            # Until it is attached again nothing is saved.
            await rig.a.reset()
            await rig.a.ask(new)
            return set(keys(new)) <= set(rig.node.slots())

        await until(saved, within_s=30, every_s=0.2, what="saves after the restart")

        async def loads(w: Worker, new: list[int] = new, expected: list[int] = expected) -> int:
            await w.reset()
            answer = await w.ask(new)
            assert answer.tokens == expected
            return answer.cached

        for w in workers:
            await until(
                lambda w=w: loads(w),  # type: ignore[misc]
                lambda cached: cached == 10 * BLOCK,
                within_s=30,
                every_s=0.2,
                what="loads after the restart",
            )
    await rig.node.at_rest()


async def test_new_weights_and_new_adapters_under_old_names_hit_nothing(
    rig: Rig, tmp_path: Path
) -> None:
    """I3, I5: the same names, the same prompt, other bytes."""
    p = prompt(LENGTH, "names")
    adapter = tmp_path / "adapter"
    shutil.copytree(rig.adapter, adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    turned = {k: -v if "lora_B" in k else v for k, v in weights.items()}
    save_file(turned, adapter / "adapter_model.safetensors")
    model = tmp_path / "model"
    shutil.copytree(rig.node.model, model)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = -weights[name]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    base = await rig.a.ask(p)
    twisted = await rig.a.ask(p, adapter="twist")
    assert twisted.tokens != base.tokens
    await rig.node.stored(keys(p))
    path = (await rig.a.card()).adapters[0].path
    await rig.node.stored(keys(p, adapter=HashedAdapter("twist", path)))
    await rig.a.reset()
    assert (await rig.a.ask(p, adapter="twist")).cached == 10 * BLOCK
    async with both(
        rig.node.worker("adapters", "--adapters", f"twist={adapter}"),
        rig.node.worker("weights", model=model),
    ) as (other_adapter, other_weights):
        hit = await other_adapter.ask(p)
        assert (hit.tokens, hit.cached) == (base.tokens, 10 * BLOCK)
        answer = await other_adapter.ask(p, adapter="twist")
        assert answer.cached == 0
        assert answer.tokens != twisted.tokens
        answer = await other_weights.ask(p)
        assert answer.cached == 0
        assert len((await rig.node.stats()).namespaces) == 2


async def test_a_killed_engine_s_blocks_serve_its_successor(rig: Rig) -> None:
    """kill -9 of a worker loses no block and leaks no slot."""
    p = prompt(LENGTH, "successor")
    fresh = await rig.a.ask(p)
    await rig.node.stored(keys(p))
    running = asyncio.gather(
        *(rig.a.ask(prompt(900, ("busy", n)), 50) for n in range(4)), return_exceptions=True
    )
    await asyncio.sleep(0.3)
    rig.a.process.kill()
    await running

    async def granted() -> int:
        return sum(n.granted for n in (await rig.node.stats()).namespaces)

    # What is left is b's.
    await until(granted, lambda n: n <= 64, within_s=20, what="slots of the dead")
    async with rig.node.worker("a2").running() as worker:
        answer = await worker.ask(p)
        assert (answer.tokens, answer.cached) == (fresh.tokens, 10 * BLOCK)
    await rig.node.at_rest()
