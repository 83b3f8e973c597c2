"""Remote storage that is away, slow, refusing, hanging or gone: causes, bounded time, recovery."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from services.kvbm.movers.s3 import S3Objects
from services.kvbm.tiers.object import RemoteTier
from services.kvbm.tiers.port import Health
from tests.support.polling import until
from tests.support.remote import GEOMETRY, RUN, Node, Place, chain, node
from tests.support.s3 import BUCKET, Link, shared_server


def s3(endpoint: str = "", *, nixl: bool = False, timeout_s: float = 10.0) -> Place:
    server = shared_server()
    place = Place(f"s3://{BUCKET}", endpoint or server.endpoint, nixl=nixl, timeout_s=timeout_s)
    return place.apart()


async def healthy(tier: RemoteTier, within_s: float = 20) -> Health:
    """Probes as the daemon does, until it works."""
    return await until(tier.probe, lambda h: h.ok, within_s=within_s, what="recovery")


def helper(tier: RemoteTier) -> int:
    """Process id of the NIXL helper."""
    assert isinstance(tier.objects, S3Objects)
    courier = tier.objects._courier
    assert courier is not None
    return courier.pid


def ended(pid: int) -> bool:
    """Whether the process is gone, or dead and not yet reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(") ")[2][0] in "ZX"


def ran(*command: str) -> bool:
    """Whether the command succeeded."""
    return subprocess.run(command, capture_output=True).returncode == 0


async def nothing_works_and_nothing_waits(n: Node, keys: list[bytes]) -> None:
    """H5: while degraded, every call ends at once, as a miss."""
    began = time.monotonic()
    for _ in range(20):
        assert await n.space.find(keys, 10) == 0
        assert (await n.load(keys, range(RUN))).errors[0] is not None
        assert (await n.store(keys[:RUN]))[0].errors[0] is not None
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"secret_key": "wrong"}, "access key or secret key is wrong"),
        ({"access_key": "nobody"}, "access key or secret key is wrong"),
        ({"url": "s3://no-such-bucket/x"}, "bucket does not exist"),
        ({"endpoint": "http://127.0.0.1:1"}, "can't be reached"),
        ({"url": "file:///proc/no/such/folder"}, "ENOENT"),
    ],
)
async def test_starts_degraded_with_the_cause(
    wrong: dict[str, str], cause: str, tmp_path: Path
) -> None:
    """H1: wrong credentials, bucket, address or folder: the daemon starts, and says why."""
    keys = chain("degraded", RUN)
    began = time.monotonic()
    async with node(replace(s3(), **wrong), tmp_path) as n:  # type: ignore[arg-type]
        assert time.monotonic() - began < 8
        assert not n.tier.health.ok and cause in n.tier.health.why
        stored = (await n.store(keys))[0]
        assert stored.errors[0] is not None and cause in stored.errors[0]
        assert (await n.load(keys, range(RUN))).errors[0] is not None
        assert await n.space.find(keys, 5) == 0
        await n.space.erase(keys)
        assert not (await n.tier.probe()).ok


async def test_a_bucket_that_comes_later(tmp_path: Path) -> None:
    place = replace(s3(), url="s3://comes-later/x")
    async with node(place, tmp_path) as n:
        assert not n.tier.health.ok
        shared_server().make_bucket("comes-later")
        await healthy(n.tier)
        assert (await n.store(chain("later", RUN)))[0].errors == [None] * RUN


async def test_a_key_that_may_only_read(tmp_path: Path) -> None:
    """Stores are refused with the cause; what others stored is loaded all the same."""
    place, keys = s3(), chain("read only", RUN)
    async with (
        node(place, tmp_path) as writer,
        node(replace(place, access_key="reader"), tmp_path) as n,
    ):
        await writer.store(keys)
        assert not n.tier.health.ok and "lacks a right" in n.tier.health.why
        assert await n.space.find(keys, 5) == RUN
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN
        assert (await n.store(chain("more", RUN)))[0].errors[0] is not None


async def test_a_server_that_dies_and_comes_back(tmp_path: Path) -> None:
    """kill -9 of the server between and during requests; what it had acknowledged is there."""
    server, place, keys = shared_server(), s3(nixl=True, timeout_s=5), chain("dies", 4 * RUN)
    async with node(place, tmp_path) as n:
        await n.store(keys[: 2 * RUN])
        moving = [asyncio.create_task(n.load(keys, range(RUN))) for _ in range(3)]
        await asyncio.to_thread(server.kill)
        for loaded in await asyncio.gather(*moving):
            assert all(
                error is not None or n.has(keys[slot], slot)
                for slot, error in enumerate(loaded.errors)
            )
        stored = await n.space.store(n.fill(keys)[2 * RUN : 3 * RUN], 5)
        assert stored.errors[0] is not None
        assert not n.tier.health.ok
        # Of who asked when it died, or after: what ended last is what is told.
        assert any(said in n.tier.health.why for said in ("can't be reached", "no answer"))
        await nothing_works_and_nothing_waits(n, keys)
        assert not (await n.tier.probe()).ok
        server.start()  # in this thread: it dies with the thread that started it
        await healthy(n.tier)
        assert await n.space.find(keys, 5) == 2 * RUN
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN
        assert (await n.store(keys))[3].errors == [None] * RUN


@pytest.mark.parametrize("nixl", [True, False])
async def test_slower_than_the_deadline(nixl: bool, tmp_path: Path) -> None:
    """L5, C14: a load ends at its deadline, once; nothing is written into the slots afterwards."""
    keys = chain(f"slow{nixl}", RUN)
    with Link(shared_server().port) as link:
        place = s3(link.endpoint, nixl=nixl, timeout_s=5)
        async with node(place, tmp_path) as n:
            await n.store(keys)
            pid = helper(n.tier) if nixl else 0
            link.slow(40_000)
            began = time.monotonic()
            loaded = await n.load(keys, range(RUN), 0.7)
            assert 0.6 < time.monotonic() - began < 2.5
            assert all(error is not None for error in loaded.errors) and loaded.fence is None
            assert not n.tier.health.ok and "no answer" in n.tier.health.why
            for slot in range(RUN):
                n.arena.payload(slot)[:] = b"\xee" * GEOMETRY.payload_bytes
            await nothing_works_and_nothing_waits(n, [b"\xee" * 32] * RUN)
            if nixl:
                # The fence: nothing less ends the transfer.
                await until(lambda: _now(ended(pid)), within_s=5, what="end of the helper")
            link.slow(0)
            await healthy(n.tier)
            assert (await n.load(keys, range(RUN))).errors == [None] * RUN
            if nixl:
                await until(lambda: _now(n.tier.backend), lambda b: b == "nixl-obj", within_s=20)
                assert helper(n.tier) != pid


async def _now(value: object) -> object:
    return value


async def test_an_upload_cut_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    """C5: a failed store is invisible to everybody, and is made good by the next."""
    keys = chain("cut", RUN)
    direct = s3()
    with Link(shared_server().port) as link:
        async with (
            node(replace(direct, endpoint=link.endpoint, timeout_s=5), tmp_path) as a,
            node(direct, tmp_path) as b,
        ):
            await a.tier.objects.size("warm", 5)
            link.slow(30_000)
            storing = asyncio.create_task(a.store(keys))
            await until(lambda: _now(a.tier.objects._requests._value < 32), within_s=5)  # type: ignore[attr-defined]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(link.cut)
            (stored,) = await storing
            assert stored.errors[0] is not None and not a.tier.health.ok
            assert await b.space.find(keys, 5) == 0
            link.slow(0)
            await asyncio.to_thread(link.flow)
            await healthy(a.tier)
            assert (await a.store(keys))[0].errors == [None] * RUN
            assert (await b.load(keys, range(RUN))).errors == [None] * RUN


async def test_a_frozen_server(tmp_path: Path) -> None:
    """SIGSTOP: connections stay open and silent. Deadlines hold; it recovers."""
    server, keys = shared_server(), chain("frozen", RUN)
    async with node(s3(timeout_s=3), tmp_path) as n:
        await n.store(keys)
        await asyncio.to_thread(server.freeze)
        try:
            began = time.monotonic()
            loaded = await n.load(keys, range(RUN), 0.5)
            assert time.monotonic() - began < 2 and loaded.errors[0] is not None
            await nothing_works_and_nothing_waits(n, keys)
            assert not (await n.tier.probe()).ok
        finally:
            server.thaw()
        await healthy(n.tier)
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN


async def test_the_nixl_helper_dies(tmp_path: Path) -> None:
    """kill -9 of the helper: obstore goes on, nothing fails, and NIXL comes back."""
    keys = chain("helper", 2 * RUN)
    async with node(s3(nixl=True), tmp_path) as n:
        await n.store(keys[:RUN])
        os.kill(helper(n.tier), signal.SIGKILL)
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN
        stored = await n.space.store(n.fill(keys)[RUN:], 10)
        assert stored.errors == [None] * RUN and n.tier.health.ok
        assert n.tier.backend.startswith("obstore: nixl-obj failed")
        n.tier.objects._again_at = 0.0  # type: ignore[attr-defined]
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN
        await until(lambda: _now(n.tier.backend), lambda b: b == "nixl-obj", within_s=20)
        pid = helper(n.tier)
        assert (await n.load(keys, range(RUN, 2 * RUN))).errors == [None] * RUN
    assert ended(pid)


async def test_a_folder_that_is_deleted(tmp_path: Path) -> None:
    """The folder goes under a running daemon: misses, and it is made again."""
    folder, keys = tmp_path / "mnt" / "remote", chain("deleted", RUN)
    async with node(Place(f"file://{folder}"), tmp_path) as n:
        await n.store(keys)
        shutil.rmtree(folder)
        loaded = await n.load(keys, range(RUN))
        assert loaded.errors[0] is not None and loaded.errors[0].startswith("not found")
        stored = await n.space.store(n.fill(chain("next", RUN)), 5)
        assert stored.errors[0] is not None and not n.tier.health.ok
        await healthy(n.tier)
        assert (await n.store(keys))[0].errors == [None] * RUN
        # As when a mount has gone with all its folders: nothing is made in its place.
        shutil.rmtree(folder.parent)
        await n.space.store(n.fill(chain("more", RUN)), 5)
        assert not (await n.tier.probe()).ok and not folder.parent.exists()


async def test_a_mount_that_goes(tmp_path: Path) -> None:
    """Nothing is written beside a file system that is away; when it is back, all is there."""
    mount, keys = tmp_path / "mnt", chain("mount", RUN)
    mount.mkdir()
    kept = tmp_path / "kept"
    if not ran("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)):
        pytest.skip("mounting is not permitted here")
    try:
        async with node(Place(f"file://{mount}/remote"), tmp_path) as n:
            await n.store(keys)
            kept.mkdir()
            assert ran("mount", "--move", str(mount), str(kept))
            assert (await n.space.store(n.fill(chain("more", RUN)), 5)).errors[0] is not None
            assert not (await n.tier.probe()).ok and list(mount.iterdir()) == []
            assert ran("mount", "--move", str(kept), str(mount))
            await healthy(n.tier)
            assert (await n.load(keys, range(RUN))).errors == [None] * RUN
    finally:
        for path in (kept, mount):
            ran("umount", "-l", str(path))


async def test_a_folder_that_hangs(tmp_path: Path) -> None:
    """C14: a read that never returns holds a thread, not the caller, and its slots till it ends."""
    folder, keys = tmp_path / "remote", chain("hangs", RUN)
    async with node(Place(f"file://{folder}"), tmp_path) as n:
        await n.store(keys)
        path = folder / n.space.namespace.hex() / keys[-1].hex()
        path.unlink()
        os.mkfifo(path)  # opening it for reading hangs in the kernel
        began = time.monotonic()
        loaded = await n.load(keys, range(RUN), 0.5)
        assert time.monotonic() - began < 2 and loaded.errors[0] is not None
        assert not n.tier.health.ok
        await nothing_works_and_nothing_waits(n, keys)
        await healthy(n.tier)
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        path.unlink()
        assert (await n.store(keys))[0].errors == [None] * RUN
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN


async def test_full_or_read_only_folder(tmp_path: Path) -> None:
    """Stores fail with the cause and nothing is left half-written; loads go on."""
    folder, keys = tmp_path / "remote", chain("full", 2 * RUN)
    async with node(Place(f"file://{folder}"), tmp_path) as n:
        await n.store(keys[:RUN])
        # A name that is a file where the namespace's folder must be refuses all writes there.
        space = folder / n.space.namespace.hex()
        space.rename(folder / "aside")
        space.write_bytes(b"")
        stored = await n.space.store(n.fill(keys)[RUN:], 5)
        assert stored.errors[0] is not None and not n.tier.health.ok
        space.unlink()
        (folder / "aside").rename(space)
        await healthy(n.tier)
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN


async def test_a_cancelled_load_goes_on_to_its_end(tmp_path: Path) -> None:
    """L5: whoever gives up waiting leaves nothing behind: no lane is lost, no slot is in doubt."""
    keys = chain("cancel", RUN)
    with Link(shared_server().port) as link:
        async with node(s3(link.endpoint, timeout_s=5), tmp_path) as n:
            await n.store(keys)
            for _ in range(8):
                link.slow(400_000)
                load = asyncio.create_task(n.load(keys, range(RUN), 5))
                await asyncio.sleep(0.02)
                load.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await load
                link.slow(0)
            await until(lambda: _now(len(n.space._moves)), lambda c: c == 0, within_s=10)
            assert n.space._heads.qsize() == 4
            assert (await n.load(keys, range(RUN))).errors == [None] * RUN
