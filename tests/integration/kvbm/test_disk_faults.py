"""The local disk when it fails, hangs, is full or gone: errors, never exceptions or wrong bytes."""

import asyncio
import os
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.common.arena import HEADER_BYTES, SlotHeader, SlotState
from services.kvbm.tiers.disk import LocalDisk
from services.kvbm.tiers.port import Transferred
from services.kvbm.tiers.space import LocalSpace
from tests.fakes.movers import Fault, FaultyMover
from tests.support.disks import GEOMETRY, NAMESPACE, Blocks, disk_tier, key_of, sealed
from tests.support.faultfs import FaultFs, can_mount, fault_fs
from tests.support.polling import until

needs_mount = pytest.mark.skipif(not can_mount(), reason="may not mount")


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    blocks = Blocks(tmp_path)
    yield blocks
    blocks.arena.close()


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[LocalDisk]:
    async with disk_tier(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
async def fs(tmp_path: Path) -> AsyncIterator[FaultFs]:
    folder = tmp_path / "fs"
    folder.mkdir()
    async with fault_fs(folder) as fs:
        yield fs


def kinds(moved: Transferred) -> list[str | None]:
    return [error and error.split(":")[0] for error in moved.errors]


async def passed(fence: Awaitable[None] | None) -> None:
    assert fence is not None
    async with asyncio.timeout(10):
        await fence


def faulty(disk: LocalDisk, seed: int = 0) -> FaultyMover:
    mover = FaultyMover(disk.mover, seed=seed, faults=tuple(Fault))
    disk.mover = mover
    return mover


async def stored(space: LocalSpace, blocks: Blocks, numbers: range, first: int = 0) -> Transferred:
    return await space.store(blocks.filled(numbers, range(first, first + len(numbers))), 10)


# ---- single errors


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC, Fault.SHORT])
async def test_a_failed_store_is_visible_to_nobody(
    tmp_path: Path, blocks: Blocks, fault: Fault
) -> None:
    """C5: neither now nor after a restart; what the slot held before is gone as well."""
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await stored(space, blocks, range(4))
        faulty(disk).next = [None, fault, None, None]
        new = blocks.filled(range(100, 104), range(4))
        moved = await space.store(new, 10)
        assert kinds(moved) == [None, fault.name if fault != Fault.SHORT else "short", None, None]
        assert moved.fence is None
        blocks.cleared(new)
        assert kinds(await space.load(new, 10)) == [None, "corrupt", None, None]
        raw = os.pread(space.files.segments[0].headers, HEADER_BYTES, HEADER_BYTES)
        assert SlotHeader.unpack(raw, NAMESPACE).state is not SlotState.SEALED
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        found = {slot: header.key for slot, header in sealed(space).items()}
        assert found == {slot: key_of(100 + slot) for slot in (0, 2, 3)}


async def test_a_seal_that_failed_and_landed_is_taken_back(
    tmp_path: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: an error says nothing about what is on disk, so the slot is erased after it."""
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await stored(space, blocks, range(2))
        put = space._put

        def lying(headers: Sequence[tuple[int, SlotHeader]]) -> list[str | None]:
            errors = put(headers)
            sealed = headers[0][1].state is SlotState.SEALED
            return ["EIO: so it says"] * len(errors) if sealed else errors

        monkeypatch.setattr(space, "_put", lying)
        assert kinds(await stored(space, blocks, range(50, 52))) == ["EIO"] * 2
    async with disk_tier(tmp_path / "disk") as disk:
        assert sealed(await disk.open(NAMESPACE, blocks.arena)) == {}


async def test_a_degraded_disk_loads_and_recovers(disk: LocalDisk, blocks: Blocks) -> None:
    space = await disk.open(NAMESPACE, blocks.arena)
    good = blocks.filled(range(4), range(4))
    await space.store(good, 10)
    mover = faulty(disk)
    mover.next = [Fault.ENOSPC]
    await stored(space, blocks, range(9, 10), 4)
    assert not disk.health.ok
    assert disk.health.why.startswith("ENOSPC")
    assert kinds(await stored(space, blocks, range(9, 10), 4)) == ["refused"]
    assert await space.grow() == 0
    assert kinds(await space.load(good, 10)) == [None] * 4
    assert (await disk.probe()).ok
    assert kinds(await stored(space, blocks, range(9, 10), 4)) == [None]
    assert disk.counters.degraded == 1


async def test_loads_fail_block_by_block(disk: LocalDisk, blocks: Blocks) -> None:
    """C1: no block counts as loaded unless every byte of it came, and fits."""
    space = await disk.open(NAMESPACE, blocks.arena)
    transfers = blocks.filled(range(6), range(6))
    await space.store(transfers, 10)
    blocks.cleared(transfers)
    faulty(disk).next = [None, Fault.EIO, Fault.SILENT, Fault.SHORT, Fault.HANG, None]
    moved = await space.load(transfers, 0.5)
    assert kinds(moved) == [None, "EIO", "corrupt", "corrupt", "timeout", None]
    assert moved.fence is not None
    assert disk.counters.corrupt_blocks == 2
    assert disk.counters.failed_loads == 2
    assert disk.counters.timeouts == 1


async def test_a_hanging_store_keeps_its_slot_until_it_is_over(
    disk: LocalDisk, blocks: Blocks
) -> None:
    """C14: a late write never meets the slot's next block."""
    space = await disk.open(NAMESPACE, blocks.arena)
    mover = faulty(disk)
    mover.next = [Fault.HANG, None]
    moved = await space.store(blocks.filled([1, 2], [0, 1]), 0.2)
    assert kinds(moved) == ["timeout", None]
    assert (await disk.probe()).ok
    assert kinds(await space.store(blocks.filled([3], [0]), 1)) == ["refused"]
    await mover.release()
    await passed(moved.fence)

    async def again() -> Transferred:
        return await space.store(blocks.filled([3], [0]), 1)

    await until(again, lambda moved: moved.errors == [None], within_s=5)
    blocks.cleared(later := blocks.filled([3], [0]))
    assert kinds(await space.load(later, 1)) == [None]
    assert blocks.holds(later[0])


async def test_a_disk_that_crawls_is_degraded(
    disk: LocalDisk, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = await disk.open(NAMESPACE, blocks.arena)
    monkeypatch.setattr("services.kvbm.tiers.disk._STALL_S", 0.0)
    monkeypatch.setattr("services.kvbm.tiers.disk._CRAWL_BYTES_S", 1e12)
    assert kinds(await stored(space, blocks, range(4))) == [None] * 4
    assert "a batch of 80 KiB took" in disk.health.why


async def test_what_can_not_be_erased_is_later(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await stored(space, blocks, range(4))
        path = space.files.segments[0].path
        moved = path.with_suffix(".away")
        path.rename(moved)
        await space.erase([1, 2])
        assert kinds(await stored(space, blocks, range(9, 10), 9)) == ["refused"]
        moved.rename(path)
        assert (await disk.probe()).ok
    async with disk_tier(tmp_path / "disk") as disk:
        assert sorted(sealed(await disk.open(NAMESPACE, blocks.arena))) == [0, 3]


# ---- everything at once


@pytest.mark.parametrize("seed", range(6))
async def test_faults_by_chance_never_give_wrong_bytes(
    tmp_path: Path, blocks: Blocks, seed: int
) -> None:
    """C4, C5, C14, R1: a model of what each slot may hold, over all faults and restarts."""
    chance = random.Random(seed)
    held: dict[int, int] = {}
    """Slot -> number of the block that was stored there without an error, and not erased."""
    spoilt: set[int] = set()
    """Slots whose bytes a silent fault may have changed."""
    number, checked = 0, 0
    for _ in range(4):
        async with disk_tier(tmp_path / "disk") as disk:
            space = await disk.open(NAMESPACE, blocks.arena)
            found = {slot: header.key for slot, header in sealed(space).items()}
            assert found == {slot: key_of(number) for slot, number in held.items()}
            mover = faulty(disk, chance.randrange(1 << 30))
            for _ in range(25):
                mover.rate = chance.choice([0.0, 0.0, 0.3])
                slots = chance.sample(range(24), chance.randrange(1, 9))
                if chance.random() < 0.5:
                    numbers = range(number, number + len(slots))
                    number += len(slots)
                    before = len(mover.injected)
                    moved = await space.store(blocks.filled(numbers, slots), 2)
                    silent = any(
                        fault in (Fault.SILENT, Fault.FLIPPED)
                        for _, fault in mover.injected[before:]
                    )
                    for slot, error, new in zip(slots, moved.errors, numbers, strict=True):
                        if error and error.startswith("refused"):
                            continue
                        held.pop(slot, None)
                        spoilt.discard(slot)
                        if error is None:
                            held[slot] = new
                            if silent:
                                spoilt.add(slot)
                elif chance.random() < 0.8:
                    wanted = [slot for slot in slots if slot in held]
                    transfers = blocks.filled([held[slot] for slot in wanted], wanted)
                    blocks.cleared(transfers)
                    moved = await space.load(transfers, 2)
                    for transfer, error in zip(transfers, moved.errors, strict=True):
                        if error is None:
                            assert blocks.holds(transfer)
                            checked += 1
                        elif mover.rate == 0.0:
                            assert transfer.slot in spoilt
                            assert error.startswith("corrupt")
                else:
                    await space.erase(slots)
                    moved = Transferred(())
                    for slot in slots:
                        held.pop(slot, None)
                if moved.fence is not None:
                    await mover.release()
                    await passed(moved.fence)
                mover.rate = 0.0
                if not disk.health.ok:
                    assert (await disk.probe()).ok
    assert checked > 20


# ---- files that vanish


@pytest.mark.parametrize("what", ["folder", "namespace", "headers", "data"])
async def test_files_deleted_under_it(tmp_path: Path, blocks: Blocks, what: str) -> None:
    """Stores stop, the probe makes the files anew, and tells whose blocks are lost."""
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        transfers = blocks.filled(range(4), range(4))
        await space.store(transfers, 10)
        segment = space.files.segments[0]
        if what == "folder":
            shutil.rmtree(tmp_path / "disk")
        elif what == "namespace":
            shutil.rmtree(space.files.path)
        else:
            segment.path.with_suffix(f".{what}").unlink()
        assert kinds(await stored(space, blocks, range(9, 10), 9)) == ["ENOENT"]
        assert not disk.health.ok
        # The open files still have them.
        assert kinds(await space.load(transfers, 10)) == [None] * 4
        assert (await disk.probe()).ok
        assert space.take_lost() == set(range(space.slots))
        assert space.take_lost() == set()
        assert kinds(await space.load(transfers, 10)) == ["corrupt"] * 4
        again = blocks.filled(range(4), range(4))
        assert kinds(await space.store(again, 10)) == [None] * 4
        assert kinds(await space.load(again, 10)) == [None] * 4
    async with disk_tier(tmp_path / "disk") as disk:
        assert len(sealed(await disk.open(NAMESPACE, blocks.arena))) == 4


async def test_a_folder_that_another_daemon_took_meanwhile(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        shutil.rmtree(tmp_path / "disk")
        async with disk_tier(tmp_path / "disk"):
            assert kinds(await stored(space, blocks, range(1))) == ["ENOENT"]
            health = await disk.probe()
            assert "another daemon" in health.why
        assert (await disk.probe()).ok
        assert kinds(await stored(space, blocks, range(1))) == [None]


# ---- bytes changed behind its back


async def test_corruptions_of_all_kinds_are_found(tmp_path: Path, blocks: Blocks) -> None:
    """C4: 3,000 injections into payloads and headers: found, none served, all counted."""
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        transfers = blocks.filled(range(60), range(60))
        await space.store(transfers, 10)
        segment = space.files.segments[0]
        data = segment.path.with_suffix(".data").read_bytes()
        headers = segment.path.read_bytes()
        fd = os.open(segment.path.with_suffix(".data"), os.O_RDWR)
        chance = random.Random(1)
        injected = 0
        for _ in range(100):
            chosen = chance.sample(range(60), 30)
            for slot in chosen:
                chance.choice(INJECTIONS)(slot, fd, segment.headers, data, headers, chance)
            injected += len(chosen)
            blocks.cleared(transfers)
            moved = await space.load(transfers, 10)
            bad = {slot for slot, error in enumerate(moved.errors) if error}
            assert bad == set(chosen)
            assert all(str(moved.errors[slot]).startswith("corrupt") for slot in chosen)
            assert all(blocks.holds(transfers[slot]) for slot in set(range(60)) - bad)
            os.pwrite(fd, data[: 60 * GEOMETRY.stride], 0)
            os.pwrite(segment.headers, headers[: 60 * HEADER_BYTES], 0)
        os.close(fd)
        assert injected == 3000
        assert disk.counters.corrupt_blocks == 3000
        assert disk.health.ok


Injection = Callable[[int, int, int, bytes, bytes, random.Random], object]


def flip_payload(
    slot: int, data: int, _h: int, was: bytes, _w: bytes, chance: random.Random
) -> object:
    at = slot * GEOMETRY.stride + chance.randrange(GEOMETRY.payload_bytes)
    return os.pwrite(data, bytes([was[at] ^ (1 << chance.randrange(8))]), at)


def flip_header(
    slot: int, _d: int, headers: int, _w: bytes, was: bytes, chance: random.Random
) -> object:
    at = slot * HEADER_BYTES + chance.randrange(HEADER_BYTES)
    return os.pwrite(headers, bytes([was[at] ^ (1 << chance.randrange(8))]), at)


def truncate_payload(
    slot: int, data: int, _h: int, was: bytes, _w: bytes, chance: random.Random
) -> object:
    """Zeros from somewhere on, as a write that was cut off leaves them."""
    at = chance.randrange(GEOMETRY.payload_bytes - 64)
    return os.pwrite(data, bytes(GEOMETRY.payload_bytes - at), slot * GEOMETRY.stride + at)


def swap_payload(
    slot: int, data: int, _h: int, was: bytes, _w: bytes, chance: random.Random
) -> object:
    other = (slot + chance.randrange(1, 60)) % 60 * GEOMETRY.stride
    return os.pwrite(data, was[other : other + GEOMETRY.stride], slot * GEOMETRY.stride)


def swap_shards(slot: int, data: int, _h: int, was: bytes, _w: bytes, _c: random.Random) -> object:
    at, size = slot * GEOMETRY.stride, GEOMETRY.shard_bytes
    return os.pwrite(data, was[at + size : at + 2 * size] + was[at : at + size], at)


def swap_block(
    slot: int, data: int, headers: int, was: bytes, headed: bytes, chance: random.Random
) -> object:
    """Another block, whole, with its header."""
    other = (slot + chance.randrange(1, 60)) % 60
    at = other * GEOMETRY.stride
    os.pwrite(data, was[at : at + GEOMETRY.stride], slot * GEOMETRY.stride)
    at = other * HEADER_BYTES
    return os.pwrite(headers, headed[at : at + HEADER_BYTES], slot * HEADER_BYTES)


def other_namespace(
    slot: int, _d: int, headers: int, _w: bytes, was: bytes, _c: random.Random
) -> object:
    at = slot * HEADER_BYTES
    header = SlotHeader.unpack(was[at : at + HEADER_BYTES], NAMESPACE)
    return os.pwrite(headers, header.pack(bytes(32)), at)


def older_use(
    slot: int, _d: int, headers: int, _w: bytes, _h: bytes, chance: random.Random
) -> object:
    """The header that the slot had before this block, or while it was filled."""
    state = chance.choice([SlotState.FREE, SlotState.FILLING])
    header = SlotHeader(state, 1, key_of(slot), payload_bytes=GEOMETRY.payload_bytes)
    return os.pwrite(headers, header.pack(NAMESPACE), slot * HEADER_BYTES)


INJECTIONS: list[Injection] = [
    flip_payload,
    flip_header,
    truncate_payload,
    swap_payload,
    swap_shards,
    swap_block,
    other_namespace,
    older_use,
]


# ---- a real file system that misbehaves


@needs_mount
async def test_a_stalled_disk(fs: FaultFs, blocks: Blocks) -> None:
    """C14, H1: a stall ends in errors at the deadline, degrades the tier, and passes."""
    async with disk_tier(fs.folder / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        good = blocks.filled(range(4), range(4))
        await space.store(good, 10)
        await fs.tell("hang write")
        start = time.monotonic()
        moved = await space.store(blocks.filled(range(50, 58), range(10, 18)), 0.5)
        assert time.monotonic() - start < 2
        assert kinds(moved) == ["timeout"] * 8
        assert disk.stuck
        good = blocks.filled(range(4), range(4))
        blocks.cleared(good)
        assert kinds(await space.load(good, 2)) == [None] * 4
        assert all(blocks.holds(transfer) for transfer in good)
        start = time.monotonic()
        assert not (await disk.probe()).ok
        assert time.monotonic() - start < 10
        await fs.tell("go")
        await passed(moved.fence)
        await until(disk.probe, lambda health: health.ok, within_s=10)
        again = blocks.filled(range(50, 58), range(10, 18))
        assert kinds(await space.store(again, 10)) == [None] * 8
        assert kinds(await space.load(again, 10)) == [None] * 8

        async def stuck() -> int:
            return disk.stuck

        await until(stuck, lambda count: count == 0, within_s=10)


@needs_mount
@pytest.mark.parametrize("fault", ["eio", "enospc"])
async def test_a_disk_with_errors(fs: FaultFs, blocks: Blocks, fault: str) -> None:
    """D1: errors of the file system itself, in payloads and headers, and recovery."""
    async with disk_tier(fs.folder / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await stored(space, blocks, range(4))
        await fs.tell(f"{fault} write")
        moved = await stored(space, blocks, range(50, 54))
        assert kinds(moved) == [fault.upper()] * 4
        assert not (await disk.probe()).ok
        assert fault.upper() in disk.health.why
        await space.erase([1])
        await fs.tell("go")
        assert (await disk.probe()).ok
        # The first error was in voiding the headers: the old blocks stood until then.
        assert kinds(await stored(space, blocks, range(60, 64))) == [None] * 4
        await fs.tell("eio read")
        transfers = blocks.filled(range(60, 64), range(4))
        blocks.cleared(transfers)
        assert kinds(await space.load(transfers, 10)) == ["EIO"] * 4
        await fs.tell("go")
        assert (await disk.probe()).ok
        assert kinds(await space.load(transfers, 10)) == [None] * 4
    async with disk_tier(fs.folder / "disk") as disk:
        found = sealed(await disk.open(NAMESPACE, blocks.arena))
        assert {header.key for header in found.values()} == {key_of(n) for n in range(60, 64)}


@needs_mount
async def test_a_start_on_a_disk_that_hangs_ends(
    fs: FaultFs, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H1: opening a namespace is an error in time, not a hang."""
    monkeypatch.setattr("services.kvbm.tiers.disk._FILES_S", 0.5)
    async with disk_tier(fs.folder / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.close()
        await fs.tell("hang read")
        with pytest.raises(TimeoutError):
            await disk.open(NAMESPACE, blocks.arena)
        await fs.tell("go")


@needs_mount
async def test_closing_when_the_disk_is_gone(tmp_path: Path, blocks: Blocks) -> None:
    """Each descriptor is closed, once: by then its number may mean a file of somebody else."""
    async with fault_fs(tmp_path) as fs, AsyncExitStack() as stack:
        disk = await stack.enter_async_context(disk_tier(fs.folder / "disk"))
        space = await disk.open(NAMESPACE, blocks.arena)
        assert kinds(await stored(space, blocks, range(2))) == [None] * 2
        (segment,) = space.files.segments
        outlives = stack.pop_all()
    with pytest.raises(OSError, match="not connected"):
        os.fstat(segment.data)
    await space.close()
    taken = {os.open("/dev/null", os.O_RDONLY) for _ in range(8)}
    assert {segment.data, segment.headers} <= taken
    await outlives.aclose()
    for fd in taken:
        os.close(fd)


@needs_mount
async def test_closing_while_the_disk_hangs(
    fs: FaultFs, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files in which something hangs stay open: their descriptors must not mean other files."""
    monkeypatch.setattr("services.kvbm.tiers.space._CLOSE_S", 0.3)
    async with disk_tier(fs.folder / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        segment = space.files.segments[0]
        await fs.tell("hang write")
        moved = await space.store(blocks.filled([1], [0]), 0.2)
        assert kinds(moved) == ["timeout"]
        await space.close()
        os.fstat(segment.data)
        await fs.tell("go")
        await passed(moved.fence)
    os.close(segment.data)
    os.close(segment.headers)
