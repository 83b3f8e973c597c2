"""One suite for all stores of objects: S3 by NIXL and by obstore, a folder, and the fake."""

import asyncio
import ctypes
import mmap
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.kvbm.movers.directory import DirectoryObjects
from services.kvbm.movers.objects import AWAY, MISSING, SKIP, Objects, StoreError, view
from services.kvbm.movers.plain import PlainMover
from services.kvbm.movers.port import FileMover, Memory, ObjectPiece
from services.kvbm.movers.s3 import S3Objects, S3Place
from tests.fakes.objects import MemoryObjects
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Link, shared_server

T = 10.0
KINDS = ["nixl", "obstore", "directory", "memory"]
requests_only = pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
"""For what NIXL has no part in; its helper takes a second to start."""


class Pages:
    """Memory of a test, handed out part by part."""

    def __init__(self, length: int = 1 << 20) -> None:
        self._map = mmap.mmap(-1, length)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._used = 0
        self.all = Memory(self._address, length)

    def part(self, data: bytes | int) -> Memory:
        """A page-aligned part with these bytes, or so many zeros."""
        length = data if isinstance(data, int) else len(data)
        memory = Memory(self._address + self._used, length)
        self._used += -(-length // 4096) * 4096
        if isinstance(data, bytes):
            view(memory)[:] = data
        return memory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Stall:
    """Makes a store silent for a while, each in the way that is true for it."""

    def __init__(self, begin: Callable[[str], None], end: Callable[[], None]) -> None:
        self.begin = begin
        self.end = end


@pytest.fixture
async def store(kind: str, tmp_path: Path) -> AsyncIterator[tuple[Objects, Stall]]:
    """An open store of each kind, and what makes it silent."""
    if kind == "memory":
        memory = MemoryObjects()
        yield memory, Stall(lambda key: memory.flowing.clear(), memory.flowing.set)
    elif kind == "directory":
        folder = tmp_path / "objects"
        fifo: list[Path] = []

        async def mover() -> FileMover:
            return PlainMover(direct=False)

        def begin(key: str) -> None:
            # Opening a pipe for reading hangs in the kernel, as files on a dead server do.
            path = folder / key
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            os.mkfifo(path)
            fifo.append(path)

        def end() -> None:
            for path in fifo:
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
                path.unlink()

        directory = DirectoryObjects(folder, mover)
        await directory.open(T)
        yield directory, Stall(begin, end)
        await directory.close()
    else:
        with Link(shared_server().port) as link:
            place = S3Place(
                BUCKET,
                secrets.token_hex(6),
                link.endpoint,
                access_key=ACCESS_KEY,
                secret_key=SECRET_KEY,
            )
            s3 = S3Objects(place, nixl=kind == "nixl", timeout_s=T)
            await s3.open(T)
            assert s3.name == {"nixl": "nixl-obj", "obstore": "obstore"}[kind]
            yield s3, Stall(lambda key: link.stall(), link.flow)
            await s3.close()


@pytest.fixture
def objects(store: tuple[Objects, Stall]) -> Objects:
    return store[0]


def pieces(pages: Pages, key: str, *data: bytes | int) -> ObjectPiece:
    return ObjectPiece([pages.part(d) for d in data], key)


async def test_brings_back_what_was_put_part_by_part(objects: Objects) -> None:
    pages = Pages()
    await objects.register(pages.all)
    data = [os.urandom(n) for n in (4096, 20_000, 4096, 1)]
    put = await objects.put([pieces(pages, "a/one", *data), pieces(pages, "a/two", data[1])], T)
    assert put.ok and put.fence is None
    back = pieces(pages, "a/one", *(len(d) for d in data))
    two = pieces(pages, "a/two", len(data[1]))
    got = await objects.get([back, two], T)
    assert got.ok and got.fence is None
    assert [bytes(view(part)) for part in back.parts] == data
    assert bytes(view(two.parts[0])) == data[1]
    await objects.forget(pages.all)


async def test_reads_the_leading_part_and_skips_what_nobody_wants(objects: Objects) -> None:
    pages = Pages()
    await objects.register(pages.all)
    data = [os.urandom(4096) for _ in range(4)]
    assert (await objects.put([pieces(pages, "a/one", *data)], T)).ok
    first, third = pages.part(4096), pages.part(4096)
    piece = ObjectPiece([first, Memory(SKIP, 4096), third], "a/one")
    assert (await objects.get([piece], T)).ok
    assert [bytes(view(first)), bytes(view(third))] == [data[0], data[2]]


async def test_tells_each_piece_apart(objects: Objects) -> None:
    """What is missing, or too short, fails alone."""
    pages = Pages()
    await objects.register(pages.all)
    data = os.urandom(8192)
    await objects.write("a/short", data[:100], T)
    await objects.write("a/there", data, T)
    there = pieces(pages, "a/there", 8192)
    got = await objects.get(
        [pieces(pages, "a/short", 8192), there, pieces(pages, "a/missing", 8192)], T
    )
    short, fine, missing = got.errors
    assert short is not None and short.startswith("short")
    assert fine is None and bytes(view(there.parts[0])) == data
    assert missing is not None and missing.startswith(MISSING)


@requests_only
async def test_put_replaces(objects: Objects) -> None:
    pages = Pages()
    for data in (b"1" * 5000, b"2" * 3000):
        assert (await objects.put([pieces(pages, "a/one", data)], T)).ok
        assert await objects.read("a/one", T) == data


@requests_only
async def test_small_requests(objects: Objects) -> None:
    assert await objects.size("a/one", T) is None
    assert await objects.read("a/one", T) is None
    assert await objects.write("a/one", b"first", T, absent=True)
    assert not await objects.write("a/one", b"second", T, absent=True)
    assert await objects.read("a/one", T) == b"first"
    entry = await objects.size("a/one", T)
    assert entry is not None and (entry.key, entry.size) == ("a/one", 5)
    assert abs(entry.modified_s - time.time()) < 60
    assert await objects.write("a/one", b"changed!", T)
    assert await objects.read("a/one", T) == b"changed!"


@requests_only
async def test_lists_and_deletes(objects: Objects) -> None:
    for key in ("a/one", "a/two", "b/one"):
        await objects.write(key, key.encode(), T)
    assert set(await objects.folders(T)) >= {"a", "b"}
    found = [entry async for batch in objects.entries("a", T) for entry in batch]
    assert sorted((e.key, e.size) for e in found) == [("a/one", 5), ("a/two", 5)]
    await objects.delete(["a/one", "a/two", "a/never"], T)
    assert [e async for batch in objects.entries("a", T) for e in batch] == []
    assert await objects.read("b/one", T) == b"b/one"


async def test_a_deadline_ends_the_wait_and_the_writes(
    store: tuple[Objects, Stall], kind: str
) -> None:
    """L5, C14: a read that hangs fails in time, and writes nothing when it is back."""
    objects, stall = store
    pages = Pages()
    await objects.register(pages.all)
    await objects.write("a/one", os.urandom(300_000), T)
    stall.begin("a/one")
    began = time.monotonic()
    piece = pieces(pages, "a/one", 300_000)
    got = await objects.get([piece], 0.5)
    took = time.monotonic() - began
    assert 0.4 < took < 3, took
    assert got.errors[0] is not None and got.errors[0].startswith((AWAY, "timeout"))
    fence = got.fence
    view(piece.parts[0])[:] = b"\xee" * 300_000
    stall.end()
    if fence is not None:
        await asyncio.wait_for(_await(fence), T)
    await asyncio.sleep(0.2)
    assert bytes(view(piece.parts[0])) == b"\xee" * 300_000


async def _await(fence: Awaitable[None]) -> None:
    await fence


@requests_only
async def test_a_request_that_hangs_says_so(store: tuple[Objects, Stall]) -> None:
    objects, stall = store
    await objects.write("a/one", b"here", T)
    stall.begin("a/one")
    with pytest.raises(StoreError) as caught:
        await objects.read("a/one", 0.3)
    assert caught.value.away
    stall.end()
    if not isinstance(objects, DirectoryObjects):
        assert await objects.read("a/one", T) == b"here"


async def test_many_at_once(objects: Objects) -> None:
    """More than there are lanes, buffers or threads: they wait for each other and all end well."""
    pages = Pages(4 << 20)
    await objects.register(pages.all)
    data = {f"a/{n}": os.urandom(40_000 + n) for n in range(24)}

    async def round_trip(key: str) -> bool:
        put = await objects.put([pieces(pages, key, data[key])], T)
        back = pieces(pages, key, len(data[key]))
        got = await objects.get([back], T)
        return put.ok and got.ok and bytes(view(back.parts[0])) == data[key]

    assert all(await asyncio.gather(*(round_trip(key) for key in data)))


async def test_nothing_appears_under_the_name_before_it_is_whole(tmp_path: Path) -> None:
    """C5: a folder's file is renamed into place; one that failed half-way leaves no name."""

    class Breaks(PlainMover):
        async def write(self, pieces: Sequence[Any], timeout_s: float) -> Any:
            await super().write(pieces[:1], timeout_s)
            return type(await super().read([], 1))(["EIO: broken"] * len(pieces))

    async def mover() -> FileMover:
        return Breaks(direct=False)

    objects = DirectoryObjects(tmp_path, mover)
    await objects.open(T)
    pages = Pages()
    put = await objects.put([pieces(pages, "a/one", b"1" * 4096, b"2" * 4096)], T)
    assert put.errors == ["EIO: broken"]
    assert await objects.size("a/one", T) is None
    assert list((tmp_path / "a").iterdir()) == []
    await objects.close()
