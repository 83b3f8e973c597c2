"""Injected corruptions, by the thousand, on every tier: all are found, none is served.

In the arena blocks are loaded by the engine's own copier, on disk and in remote storage by the
tiers' own loads. Of every round the sound blocks must still be served: a tier that refuses all
would find everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from services.common.arena import (
    HEADER_BYTES,
    NO_KEY,
    PAGE,
    Arena,
    Geometry,
    SlotHeader,
    SlotState,
    checksum,
)
from services.kvbm.tiers.disk import open_disk_tier
from services.kvbm.tiers.object import open_object_tier
from services.kvbm.tiers.port import Transfer
from services.kvbm.tiers.runs import head_bytes
from services.worker.connector.copier import Copier
from services.worker.connector.model import LoadItem, Slot
from tests.support.corrupt import KINDS, Corrupter, Damage, Record

SPACE = hashlib.sha256(b"namespace").digest()
LAYERS, PIECE, BLOCKS = 4, 50, 64
GEOMETRY = Geometry(32, LAYERS * PIECE, 1, "test")
TIMES = 10_000


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def content(number: int) -> bytes:
    return random.Random(number).randbytes(GEOMETRY.payload_bytes)


def header_of(number: int, parent: bytes = NO_KEY, position: int = 0) -> SlotHeader:
    return SlotHeader(
        SlotState.SEALED,
        5,
        key_of(number),
        parent,
        position,
        payload_bytes=GEOMETRY.payload_bytes,
        checksums=(checksum(content(number)),),
    )


def record_of(number: int) -> Record:
    return header_of(number).pack(SPACE), content(number)


def earlier() -> list[Record]:
    """What other blocks were in the same places before."""
    return [record_of(1000 + number) for number in range(BLOCKS)]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena.create(tmp_path / "a.arena", SPACE, GEOMETRY, BLOCKS)
    yield made
    made.close()


# -- host memory ----------------------------------------------------------------------------------


class Engine:
    """An engine's cache over an arena full of blocks, and whoever damages them."""

    def __init__(self, arena: Arena, verify: bool) -> None:
        self.arena = arena
        self.cache = torch.zeros(LAYERS, BLOCKS, PIECE, dtype=torch.uint8)
        self.copier = Copier(list(self.cache), arena, 0, verify)
        self.items = [
            LoadItem(n, Slot(n, 5), key_of(n), (checksum(content(n)),)) for n in range(BLOCKS)
        ]
        records = [record_of(number) for number in range(BLOCKS)]
        for number, record in enumerate(records):
            self.write(number, *record)
        self.corrupter = Corrupter(
            7, records, earlier(), SPACE, self.write, (*KINDS, Damage.GENERATION)
        )
        self.expected = [content(number) for number in range(BLOCKS)]

    def write(self, number: int, header: bytes, payload: bytes) -> None:
        at = PAGE + number * HEADER_BYTES
        self.arena._view[at : at + HEADER_BYTES] = header
        self.arena.payload(number)[:] = payload

    def served(self) -> set[int]:
        """Blocks that a load calls good."""
        self.cache.zero_()
        return {number for number, ok in enumerate(self.copier.load(self.items)) if ok}

    def wrong(self, served: set[int]) -> set[int]:
        """Those of them whose bytes in the cache aren't theirs."""
        whole = self.cache.transpose(0, 1).reshape(BLOCKS, -1).numpy()
        return {number for number in served if whole[number].tobytes() != self.expected[number]}


def test_ten_thousand_corruptions_in_host_memory(arena: Arena) -> None:
    """C4, C12, C14, I5: whatever befalls a slot, the engine gets its block's bytes or a miss."""
    engine = Engine(arena, verify=True)
    assert engine.served() == set(range(BLOCKS))
    while engine.corrupter.total < TIMES:
        damaged = engine.corrupter.hit(40)
        served = engine.served()
        assert served == set(range(BLOCKS)) - damaged
        assert not engine.wrong(served)
        engine.corrupter.heal()
    assert engine.served() == set(range(BLOCKS))
    assert min(engine.corrupter.counts.values()) >= TIMES // 9
    assert len(engine.corrupter.counts) == len(Damage)


def test_without_checks_wrong_bytes_are_served(arena: Arena) -> None:
    """The negative control: it is the checks that find them."""
    engine = Engine(arena, verify=False)
    damaged = engine.corrupter.hit(40)
    served = engine.served()
    assert served == set(range(BLOCKS))
    assert engine.wrong(served)
    assert engine.wrong(served) <= damaged


# -- disk and remote storage ----------------------------------------------------------------------


class Tier:
    """Blocks on a lower tier, and whoever damages them."""

    def __init__(
        self,
        arena: Arena,
        load: Callable[[], Awaitable[Sequence[str | None]]],
        write: Callable[[int, bytes, bytes], None],
        records: list[Record],
        run: int = 1,
    ) -> None:
        """run: blocks that are one object; a bad one may take the next with it."""
        self.arena = arena
        self.load = load
        self.run = run
        self.corrupter = Corrupter(11, records, earlier(), SPACE, write)

    async def served(self) -> set[int]:
        for number in range(BLOCKS):
            self.arena.payload(number)[:] = bytes(GEOMETRY.payload_bytes)
        errors = await self.load()
        served = {number for number, error in enumerate(errors) if error is None}
        for number in served:
            assert bytes(self.arena.payload(number)) == content(number), "wrong bytes were served"
        for error in errors:
            assert error is None or error.startswith("corrupt: "), error
        return served

    async def endure(self, times: int) -> None:
        """Damages, loads and heals, again and again."""
        everything = set(range(BLOCKS))
        assert await self.served() == everything
        while self.corrupter.total < times:
            damaged = self.corrupter.hit(40)
            served = await self.served()
            assert not served & damaged
            beside = {n + 1 for n in damaged if (n + 1) % self.run}
            assert served >= everything - damaged - beside
            self.corrupter.heal()
        assert await self.served() == everything
        assert len(self.corrupter.counts) == len(KINDS)


@asynccontextmanager
async def disk_blocks(folder: Path, arena: Arena) -> AsyncIterator[Tier]:
    async with open_disk_tier(folder, 64 << 20, 0, nixl=False, direct=False) as disk:
        space = await disk.open(SPACE, arena)
        transfers = []
        for number in range(BLOCKS):
            arena.payload(number)[:] = content(number)
            transfers.append(Transfer(number, header_of(number), number))
        assert (await space.store(transfers, 10)).errors == [None] * BLOCKS
        headers, payloads = (
            os.open(folder / SPACE.hex() / f"segment-0000.{kind}", os.O_RDWR)
            for kind in ("headers", "data")
        )

        async def load() -> Sequence[str | None]:
            return (await space.load(transfers, 10)).errors

        def write(number: int, header: bytes, payload: bytes) -> None:
            os.pwrite(headers, header, number * HEADER_BYTES)
            os.pwrite(payloads, payload, number * GEOMETRY.stride)

        try:
            yield Tier(arena, load, write, [record_of(number) for number in range(BLOCKS)])
        finally:
            os.close(headers)
            os.close(payloads)


async def test_ten_thousand_corruptions_on_disk(tmp_path: Path, arena: Arena) -> None:
    """C4, C5, C14: right length, wrong bytes, is a miss."""
    async with disk_blocks(tmp_path / "disk", arena) as tier:
        await tier.endure(TIMES)


RUN = 32


@asynccontextmanager
async def remote_blocks(folder: Path, arena: Arena) -> AsyncIterator[Tier]:
    """Objects as files, RUN blocks each."""
    headers = [header_of(n, key_of(n - 1) if n else NO_KEY, n) for n in range(BLOCKS)]
    transfers = [Transfer(n, headers[n]) for n in range(BLOCKS)]
    runs = [transfers[first : first + RUN] for first in range(0, BLOCKS, RUN)]
    paths = [folder / SPACE.hex() / run[-1].header.key.hex() for run in runs]
    head = head_bytes(RUN)
    opened = open_object_tier(
        f"file://{folder}",
        "",
        "",
        "",
        "",
        run_blocks=RUN,
        timeout_s=10,
        ttl_s=0,
        nixl=False,
        file_mover=None,
    )
    async with opened as tier:
        space = await tier.open(SPACE, arena)
        for number in range(BLOCKS):
            arena.payload(number)[:] = content(number)
        for run in runs:
            assert (await space.store(run, 10)).errors == [None] * RUN
        objects = [bytearray(path.read_bytes()) for path in paths]
        first = objects[0].index(headers[0].pack(SPACE))
        changed: set[int] = set()

        def write(number: int, header: bytes, payload: bytes) -> None:
            run, index = divmod(number, RUN)
            at = first + index * HEADER_BYTES
            objects[run][at : at + HEADER_BYTES] = header
            at = head + index * GEOMETRY.stride
            objects[run][at : at + len(payload)] = payload
            changed.add(run)

        async def load() -> Sequence[str | None]:
            for run in changed:
                # A bad object is removed when it is found.
                paths[run].parent.mkdir(exist_ok=True)
                paths[run].write_bytes(objects[run])
            changed.clear()
            done = await asyncio.gather(*(space.load(run, 10) for run in runs))
            return [error for each in done for error in each.errors]

        records = [(headers[n].pack(SPACE), content(n)) for n in range(BLOCKS)]
        yield Tier(arena, load, write, records, RUN)


async def test_ten_thousand_corruptions_in_remote_storage(tmp_path: Path, arena: Arena) -> None:
    """C4, C5, C14: the same, of objects that other nodes or their storage have damaged."""
    async with remote_blocks(tmp_path / "remote", arena) as tier:
        with capture_logs() as logs:
            await tier.endure(TIMES)
    assert any("corrupt" in line["event"] for line in logs)
