"""Exactness on the real engine: text from G2 equals fresh text, whatever happens on the way.

Real worker processes in float32 with a context-sensitive model, and a real daemon.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import pytest_asyncio

from tests.models import default_cache_dir, tiny_model
from tests.support.polling import until
from tests.support.tiers import BLOCK, Answer, Node, Worker, keys, prompt

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
LENGTH = 10 * BLOCK + 5


@dataclass
class Rig:
    node: Node
    worker: Worker

    async def fresh(self, tokens: list[int], max_tokens: int = 8) -> Answer:
        """The answer of an engine that has nothing of the prompt; its blocks are saved then."""
        answer = await self.worker.ask(tokens, max_tokens)
        assert answer.cached == 0, "not fresh"
        await self.node.stored(keys(tokens))
        return answer

    async def heal(self, tokens: list[int]) -> None:
        """Blocks that were found bad are stored anew as their prompt comes again.

        Not always with the first: until the daemon has looked itself, a bad one is in the way.
        """

        async def missing() -> int:
            left = len(set(keys(tokens)) - set(self.node.slots()))
            if left:
                await self.again(tokens)
            return left

        await until(missing, lambda n: n == 0, within_s=15, every_s=0.1, what="healing")

    async def again(self, tokens: list[int], max_tokens: int = 8) -> Answer:
        """The answer of an engine whose own cache is empty."""
        await self.worker.reset()
        return await self.worker.ask(tokens, max_tokens)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("tiers")
    node = Node(folder, tiny_model(default_cache_dir()))
    async with node.running(), node.worker("a", blocks=64).running() as worker:
        yield Rig(node, worker)


async def at_rest(rig: Rig) -> None:
    """No lease, no block in use, no slot lost: after everything."""
    await rig.node.at_rest()

    async def usage() -> float:
        return (await rig.worker.metrics())['forebay_worker_kv_usage_ratio{dp_rank="0"}']

    await until(usage, lambda used: used == 0, within_s=10, what="rest")


async def test_text_from_g2_equals_fresh_text(rig: Rig) -> None:
    """C3, C10: and the counts of cached tokens are true."""
    p = prompt(LENGTH, "g2")
    fresh = await rig.fresh(p)
    hit = await rig.worker.ask(p)
    assert (hit.tokens, hit.cached) == (fresh.tokens, 10 * BLOCK), "from G1"
    before = await rig.worker.blocks("loaded")
    loaded = await rig.again(p)
    assert (loaded.tokens, loaded.cached) == (fresh.tokens, 10 * BLOCK)
    assert await rig.worker.blocks("loaded") - before == 10
    # What comes after a common beginning is computed.
    branch = [*p[: 4 * BLOCK], *prompt(3 * BLOCK, "branch")]
    answer = await rig.again(branch)
    assert answer.cached == 4 * BLOCK
    assert answer.tokens == (await rig.worker.ask(branch, cache_salt="fresh")).tokens
    await at_rest(rig)


async def test_blocks_made_while_decoding_are_saved_too(rig: Rig) -> None:
    p = prompt(LENGTH, "turns")
    first = await rig.fresh(p, 70)
    turn = [*p, *first.tokens, *prompt(20, "next turn")]
    stored = keys([*p, *first.tokens[:-1]])
    await rig.node.stored(stored)
    loaded = await rig.again(turn)
    assert loaded.cached == len(stored) * BLOCK == 12 * BLOCK
    hit = await rig.worker.ask(turn)
    assert hit.tokens == loaded.tokens


async def test_many_at_once_load_and_save_exactly(rig: Rig) -> None:
    """C3: at concurrency 8, with common beginnings, from an empty G1, again and again."""
    head = prompt(4 * BLOCK, "head")
    prompts = [[*head, *prompt(60 + 11 * n, ("many", n))] for n in range(12)]
    fresh = {}
    for n, p in enumerate(prompts):
        await rig.worker.reset()
        fresh[n] = (await rig.worker.ask(p, 12)).tokens
    gate = asyncio.Semaphore(8)

    async def one(n: int) -> None:
        async with gate:
            answer = await rig.worker.ask(prompts[n], 12)
        assert answer.tokens == fresh[n], n

    for _ in range(3):
        await rig.worker.reset()
        await asyncio.gather(*(one(n) for n in range(12)))
    await at_rest(rig)


async def test_a_bad_block_in_the_middle_is_computed(rig: Rig) -> None:
    """C1, C4, C15: the good head is used, the rest computed, counted, and stored anew."""
    p = prompt(LENGTH, "bad")
    fresh = await rig.fresh(p)
    bad = await rig.worker.blocks("bad")
    rig.node.damage(keys(p)[4], random.Random(1))
    answer = await rig.again(p)
    assert answer.tokens == fresh.tokens
    assert answer.cached == 4 * BLOCK, "tokens of the failed load were computed"
    assert await rig.worker.blocks("bad") == bad + 1
    assert (await rig.worker.ask(p)).tokens == fresh.tokens, "nothing bad is left in G1"
    await rig.heal(p)
    whole = await rig.again(p)
    assert (whole.tokens, whole.cached) == (fresh.tokens, 10 * BLOCK)
    await at_rest(rig)


@pytest.mark.parametrize("seed", range(4))
async def test_aborts_around_a_failed_load_leave_nothing_bad(rig: Rig, seed: int) -> None:
    """C1, L5: abort right after a failed load, then the same prompt: no garbage in G1 or G2."""
    rng = random.Random(seed)
    p = prompt(LENGTH, ("abort", seed))
    fresh = await rig.fresh(p)
    for _ in range(4):
        rig.node.damage(keys(p)[rng.randrange(10)], rng)
        await rig.worker.reset()
        await asyncio.gather(
            rig.worker.abort(p, rng.choice((0.002, 0.01, 0.02, 0.04, 0.08))),
            rig.worker.abort(p, rng.choice((0.002, 0.01, 0.02, 0.04, 0.08))),
        )
        answer = await rig.worker.ask(p)
        assert answer.tokens == fresh.tokens
        assert (await rig.worker.ask(p)).tokens == fresh.tokens
        await rig.heal(p)
        assert (await rig.again(p)).tokens == fresh.tokens
    await at_rest(rig)


async def test_preemption_after_failed_loads_leaves_nothing_bad(rig: Rig) -> None:
    """K2, K3: more long answers than G1 holds, with bad blocks in what they begin with."""
    rng = random.Random(3)
    prompts = [prompt(LENGTH, ("preempt", n)) for n in range(6)]
    before = await asked_again(rig)
    fresh = []
    for p in prompts:
        await rig.worker.reset()
        fresh.append((await rig.worker.ask(p, 200)).tokens)
        await rig.node.stored(keys(p))
    for _ in range(2):
        for p in prompts[::2]:
            rig.node.damage(keys(p)[rng.randrange(10)], rng)
        await rig.worker.reset()
        # 6 x 17 blocks in a cache of 63: some are thrown out and come back.
        answers = await asyncio.gather(*(rig.worker.ask(p, 200) for p in prompts))
        assert [a.tokens for a in answers] == fresh
        for p in prompts:
            await rig.heal(p)
    assert await asked_again(rig) > before, "nobody was preempted"
    await at_rest(rig)


async def asked_again(rig: Rig) -> float:
    name = 'forebay_worker_kvbm_events_total{event="asked_again"}'
    return (await rig.worker.metrics()).get(name, 0.0)


async def test_salts_share_nothing_in_g2(rig: Rig) -> None:
    """I1, I2: the salt is part of the key."""
    p = prompt(LENGTH, "salt")
    fresh = await rig.worker.ask(p, cache_salt="a")
    await rig.node.stored(keys(p, cache_salt="a"))
    await rig.worker.reset()
    other = await rig.worker.ask(p, cache_salt="b")
    assert (other.cached, other.tokens) == (0, fresh.tokens)
    await rig.worker.reset()
    assert (await rig.worker.ask(p, cache_salt="a")).cached == 10 * BLOCK


async def test_a_forged_header_is_no_way_in(rig: Rig) -> None:
    """C4: the checksum is the one of what was saved, not the one that stands beside the bytes."""
    p = prompt(LENGTH, "forged")
    fresh = await rig.fresh(p)
    arena, slot = rig.node.slots()[keys(p)[2]]
    payload = arena.payload(slot)
    payload[:] = bytes(len(payload))
    arena.write_header(slot, replace(arena.header(slot), checksums=arena.checksums(slot)))
    answer = await rig.again(p)
    assert answer.tokens == fresh.tokens
    assert answer.cached == 2 * BLOCK


async def test_corruption_at_scale_is_always_found(rig: Rig) -> None:
    """C1, C4, C14: some hundred blocks damaged, all found, none served."""
    rng = random.Random(11)
    prompts = [prompt(20 * BLOCK + 1, ("scale", n)) for n in range(4)]
    fresh = []
    for p in prompts:
        await rig.worker.reset()
        fresh.append((await rig.worker.ask(p)).tokens)
        await rig.node.stored(keys(p))
    done = 0
    before = await rig.worker.blocks("bad")
    while done < 160:
        for n, p in enumerate(prompts):
            victims = rng.sample(keys(p)[:20], 10)
            for key in victims:
                rig.node.damage(key, rng)
            await rig.worker.reset()
            assert (await rig.worker.ask(p)).tokens == fresh[n]
            await rig.heal(p)
            done += len(victims)
    assert await rig.worker.blocks("bad") - before == done
    await at_rest(rig)
