"""What every mover of files does: the plain one, NIXL's by both queues, and the fake."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.kvbm.movers.nixl import NixlMover
from services.kvbm.movers.plain import PlainMover
from services.kvbm.movers.port import FileMover, FilePiece, Moved
from services.kvbm.movers.select import Probe, open_file_mover
from tests.fakes.movers import FakeMover, Fault, FaultyMover
from tests.support.faultfs import can_mount, fault_fs
from tests.support.pages import PAGE, Pages
from tests.support.polling import until


def _nixl(use: str) -> NixlMover:
    parameters = {use: "true", "ios_pool_size": "1024"}
    return NixlMover(f"posix({use})", "POSIX", parameters, direct=True)


MOVERS: dict[str, Callable[[], FileMover]] = {
    "plain-direct": lambda: PlainMover(direct=True),
    "plain-buffered": lambda: PlainMover(direct=False),
    "nixl-uring": lambda: _nixl("use_uring"),
    "nixl-aio": lambda: _nixl("use_aio"),
    "fake": FakeMover,
    "faulty-without-faults": lambda: FaultyMover(FakeMover()),
}
REAL = [name for name in MOVERS if name.startswith(("plain", "nixl"))]
PIECES = 40


@pytest.fixture(params=MOVERS)
async def mover(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FileMover]:
    mover = MOVERS[request.param]()
    if request.param == "nixl-uring" and await Probe(tmp_path).check(mover):
        pytest.skip("no io_uring here")
    yield mover
    await mover.close()


@pytest.fixture
async def pages(mover: FileMover) -> AsyncIterator[Pages]:
    pages = Pages(PIECES * PAGE)
    await mover.register(pages.memory)
    yield pages
    await mover.forget(pages.memory)


def opened(path: Path, mover: FileMover) -> int:
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if mover.direct else 0)
    return os.open(path, flags)


@pytest.fixture
async def fd(mover: FileMover, tmp_path: Path) -> AsyncIterator[int]:
    fd = opened(tmp_path / "file", mover)
    os.posix_fallocate(fd, 0, PIECES * PAGE)
    yield fd
    await mover.forget_file(fd)
    os.close(fd)


def scattered(pages: Pages, fd: int, count: int = PIECES) -> list[FilePiece]:
    """Pieces whose order in memory is the reverse of their order in the file."""
    return [
        FilePiece(pages.part(index * PAGE, PAGE), fd, (count - 1 - index) * PAGE)
        for index in range(count)
    ]


async def test_what_was_written_is_read_back(mover: FileMover, pages: Pages, fd: int) -> None:
    written = pages.fill()
    assert await mover.write(scattered(pages, fd), 10) == Moved([None] * PIECES)
    pages.clear()
    assert await mover.read(scattered(pages, fd), 10) == Moved([None] * PIECES)
    assert pages.bytes[:] == written
    # Where it belongs: the first piece of memory is the last of the file.
    assert _content(Path(f"/proc/self/fd/{fd}"))[-PAGE:] == written[:PAGE]


async def test_no_pieces_are_done_at_once(mover: FileMover) -> None:
    assert (await mover.read([], 1)).ok
    assert (await mover.write([], 1)).ok


async def test_more_pieces_than_any_queue_holds(mover: FileMover, pages: Pages, fd: int) -> None:
    written = pages.fill()
    pieces = scattered(pages, fd) * 50
    assert (await mover.write(pieces, 20)).errors == [None] * len(pieces)
    pages.clear()
    assert (await mover.read(pieces, 20)).ok
    assert pages.bytes[:] == written


async def test_batches_side_by_side(mover: FileMover, pages: Pages, fd: int) -> None:
    written = pages.fill()
    pieces = scattered(pages, fd)
    parts = [pieces[start::8] for start in range(8)]
    moved = await asyncio.gather(*(mover.write(part, 10) for part in parts))
    assert all(item.ok for item in moved)
    pages.clear()
    moved = await asyncio.gather(*(mover.read(part, 10) for part in parts))
    assert all(item.ok for item in moved)
    assert pages.bytes[:] == written


async def test_only_the_pieces_that_failed_are_said_to_have(
    mover: FileMover, pages: Pages, fd: int
) -> None:
    """C1: a load is done only when every byte of it came."""
    written = pages.fill()
    assert (await mover.write(scattered(pages, fd), 10)).ok
    pages.clear()
    pieces = scattered(pages, fd)
    # The file ends in the middle of this one.
    bad = FilePiece(pieces[3].memory, fd, PIECES * PAGE)
    moved = await mover.read([*pieces[:3], bad, *pieces[4:]], 10)
    assert moved.errors[3] is not None
    assert moved.errors[3].startswith("short: 0 of 4096")
    assert [error for error in moved.errors if error] == [moved.errors[3]]
    assert moved.fence is None
    assert pages.bytes[: 3 * PAGE] == written[: 3 * PAGE]
    assert pages.bytes[4 * PAGE :] == written[4 * PAGE :]


async def test_a_file_that_is_closed_is_an_error(
    mover: FileMover, pages: Pages, tmp_path: Path
) -> None:
    fd = opened(tmp_path / "closed", mover)
    os.close(fd)
    moved = await mover.write(scattered(pages, fd)[:2], 10)
    assert [str(error)[:5] for error in moved.errors] == ["EBADF"] * 2
    assert moved.fence is None


async def test_a_file_that_may_only_be_read_is_an_error_and_others_go_on(
    mover: FileMover, pages: Pages, fd: int, tmp_path: Path
) -> None:
    path = tmp_path / "readable"
    path.write_bytes(bytes(PAGE))
    readable = os.open(path, os.O_RDONLY | (os.O_DIRECT if mover.direct else 0))
    try:
        pieces = scattered(pages, fd)[:4]
        pieces[1] = FilePiece(pieces[1].memory, readable, 0)
        moved = await mover.write(pieces, 10)
    finally:
        await mover.forget_file(readable)
        os.close(readable)
    assert str(moved.errors[1]).startswith("EBADF")
    assert [moved.errors[i] for i in (0, 2, 3)] == [None] * 3
    assert (await mover.write(scattered(pages, fd), 10)).ok


async def test_a_descriptor_that_means_another_file_now(
    mover: FileMover, pages: Pages, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        written = pages.fill()
        fd = opened(tmp_path / name, mover)
        assert (await mover.write(scattered(pages, fd), 10)).ok
        await mover.forget_file(fd)
        os.close(fd)
        assert _content(tmp_path / name)[:PAGE] == written[-PAGE:]


async def test_nothing_is_moved_after_close(mover: FileMover, pages: Pages, fd: int) -> None:
    await mover.close()
    moved = await mover.write(scattered(pages, fd)[:1], 1)
    assert str(moved.errors[0]).startswith("refused")


# ---- on a file system that misbehaves

needs_mount = pytest.mark.skipif(not can_mount(), reason="may not mount")


@needs_mount
@pytest.mark.parametrize("name", REAL)
async def test_a_hanging_disk_ends_the_wait_and_not_the_ownership(
    name: str, tmp_path: Path
) -> None:
    """C14: at the deadline the caller knows; the memory is its own again when the fence opens."""
    mover, pages = MOVERS[name](), Pages(PIECES * PAGE)
    await mover.register(pages.memory)
    async with fault_fs(tmp_path) as fs:
        fd = await asyncio.to_thread(opened, fs.folder / "file", mover)
        other = opened(tmp_path / "other", mover)
        written = pages.fill()
        assert (await mover.write(scattered(pages, fd), 10)).ok
        pages.clear()
        await fs.tell("hang read")
        start = time.monotonic()
        moved = await mover.read(scattered(pages, fd)[:4], 0.3)
        assert time.monotonic() - start < 2
        assert all(str(error).startswith("timeout") for error in moved.errors)
        assert moved.fence is not None
        assert mover.stuck > 0
        # Others are served meanwhile, by other threads.
        assert (await mover.write(scattered(pages, other)[4:], 10)).ok
        fence = asyncio.ensure_future(_passed(moved.fence))
        await asyncio.wait([fence], timeout=0.2)
        assert not fence.done()
        assert pages.bytes[: 4 * PAGE] == bytes(4 * PAGE)
        await fs.tell("go")
        await asyncio.wait_for(fence, 10)
        # All that was to come has come.
        assert pages.bytes[: 4 * PAGE] == written[: 4 * PAGE]
        await until(_async(lambda: mover.stuck), lambda stuck: stuck == 0, within_s=5)
        assert (await mover.read(scattered(pages, fd), 10)).ok
        await mover.close()
        await asyncio.to_thread(os.close, fd)
        os.close(other)


@needs_mount
@pytest.mark.parametrize("name", REAL)
async def test_hangs_are_bounded_and_end(name: str, tmp_path: Path) -> None:
    """C14: when every thread hangs, more work is refused at once; later all is as before."""
    mover, pages = MOVERS[name](), Pages(PIECES * PAGE)
    await mover.register(pages.memory)
    async with fault_fs(tmp_path) as fs:
        fd = await asyncio.to_thread(opened, fs.folder / "file", mover)
        assert (await mover.write(scattered(pages, fd), 10)).ok
        await fs.tell("hang read")
        moved = []
        for _ in range(40):
            moved.append(await mover.read(scattered(pages, fd)[:1], 0.05))
            if str(moved[-1].errors[0]).startswith("refused"):
                break
        assert "hang" in str(moved[-1].errors[0])
        assert moved[-1].fence is None
        await fs.tell("go")
        for item in moved:
            if item.fence is not None:
                await asyncio.wait_for(_passed(item.fence), 10)
        await until(_async(lambda: mover.stuck), lambda stuck: stuck == 0, within_s=5)
        assert (await mover.read(scattered(pages, fd), 10)).ok
        await mover.close()
        await asyncio.to_thread(os.close, fd)


@needs_mount
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("fault", ["EIO", "ENOSPC"])
async def test_errors_of_the_disk_are_named(name: str, fault: str, tmp_path: Path) -> None:
    mover, pages = MOVERS[name](), Pages(PIECES * PAGE)
    await mover.register(pages.memory)
    async with fault_fs(tmp_path) as fs:
        fd = await asyncio.to_thread(opened, fs.folder / "file", mover)
        await fs.tell(f"{fault.lower()} write")
        moved = await mover.write(scattered(pages, fd)[:3], 10)
        assert [str(error).split(":")[0] for error in moved.errors] == [fault] * 3
        assert moved.fence is None
        await fs.tell("go")
        assert (await mover.write(scattered(pages, fd), 10)).ok
        await mover.close()
        await asyncio.to_thread(os.close, fd)


# ---- the choice at start


async def test_the_best_that_works_is_picked(tmp_path: Path) -> None:
    mover = await open_file_mover(nixl=True, direct=True, gds=False, folder=tmp_path)
    assert mover.name in ("nixl-posix(uring,direct)",) or "refused" in mover.name
    assert os.listdir(tmp_path) == []
    await mover.close()
    mover = await open_file_mover(nixl=False, direct=False, gds=False, folder=tmp_path)
    assert mover.name == "plain(buffered)"
    await mover.close()


async def test_gds_is_off_where_it_does_not_work(tmp_path: Path) -> None:
    """H1: a back-end that is wished for and missing is named, and the next one runs."""
    mover = await open_file_mover(nixl=True, direct=True, gds=True, folder=tmp_path)
    if mover.name.startswith("nixl-gds"):
        pytest.skip("GDS works here")
    assert "GDS refused" in mover.name
    assert mover.name.startswith("nixl-posix")
    await mover.close()


@needs_mount
async def test_o_direct_refused(tmp_path: Path) -> None:
    """D4: EINVAL for O_DIRECT means buffered I/O, and the name says why."""
    async with fault_fs(tmp_path) as fs:
        await fs.tell("refuse direct")
        mover = await open_file_mover(nixl=True, direct=True, gds=False, folder=fs.folder)
        assert mover.name.startswith("plain(buffered): ")
        assert "O_DIRECT refused (EINVAL" in mover.name
        assert not mover.direct
        await mover.close()


@needs_mount
async def test_a_disk_that_does_not_work_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1: no silent hang at start."""
    monkeypatch.setattr("services.kvbm.movers.select._START_S", 0.5)
    async with fault_fs(tmp_path) as fs:
        await fs.tell("eio all")
        with pytest.raises(OSError, match=r"can't be used.*EIO"):
            await open_file_mover(nixl=True, direct=True, gds=False, folder=fs.folder)
        await fs.tell("hang all")
        async with asyncio.timeout(20):
            with pytest.raises(OSError, match=r"can't be used.*timeout"):
                await open_file_mover(nixl=False, direct=True, gds=False, folder=fs.folder)
        await fs.tell("go")


# ---- the fake's faults are what they say


async def test_the_faults_of_the_fake(tmp_path: Path) -> None:
    mover, pages = FaultyMover(FakeMover(), seed=1), Pages(PIECES * PAGE)
    fd = opened(tmp_path / "file", mover)
    written = pages.fill()
    assert (await mover.write(scattered(pages, fd), 1)).ok
    pages.clear()
    mover.next = [Fault.EIO, Fault.SHORT, Fault.SILENT, Fault.FLIPPED, Fault.HANG, None]
    moved = await mover.read(scattered(pages, fd)[:6], 1)
    kinds = [error and error.split(":")[0] for error in moved.errors]
    assert kinds == ["EIO", "short", None, None, "timeout", None]
    assert [pages.bytes[i * PAGE : (i + 1) * PAGE] == written[i * PAGE : (i + 1) * PAGE]
            for i in range(6)] == [False] * 5 + [True]  # fmt: skip
    assert moved.fence is not None
    await mover.release()
    await moved.fence
    assert pages.bytes[4 * PAGE : 5 * PAGE] == written[4 * PAGE : 5 * PAGE]
    os.close(fd)


def _content(path: Path) -> bytes:
    return path.read_bytes()


async def _passed(fence: Awaitable[None]) -> None:
    await fence


def _async(read: Callable[[], int]) -> Callable[[], Awaitable[int]]:
    async def probe() -> int:
        return read()

    return probe
