"""Runs in remote storage, on a fake store: the search, what is remembered, and trouble."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.arena import HEADER_BYTES, Arena, CorruptHeader
from services.kvbm.movers.objects import StoreError
from services.kvbm.tiers.known import ABSENT_S, THERE_S, Known
from services.kvbm.tiers.object import RemoteTier
from services.kvbm.tiers.runs import OtherRuns, head_bytes, pack_head, unpack_head
from tests.fakes.objects import MemoryObjects, now_and_then
from tests.support.remote import GEOMETRY, NAMESPACE, RUN, Node, chain


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[tuple[Node, MemoryObjects]]:
    """A node on a fake store."""
    arena = Arena.create(tmp_path / "arena", NAMESPACE, GEOMETRY, 64)
    objects = MemoryObjects()
    tier = RemoteTier(objects, run_blocks=RUN, timeout_s=5)
    await tier.probe()
    yield Node(tier, await tier.open(NAMESPACE, arena), arena), objects
    await tier.close()
    arena.close()


async def another(node: Node, objects: MemoryObjects) -> Node:
    """A node that remembers nothing."""
    tier = RemoteTier(objects, run_blocks=RUN, timeout_s=5)
    await tier.probe()
    return Node(tier, await tier.open(NAMESPACE, node.arena), node.arena)


async def test_find_is_right_for_every_length(fake: tuple[Node, MemoryObjects]) -> None:
    """Equal to counting, with at most a few steps of a few requests."""
    node, objects = fake
    keys = chain("find", 15 * RUN + 3)
    for stored in range(16):
        if stored:
            run = node.fill(keys[: stored * RUN])[-RUN:]
            assert (await node.space.store(run, 5)).errors == [None] * RUN
        for asked in (0, RUN - 1, RUN, 7 * RUN + 1, len(keys)):
            fresh = await another(node, objects)
            objects.requests.clear()
            there = await fresh.space.find(keys[:asked], 5)
            assert there == min(stored, asked // RUN) * RUN
            assert len(objects.requests) <= 9, "three steps of three"
            objects.requests.clear()
            assert await fresh.space.find(keys[:asked], 5) == there
            assert len(objects.requests) == 0, "the answers are remembered"


async def test_absence_is_forgotten_soon(fake: tuple[Node, MemoryObjects]) -> None:
    """What another node stores later is found once the negative answer has expired."""
    now = [0.0]
    known = Known(lambda: now[0], entries=4)
    known.learn(b"a", False)
    known.learn(b"b", True)
    now[0] = ABSENT_S - 0.1
    assert known.there(b"a") is False
    now[0] = ABSENT_S
    assert known.there(b"a") is None and known.there(b"b") is True
    now[0] = THERE_S
    assert known.there(b"b") is None
    for key in (b"1", b"2", b"3", b"4", b"5"):
        known.learn(key, True)
        known.learn_run([key])
    assert known.there(b"1") is None and known.there(b"5") is True
    assert known.run_of(b"1") is None and known.run_of(b"5") == b"5"
    known.learn(b"5", None)
    assert known.there(b"5") is None


async def test_what_this_node_stored_is_remembered_until_it_is_gone(
    fake: tuple[Node, MemoryObjects],
) -> None:
    """However long ago: a look-up needs no luck to find it again."""
    node, objects = fake
    keys = chain("seen", 2 * RUN)
    assert node.space.seen(keys) == 0
    filled = node.fill(keys)
    await node.space.store(filled[:RUN], 5)
    assert node.space.seen(keys) == RUN and node.space.seen(keys[RUN:]) == 0
    assert (await another(node, objects)).space.seen(keys) == 0
    await node.space.erase(keys[:1])
    assert node.space.seen(keys) == 0
    await node.space.store(filled[:RUN], 5)
    assert node.space.seen(keys) == RUN


async def test_a_hole_costs_one_load(fake: tuple[Node, MemoryObjects]) -> None:
    """The search trusts that earlier runs are there; a load corrects it."""
    node, objects = fake
    keys = chain("hole", 16 * RUN)
    await node.store(keys)
    del objects.objects[f"{NAMESPACE.hex()}/{keys[2 * RUN - 1].hex()}"]
    fresh = await another(node, objects)
    assert await fresh.space.find(keys, 5) == 16 * RUN
    assert (await fresh.load(keys, range(RUN, 2 * RUN))).errors[0] is not None
    assert await fresh.space.find(keys, 5) == RUN
    assert fresh.tier.health.ok


async def test_storms_of_errors_never_raise_and_serve_nothing_wrong(
    fake: tuple[Node, MemoryObjects],
) -> None:
    """C5: whatever fails when, what loads is right, and it all works once the trouble is over."""
    node, objects = fake
    chance = random.Random(7)
    chains = [chain(f"storm {n}", 2 * RUN) for n in range(4)]
    for round in range(60):
        objects.trouble = now_and_then(round, 0.3)
        keys = chance.choice(chains)
        run = chance.randrange(2)
        positions = range(run * RUN, (run + 1) * RUN)
        match chance.randrange(4):
            case 0:
                await node.space.store(node.fill(keys)[run * RUN : (run + 1) * RUN], 5)
            case 1:
                for slot, error in zip(
                    positions, (await node.load(keys, positions)).errors, strict=True
                ):
                    assert error is not None or node.has(keys[slot], slot)
            case 2:
                assert await node.space.find(keys, 5) in (0, RUN, 2 * RUN)
            case _:
                await node.space.erase([keys[run * RUN]])
        if not node.tier.health.ok:
            await node.tier.probe()
        assert node.space._heads.qsize() == 4
    objects.trouble = lambda verb, key: None
    assert (await node.tier.probe()).ok
    for keys in chains:
        assert all(stored.errors == [None] * RUN for stored in await node.store(keys))
        for run in range(2):
            loaded = await node.load(keys, range(run * RUN, (run + 1) * RUN))
            assert loaded.errors == [None] * RUN


async def test_a_silent_store_costs_the_deadline_once(fake: tuple[Node, MemoryObjects]) -> None:
    """H5: the first call waits to its deadline, those after it not at all."""
    node, objects = fake
    keys = chain("silent", 3 * RUN)
    objects.flowing.clear()
    began = time.monotonic()
    assert await node.space.find(keys, 0.2) == 0
    assert 0.15 < time.monotonic() - began < 1
    assert not node.tier.health.ok and "no answer" in node.tier.health.why
    objects.requests.clear()
    for _ in range(10):
        assert await node.space.find(keys, 0.2) == 0
        assert (await node.load(keys, range(RUN), 0.2)).errors[0] is not None
        assert (await node.space.store(node.fill(keys)[:RUN], 0.2)).errors[0] is not None
    assert objects.requests == []
    objects.flowing.set()
    assert (await node.tier.probe()).ok
    assert (await node.store(keys))[2].errors == [None] * RUN


async def test_a_failure_says_nothing_about_what_is_there(
    fake: tuple[Node, MemoryObjects],
) -> None:
    """A load or store that the network ended is not remembered as an answer."""
    node, objects = fake
    keys = chain("network", 2 * RUN)
    await node.store(keys[:RUN])
    away = StoreError("gone", away=True)
    objects.trouble = lambda verb, key: away if verb in ("get", "put") else None
    assert (await node.load(keys, range(RUN))).errors == ["away: gone"] * RUN
    assert (await node.tier.probe()).ok
    stored = await node.space.store(node.fill(keys)[RUN:], 5)
    assert stored.errors == ["away: gone"] * RUN
    objects.trouble = lambda verb, key: None
    assert (await node.tier.probe()).ok
    await (await another(node, objects)).store(keys)
    assert await node.space.find(keys, 5) == 2 * RUN


async def test_refused_writes_leave_reads_alone(fake: tuple[Node, MemoryObjects]) -> None:
    node, objects = fake
    keys = chain("refused", 2 * RUN)
    await node.store(keys[:RUN])
    objects.trouble = lambda verb, key: StoreError("full") if verb == "put" else None
    stored = await node.space.store(node.fill(keys)[RUN:], 5)
    assert stored.errors == ["full"] * RUN
    assert (node.tier.health.ok, node.tier.health.why) == (False, "full")
    assert await node.space.find(keys, 5) == RUN
    assert (await node.load(keys, range(RUN))).errors == [None] * RUN


async def test_more_moves_than_lanes(fake: tuple[Node, MemoryObjects]) -> None:
    """They wait for each other; those that can't begin in time fail, and only they."""
    node, objects = fake
    keys = chain("lanes", 12 * RUN)
    runs = [node.fill(keys)[start : start + RUN] for start in range(0, 12 * RUN, RUN)]
    stored = await asyncio.gather(*(node.space.store(run, 5) for run in runs))
    assert all(s.errors == [None] * RUN for s in stored)
    objects.flowing.clear()
    loads = [
        asyncio.create_task(node.load(keys, range(start, start + RUN), 0.3))
        for start in range(0, 12 * RUN, RUN)
    ]
    results = await asyncio.gather(*loads)
    assert all(r.errors[0] is not None for r in results)
    assert node.space._heads.qsize() == 4


def test_every_flipped_byte_of_a_head_is_found(tmp_path: Path) -> None:
    """C4: of the fields as of the blocks' headers; only the padding means nothing."""
    arena = Arena.create(tmp_path / "arena", NAMESPACE, GEOMETRY, RUN)
    node = Node(None, None, arena)  # type: ignore[arg-type]
    headers = [t.header for t in node.fill(chain("head", RUN))]
    arena.close()
    head = pack_head(NAMESPACE, headers, GEOMETRY)
    assert len(head) == head_bytes(RUN) == 4096
    assert unpack_head(head, NAMESPACE, RUN, GEOMETRY) == headers
    for offset in range(64 + RUN * HEADER_BYTES):
        bad = bytearray(head)
        bad[offset] ^= 1 << offset % 8
        try:
            found = unpack_head(bad, NAMESPACE, RUN, GEOMETRY)
        except (CorruptHeader, OtherRuns):
            continue
        wrong = [index for index, header in enumerate(found) if isinstance(header, CorruptHeader)]
        assert wrong == [(offset - 64) // HEADER_BYTES], offset
