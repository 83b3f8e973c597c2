"""The local disk: blocks there and back, over restarts, within cap and floor. Real files."""

import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.common.arena import HEADER_BYTES, Arena, CorruptHeader, SlotHeader, SlotState
from services.kvbm.tiers.disk import LocalDisk
from services.kvbm.tiers.files import namespaces
from tests.support.disks import (
    ARENA_SLOTS,
    GEOMETRY,
    MIB,
    NAMESPACE,
    Blocks,
    disk_tier,
    key_of,
    sealed,
)
from tests.support.faultfs import can_mount

OTHERS = [bytes([number]) * 32 for number in range(8)]


@pytest.fixture
def blocks(tmp_path: Path) -> Iterator[Blocks]:
    blocks = Blocks(tmp_path)
    yield blocks
    blocks.arena.close()


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[LocalDisk]:
    async with disk_tier(tmp_path / "disk") as disk:
        yield disk


def on_disk(folder: Path) -> int:
    return sum(item.stat().st_blocks * 512 for item in folder.rglob("*"))


# ---- there and back


async def test_blocks_come_back_as_they_were(disk: LocalDisk, blocks: Blocks) -> None:
    space = await disk.open(NAMESPACE, blocks.arena)
    assert {header.state for header in space.headers()} == {SlotState.FREE}
    transfers = blocks.filled(range(40), range(5, 45))
    assert (await space.store(transfers, 10)).errors == [None] * 40
    blocks.cleared(transfers)
    loaded = await space.load(transfers, 10)
    assert loaded.errors == [None] * 40
    assert loaded.fence is None
    assert all(blocks.holds(transfer) for transfer in transfers)
    assert disk.health.ok


async def test_each_block_is_written_once(disk: LocalDisk, blocks: Blocks) -> None:
    """D5: what is written is what is stored, and it is counted."""
    space = await disk.open(NAMESPACE, blocks.arena)
    await space.store(blocks.filled(range(30), range(30)), 10)
    assert disk.counters.stored_blocks == 30
    assert disk.counters.written_bytes == 30 * GEOMETRY.stride


async def test_a_restart_finds_all_blocks(tmp_path: Path, blocks: Blocks) -> None:
    """R1: segments keep their names and slots; what was whole is found, in place."""
    transfers = blocks.filled(range(40), range(40))
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(transfers, 10)
        slots = space.slots
    blocks.cleared(transfers)
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert space.slots == slots
        found = sealed(space)
        assert found == {transfer.slot: transfer.header for transfer in transfers}
        assert (await space.load(transfers, 10)).errors == [None] * 40
        assert all(blocks.holds(transfer) for transfer in transfers)


async def test_a_reused_slot_holds_the_new_block(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        old = blocks.filled(range(10), range(10))
        await space.store(old, 10)
        new = blocks.filled(range(100, 110), range(10))
        assert (await space.store(new, 10)).errors == [None] * 10
        blocks.cleared(new)
        stale = await space.load(old, 10)
        assert all(str(error).startswith("corrupt") for error in stale.errors)
        assert (await space.load(new, 10)).errors == [None] * 10
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert {header.key for header in sealed(space).values()} == {
            key_of(number) for number in range(100, 110)
        }


async def test_erased_blocks_are_not_found_again(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(blocks.filled(range(10), range(10)), 10)
        await space.erase([2, 3, 3, 7])
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert sorted(sealed(space)) == [0, 1, 4, 5, 6, 8, 9]


async def test_purge_removes_all_blocks_and_nothing_else(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(blocks.filled(range(10), range(10)), 10)
    (tmp_path / "disk" / "notes").write_text("somebody else's")
    async with disk_tier(tmp_path / "disk", purge=True) as disk:
        assert await disk.namespaces() == []
        assert sealed(await disk.open(NAMESPACE, blocks.arena)) == {}
    assert (tmp_path / "disk" / "notes").exists()


async def test_a_store_whose_caller_has_gone_is_whole(disk: LocalDisk, blocks: Blocks) -> None:
    space = await disk.open(NAMESPACE, blocks.arena)
    transfers = blocks.filled(range(20), range(20))
    task = asyncio.create_task(space.store(transfers, 10))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # It is still under way: its slots are nobody else's, until closing has waited for it.
    again = await space.store(transfers[:1], 10)
    assert again.errors[0] is None or again.errors[0].startswith("refused: an older write")
    await space.close()
    space = await disk.open(NAMESPACE, blocks.arena)
    assert len(sealed(space)) == 20


async def test_what_can_not_be_right_is_refused_and_changes_nothing(
    disk: LocalDisk, blocks: Blocks
) -> None:
    space = await disk.open(NAMESPACE, blocks.arena)
    (good,) = blocks.filled([1], [0])
    await space.store([good], 10)
    header = good.header
    for bad in (
        dataclasses.replace(good, slot=space.slots),
        dataclasses.replace(good, slot=-1),
        dataclasses.replace(good, arena_slot=ARENA_SLOTS),
        dataclasses.replace(good, header=dataclasses.replace(header, payload_bytes=1)),
        dataclasses.replace(good, header=dataclasses.replace(header, checksums=(1,))),
        dataclasses.replace(good, header=dataclasses.replace(header, state=SlotState.FILLING)),
    ):
        for moved in (await space.store([bad], 10), await space.load([bad], 10)):
            assert str(moved.errors[0]).startswith("refused"), bad
    await space.erase([-1, space.slots])
    # One slot, two blocks, one batch: only one can have it.
    twice = await space.store([good, dataclasses.replace(good)], 10)
    assert [str(error)[:7] for error in twice.errors] == ["None", "refused"]
    assert (await space.load([good], 10)).errors == [None]
    assert disk.health.ok
    await space.close()
    assert str((await space.store([good], 10)).errors[0]).startswith("refused")
    assert str((await space.load([good], 10)).errors[0]).startswith("refused")
    await space.erase([0])


# ---- torn and halved files


async def test_torn_headers_are_told_from_whole_ones(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(blocks.filled(range(10), range(10)), 10)
        path = space.files.segments[0].path
    raw = bytearray(path.read_bytes())
    new = SlotHeader(SlotState.SEALED, 2, key_of(77), payload_bytes=GEOMETRY.payload_bytes)
    # The first half of another header over slot 3; slot 5 says FREE, and its rest is another's.
    raw[3 * HEADER_BYTES : 3 * HEADER_BYTES + 128] = new.pack(NAMESPACE)[:128]
    raw[5 * HEADER_BYTES : 5 * HEADER_BYTES + 4] = bytes(4)
    path.write_bytes(raw)
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        headers = list(space.headers())
        assert isinstance(headers[3], CorruptHeader)
        assert isinstance(headers[5], CorruptHeader)
        assert sum(isinstance(header, CorruptHeader) for header in headers) == 2
        # They are slots like others for what comes next.
        transfers = blocks.filled([300, 500], [3, 5])
        assert (await space.store(transfers, 10)).errors == [None, None]
        assert (await space.load(transfers, 10)).errors == [None, None]


async def test_halves_of_segments_are_removed(tmp_path: Path, blocks: Blocks) -> None:
    """R1: a start that was killed leaves segments that are whole or gone."""
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(blocks.filled(range(10), range(10)), 10)
        folder, slots = space.files.path, space.slots
    (folder / "segment-0001.data").write_bytes(bytes(GEOMETRY.stride * 64))
    (folder / "segment-0002.making").write_bytes(bytes(64))
    (folder / "segment-0003.headers").write_bytes(bytes(HEADER_BYTES * 64))
    (folder / "segment-0004.headers").write_bytes(bytes(HEADER_BYTES * 64))
    (folder / "segment-0004.data").write_bytes(bytes(GEOMETRY.stride * 63))
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert space.slots == slots
        assert len(sealed(space)) == 10
        assert sorted(os.listdir(folder)) == [
            "segment-0000.data",
            "segment-0000.headers",
            "space.json",
        ]


@pytest.mark.parametrize("change", ["version", "geometry", "namespace", "garbage", "missing"])
async def test_files_of_another_make_are_removed(
    tmp_path: Path, blocks: Blocks, change: str
) -> None:
    """C6, C7: what was written with another layout can't be read, nor taken for ours."""
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(blocks.filled(range(10), range(10)), 10)
        head = space.files.path / "space.json"
    told = json.loads(head.read_text())
    if change == "version":
        told["version"] += 1
    elif change == "geometry":
        told["geometry"]["layout"] = "packed otherwise"
    elif change == "namespace":
        told["namespace"] = "00" * 32
    head.write_text("{" if change == "garbage" else json.dumps(told))
    if change == "missing":
        head.unlink()
    async with disk_tier(tmp_path / "disk") as disk:
        assert sealed(await disk.open(NAMESPACE, blocks.arena)) == {}


# ---- cap and floor


async def test_the_cap_is_never_passed(
    tmp_path: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: growth is lazy, and ends at the cap, all files counted."""
    monkeypatch.setattr("services.kvbm.tiers.disk._SEGMENT_BYTES", 2 * MIB)
    cap = 9 * MIB
    async with disk_tier(tmp_path / "disk", cap) as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        sizes = [space.slots]
        assert sizes[0] < 110
        assert on_disk(tmp_path / "disk") < 3 * MIB
        while grown := await space.grow():
            sizes.append(grown)
            assert on_disk(tmp_path / "disk") <= cap
        assert sum(sizes) == space.slots
        assert len(sizes) > 3
        assert cap - on_disk(tmp_path / "disk") < 17 * (GEOMETRY.stride + HEADER_BYTES)
        # The last one works as well as the first.
        transfers = blocks.filled([1, 2], [0, space.slots - 1])
        assert (await space.store(transfers, 10)).errors == [None, None]
        assert (await space.load(transfers, 10)).errors == [None, None]
    # A smaller cap after a restart is kept as well.
    async with disk_tier(tmp_path / "disk", 5 * MIB) as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert on_disk(tmp_path / "disk") <= 5 * MIB
        assert list(sealed(space)) == [0]


async def test_no_room_for_one_block_is_an_error(tmp_path: Path, blocks: Blocks) -> None:
    async with disk_tier(tmp_path / "disk", 20_000) as disk:
        with pytest.raises(OSError, match="no room for a block"):
            await disk.open(NAMESPACE, blocks.arena)


async def test_the_floor_is_kept_before_the_first_write(tmp_path: Path, blocks: Blocks) -> None:
    """D1: less free than the floor means not even one block."""
    async with disk_tier(tmp_path / "disk", floor=1 << 60) as disk:
        with pytest.raises(OSError, match="must stay free"):
            await disk.open(NAMESPACE, blocks.arena)
        assert on_disk(tmp_path / "disk") < MIB


async def test_what_others_take_of_the_disk_is_left_to_them(
    tmp_path: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1, D2: the file system's own count decides, at growth and at the next start."""
    monkeypatch.setattr("services.kvbm.tiers.disk._SEGMENT_BYTES", 2 * MIB)
    taken = [0]

    def free(folder: Path) -> int:
        return 12 * MIB - taken[0] - on_disk(folder)

    monkeypatch.setattr("services.kvbm.tiers.disk._free_bytes", free)
    async with disk_tier(tmp_path / "disk", floor=4 * MIB) as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert await space.grow()
        taken[0] = 4 * MIB
        assert await space.grow() == 0
        assert free(tmp_path / "disk") >= 0
    taken[0] = 6 * MIB
    async with disk_tier(tmp_path / "disk", floor=4 * MIB) as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        assert on_disk(tmp_path / "disk") < 3 * MIB
        assert space.slots


# ---- namespaces


async def test_namespaces_without_users_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: old weights' blocks are unreadable, and make room for those in use, oldest first."""
    folder, cap = tmp_path / "disk", 5 * MIB
    monkeypatch.setattr("services.kvbm.tiers.disk._SEGMENT_BYTES", 2 * MIB)
    arenas = {}
    for namespace in OTHERS[:4]:
        arenas[namespace] = Arena.create(
            tmp_path / namespace.hex()[:2], namespace, GEOMETRY, ARENA_SLOTS
        )
    async with disk_tier(folder, cap) as disk:
        for number, namespace in enumerate(OTHERS[:2]):
            space = await disk.open(namespace, arenas[namespace])
            await space.close()
            os.utime(folder / namespace.hex() / "space.json", (number, number))
        used = await disk.open(OTHERS[2], arenas[OTHERS[2]])
        # It had to make room: the oldest without users went, and no other.
        assert [item.namespace for item in await disk.namespaces()] == [OTHERS[1], OTHERS[2]]
        assert not await disk.remove(OTHERS[2])
        with pytest.raises(OSError, match="open already"):
            await disk.open(OTHERS[2], arenas[OTHERS[2]])
        await disk.open(OTHERS[3], arenas[OTHERS[3]])
        left = [item.namespace for item in await disk.namespaces()]
        assert sorted(left) == [OTHERS[2], OTHERS[3]]
        assert on_disk(folder) <= cap
        await used.close(remove=True)
        assert [item.namespace for item in await disk.namespaces()] == [OTHERS[3]]
    for arena in arenas.values():
        arena.close()


async def test_a_removed_namespace_is_gone_though_the_removal_was_killed(
    tmp_path: Path, blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk_tier(tmp_path / "disk") as disk:
        space = await disk.open(NAMESPACE, blocks.arena)
        await space.store(blocks.filled(range(10), range(10)), 10)
        await space.close()
        monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_more: None)
        await disk.remove(NAMESPACE)
        monkeypatch.undo()
        assert len(namespaces(tmp_path / "disk")) == 1
        assert sealed(await disk.open(NAMESPACE, blocks.arena)) == {}


async def test_another_daemon_can_not_use_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2: one owner for each disk cache."""
    monkeypatch.setattr("services.kvbm.tiers.disk._LOCK_S", 0.2)
    async with disk_tier(tmp_path / "disk"):
        with pytest.raises(OSError, match="another daemon uses the folder"):
            async with disk_tier(tmp_path / "disk"):
                pass
    async with disk_tier(tmp_path / "disk"):
        pass


# ---- real file systems


@pytest.mark.skipif(not can_mount(), reason="may not mount")
async def test_a_full_disk(tmp_path: Path, blocks: Blocks) -> None:
    """D1: on a real, small file system: what fits is taken, the floor stays; full, all works."""
    folder = tmp_path / "small"
    with mounted("tmpfs", folder, "size=8m"):
        async with disk_tier(folder / "disk", 64 * MIB, floor=2 * MIB) as disk:
            space = await disk.open(NAMESPACE, blocks.arena)
            assert await space.grow() == 0
            left = os.statvfs(folder)
            assert left.f_bavail * left.f_frsize >= 2 * MIB
            assert space.slots * GEOMETRY.stride > 5 * MIB
            # Others fill the rest: our space was taken before, so nothing changes for us.
            fill(folder / "rest")
            transfers = blocks.filled(range(60), range(60))
            assert (await space.store(transfers, 10)).errors == [None] * 60
            blocks.cleared(transfers)
            assert (await space.load(transfers, 10)).errors == [None] * 60
            assert disk.health.ok


@pytest.mark.skipif(not can_mount(), reason="may not mount")
async def test_a_file_system_without_fallocate_and_direct_io(
    tmp_path: Path, blocks: Blocks
) -> None:
    """D4: both refused by a real file system: zeros, the page cache, and both are named."""
    folder = tmp_path / "plain"
    with mounted("ramfs", folder):
        async with disk_tier(folder / "disk", 4 * MIB) as disk:
            space = await disk.open(NAMESPACE, blocks.arena)
            assert "plain(buffered): " in disk.backend
            assert "fallocate refused: files are filled with zeros" in disk.backend
            segment = space.files.segments[0]
            assert os.fstat(segment.data).st_blocks * 512 >= segment.slots * GEOMETRY.stride
            # These zeros wear a disk like anything else.
            assert disk.counters.written_bytes == segment.slots * GEOMETRY.stride
            transfers = blocks.filled(range(40), range(40))
            assert (await space.store(transfers, 10)).errors == [None] * 40
            blocks.cleared(transfers)
            assert (await space.load(transfers, 10)).errors == [None] * 40
        async with disk_tier(folder / "disk", 4 * MIB) as disk:
            assert len(sealed(await disk.open(NAMESPACE, blocks.arena))) == 40


class mounted:
    """A file system on a folder."""

    def __init__(self, kind: str, folder: Path, options: str = "") -> None:
        self._command = ["mount", "-t", kind, *(["-o", options] if options else []), "none"]
        self._folder = folder

    def __enter__(self) -> None:
        self._folder.mkdir()
        subprocess.run([*self._command, str(self._folder)], check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self._folder)], check=True)


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)) == 65536:
                pass
        except OSError:
            return
