"""Expiry, dead namespaces, and who deletes them: on real storage, elected by a real etcd."""

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.discovery import open_discovery
from services.kvbm.config import KvbmSettings
from services.kvbm.tiers.janitor import Janitor, elect_by_store, elector, run_janitor
from tests.support.etcd import Etcd
from tests.support.polling import until
from tests.support.remote import NAMESPACE, RUN, Node, Place, chain, node
from tests.support.s3 import BUCKET, shared_server

TTL = 1000.0
DEAD = 5000.0


@pytest.fixture(params=["s3", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(f"file://{tmp_path}/remote")
    return Place(f"s3://{BUCKET}", shared_server().endpoint, nixl=False).apart()


async def always(now: float) -> bool:
    return True


def janitor(n: Node) -> Janitor:
    return Janitor(n.tier, "node", always, dead_s=DEAD)


async def count(n: Node, folder: str) -> int:
    return sum([len(batch) async for batch in n.tier.objects.entries(folder, 5)])


async def test_objects_expire(place: Place, tmp_path: Path) -> None:
    keys = chain("expire", 3 * RUN)
    async with node(replace(place, ttl_s=TTL), tmp_path) as n:
        await n.store(keys)
        now = await janitor(n).touch()
        assert abs(now - time.time()) < 60
        assert (await janitor(n).sweep(now + TTL - 5)).expired == 0
        assert (await janitor(n).sweep(now + TTL + 5)).expired == 3
        assert (await n.load(keys, range(RUN))).errors[0] is not None
        assert await n.space.find(keys, 5) == 0
        assert (await n.store(keys))[0].errors == [None] * RUN


async def test_without_a_lifetime_nothing_expires(place: Place, tmp_path: Path) -> None:
    keys = chain("for ever", RUN)
    async with node(place, tmp_path) as n:
        await n.store(keys)
        now = await janitor(n).touch()
        swept = await janitor(n).sweep(now + DEAD - 5)
        assert (swept.expired, swept.dead) == (0, 0)
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN


async def test_what_is_used_is_renewed(tmp_path: Path) -> None:
    """In the second half of its time, once; what nobody uses goes."""
    folder, keys = tmp_path / "remote", chain("used", 2 * RUN)
    async with node(Place(f"file://{folder}", ttl_s=TTL), tmp_path) as n:
        await n.store(keys)
        now = await janitor(n).touch()

        def age(run: int, seconds: float) -> None:
            name = keys[(run + 1) * RUN - 1].hex()
            os.utime(folder / NAMESPACE.hex() / name, (now - seconds, now - seconds))

        await n.load(keys, range(RUN))
        age(0, TTL / 2 - 10)
        assert await janitor(n).renew(now) == 0
        for run in range(2):
            age(run, TTL - 10)
        await n.load(keys, range(RUN))
        assert await janitor(n).renew(now) == 1
        assert (await janitor(n).sweep(now + 20)).expired == 1
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN
        assert (await n.load(keys, range(RUN, 2 * RUN))).errors[0] is not None


async def test_dead_namespaces_are_deleted(place: Place, tmp_path: Path) -> None:
    """I5: weights that nobody serves any more leave no objects behind; the living keep theirs."""
    keys = chain("namespaces", 2 * RUN)
    async with node(place, tmp_path) as alive:
        async with node(place, tmp_path, bytes(32)) as dead:
            await alive.store(keys)
            await dead.store(keys)
            await janitor(dead).touch()
        now = await janitor(alive).touch()
        assert (await janitor(alive).sweep(now + DEAD - 5)).namespaces == 0
        # The living one is touched as time goes by.
        later = now + DEAD + 5
        marker = await alive.tier.objects.size(f"alive/{NAMESPACE.hex()}", 5)
        assert marker is not None
        if place.url.startswith("file"):
            root = Path(place.url.removeprefix("file://"))
            os.utime(root / "alive" / NAMESPACE.hex(), (later, later))
            swept = await janitor(alive).sweep(later)
            assert (swept.namespaces, swept.dead) == (1, 2)
            assert await count(alive, bytes(32).hex()) == 0
            assert await count(alive, "alive") == 1
            assert (await alive.load(keys, range(RUN))).errors == [None] * RUN
        else:  # a server's clock can't be turned: both are dead then
            swept = await janitor(alive).sweep(later)
            assert (swept.namespaces, swept.dead) == (2, 4)


async def test_leftovers_go(tmp_path: Path) -> None:
    """Files that a killed daemon was writing."""
    folder, keys = tmp_path / "remote", chain("leftovers", RUN)
    async with node(Place(f"file://{folder}"), tmp_path) as n:
        await n.store(keys)
        half = folder / NAMESPACE.hex() / f".{keys[0].hex()}.0123.part"
        half.write_bytes(b"half")
        now = await janitor(n).touch()
        assert (await janitor(n).sweep(now + 1800)).expired == 0
        assert (await janitor(n).sweep(now + 3700)).expired == 1
        assert not half.exists()
        assert (await n.load(keys, range(RUN))).errors == [None] * RUN


async def test_the_store_elects_one(place: Place, tmp_path: Path) -> None:
    """Without etcd a lease object does; it passes on when its holder is silent."""
    async with node(place, tmp_path) as n:
        objects, now = n.tier.objects, await janitor(n).touch()
        won = await asyncio.gather(*(elect_by_store(objects, f"n{i}", now, 60) for i in range(5)))
        assert sum(won) == 1
        first = f"n{won.index(True)}"
        assert await elect_by_store(objects, first, now + 30, 60)
        assert not await elect_by_store(objects, "late", now + 30, 60)
        assert await elect_by_store(objects, "late", now + 90, 60)
        assert not await elect_by_store(objects, first, now, 60)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with Etcd(tmp_path) as etcd:
        yield etcd


async def test_etcd_elects_one(etcd: Etcd, tmp_path: Path) -> None:
    """One of several for as long as it claims; another when it is gone; the store when etcd is."""
    place = Place(f"file://{tmp_path}/remote")
    settings = KvbmSettings(etcd_endpoints=(etcd.endpoint,), cluster="test")
    async with node(place, tmp_path) as n, open_discovery(settings) as discovery:
        electors = [elector(n.tier, f"n{i}", discovery, ttl_s=1) for i in range(3)]
        won = await asyncio.gather(*(elect(0) for elect in electors))
        assert sum(won) == 1
        holder = electors[won.index(True)]
        others = [elect for elect in electors if elect is not holder]
        for _ in range(2):
            await asyncio.sleep(0.6)
            assert await holder(0)
            assert not any([await elect(0) for elect in others])
        await until(lambda: others[0](0), within_s=10, what="another janitor", every_s=0.2)
        assert not await holder(0)
        etcd.kill()
        assert await holder(time.time())
        assert not await others[0](time.time())


async def test_runs_by_itself(tmp_path: Path) -> None:
    """Nodes touch, one sweeps: objects with a short life are gone after it."""
    folder, keys = tmp_path / "remote", chain("itself", RUN)
    place = Place(f"file://{folder}", ttl_s=1.2)
    async with node(place, tmp_path) as a, node(place, tmp_path) as b:
        await a.store(keys)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(run_janitor(n.tier, name)) for n, name in ((a, "a"), (b, "b"))
            ]
            await until(lambda: count(b, NAMESPACE.hex()), lambda c: c == 0, within_s=10)
            assert await count(a, "alive") == 1
            assert await a.tier.objects.read("janitor/lease", 5) in (b"a", b"b")
            for task in running:
                task.cancel()
