"""The daemon over its real wire: saves, look-ups, leases, deaths, restarts, rules."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.arena import Geometry
from services.common.events.model import Tier
from services.common.rpc.errors import translate
from services.kvbm.caretaker import SCRUBBER
from services.kvbm.core.model import Owner, SlotRef
from tests.support.kvbm import NAMESPACE, SMALL, chain, content, daemon_process, engine
from tests.support.polling import until

STORED, DUPLICATE, FENCED = 1, 3, 4


async def test_what_one_engine_saves_another_loads(rig: Any) -> None:
    """C10: read back byte for byte; one copy serves all workers of the node."""
    async with rig() as r, engine(r.address, worker="a") as a, engine(r.address, worker="b") as b:
        keys = chain("p", 20)
        assert await a.save(keys) == [STORED] * 20
        assert await b.load(keys) == 20
        assert await b.load([*keys[:7], *chain("other", 5)]) == 7
        assert await b.load(keys, skip_blocks=12) == 8
        assert r.daemon.readers.leases == 0
        assert await b.save(keys[:3]) == [DUPLICATE] * 3


async def test_unknown_names_and_sizes_are_told(rig: Any) -> None:
    async with rig() as r, engine(r.address) as e:
        for request, code, named in (
            (pb.LookupRequest(namespace=b"x"), "INVALID_ARGUMENT", "namespace"),
            (pb.LookupRequest(namespace=NAMESPACE, keys=[b"short"]), "INVALID_ARGUMENT", "keys"),
            (pb.LookupRequest(namespace=bytes(32)), "NOT_FOUND", ""),
            (
                pb.LookupRequest(namespace=NAMESPACE, skip_blocks=3),
                "INVALID_ARGUMENT",
                "skip_blocks",
            ),
            (pb.LookupRequest(namespace=NAMESPACE, wait_s=-1), "INVALID_ARGUMENT", "wait_s"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await r.stub.Lookup(request, timeout=5)
            assert caught.value.code().name == code, caught.value.details()
            assert named in translate(caught.value).metadata.get("field", "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.stub.Grant(pb.GrantRequest(owner=12345, count=1), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert await e.save(chain("still works", 1)) == [STORED]


async def test_another_geometry_of_a_namespace_is_refused(rig: Any) -> None:
    """C7, C8: a layout that differs is no hit, and no mix-up."""
    other = Geometry(32, SMALL.shard_bytes * 2, 1, "test")
    async with rig() as r, engine(r.address):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with engine(r.address, geometry=other):
                pass
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_other_weights_share_nothing(rig: Any) -> None:
    """I5: the same hashes under another namespace are other blocks."""
    async with (
        rig(arena_share=0.5) as r,
        engine(r.address) as old,
        engine(r.address, namespace=hashlib.sha256(b"new weights").digest()) as new,
    ):
        keys = chain("p", 4)
        await old.save(keys)
        assert await new.load(keys) == 0
        assert await old.load(keys) == 4


async def test_an_engine_that_dies_leaves_no_slot_behind(rig: Any) -> None:
    """L5, R4: the lock tells, no deadline and no process id."""
    async with rig() as r:
        async with engine(r.address) as e:
            await e.grant(10)
            assert r.daemon.node.spaces[NAMESPACE].catalog.counts().granted == 10

        async def granted() -> int:
            return int(r.daemon.node.spaces[NAMESPACE].catalog.counts().granted)

        await until(granted, lambda n: n == 0, within_s=5, what="slots taken back")
        assert not r.daemon.node.attached
        assert not list((r.folder / "arenas" / "owners").iterdir())


async def test_a_commit_of_a_slot_that_is_not_ours_stores_nothing(rig: Any) -> None:
    async with rig() as r, engine(r.address) as a, engine(r.address) as b:
        (slot,) = await a.grant(1)
        key = chain("p", 1)[0]
        a.fill(slot, content(key))
        forged = pb.Filled(slot=slot, key=key, checksum=1)
        answer = await b.stub.Commit(pb.CommitRequest(owner=b.owner, filled=[forged]), timeout=5)
        assert list(answer.results) == [FENCED]
        assert await b.load([key]) == 0


async def test_leases_that_nobody_releases_expire(rig: Any) -> None:
    """L1: looked up, never loaded."""
    async with rig(lease_s=0.3) as r, engine(r.address) as e:
        keys = chain("p", 3)
        await e.save(keys)
        for _ in range(5):
            await e.lookup(keys)
        assert r.daemon.readers.leases == 5

        async def leases() -> int:
            return int(r.daemon.readers.leases)

        await until(leases, lambda n: n == 0, within_s=5, what="expiry")
        assert r.daemon.node.spaces[NAMESPACE].catalog.counts().leases == 0


async def test_more_than_fits_evicts_the_oldest_and_serves_the_rest(rig: Any) -> None:
    """K5: a full tier is no error."""
    async with rig() as r, engine(r.address) as e:
        slots = r.daemon.node.spaces[NAMESPACE].arena.slots
        prompts = [chain(f"p{n}", 16) for n in range(slots // 16 + 5)]
        for keys in prompts:
            assert len(await e.save(keys)) == 16
        assert await e.load(prompts[-1]) == 16
        assert await e.load(prompts[0]) == 0
        r.daemon.node.spaces[NAMESPACE].catalog.check_invariants()


async def test_corrupt_memory_is_never_served_and_forgotten(rig: Any) -> None:
    """C4, C14: right length, wrong bytes."""
    async with rig() as r, engine(r.address) as e:
        keys = chain("p", 8)
        await e.save(keys)
        found = await e.lookup(keys)
        e.arena.payload(found.ready[3].slot.index)[17] ^= 1
        await e.release(found)
        assert await e.load(keys) == 3

        async def corrupt() -> int:
            return int(r.counts["corrupt_blocks"])

        await until(corrupt, lambda n: n == 1, within_s=5, what="a verdict")
        assert len((await e.lookup(keys)).ready) == 3
        assert await e.save(keys[3:4], first=3, parent=keys[2]) == [STORED]
        assert await e.load(keys) == 8


async def test_scrub_finds_what_nobody_reads(rig: Any) -> None:
    async with rig(disk_cache_gb=16 * 2**20 / 2**30) as r, engine(r.address) as e:
        keys = chain("p", 8)
        await e.save(keys)
        space = r.daemon.node.spaces[NAMESPACE]
        await r.daemon.node.moves[NAMESPACE].to_disk(keys)

        async def on_disk() -> int:
            return sum(Tier.G3 in t for t in space.catalog.run(keys))

        await until(on_disk, lambda n: n == 8, within_s=10, what="blocks on disk")
        space.arena.payload(space.catalog.slot(Tier.G2, keys[2]).index)[0] ^= 255
        data = next((r.folder / "disk").rglob("*.data"))
        ref = space.catalog.slot(Tier.G3, keys[5])
        with data.open("r+b") as f:
            f.seek(ref.index * SMALL.stride + 100)
            f.write(b"\xff\x00\xff")
        last = None
        async for progress in r.stub.Scrub(pb.ScrubRequest(), timeout=30):
            last = progress
        assert last is not None and last.done and last.total == 16
        assert last.corrupt == 2
        assert Tier.G2 not in space.catalog.tiers_of(keys[2])
        # By now it may have been written anew, from the good one in memory.
        assert Tier.G2 in space.catalog.tiers_of(keys[5])
        assert space.catalog.slot(Tier.G3, keys[5]) != ref


async def test_clear_by_prefix_counts_first_and_lets_readers_finish(rig: Any) -> None:
    async with rig() as r, engine(r.address) as e:
        head = chain("head", 4)
        left, right = chain("left", 3, head[-1]), chain("right", 3, head[-1])
        await e.save([*head, *left])
        await e.save(right, first=4, parent=head[-1])
        found = await e.lookup([*head, *left])
        dry = await r.stub.Clear(
            pb.ClearRequest(namespace=NAMESPACE, prefix=left[0], dry_run=True), timeout=5
        )
        assert [(c.tier, c.blocks) for c in dry.cleared] == [(2, 3)] and dry.leased_blocks == 3
        assert len((await e.lookup([*head, *left])).ready) == 7
        await r.stub.Clear(pb.ClearRequest(namespace=NAMESPACE, prefix=left[0]), timeout=5)
        for key, block in zip([*head, *left], found.ready, strict=True):
            assert e.read(key, block), "a reader in flight was harmed"
        assert len((await e.lookup([*head, *left])).ready) == 4
        assert len((await e.lookup([*head, *right])).ready) == 7
        with pytest.raises(grpc.aio.AioRpcError):
            await r.stub.Clear(pb.ClearRequest(), timeout=5)
        await r.stub.Clear(pb.ClearRequest(everything=True), timeout=5)
        assert not (await e.lookup(head)).ready


async def test_pins_keep_a_prefix_while_they_last(rig: Any) -> None:
    async with rig() as r, engine(r.address) as e:
        keys = chain("system prompt", 8)
        await e.save(keys)
        pin = pb.PinRequest(namespace=NAMESPACE, key=keys[-1], owner="me", ttl_ms=60_000)
        assert (await r.stub.Pin(pin, timeout=5)).blocks == 8
        slots = r.daemon.node.spaces[NAMESPACE].arena.slots
        for n in range(slots // 16 + 3):
            await e.save(chain(f"p{n}", 16))
        assert await e.load(keys) == 8
        undone = await r.stub.Unpin(pb.UnpinRequest(owner="me"), timeout=5)
        assert undone.pins == 1
        pin.ttl_ms = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await r.stub.Pin(pin, timeout=5)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_blocks_expire(rig: Any) -> None:
    async with rig(ttl_s=0.3) as r, engine(r.address) as e:
        keys = chain("p", 2)
        await e.save(keys)

        async def found() -> int:
            return len((await e.lookup(keys)).ready)

        await until(found, lambda n: n == 0, within_s=5, what="expiry of blocks")


async def test_a_tenant_stays_within_its_quota(rig: Any) -> None:
    quota = {"small": {"g2": 10 * SMALL.payload_bytes / 2**30}}
    async with rig(quotas=quota) as r, engine(r.address) as e:
        keys = chain("mine", 5)
        await e.save(keys, tenant="other")
        for n in range(5):
            await e.save(chain(f"s{n}", 5), tenant="small")
        use = {
            t.tenant: t.tiers for t in (await r.stub.Stats(pb.StatsRequest(), timeout=5)).tenants
        }
        assert use["small"][0].bytes <= 10 * SMALL.payload_bytes
        assert await e.load(keys) == 5
        assert await e.load(chain("s4", 5)) == 5


async def test_blocks_go_down_to_disk_and_come_back(rig: Any) -> None:
    """The head of a prefix in memory and its tail on disk are one load."""
    disk = {"disk_cache_gb": 64 / 1024, "disk_write_mb_s": 1000}
    async with rig(**disk) as r, engine(r.address) as e:
        space = r.daemon.node.spaces[NAMESPACE]
        keys = chain("p", 16)
        await e.save(keys)
        await e.load(keys)
        await e.load(keys)

        async def on_disk() -> int:
            await r.daemon.node.moves[NAMESPACE].to_disk(keys)
            return sum(Tier.G3 in t for t in space.catalog.run(keys))

        await until(on_disk, lambda n: n == 16, within_s=10, what="blocks on disk")
        for key in keys[6:]:
            space.catalog.forget(Tier.G2, key, r.daemon.node.now_ms())
        space.apply()
        found = await e.lookup(keys)
        assert len(found.ready) == 6 and found.promoting == 10
        assert await e.load(keys) == 16
        assert r.counts["onboard_blocks_d2d"] == 10
        space.catalog.check_invariants()


@pytest.mark.parametrize("how", ["daemon", "daemon and engine"])
async def test_kill_9_and_what_memory_held_is_there_again(tmp_path: Path, how: str) -> None:
    """R1, L7: at least 99% of G2 is adopted; a stale arena is not left behind."""
    process = daemon_process(tmp_path, "--cpu-cache-gb", str(32 / 1024))
    process.start()
    try:
        ready = await process.until_ready()
        prompts = [chain(f"p{n}", 20) for n in range(20)]
        async with engine(ready.address) as e:
            for keys in prompts:
                await e.save(keys)
            await e.grant(5)
            process.kill()
            if how == "daemon":
                process.start()
                ready = await process.until_ready()
                async with engine(ready.address, former=e.owner) as again:
                    good = sum([await again.load(keys) for keys in prompts])
                    assert good >= 0.99 * 400
                    stats = await again.stub.Stats(pb.StatsRequest(), timeout=5)
                    assert stats.adopted_blocks >= 396
                    assert stats.namespaces[0].granted == 0
        if how != "daemon":
            process.start()
            ready = await process.until_ready()
            async with engine(ready.address) as again:
                assert sum([await again.load(keys) for keys in prompts]) >= 0.99 * 400
        process.terminate()
        assert await process.until_ended(20) == 0
        assert len(list((tmp_path / "arenas").glob("*.arena"))) == 1
    finally:
        process.close()


async def test_a_frozen_engine_keeps_its_slots_until_it_dies(rig: Any) -> None:
    """Its slots are nobody else's, however long it says nothing."""
    async with rig(lease_s=0.2) as r, engine(r.address) as frozen, engine(r.address) as other:
        held = {s.index for s in await frozen.grant(20)}
        slots = r.daemon.node.spaces[NAMESPACE].arena.slots
        given: set[int] = set()
        for n in range(slots // 16 + 3):
            keys = chain(f"p{n}", 16)
            await other.save(keys)
            given |= {s.index for s in other.slots}
        assert not held & given
        for index in held:
            frozen.arena.payload(index)[:] = b"\xee" * SMALL.payload_bytes
        assert await other.load(chain(f"p{slots // 16 + 2}", 16)) == 16


async def test_events_and_snapshot_agree(rig: Any) -> None:
    """E2, E4: what routers hear is what is there; told once for a tier, removed with its last."""
    from services.common.events.codec import decode

    async with rig(disk_cache_gb=16 * 2**20 / 2**30) as r, engine(r.address) as e:
        import zmq.asyncio

        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(r.daemon.instance.events_address)
        try:
            await socket.recv_multipart()  # a heartbeat: subscribed
            held: dict[Tier, set[int]] = {Tier.G2: set(), Tier.G3: set(), Tier.G4: set()}
            for n in range(8):
                await e.save(chain(f"p{n}", 8))
            await e.load(chain("p3", 8))
            slots = r.daemon.node.spaces[NAMESPACE].arena.slots
            for n in range(slots // 16):
                await e.save(chain(f"q{n}", 16))
            snapshot = await r.stub.Snapshot(pb.SnapshotRequest(), timeout=5)
            sequence = 0
            while sequence < snapshot.sequence:
                batch = decode((await socket.recv_multipart())[1])
                sequence = batch.sequence
                for event in batch.events:
                    match type(event).__name__:
                        case "BlocksStored":
                            assert not held[event.tier] & set(event.keys), "told twice"
                            held[event.tier] |= set(event.keys)
                        case "BlocksRemoved":
                            assert set(event.keys) <= held[event.tier], "removed what was not"
                            held[event.tier] -= set(event.keys)
            told = {t: set() for t in held}
            for part in snapshot.blocks:
                told[Tier(part.tier)] |= set(part.block_hashes)
            assert held == told
            assert len(held[Tier.G2]) > 50
        finally:
            socket.close(0)
            context.term()


async def test_two_daemons_never_share_a_folder(rig: Any, tmp_path: Path) -> None:
    async with rig():
        second = daemon_process(tmp_path, name="second")
        second.start()
        try:
            assert await second.until_ended(20) != 0
            assert "cpu_cache_dir" in second.log_tail() or "cpu-cache-dir" in second.log_tail()
        finally:
            second.close()


async def test_lookups_of_long_prompts_are_quick_and_concurrent(rig: Any) -> None:
    async with rig(cpu_cache_gb=32 / 1024) as r, engine(r.address) as e:
        keys = chain("long", 512)
        for start in range(0, 512, 64):
            await e.save(
                keys[start : start + 64], first=start, parent=keys[start - 1] if start else b""
            )
        found = await asyncio.gather(*(e.lookup(keys) for _ in range(20)))
        assert all(len(f.ready) == 512 for f in found)
        for f in found:
            await e.release(f)
        assert r.daemon.readers.leases == 0


async def test_metrics_have_the_names_that_dashboards_ask_for(rig: Any) -> None:
    async with rig() as r, engine(r.address) as e:
        keys = chain("p", 4)
        await e.save(keys)
        await e.load(keys)
        async with httpx.AsyncClient(trust_env=False) as client:
            page = (await client.get(f"http://{r.daemon.instance.metrics_address}/metrics")).text
        lines = set(page.splitlines())
        assert "kvbm_offload_blocks_d2h 4.0" in lines
        assert "kvbm_onboard_blocks_h2d 4.0" in lines
        assert f"kvbm_matched_tokens {4.0 * SMALL.block_size}" in lines
        assert "kvbm_host_cache_hit_rate 1.0" in lines
        for name in ("offload_blocks_h2d", "offload_blocks_d2d", "onboard_blocks_d2d"):
            assert f"kvbm_{name} 0.0" in lines


async def test_ranks_fill_a_block_by_themselves_in_any_order(rig: Any) -> None:
    """H3: one slot, two ranks, no collective: the block is there when both shards are."""
    both = Geometry(32, 8_192, 2, "test")
    async with (
        rig() as r,
        engine(r.address, geometry=both, rank=0, worker="a") as first,
        engine(r.address, geometry=both, rank=1, worker="a") as second,
    ):
        keys = chain("p", 4)
        slots = await first.grant(4)

        def filled(e: Any, number: int) -> pb.Filled:
            data = content(keys[number], both) if e.rank == 0 else b"\x07" * both.shard_bytes
            return pb.Filled(
                slot=slots[number],
                key=keys[number],
                parent=keys[number - 1] if number else b"",
                position=number,
                checksum=e.fill(slots[number], data),
            )

        async def commit(e: Any, *numbers: int) -> list[int]:
            request = pb.CommitRequest(owner=e.owner, filled=[filled(e, n) for n in numbers])
            return list((await e.stub.Commit(request, timeout=5)).results)

        assert await commit(first, 0, 1) == [2, 2]
        assert not (await first.lookup(keys)).ready
        assert await commit(second, 1, 0, 2) == [STORED, STORED, 2]
        found = await second.lookup(keys)
        assert len(found.ready) == 2
        for key, block in zip(keys, found.ready, strict=False):
            assert first.read(key, block) and second.read(key, block)
        assert await commit(first, 2) == [STORED]
        await second.release(found)
        r.daemon.node.spaces[NAMESPACE].catalog.check_invariants()


async def test_a_scrubbed_block_may_go_at_any_moment(rig: Any, monkeypatch: Any) -> None:
    """C3: the slot that its bytes are read into may be its own last breath."""
    async with rig(disk_cache_gb=16 * 2**20 / 2**30, scrub_mb_s=0) as r, engine(r.address) as e:
        keys = chain("scrubbed", 4)
        await e.save(keys)
        space = r.daemon.node.spaces[NAMESPACE]

        async def on_disk() -> int:
            return sum(space.catalog.slot(Tier.G3, key) is not None for key in keys)

        await until(on_disk, lambda n: n == len(keys), within_s=10, what="blocks on disk")
        caretaker = r.daemon.caretaker
        assert await caretaker.check(space, Tier.G3, keys[0])
        grant = space.catalog.grant

        def grant_by_eviction(owner: Owner, count: int, now_ms: int) -> list[SlotRef]:
            space.catalog.forget(Tier.G3, keys[0], now_ms)
            return list(grant(owner, count, now_ms))

        monkeypatch.setattr(space.catalog, "grant", grant_by_eviction)
        assert await caretaker.check(space, Tier.G3, keys[0])
        assert space.catalog.granted(SCRUBBER) == 0
