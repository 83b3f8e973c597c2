"""Two nodes with addresses of their own: two network namespaces, a link that is cut and made slow.

They find each other by discovery alone. UCX is told to use TCP: else it would copy within the
machine, past the link; that it does not is looked at first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc

from services.common.arena import Geometry
from services.common.rpc.channel import open_channel
from tests.support.etcd import BINARIES
from tests.support.kvbm import NAMESPACE, chain, daemon_process, engine
from tests.support.netns import Host, Link, two_hosts
from tests.support.polling import until
from tests.support.processes import Process

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
LARGE = Geometry(block_size=32, shard_bytes=256 << 10, ranks=1, layout="test")
"""64 of them are 16 MiB: seconds on a slow link."""


@dataclass
class Node:
    """A daemon on one host."""

    process: Process
    address: str
    """Its socket: reached from outside of its network."""
    stub: Any

    async def stats(self) -> pb.StatsResponse:
        answer: pb.StatsResponse = await self.stub.Stats(pb.StatsRequest(), timeout=10)
        return answer

    async def count(self, name: str) -> int:
        return int((await self.stats()).counters[name])

    async def knows(self, peer: str) -> None:
        """Waits until it knows that peer, and does not avoid it."""

        async def known() -> bool:
            stats = await self.stats()
            return any(
                p.node == peer and not p.state.startswith("avoided") for p in stats.peers.known
            )

        await until(known, within_s=40, what=f"peer {peer}")

    async def at_rest(self) -> None:
        async def held() -> list[int]:
            stats = await self.stats()
            found = [stats.peers.window_used_bytes, stats.peers.exports]
            found += [tier.quarantined for tier in stats.tiers]
            return found + [n.leases for n in stats.namespaces]

        await until(held, lambda n: not any(n), within_s=30, what="rest")


@pytest.fixture
def link() -> Iterator[Link]:
    with two_hosts() as made:
        yield made


@contextlib.asynccontextmanager
async def node(folder: Path, host: Host, etcd: str, id: str, *flags: str) -> AsyncIterator[Node]:
    await asyncio.to_thread(folder.mkdir)
    argv = ["--host", host.address, "--socket", str(folder / "s"), "--etcd-endpoints", etcd]
    argv += ["--cpu-cache-gb", str(48 / 1024), "--scrub-mb-s", "0", "--promote-ms", "60000"]
    argv += ["--peer-window-mb", "16", *flags]
    process = daemon_process(folder, *argv, name=id, id=id)
    process.argv = host.argv(process.argv)
    process.env = host.env
    process.start()
    try:
        await process.until_ready()
        address = f"unix:{folder / 's'}"
        async with open_channel(address) as channel:
            yield Node(process, address, pb_grpc.KvbmServiceStub(channel))  # type: ignore[no-untyped-call]
    finally:
        process.close()


@contextlib.asynccontextmanager
async def two_nodes(
    folder: Path, link: Link, *flags: str
) -> AsyncIterator[tuple[Node, Node, Any, Any]]:
    """Daemons a and b that have met, and an engine at each."""
    port = 2379
    etcd = f"{link.a.address}:{port}"
    argv = [str(BINARIES / "etcd"), "--data-dir", str(folder / "etcd"), "--name", "e"]
    argv += ["--listen-client-urls", f"http://{etcd}", "--advertise-client-urls", f"http://{etcd}"]
    argv += ["--listen-peer-urls", "http://127.0.0.1:2380", "--log-level", "error"]
    server = Process("etcd", link.a.argv(argv), folder)
    server.start()
    try:
        async with (
            node(folder / "a", link.a, etcd, "a", *flags) as a,
            node(folder / "b", link.b, etcd, "b", *flags) as b,
            engine(a.address, geometry=LARGE) as writer,
            engine(b.address, geometry=LARGE) as reader,
        ):
            await a.knows("b")
            await b.knows("a")
            yield a, b, writer, reader
    finally:
        server.close()


def at_a(blocks: int) -> list[pb.PeerHint]:
    """As a router says it, so that nobody has to be asked in time on a busy machine."""
    return [pb.PeerHint(node="a", first_block=0, blocks=blocks)]


async def test_a_prefix_goes_over_the_link_and_a_cut_link_stops_it(
    tmp_path: Path, link: Link
) -> None:
    """Done by the bytes that the link has counted, and by what comes when it is down."""
    async with two_nodes(tmp_path, link, "--gate", "always") as (a, b, writer, reader):
        keys, more = chain("far", 64), chain("cut", 64)
        await writer.save(keys)
        before = link.b.received_bytes()
        assert await reader.load(keys, wait_s=5.0, peers=at_a(64)) == 64
        assert link.b.received_bytes() - before > 64 * LARGE.payload_bytes
        assert await b.count("peer_blocks_in") == 64
        await writer.save(more)
        link.cut()
        before = link.b.received_bytes()
        assert await reader.load(more, wait_s=5.0, peers=at_a(64)) == 0
        assert link.b.received_bytes() == before
        assert await b.count("peer_blocks_in") == 64
        assert await reader.load(keys, wait_s=5.0) == 64  # what has come is its own
        link.heal()
        await b.knows("a")
        await until(
            lambda: reader.load(more, wait_s=5.0, peers=at_a(64)),
            lambda n: n == 64,
            within_s=60,
            what="blocks",
        )
        await a.at_rest()
        await b.at_rest()


async def test_a_link_cut_in_the_midst_writes_nothing_when_it_heals(
    tmp_path: Path, link: Link
) -> None:
    """The slots of the read that was cut are used by others before the link is up again."""
    flags = ("--gate", "always", "--peer-timeout-s", "2")
    async with two_nodes(tmp_path, link, *flags) as (a, b, writer, reader):
        warm, keys = chain("warm", 4), chain("midst", 64)
        await writer.save(warm)
        assert await reader.load(warm, wait_s=5.0, peers=at_a(4)) == 4
        await writer.save(keys)
        link.slow(40)  # 16 MiB take three seconds and more
        before = link.b.received_bytes()
        load = asyncio.create_task(reader.load(keys, wait_s=5.0, peers=at_a(64)))

        async def come() -> int:
            return link.b.received_bytes() - before

        await until(come, lambda n: n > 1 << 20, within_s=30, what="the first bytes")
        link.cut()
        some = await load
        assert some < 64
        await until(lambda: b.count("peer_fences"), within_s=20, what="the agent's end")
        await b.at_rest()
        mine = chain("mine", 160)
        await reader.save(mine)  # nearly all of its memory
        link.fast()
        link.heal()
        began = time.monotonic()
        while time.monotonic() - began < 4:
            held = await reader.lookup(mine)
            good = [reader.read(key, block) for key, block in zip(mine, held.ready, strict=False)]
            assert good and all(good), "memory in use was written by a read that had ended"
            await reader.release(held)
        await b.knows("a")
        assert await reader.load(keys, wait_s=5.0) in range(64 + 1)
        await a.at_rest()
        await b.at_rest()


async def test_over_a_slow_link_blocks_are_computed_and_over_a_fast_one_fetched(
    tmp_path: Path, link: Link
) -> None:
    """The gate goes by what it has measured, and by what it measures again."""
    flags = ("--peer-timeout-s", "20")  # what is slow shall be measured, and not cut off
    async with two_nodes(tmp_path, link, *flags) as (a, b, writer, reader):
        computed_s = 0.03  # a block; by this link 0.25 MiB take 0.2 s
        hints = [pb.PeerHint(node="a", first_block=0, blocks=32)]
        more = {"recompute_block_s": computed_s, "peers": hints}

        async def fetched(seed: str) -> tuple[int, str]:
            keys = chain(seed, 32)
            await writer.save(keys)
            found = await reader.lookup(keys, **more)
            ready = await reader.ready(found, 60_000)
            if found.lease:
                await reader.release(found, len(ready))
            return len(ready), found.reason

        assert await fetched("fast") == (32, "end")
        link.slow(10)
        number = 0

        async def refused() -> tuple[int, str]:
            nonlocal number
            number += 1
            return await fetched(f"slow {number}")

        slower = (0, "slower-than-recompute")
        await until(refused, lambda came: came == slower, within_s=90, what="a refusal")
        lookup = pb.LookupRequest(namespace=NAMESPACE, keys=chain(f"slow {number}", 32), **more)
        answer = await b.stub.Explain(pb.ExplainRequest(lookup=lookup), timeout=10)
        (gate,) = answer.peers
        assert gate.refused and gate.block_s > computed_s
        link.fast()

        async def taken_again() -> int:
            nonlocal number
            number += 1
            return (await fetched(f"again {number}"))[0]

        await until(taken_again, lambda n: n == 32, within_s=90, what="a fetch", every_s=1.0)
        await a.at_rest()
        await b.at_rest()
