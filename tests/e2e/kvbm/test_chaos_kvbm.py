"""kill -9 and SIGSTOP under load: of engines, of the daemon, of both. Nothing wrong, nothing left.

Memory and disk are smaller than what is asked for, so that slots are reused all the time.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.support.kvcluster import BLOCK, G2, Answer, KvCluster, prompt
from tests.support.kvdamage import DiskRecords, arena_records
from tests.support.kvload import Tokens, load, references
from tests.support.kvrest import abandoned, nothing_is_left, shared_memory
from tests.support.polling import PROGRESS_S, until

pytestmark = pytest.mark.chaos

BOTH = ("worker-0", "worker-1")
BLOCKS = 16
LONGEST_S = 6.0
"""Longer than leases of these daemons, and than any call of an engine."""
PROMPTS = [prompt(5000 + seed, BLOCKS) for seed in range(40)]


@dataclass(frozen=True)
class Known:
    """What the module's tests share."""

    references: list[Tokens]
    entries: set[str]
    """Of /dev/shm, before anything was killed."""


@pytest.fixture(scope="module")
def module_kv(engines: KvCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvCluster]:
    # Where arenas lie in earnest.
    arenas = Path(tempfile.mkdtemp(prefix="forebay-test-", dir="/dev/shm"))
    try:
        engines.replace_daemon(
            tmp_path_factory.mktemp("chaos"),
            cpu_cache_dir=arenas,
            cpu_cache_gb=1 / 16,
            disk_cache_gb=1 / 8,
            lease_s=3,
        )
        yield engines
    finally:
        engines.cluster["kvbm-0"].close()
        shutil.rmtree(arenas)


@pytest.fixture(scope="module")
def known() -> dict[str, Known]:
    """Filled by the first test."""
    return {}


@pytest.fixture
async def expected(kv: KvCluster, known: dict[str, Known]) -> AsyncIterator[list[Tokens]]:
    """Tokens of fresh computations; afterwards nothing may be left of what the test did."""
    if not known:
        entries = shared_memory(kv.arena_dir)
        known["all"] = Known(await references(kv, "worker-0", PROMPTS), entries)
    yield known["all"].references
    await nothing_is_left(kv)
    with arena_records(kv.arenas[0]) as records:
        assert records.bad() == []

    async def lost() -> set[str]:
        return abandoned(shared_memory(kv.arena_dir) - known["all"].entries)

    await until(lost, lambda names: not names, within_s=10, what="a clean /dev/shm", every_s=0.5)


async def in_memory(kv: KvCluster, tokens: Tokens) -> int:
    """Leading blocks of a prompt that are in host memory."""
    tiers = await kv.tiers_of(tokens)
    return next((n for n, t in enumerate(tiers) if G2 not in t), len(tiers))


async def filled(kv: KvCluster) -> None:
    """Waits until memory holds enough that its loss would show."""

    async def held() -> int:
        return sum(t.blocks for t in (await kv.stats()).tiers if t.tier == G2)

    await until(held, lambda n: n > 250, within_s=PROGRESS_S, what="blocks in memory", every_s=0.1)


async def hits(kv: KvCluster, worker: str, expected: list[Tokens]) -> None:
    """An engine with an empty cache finds in host memory what was there, and says the same."""
    found = {n: await in_memory(kv, tokens) for n, tokens in enumerate(PROMPTS)}
    chosen = sorted(found, key=lambda n: -found[n])[:8]
    assert sum(found[n] for n in chosen) >= 4 * BLOCKS, "hardly anything is left in memory"
    for n in chosen:
        answer = await kv.ask(worker, PROMPTS[n])
        assert answer.tokens == expected[n]
        assert answer.cached >= found[n] * BLOCK, "a hit was missed"


async def test_an_engine_is_killed(kv: KvCluster, expected: list[Tokens], repetition: int) -> None:
    """Its blocks serve the next one; nobody else notices."""
    rng = random.Random(f"engine {repetition}")
    victim, other = rng.sample(BOTH, 2)
    async with load(kv, BOTH, PROMPTS, expected, seed=repetition) as running:
        await running.goes_on(*BOTH)
        await filled(kv)
        await asyncio.sleep(rng.uniform(0, 1.0))
        kv.cluster[victim].kill()
        await running.goes_on(other, answers=12)
    assert running.wrong == []
    assert {worker for worker, _ in running.failed} <= {victim}
    kv.cluster[victim].start()
    await kv.cluster[victim].until_ready()
    await kv.attached()
    before = await kv.counter("onboard_blocks_h2d")
    await hits(kv, victim, expected)
    assert await kv.counter("onboard_blocks_h2d") > before


async def test_the_daemon_is_killed(kv: KvCluster, expected: list[Tokens], repetition: int) -> None:
    """K1: no request fails; the next daemon has its blocks, and engines find it by themselves."""
    rng = random.Random(f"daemon {repetition}")
    async with load(kv, BOTH, PROMPTS, expected, seed=repetition) as running:
        await running.goes_on(*BOTH)
        await filled(kv)
        await asyncio.sleep(rng.uniform(0, 1.0))
        kv.cluster["kvbm-0"].kill()
        sealed = blocks_left(kv)
        await asyncio.sleep(rng.uniform(0, 1.0))
        kv.cluster["kvbm-0"].start()
        await kv.cluster["kvbm-0"].until_ready()
        adopted = (await kv.stats()).adopted_blocks
        await running.goes_on(*BOTH)
    assert running.wrong == [] and running.failed == []
    memory, disk = sealed
    assert memory > 200
    assert adopted >= 0.99 * memory + disk
    await kv.attached()
    await kv.forget_g1(*BOTH)
    before = await kv.counter("onboard_blocks_h2d")
    await hits(kv, rng.choice(BOTH), expected)
    assert await kv.counter("onboard_blocks_h2d") > before
    assert await kv.counter("corrupt_blocks") <= 1, "one header may be torn by the kill"


def blocks_left(kv: KvCluster) -> tuple[int, int]:
    """Whole blocks in memory and on disk, as a dead daemon has left them."""
    with arena_records(kv.arenas[0]) as records:
        disk = DiskRecords(kv.disk_dir, records.namespace, records.arena.geometry)
        return len(records.sealed()), len(disk.sealed())


async def test_engine_and_daemon_are_killed(
    kv: KvCluster, expected: list[Tokens], repetition: int
) -> None:
    """In either order, within a moment; what the dead engine was filling is free again."""
    rng = random.Random(f"both {repetition}")
    victim, other = rng.sample(BOTH, 2)
    async with load(kv, BOTH, PROMPTS, expected, seed=repetition) as running:
        await running.goes_on(*BOTH)
        await filled(kv)
        await asyncio.sleep(rng.uniform(0, 1.0))
        for name in rng.sample(["kvbm-0", victim], 2):
            kv.cluster[name].kill()
            await asyncio.sleep(rng.uniform(0, 0.1))
        memory, disk = blocks_left(kv)
        await running.goes_on(other)
    assert running.wrong == []
    assert {worker for worker, _ in running.failed} <= {victim}
    kv.cluster["kvbm-0"].start()
    await kv.cluster["kvbm-0"].until_ready()
    assert (await kv.stats()).adopted_blocks >= 0.99 * memory + disk
    kv.cluster[victim].start()
    await kv.cluster[victim].until_ready()
    await kv.attached()
    await hits(kv, victim, expected)


async def test_an_engine_is_frozen_while_it_saves(
    kv: KvCluster, expected: list[Tokens], repetition: int
) -> None:
    """Its deadlines pass, its memory's neighbours are reused, the daemon even starts anew.

    Then it goes on writing, and hurts nobody.
    """
    rng = random.Random(f"frozen {repetition}")
    frozen, other = rng.sample(BOTH, 2)
    fresh = [prompt(6000 + 100 * repetition + n, BLOCKS) for n in range(12)]
    saved = await kv.counter("offload_blocks_d2h")
    asked = [asyncio.create_task(kv.ask(frozen, tokens)) for tokens in fresh]

    async def saves() -> float:
        return await kv.counter("offload_blocks_d2h")

    async def leases() -> int:
        return sum(n.leases for n in (await kv.stats()).namespaces)

    await until(saves, lambda n: n > saved, within_s=20, what="saves")
    await asyncio.sleep(rng.uniform(0, 0.3))
    began = time.monotonic()
    kv.cluster[frozen].freeze()
    try:
        if repetition % 3 == 1:
            kv.cluster["kvbm-0"].kill()
            kv.cluster["kvbm-0"].start()
            await kv.cluster["kvbm-0"].until_ready()
        evicted = await kv.counter("removed_blocks_g2")
        async with load(kv, [other], PROMPTS, expected, seed=repetition) as running:

            async def reused() -> float:
                return await kv.counter("removed_blocks_g2") - evicted

            # As many as memory has, and longer than leases and calls last.
            await until(reused, lambda n: n > 500, within_s=PROGRESS_S, what="reuse of memory")
            await asyncio.sleep(max(0.0, LONGEST_S - (time.monotonic() - began)))
        assert running.wrong == [] and running.failed == []
        await until(leases, lambda n: n == 0, within_s=10, what="leases expired")
        assert (await kv.scrub())[1] == 0
    finally:
        kv.cluster[frozen].thaw()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for tokens, answer in zip(fresh, answers, strict=True):
        if isinstance(answer, Answer):
            assert answer.error == ""
            assert answer.tokens == (await kv.ask(other, tokens)).tokens
        else:
            # A connection that was silent for too long was given up.
            assert isinstance(answer, grpc.aio.AioRpcError), answer
    assert (await kv.scrub())[1] == 0
