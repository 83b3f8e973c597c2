"""Remote storage over a real S3 server (by NIXL and by obstore) and a real folder."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.arena import HEADER_BYTES
from services.kvbm.tiers.runs import head_bytes, object_bytes
from tests.support.remote import GEOMETRY, NAMESPACE, RUN, Place, chain, node
from tests.support.s3 import BUCKET, shared_server

KINDS = ["s3", "s3-obstore", "folder"]
without_nixl = pytest.mark.parametrize("place", KINDS[1:], indirect=True)
"""For what NIXL has no part in; its helper takes a second to start, for each node."""


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Storage of each kind, empty."""
    if request.param == "folder":
        return Place(f"file://{tmp_path}/remote")
    server = shared_server()
    nixl = request.param == "s3"
    return Place(f"s3://{BUCKET}", server.endpoint, nixl=nixl).apart()


async def test_nodes_share_what_one_has_stored(place: Place, tmp_path: Path) -> None:
    """C10, I5: what A stored B loads, byte for byte; another namespace sees nothing of it."""
    keys = chain("shared", 3 * RUN + 2)
    async with AsyncExitStack() as stack:
        a, b, c = [
            await stack.enter_async_context(node(there, tmp_path, namespace))
            for there, namespace in (
                (place, NAMESPACE),
                (place, NAMESPACE),
                (replace(place, nixl=False), bytes(32)),
            )
        ]
        assert [n.tier.health.ok for n in (a, b, c)] == [True] * 3
        for stored in await a.store(keys[: 3 * RUN]):
            assert stored.errors == [None] * RUN and stored.fence is None
        assert await b.space.find(keys, 5) == 3 * RUN
        assert await b.space.find(keys[: 2 * RUN + 1], 5) == 2 * RUN
        assert await b.space.find(chain("other", 3 * RUN), 5) == 0
        for start in range(0, 3 * RUN, RUN):
            positions = range(start, start + RUN)
            loaded = await b.load(keys, positions)
            assert loaded.errors == [None] * RUN
            for position, header in zip(positions, loaded.headers, strict=True):
                assert header is not None and b.has(keys[position], position)
                assert header == a.fill(keys)[position].header
        assert await c.space.find(keys, 5) == 0
        assert (await c.load(keys, range(RUN))).errors[0] is not None


@without_nixl
async def test_any_blocks_of_a_run_can_be_loaded(place: Place, tmp_path: Path) -> None:
    """A leading part, or what is missing here; slots of the others are left alone."""
    keys = chain("part", 2 * RUN)
    async with node(place, tmp_path) as a, node(place, tmp_path) as b:
        await a.store(keys)
        # The name of a run is that of its last block: who only knows others has to find it first.
        assert (await b.load(keys, [RUN, RUN + 1])).errors[0] is not None
        assert await b.space.find(keys, 5) == 2 * RUN
        for wanted in ([RUN, RUN + 1], [RUN + 1, RUN + 3], [RUN + 2]):
            slots = range(RUN, 2 * RUN)
            before = os.urandom(GEOMETRY.payload_bytes)
            for slot in slots:
                b.arena.payload(slot)[:] = before
            loaded = await b.load(keys, wanted)
            assert loaded.errors == [None] * len(wanted)
            for slot in slots:
                assert b.has(keys[slot], slot) == (slot in wanted)
                assert (bytes(b.arena.payload(slot)) == before) == (slot not in wanted)


@without_nixl
async def test_a_run_is_written_once(place: Place, tmp_path: Path) -> None:
    """D5: neither a second store nor another node's writes what is there."""
    keys = chain("once", RUN)
    async with node(place, tmp_path) as a, node(place, tmp_path) as b:
        await a.store(keys)
        for again in (a, b, b):
            (stored,) = await again.store(keys)
            assert stored.errors == [None] * RUN
        assert (a.tier.counters.stored_blocks, b.tier.counters.stored_blocks) == (RUN, 0)
        assert a.tier.counters.written_bytes == object_bytes(RUN, GEOMETRY)
        assert b.tier.counters.skipped_blocks == 2 * RUN


@without_nixl
async def test_erased_runs_are_gone_for_everybody(place: Place, tmp_path: Path) -> None:
    keys = chain("erase", 2 * RUN)
    async with node(place, tmp_path) as a, node(place, tmp_path) as b:
        await a.store(keys)
        await a.space.erase([keys[RUN + 1]])
        assert await b.space.find(keys, 5) == RUN
        assert await a.space.find(keys, 5) == RUN
        (stored, _) = await a.store(keys), None
        assert stored[1].errors == [None] * RUN
        assert a.tier.counters.stored_blocks == 3 * RUN


Edit = Callable[[bytes, dict[str, bytes]], bytes]


def flip(offset: int) -> Edit:
    def edit(data: bytes, others: dict[str, bytes]) -> bytes:
        return data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :]

    return edit


HEAD = head_bytes(RUN)
STRIDE = GEOMETRY.stride


def swap_payloads(data: bytes, others: dict[str, bytes]) -> bytes:
    first, second = data[HEAD : HEAD + STRIDE], data[HEAD + STRIDE : HEAD + 2 * STRIDE]
    return data[:HEAD] + second + first + data[HEAD + 2 * STRIDE :]


def swap_blocks(data: bytes, others: dict[str, bytes]) -> bytes:
    """Whole blocks with their headers: everything fits, but the order."""
    at = 64
    swapped = data[at + HEADER_BYTES : at + 2 * HEADER_BYTES] + data[at : at + HEADER_BYTES]
    return swap_payloads(data[:at] + swapped + data[at + 2 * HEADER_BYTES :], others)


EDITS: dict[str, Edit] = {
    "payload, first byte": flip(HEAD),
    "payload, last byte of the last block": flip(HEAD + (RUN - 1) * STRIDE + 20_001),
    "payload, second rank": flip(HEAD + STRIDE + 15_000),
    "header of a block": flip(64 + HEADER_BYTES + 40),
    "checksum in a header": flip(64 + 2 * HEADER_BYTES + 130),
    "magic": flip(0),
    "namespace": flip(12),
    "shape": flip(50),
    "truncated payload": lambda data, others: data[: HEAD + 3 * STRIDE + 5],
    "truncated head": lambda data, others: data[:100],
    "empty": lambda data, others: b"",
    "zeros": lambda data, others: bytes(len(data)),
    "foreign bytes": lambda data, others: os.urandom(len(data)),
    "payloads swapped": swap_payloads,
    "blocks swapped": swap_blocks,
    "another chain's run": lambda data, others: others["chain"],
    "another namespace's run": lambda data, others: others["namespace"],
    "the chain's next run": lambda data, others: others["next"],
}


async def test_no_corrupt_object_is_ever_served(place: Place, tmp_path: Path) -> None:
    """C4, C14: whatever lies under the name, only sound blocks load; the object is removed.

    Real edits of real objects; each is found at the load, counted, and can be stored again.
    """
    keys, other = chain("victim", 2 * RUN), chain("other", 2 * RUN)
    async with AsyncExitStack() as stack:
        plain = replace(place, nixl=False)
        a = await stack.enter_async_context(node(plain, tmp_path))
        b = await stack.enter_async_context(node(place, tmp_path))
        foreign = await stack.enter_async_context(node(plain, tmp_path, bytes(32)))
        await a.store(keys)
        await a.store(other)
        await foreign.store(keys)

        def name(keys: Sequence[bytes], run: int, namespace: bytes = NAMESPACE) -> str:
            return f"{namespace.hex()}/{keys[(run + 1) * RUN - 1].hex()}"

        objects = a.tier.objects
        victim = name(keys, 0)
        good = await objects.read(victim, 5)
        others = {
            "chain": await objects.read(name(other, 0), 5) or b"",
            "namespace": await objects.read(name(keys, 0, bytes(32)), 5) or b"",
            "next": await objects.read(name(keys, 1), 5) or b"",
        }
        assert good is not None and all(len(data) == len(good) for data in others.values())
        for number, (what, edit) in enumerate(EDITS.items(), start=1):
            await objects.write(victim, edit(good, others), 5)
            loaded = await b.load(keys, range(RUN))
            assert any(loaded.errors), f"{what}: not found"
            for position, (error, header) in enumerate(
                zip(loaded.errors, loaded.headers, strict=True)
            ):
                assert (error is None) == (header is not None)
                if error is None:
                    assert b.has(keys[position], position), f"{what}: served"
                else:
                    assert error.startswith(("corrupt", "short")), f"{what}: {error}"
            assert await objects.size(victim, 5) is None, f"{what}: still there"
            assert b.tier.counters.corrupt >= number, f"{what}: not counted"
            assert b.tier.health.ok
            # Where it was, a sound one can be stored.
            stored = await b.space.store(b.fill(keys)[:RUN], 5)
            assert stored.errors == [None] * RUN
            again = await objects.read(victim, 5)
            assert again is not None and len(again) == len(good)
        assert (await a.load(keys, range(RUN))).errors == [None] * RUN


@without_nixl
async def test_blocks_that_continue_another_chain_are_refused(place: Place, tmp_path: Path) -> None:
    """C4: all is sound in itself, but it does not follow what was asked for."""
    keys = chain("parents", 2 * RUN)
    async with node(place, tmp_path) as a:
        first, *rest = a.fill(keys)[RUN:]
        wrong = replace(first, header=replace(first.header, parent=os.urandom(32)))
        assert (await a.space.store([wrong, *rest], 5)).errors == [None] * RUN
        error, *others = (await a.load(keys, range(RUN, 2 * RUN))).errors
        assert error is not None and error.startswith("corrupt") and others == [None] * (RUN - 1)


@without_nixl
async def test_corruption_of_one_block_costs_that_block(place: Place, tmp_path: Path) -> None:
    keys = chain("one", RUN)
    async with node(place, tmp_path) as a:
        await a.store(keys)
        name = f"{NAMESPACE.hex()}/{keys[-1].hex()}"
        data = await a.tier.objects.read(name, 5)
        assert data is not None
        await a.tier.objects.write(name, flip(HEAD + 2 * STRIDE + 7)(data, {}), 5)
        errors = (await a.load(keys, range(RUN))).errors
        assert [error is None for error in errors] == [True, True, False, True]


@without_nixl
async def test_runs_of_another_length_are_a_miss(place: Place, tmp_path: Path) -> None:
    """A node with another setting of run_blocks neither serves nor removes ours."""
    keys = chain("length", 2 * RUN)
    async with node(place, tmp_path) as a:
        await a.store(keys)
        a.space.run_blocks = RUN // 2
        loaded = await a.load(keys, [RUN - 2, RUN - 1])
        assert loaded.errors[0] is not None and loaded.errors[0].startswith("not found")
        a.space.run_blocks = RUN
        assert (await a.load(keys, range(RUN))).errors == [None] * RUN


@without_nixl
async def test_concurrent_stores_of_one_run(place: Place, tmp_path: Path) -> None:
    """Two nodes store the same run at once: one object, sound."""
    keys = chain("race", 2 * RUN)
    async with node(place, tmp_path) as a, node(place, tmp_path) as b, node(place, tmp_path) as c:
        results = await asyncio.gather(a.store(keys), b.store(keys))
        assert all(s.errors == [None] * RUN for stored in results for s in stored)
        assert await c.space.find(keys, 5) == 2 * RUN
        for start in (0, RUN):
            assert (await c.load(keys, range(start, start + RUN))).errors == [None] * RUN


@without_nixl
async def test_what_is_no_run_is_refused(place: Place, tmp_path: Path) -> None:
    keys, other = chain("no run", 2 * RUN), chain("mixed", 2 * RUN)
    async with node(place, tmp_path) as a:
        whole = a.fill(keys)
        mixed = [*whole[: RUN - 1], a.fill(other)[RUN - 1]]
        for run in (whole[: RUN - 1], whole[1 : RUN + 1], whole, mixed):
            stored = await a.space.store(run, 5)
            assert all(e is not None and e.startswith("refused") for e in stored.errors)
        assert await a.space.find(keys, 5) == 0
        assert a.tier.health.ok


async def test_says_what_moves_bytes(place: Place, tmp_path: Path) -> None:
    """H1: the name tells what is in use, and why nothing better is."""
    async with node(place, tmp_path) as a:
        if place.url.startswith("file"):
            assert a.tier.backend.startswith("directory, ")
        else:
            assert a.tier.backend == ("nixl-obj" if place.nixl else "obstore")
        assert a.tier.place.startswith(place.url)
