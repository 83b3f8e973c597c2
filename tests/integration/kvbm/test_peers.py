"""Daemons that fetch blocks from each other's memory: real windows, real NIXL, real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.arena import SlotHeader
from services.common.blocks import block_key
from services.common.events.model import Tier
from services.kvbm import fetching
from services.kvbm.core.peers import PeerId, PeerInfo
from services.kvbm.tiers.port import Export
from tests.support.kvbm import NAMESPACE, SMALL, chain, content, engine
from tests.support.polling import until

BLOCKS = 40
"""Of 24 KiB: more than fit into a round of the window of 1 MiB."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may take a while; what that costs is tested elsewhere."""
    monkeypatch.setattr(fetching, "ASK_S", 5.0)


def meet(a: Any, b: Any) -> None:
    """Each learns of the other, as by discovery."""
    for one, other in ((a, b), (b, a)):
        instance = other.daemon.instance
        info = PeerInfo(PeerId(instance.id), instance.incarnation, instance.address)
        one.daemon.node.peers.record(info)


@pytest.fixture
def pair(rig: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`async with pair() as (a, b)`: two daemons that know each other."""

    @contextlib.asynccontextmanager
    async def run(**more: Any) -> AsyncIterator[tuple[Any, Any]]:
        values = {"peers": "on", "peer_window_mb": 1, "gate": "always", "promote_ms": 30_000}
        values |= {"peer_timeout_s": 10, **more}
        async with (
            rig(folder=tmp_path / "a", id="a", **values) as a,
            rig(folder=tmp_path / "b", id="b", **values) as b,
        ):
            meet(a, b)
            yield a, b

    return run


def counts(rig: Any) -> Any:
    return rig.daemon.node.metrics.counts


async def at_rest(*rigs: Any) -> None:
    """Waits until nothing is held for peers or of them, and fails when it stays."""

    async def held() -> list[int]:
        found = []
        for rig in rigs:
            node = rig.daemon.node
            fetches = [m.fetches for m in node.moves.values()]
            found += [len(node.peers.exports.window), node.peers.exports.window.used]
            found += [f.running for f in fetches] + [f.quarantined for f in fetches]
            for space in node.spaces.values():
                seen = space.catalog.counts()
                found += [seen.leases, seen.copies, *(t.quarantined for t in seen.tiers.values())]
                space.catalog.check_invariants()
            node.peers.exports.window.check_invariants()
            node.peers.book.check_invariants()
        return found

    await until(held, lambda n: not any(n), within_s=15, what="rest")


async def test_a_prefix_of_one_node_serves_another(pair: Callable[..., Any]) -> None:
    """By own look-up: asked, fetched in several rounds, verified, and then there to stay."""
    keys = chain("shared", BLOCKS)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        assert counts(b)["peer_blocks_in"] == counts(a)["peer_blocks_out"] == BLOCKS
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        assert counts(b)["peer_blocks_in"] == BLOCKS  # the second time from its own memory
        stats = await b.stub.Stats(pb.StatsRequest(), timeout=5)
        assert stats.peers.state.startswith("ok")
        (known,) = stats.peers.known
        assert (known.node, known.state, known.fetched_blocks) == ("a", "connected", BLOCKS)
        await at_rest(a, b)


async def test_a_routers_hint_is_fetched_before_anybody_asks(pair: Callable[..., Any]) -> None:
    """Short hashes only, as routers know them; no peer is asked what it holds."""
    keys = chain("hinted", BLOCKS)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        await reader.save(keys[:3])
        request = pb.PrefetchRequest(
            namespace=NAMESPACE,
            short_keys=[block_key(key) for key in keys[3:]],
            peers=[pb.PeerHint(node="a", first_block=0, blocks=BLOCKS - 3)],
        )
        assert (await b.stub.Prefetch(request, timeout=5)).promoting == BLOCKS - 3
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        assert counts(b)["peer_blocks_in"] == BLOCKS - 3
        assert not counts(b)["peer_asks_found"] and not counts(b)["peer_asks_missing"]
        await at_rest(a, b)


async def test_hints_that_are_wrong_cost_a_miss(pair: Callable[..., Any]) -> None:
    """A peer that hasn't got it, or is none, or doesn't know the namespace."""
    keys = chain("nowhere", 8)
    async with pair() as (a, b), engine(b.address) as reader:
        for node in ("a", "nobody", "b"):
            hints = [pb.PeerHint(node=node, first_block=0, blocks=8)]
            assert await reader.load(keys, wait_s=5.0, peers=hints) == 0
        async with engine(a.address):
            assert await reader.load(chain("other", 8), wait_s=5.0, peers=hints) == 0
        await at_rest(a, b)


async def test_many_requests_for_one_prefix_are_one_fetch(pair: Callable[..., Any]) -> None:
    keys = chain("popular", BLOCKS)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        loads = [reader.load(keys[: BLOCKS - n], wait_s=5.0) for n in range(6)]
        assert await asyncio.gather(*loads) == [BLOCKS - n for n in range(6)]
        assert counts(b)["peer_blocks_in"] <= BLOCKS + 6, "blocks were fetched over and over"
        await at_rest(a, b)


async def test_a_run_goes_on_over_own_tiers_and_peers(pair: Callable[..., Any]) -> None:
    """Holes of one are filled by the other, on disk as well."""
    keys = chain("patchwork", 24)
    async with (
        pair(disk_cache_gb=16 / 1024) as (a, b),
        engine(a.address) as writer,
        engine(b.address) as reader,
    ):
        await writer.save(keys)
        await reader.save(keys)
        space = b.daemon.node.spaces[NAMESPACE]
        await b.daemon.node.moves[NAMESPACE].to_disk(keys)
        now = b.daemon.node.now_ms()
        for number, key in enumerate(keys):
            if number % 8 >= 2:
                space.catalog.forget(Tier.G2, key, now)
            if number % 8 >= 4:
                space.catalog.forget(Tier.G3, key, now)
        space.apply()
        hints = [pb.PeerHint(node="a", first_block=0, blocks=24)]
        explained = await b.stub.Explain(
            pb.ExplainRequest(lookup=pb.LookupRequest(namespace=NAMESPACE, keys=keys, peers=hints)),
            timeout=5,
        )
        reasons = [block.reason for block in explained.blocks]
        assert reasons == (["ready"] * 2 + ["promote"] * 2 + ["fetch"] * 4) * 3
        assert {block.peer for block in explained.blocks} == {"", "a"}
        (gate,) = explained.peers
        assert gate.node == "a" and gate.predicted_s > 0 and not gate.refused
        assert await reader.load(keys, wait_s=5.0) == 24
        assert counts(b)["peer_blocks_in"] == 12
        await at_rest(a, b)


async def test_a_prompt_that_names_a_block_twice_breaks_nothing(pair: Callable[..., Any]) -> None:
    keys = chain("twice", 4)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        found = await reader.lookup([*keys, *keys, keys[0]], wait_s=5.0)
        assert len(await reader.ready(found)) == 9
        await reader.release(found, 9)
        await at_rest(a, b)


# Wrong bytes.


def tampered(a: Any, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Export], Export]) -> None:
    """Lets a peer's exports be spoiled on their way."""
    exports = a.daemon.node.peers.exports
    real = exports.export

    async def export(*args: Any) -> Export:
        return spoil(await real(*args))

    monkeypatch.setattr(exports, "export", export)


async def test_bytes_that_went_bad_in_the_window_are_never_served(
    pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain("window", 8)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        exports = a.daemon.node.peers.exports

        def spoil(export: Export) -> Export:
            if export.blocks:
                at = export.blocks[5].address - exports._address + 1000
                exports._buffer.view[at] ^= 1
            return export

        tampered(a, monkeypatch, spoil)
        assert await reader.load(keys, wait_s=5.0) == 5
        assert counts(b)["corrupt_blocks_peer"] == 1
        await at_rest(a, b)
        assert a.daemon.node.spaces[NAMESPACE].catalog.tiers_of(keys[5]), "its own are sound"
        # For a while nothing is fetched from there; then it is asked again.
        monkeypatch.undo()
        await until(
            lambda: reader.load(keys, wait_s=5.0), lambda n: n == 8, within_s=15, what="a fetch"
        )


async def test_bytes_that_went_bad_in_the_peers_memory_are_found_there_as_well(
    pair: Callable[..., Any],
) -> None:
    keys = chain("arena", 8)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        space = a.daemon.node.spaces[NAMESPACE]
        space.arena.payload(space.catalog.slot(Tier.G2, keys[2]).index)[100] ^= 1
        assert await reader.load(keys, wait_s=5.0) == 2
        assert counts(b)["corrupt_blocks_peer"] == 1

        async def found() -> int:
            return int(counts(a)["corrupt_blocks_g2"])

        await until(found, lambda n: n == 1, within_s=10, what="a look at its own memory")
        await at_rest(b)


@pytest.mark.parametrize("what", ["key", "namespace", "unsealed", "length", "torn", "moved"])
async def test_headers_that_are_not_what_was_asked_for_are_misses(
    pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Namespace, key, length and state: each is looked at before anything is read."""
    keys = chain("headers", 8)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)

        def spoil(export: Export) -> Export:
            if not export.blocks:
                return export
            blocks = list(export.blocks)
            header = SlotHeader.unpack(blocks[3].header, NAMESPACE)
            raw = {
                "key": replace(header, key=keys[4]).pack(NAMESPACE),
                "namespace": header.pack(hashlib.sha256(b"another").digest()),
                "unsealed": replace(header, state=1).pack(NAMESPACE),
                "length": replace(header, payload_bytes=4096).pack(NAMESPACE),
                "torn": blocks[3].header[:100] + bytes(156),
                "moved": blocks[3].header,
            }[what]
            blocks[3] = replace(blocks[3], header=raw)
            if what == "moved":  # sound words before another block's bytes
                blocks[3] = replace(blocks[3], address=blocks[4].address)
            return replace(export, blocks=blocks)

        tampered(a, monkeypatch, spoil)
        assert await reader.load(keys, wait_s=5.0) == 3
        await at_rest(a, b)
        space = b.daemon.node.spaces[NAMESPACE]
        for key in keys:
            ref = space.catalog.slot(Tier.G2, key)
            assert ref is None or bytes(space.arena.payload(ref.index)) == content(key)


async def test_a_reader_that_comes_too_late_finds_other_bytes_and_knows_it(
    pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window's room is used again when time is over, whatever readers do."""
    keys, others = chain("early", 8), chain("late", 40)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        await writer.save(others)
        space, exports = a.daemon.node.spaces[NAMESPACE], a.daemon.node.peers.exports
        stale: list[Export] = []
        real = exports.export

        async def export(*args: Any) -> Export:
            if not stale:
                stale.append(await real(*args))
                exports.end([stale[0].id])
                await real(space, others, "")
            return stale[0]

        monkeypatch.setattr(exports, "export", export)
        assert await reader.load(keys, wait_s=5.0) == 0
        assert counts(b)["corrupt_blocks_peer"] == 8


async def test_other_geometry_and_other_namespaces_are_misses(pair: Callable[..., Any]) -> None:
    """T: blocks of another shape are never guessed at, whatever a hint says."""
    keys = chain("shape", 8)
    halves = replace(SMALL, shard_bytes=SMALL.shard_bytes // 2, ranks=2)
    words = replace(SMALL, layout="another order")
    hints = [pb.PeerHint(node="a", first_block=0, blocks=8)]
    async with pair() as (a, b), engine(a.address) as writer:
        await writer.save(keys)
        for geometry in (halves, words):
            async with engine(b.address, geometry=geometry) as reader:
                assert await reader.load(keys, wait_s=5.0, peers=hints) == 0
            (space,) = b.daemon.node.spaces.values()
            await b.daemon.node._drop(space.namespace)
            await b.daemon.node.host.remove(NAMESPACE)
        other = hashlib.sha256(b"another").digest()
        async with engine(b.address, namespace=other) as reader:
            assert await reader.load(keys, wait_s=5.0, peers=hints) == 0
        assert not counts(a)["peer_blocks_out"]
        await at_rest(a, b)


# Room.


def export_of(a: Any, keys: Sequence[bytes]) -> pb.ExportRequest:
    geometry = pb.Geometry(
        block_size_tokens=SMALL.block_size,
        shard_bytes=SMALL.shard_bytes,
        ranks=SMALL.ranks,
        layout=SMALL.layout,
    )
    return pb.ExportRequest(namespace=NAMESPACE, geometry=geometry, keys=keys, node="test")


async def test_a_full_window_is_a_miss_and_frees_itself(pair: Callable[..., Any]) -> None:
    keys = chain("crowd", BLOCKS)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        a.daemon.node.peers.exports._expires_s = 2.0
        await writer.save(keys)
        ids = []
        while (answer := await a.stub.Export(export_of(a, keys), timeout=5)).export:
            ids.append(answer.export)
            assert answer.reason == "part" and answer.available == BLOCKS
        assert answer.reason == "window-full" and len(ids) == 5
        assert await reader.load(keys, wait_s=5.0) == 0
        assert counts(b)["peer_fetches_window_full"] == 1
        await a.stub.EndExport(pb.EndExportRequest(exports=ids[:1]), timeout=5)
        again = await a.stub.EndExport(pb.EndExportRequest(exports=ids[:1]), timeout=5)
        assert again.ended == 0
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        await at_rest(a, b)  # the other exports by their time


async def test_blocks_larger_than_the_window_are_not_exported(pair: Callable[..., Any]) -> None:
    big = replace(SMALL, shard_bytes=1_500_000)
    keys = chain("big", 2)
    async with (
        pair(cpu_cache_gb=64 / 1024) as (a, b),
        engine(a.address, geometry=big) as writer,
        engine(b.address, geometry=big) as reader,
    ):
        assert len(await writer.save(keys)) == 2
        assert await reader.load(keys, wait_s=5.0) == 0
        assert counts(b)["peer_fetches_block_too_large"] == 1
        await at_rest(a, b)


async def test_a_full_memory_takes_what_fits(pair: Callable[..., Any]) -> None:
    """Slots that readers hold are not taken for a fetch."""
    keys, held = chain("many", BLOCKS), chain("held", 300)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        await reader.save(held)
        lease = await reader.lookup(held)
        assert len(lease.ready) == 300
        free = b.daemon.node.spaces[NAMESPACE].arena.slots - 300
        assert await reader.load(keys, wait_s=5.0) <= free
        for key, block in zip(held, lease.ready, strict=True):
            assert reader.read(key, block)
        await reader.release(lease)
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        await at_rest(a, b)


# Whether it pays.


async def test_a_peer_that_is_slower_than_computing_is_refused_and_probed(
    pair: Callable[..., Any],
) -> None:
    keys = chain("slow", 16)
    hints = [pb.PeerHint(node="a", first_block=0, blocks=16)]
    async with (
        pair(gate="measured") as (a, b),
        engine(a.address) as writer,
        engine(b.address) as reader,
    ):
        await writer.save(keys)
        gate = b.daemon.node.spaces[NAMESPACE].gate
        for _ in range(3):
            gate.observe(PeerId("a"), 16, 8.0, time.monotonic())
        more = {"recompute_block_s": 0.05, "peers": hints}
        found = await reader.lookup(keys, **more)
        assert (found.lease, found.reason) == (0, "slower-than-recompute")
        assert not counts(b)["peer_blocks_in"]
        lookup = pb.LookupRequest(namespace=NAMESPACE, keys=keys, **more)
        explained = await b.stub.Explain(pb.ExplainRequest(lookup=lookup), timeout=5)
        (verdict,) = explained.peers
        assert verdict.node == "a" and verdict.refused and verdict.samples == 3
        assert {block.reason for block in explained.blocks} == {"slower-than-recompute"}
        # Off the path it is tried again, and the verdict changes.
        gate._standings[PeerId("a")].measured_s = float("-inf")
        await reader.lookup(keys, **more)

        async def fetched() -> int:
            return int(counts(b)["peer_blocks_in"])

        await until(fetched, lambda n: n == 8, within_s=15, what="a probe")
        await at_rest(a, b)
        assert gate.rate(PeerId("a")).block_s < 0.4


async def test_a_node_without_peers_says_so(rig: Callable[..., Any]) -> None:
    async with rig() as r, engine(r.address) as worker:
        stats = await r.stub.Stats(pb.StatsRequest(), timeout=5)
        assert stats.peers.state == "off: this daemon listens on loopback"
        assert not r.daemon.instance.transfer
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await r.stub.Export(export_of(r, chain("x", 1)), timeout=5)
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await worker.load(chain("x", 4), wait_s=1.0) == 0
        ended = await r.stub.EndExport(pb.EndExportRequest(exports=[1]), timeout=5)
        assert ended.ended == 0


async def test_bad_input_is_refused(pair: Callable[..., Any]) -> None:
    async with pair() as (a, b), engine(a.address):
        for request in (export_of(a, [b"short"]), export_of(a, [])):
            request.geometry.ranks = 99
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await a.stub.Export(request, timeout=5)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        answer = await a.stub.Export(export_of(a, []), timeout=5)
        assert not answer.export and not answer.blocks
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await a.stub.Locate(pb.LocateRequest(namespace=NAMESPACE, keys=[b"x"]), timeout=5)
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await at_rest(a, b)


async def test_clearing_voids_what_is_on_its_way(
    pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was cleared while it was fetched does not appear."""
    keys = chain("cleared", 8)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        peers = b.daemon.node.peers
        real, reading, go = peers.read, asyncio.Event(), asyncio.Event()

        async def read(*args: Any) -> None:
            await real(*args)
            reading.set()
            await go.wait()

        monkeypatch.setattr(peers, "read", read)
        load = asyncio.create_task(reader.load(keys, wait_s=5.0))
        await asyncio.wait_for(reading.wait(), 20)
        await b.stub.Clear(pb.ClearRequest(everything=True), timeout=5)
        go.set()
        assert await load == 0
        space = b.daemon.node.spaces[NAMESPACE]
        assert not any(space.catalog.tiers_of(key) for key in keys)
        await at_rest(a, b)


async def test_on_loopback_agents_listen_there_alone(pair: Callable[..., Any]) -> None:
    keys = chain("quiet", BLOCKS)
    async with pair() as (a, b), engine(a.address) as writer, engine(b.address) as reader:
        await writer.save(keys)
        assert await reader.load(keys, wait_s=5.0) == BLOCKS
        pids = [a.daemon.node.peers.exports.agent_pid, *b.daemon.node.peers.agent_pids()]
        addresses = {
            socket.laddr.ip
            for pid in pids
            for socket in psutil.Process(pid).net_connections("tcp")
            if socket.status == psutil.CONN_LISTEN
        }
        assert len(pids) == 2 and addresses == {"127.0.0.1"}
