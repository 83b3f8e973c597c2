"""Daemons that share remote storage: blocks computed on one node serve another."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forebay.common.v1 import common_pb2
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.arena import HEADER_BYTES
from tests.support.kvbm import SMALL, chain, engine
from tests.support.polling import until
from tests.support.remote import Place
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, shared_server

RUN = 4


@pytest.fixture(params=["s3", "folder"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings for storage that is empty."""
    return settings_of(request.param, tmp_path)


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """The daemon's settings for remote storage of this kind."""
    if kind == "folder":
        return {"remote_url": f"file://{folder}/remote", "remote_run_blocks": RUN}
    server = shared_server()
    return {
        "remote_url": Place(f"s3://{BUCKET}").apart().url,
        "remote_endpoint": server.endpoint,
        "remote_access_key": ACCESS_KEY,
        "remote_secret_key": SECRET_KEY,
        "remote_run_blocks": RUN,
        "remote_timeout_s": 3,
    }


async def stored(rig: Any, blocks: int) -> None:
    """Waits until that many blocks lie in remote storage."""

    async def count() -> int:
        return int(rig.daemon.node.remote.counters.stored_blocks)

    await until(count, lambda c: c >= blocks, within_s=20, what="blocks in remote storage")


async def test_a_node_loads_what_another_has_computed(
    rig: Callable[..., Any], remote: dict[str, Any], tmp_path: Path
) -> None:
    """C10: through both daemons, byte for byte, and after a restart with nothing in memory."""
    keys = chain("shared", 4 * RUN)
    async with rig(folder=tmp_path / "a", **remote) as a, engine(a.address) as writer:
        assert a.daemon.node.remote.health.ok
        await writer.save(keys)
        await stored(a, len(keys))
        for name in ("b", "c"):
            async with rig(folder=tmp_path / name, **remote) as b, engine(b.address) as reader:
                assert await reader.load(keys, wait_s=5.0) == len(keys)
                assert await reader.load(chain("other", 4 * RUN), wait_s=5.0) == 0
                assert b.daemon.node.remote.counters.loaded_blocks == len(keys)


async def test_a_node_finds_what_it_stored_among_many_new_prompts(
    rig: Callable[..., Any], tmp_path: Path
) -> None:
    """C10: hits so rare that asking for the unknown isn't worth it don't cost the known ones."""
    remote = settings_of("folder", tmp_path)
    keys = chain("known", 2 * RUN)
    async with rig(**remote) as r, engine(r.address) as worker:
        await worker.save(keys)
        await stored(r, len(keys))
        (space,) = r.daemon.node.spaces.values()
        space.odds.chance = 0.0
        tiers = [common_pb2.TIER_G2, common_pb2.TIER_G3]
        await r.stub.Clear(pb.ClearRequest(everything=True, tiers=tiers), timeout=5)
        assert space.catalog.run(keys) == []
        assert await worker.load(keys, wait_s=5.0) == len(keys)


async def test_corrupt_objects_are_never_served(rig: Callable[..., Any], tmp_path: Path) -> None:
    """C4, C14: through the daemon; what follows a bad block is a miss, and the object goes."""
    keys = chain("corrupt", 3 * RUN)
    remote = settings_of("folder", tmp_path)
    async with rig(folder=tmp_path / "a", **remote) as a, engine(a.address) as writer:
        await writer.save(keys)
        await stored(a, len(keys))
    (folder,) = [f for f in (tmp_path / "remote").iterdir() if len(f.name) == 64]
    victim = folder / keys[2 * RUN - 1].hex()
    data = bytearray(victim.read_bytes())
    data[64 + RUN * HEADER_BYTES + 4096 + SMALL.stride] ^= 1  # in the run's second block
    victim.write_bytes(data)
    async with rig(folder=tmp_path / "b", **remote) as b, engine(b.address) as reader:
        assert await reader.load(keys, wait_s=5.0) == RUN + 1
        assert not victim.exists()
        assert b.daemon.node.remote.counters.corrupt == 1


async def test_wrong_credentials_cost_nothing_but_the_tier(
    rig: Callable[..., Any], tmp_path: Path
) -> None:
    """H1, H5: the daemon starts, says why, and serves all else at full speed."""
    remote = {**settings_of("s3", tmp_path), "remote_secret_key": "wrong"}
    async with rig(**remote) as r, engine(r.address) as worker:
        stats = await r.stub.Stats(pb.StatsRequest(), timeout=5)
        told = [tier for tier in stats.tiers if "wrong" in str(tier)]
        assert told, stats
        keys = chain("degraded", 2 * RUN)
        await worker.save(keys)
        began = time.monotonic()
        for _ in range(20):
            assert await worker.load(keys, wait_s=5.0) == len(keys)
            assert await worker.load(chain("absent", 2 * RUN), wait_s=5.0) == 0
        assert time.monotonic() - began < 3


async def test_blocks_that_came_too_late_are_not_waited_for_again(
    rig: Callable[..., Any], tmp_path: Path
) -> None:
    """E4: what requests gave up is learned when they do, not at the store's own deadline."""
    remote = {**settings_of("s3", tmp_path), "remote_timeout_s": 60, "promote_ms": 400}
    server, keys = shared_server(), chain("late", 4 * RUN)
    async with (
        rig(folder=tmp_path / "a", **remote) as a,
        engine(a.address) as writer,
        rig(folder=tmp_path / "b", **remote) as b,
        engine(b.address) as reader,
    ):
        await writer.save(keys)
        await stored(a, len(keys))
        await asyncio.to_thread(server.freeze)
        try:
            waited = 0
            for _ in range(10):
                found = await reader.lookup(keys, recompute_block_s=5.0)
                if not found.lease:
                    break
                waited += 1
                assert not await reader.ready(found, wait_ms=400)
                await reader.release(found)
        finally:
            server.thaw()
        assert found.reason == "promotion-limit"
        assert 1 <= waited <= 4


async def test_a_server_that_goes_silent_and_comes_back(
    rig: Callable[..., Any], tmp_path: Path
) -> None:
    """H5, L5: look-ups stay quick, nothing stays leased or filling, and it recovers by itself."""
    remote = {**settings_of("s3", tmp_path), "remote_timeout_s": 1}
    server, keys = shared_server(), chain("silent", 4 * RUN)
    async with (
        rig(folder=tmp_path / "a", **remote) as a,
        engine(a.address) as writer,
        rig(folder=tmp_path / "b", **remote) as b,
        engine(b.address) as reader,
    ):
        await writer.save(keys)
        await stored(a, len(keys))
        await asyncio.to_thread(server.freeze)
        try:
            began = time.monotonic()
            assert await reader.load(keys, wait_s=5.0) == 0
            assert time.monotonic() - began < 5
            began = time.monotonic()
            for _ in range(10):
                assert await reader.load(keys, wait_s=5.0) == 0
            assert time.monotonic() - began < 2
            assert not b.daemon.node.remote.health.ok
        finally:
            server.thaw()

        async def healthy() -> bool:
            return bool(b.daemon.node.remote.health.ok)

        await until(healthy, within_s=30, what="recovery")
        assert await reader.load(keys, wait_s=5.0) == len(keys)
        for node in (a.daemon.node, b.daemon.node):
            for space in node.spaces.values():
                space.catalog.check_invariants()
