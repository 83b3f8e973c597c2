"""Disks and folders that fail under a daemon: saves and loads go on, the tier heals by itself."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.arena import SlotState
from services.common.events.model import Tier
from tests.fakes.movers import Fault, FaultyMover
from tests.support.kvbm import NAMESPACE, SMALL, chain, engine
from tests.support.polling import until

DISK = {"disk_cache_gb": 16 / 1024, "disk_write_mb_s": 1000}


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


async def down(r: Any, keys: list[bytes]) -> None:
    """Writes to disk what the daemon has not written by itself."""
    await r.daemon.node.moves[NAMESPACE].to_disk(keys)


async def on_disk(r: Any, keys: list[bytes]) -> None:
    """Waits until all are there."""

    async def stored() -> int:
        await down(r, keys)
        return sum(Tier.G3 in t for t in r.daemon.node.spaces[NAMESPACE].catalog.run(keys))

    await until(stored, lambda n: n == len(keys), within_s=20, what="blocks on disk")


def drop_from_memory(r: Any, keys: list[bytes]) -> None:
    space = r.daemon.node.spaces[NAMESPACE]
    for key in keys:
        space.catalog.forget(Tier.G2, key, r.daemon.node.now_ms())
    space.apply()


def faulty(r: Any) -> FaultyMover:
    """Puts faults between the tier and its real mover."""
    disk = r.daemon.node.disk
    disk.mover = FaultyMover(disk.mover)
    return disk.mover


async def healthy(r: Any, wanted: bool) -> None:
    async def state() -> bool:
        return bool(r.daemon.node.disk.health.ok)

    await until(state, lambda ok: ok is wanted, within_s=20, what=f"health {wanted}")


async def test_a_full_disk_stops_stores_and_nothing_else(rig: Any, tmp_path: Path) -> None:
    """D1, D2: statvfs is the truth."""
    with tmpfs(tmp_path / "small", "8m") as folder:
        more = {**DISK, "disk_cache_dir": str(folder / "kv"), "disk_free_gb": 1 / 1024}
        async with rig(**more) as r, engine(r.address) as e:
            for n in range(30):
                keys = chain(f"p{n}", 16)
                assert len(await e.save(keys)) == 16
                await down(r, keys)
                assert await e.load(keys) == 16
            free = shutil.disk_usage(folder).free
            assert free >= 2**20 - SMALL.stride, "the free-space floor was broken"
            r.daemon.node.spaces[NAMESPACE].catalog.check_invariants()


async def test_a_disk_without_room_says_so(rig: Any, tmp_path: Path) -> None:
    """Not degraded by an error, but nothing is stored: that is what people must see."""

    async def said(r: Any) -> str:
        tiers = (await r.stub.Stats(pb.StatsRequest(), timeout=5)).tiers
        return next(t.state for t in tiers if t.tier == 3)

    with tmpfs(tmp_path / "small", "8m") as folder:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(7 * 2**20))
        more = {**DISK, "disk_cache_dir": str(folder / "kv"), "disk_free_gb": 1 / 1024}
        async with rig(**more) as r, engine(r.address) as e:
            keys = chain("p", 8)
            assert len(await e.save(keys)) == 8
            assert "no room" in await said(r)
            ballast.unlink()
            await until(lambda: said(r), lambda s: s == "ok", within_s=10, what="room")
            await on_disk(r, keys)


async def test_a_slot_that_says_that_it_holds_nothing_is_bad(rig: Any) -> None:
    """A sound header is not enough: it must say that the block is whole."""
    async with rig() as r, engine(r.address) as e:
        keys = chain("p", 4)
        await e.save(keys)
        ref = r.daemon.node.spaces[NAMESPACE].catalog.slot(Tier.G2, keys[2])
        header = e.arena.header(ref.index)
        e.arena.write_header(ref.index, replace(header, state=SlotState.FILLING))
        assert await e.load(keys) == 2

        async def corrupt() -> int:
            return int(r.counts["corrupt_blocks"])

        await until(corrupt, lambda n: n == 1, within_s=5, what="a verdict")
        assert await e.load(keys) == 2


async def test_an_arena_that_does_not_fit_is_refused_with_numbers(rig: Any, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "tiny", "4m") as folder:
        async with rig(cpu_cache_dir=str(folder / "arenas")) as r:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async with engine(r.address):
                    pass
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "MiB" in (caught.value.details() or "")
            assert (await r.stub.Stats(pb.StatsRequest(), timeout=5)).node == "n0"


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.FLIPPED, Fault.SILENT, Fault.SHORT])
async def test_bad_reads_are_misses(rig: Any, fault: Fault) -> None:
    """C1, C5: a load is done only if every byte range came and its checksum matches."""
    async with rig(**DISK) as r, engine(r.address) as e:
        keys = chain("p", 8)
        await e.save(keys)
        await on_disk(r, keys)
        drop_from_memory(r, keys[2:])
        faulty(r).next.append(fault)
        good = await e.load(keys)
        assert 2 <= good < 8
        await healthy(r, True)
        assert await e.save(keys[good:], first=good, parent=keys[good - 1])
        assert await e.load(keys) == 8
        space = r.daemon.node.spaces[NAMESPACE]
        space.catalog.check_invariants()


async def test_an_outage_that_nobody_saw_costs_no_slots(rig: Any) -> None:
    """Over between two looks at the disk; but a place that fails time and again is a bad one."""
    async with rig(**DISK) as r, engine(r.address) as e:
        space = r.daemon.node.spaces[NAMESPACE]

        async def quarantined() -> int:
            return int(space.count(Tier.G3).quarantined)

        keys = chain("p", 1)
        mover = faulty(r)
        for bad in (0, 1):
            await e.save(keys)
            await on_disk(r, keys)
            drop_from_memory(r, keys)
            mover.next.append(Fault.EIO)
            assert await e.load(keys) == 0
            assert await quarantined() == 1
            await healthy(r, True)
            await until(quarantined, lambda n, bad=bad: n == bad, within_s=10, what="slots")
        space.catalog.check_invariants()


async def test_a_stalled_disk_quarantines_and_gives_back(rig: Any) -> None:
    """A deadline ends the wait; the slot is nobody's until the operation has ended."""
    async with rig(**DISK, disk_timeout_s=0.5) as r, engine(r.address) as e:
        keys = chain("p", 4)
        await e.save(keys)
        await on_disk(r, keys)
        drop_from_memory(r, keys)
        mover = faulty(r)
        mover.next.append(Fault.HANG)
        assert await e.load(keys) < 4
        space = r.daemon.node.spaces[NAMESPACE]
        assert space.count(Tier.G2).quarantined >= 1
        assert len(await e.save(chain("meanwhile", 16))) == 16
        await mover.release()

        async def quarantined() -> int:
            return int(space.count(Tier.G2).quarantined)

        await until(quarantined, lambda n: n == 0, within_s=10, what="slots given back")
        space.catalog.check_invariants()


async def test_a_folder_deleted_under_it_is_made_anew(rig: Any) -> None:
    async with rig(**DISK) as r, engine(r.address) as e:
        keys = chain("p", 8)
        await e.save(keys)
        await on_disk(r, keys)
        shutil.rmtree(r.folder / "disk")
        drop_from_memory(r, keys)
        assert await e.load(keys) in range(9)
        more = chain("more", 8)
        await e.save(more)
        await on_disk(r, more)
        drop_from_memory(r, more)
        assert await e.load(more) == 8


async def test_a_full_quota_is_no_error(rig: Any) -> None:
    quota = {"small": {"g2": 2 * SMALL.payload_bytes / 2**30, "g3": 0.0}}
    async with rig(**DISK, quotas=quota) as r, engine(r.address) as e:
        keys = chain("p", 8)
        results = await e.save(keys, tenant="small")
        assert len(results) == 8 and set(results) <= {1, 5}
        await down(r, keys)
        use = (await r.stub.Stats(pb.StatsRequest(), timeout=5)).tenants
        assert all(c.tier != 3 or c.bytes == 0 for t in use for c in t.tiers)
