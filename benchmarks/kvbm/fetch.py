"""Blocks from another daemon's memory, beside NIXL's own rate: `python -m benchmarks.kvbm.fetch`.

Two daemons on this machine; one holds a prompt's blocks, the other fetches them for a look-up:
export, read, verification, registration. Beside it the same bytes in the same pieces between two
bare NIXL agents, one transfer at a time for a whole window. Both take turns; ratios are of medians.
By what UCX picks between processes of one machine (it copies memory), and by TCP. Time begins when
agents are connected, as they stay. Beside the ratio: the CPU that a GB takes in all processes
together, since on few cores that is the bound of both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil  # type: ignore[import-untyped]
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from benchmarks import report
from benchmarks.kvbm.bare import bare_engine
from benchmarks.kvbm.lookup import NAMESPACE, chain
from benchmarks.kvbm.rig import Folders, folders
from benchmarks.kvbm.rig import daemon as other_daemon
from benchmarks.report import Report, ratio, turns
from services.common.rpc.channel import open_channel
from services.common.telemetry.logging import setup_logging
from services.kvbm.app import Daemon, daemon
from services.kvbm.config import KvbmSettings
from services.kvbm.core.peers import PeerId, PeerInfo
from services.kvbm.movers.nixl_peers import PeerAgent, RemotePiece

TOTAL = 192 << 20
WINDOW = 64 << 20
GOAL = 0.8
SIZES = (720 << 10, 1440 << 10, 4 << 20)
"""Bytes of a block: of SmolLM2-135M in 16 and 32 bits, of an 8B model."""
WAYS = {"as UCX picks": "", "TCP": "tcp"}


class Agents:
    """Two bare agents: one shows a window, the other reads it."""

    def __init__(self) -> None:
        self._source, self._reader = PeerAgent(loopback=True), PeerAgent(loopback=True)
        self._memory: list[mmap.mmap] = []
        self._read: Callable[[int], Any] | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Agents]:
        """Connected."""
        try:
            await asyncio.gather(self._source.start(), self._reader.start())
            _, address = await self._source.map(self._buffer(), WINDOW)
            region, _ = await self._reader.map(self._buffer(), WINDOW)
            name = await self._reader.know(self._source.metadata, 10)

            async def read(size: int) -> int:
                pieces = [
                    RemotePiece(at, address + at, size) for at in range(0, WINDOW - size + 1, size)
                ]
                await self._reader.read(name, region, pieces, 60)
                return len(pieces) * size

            self._read = read
            yield self
        finally:
            await asyncio.gather(self._source.close(), self._reader.close())

    async def rate(self, size: int, total: int) -> float:
        """Bytes a second in pieces of `size`, over `total` bytes and more."""
        assert self._read is not None
        # As a daemon does that exports blocks: else its agent rests.
        self._source.expect(60)
        done, began = 0, time.perf_counter()
        while done < total:
            done += await self._read(size)
        took = time.perf_counter() - began
        # It must not keep a core busy while it is the daemons' turn.
        self._source.expect(0)
        return done / took

    def _buffer(self) -> int:
        fd = os.memfd_create("forebay-bench")
        os.posix_fallocate(fd, 0, WINDOW)
        self._memory.append(mmap.mmap(fd, WINDOW))
        self._memory[-1][:] = os.urandom(1 << 20) * (WINDOW >> 20)
        return fd


def cpu_s() -> float:
    """Seconds of CPU that this process and all below it have used."""
    me = psutil.Process()
    times = [one.cpu_times() for one in (me, *me.children(recursive=True))]
    return sum((one.user + one.system for one in times), 0.0)


async def fetched(stub: Any, keys: list[bytes], size: int) -> float:
    """Bytes a second of one look-up's fetch; the reader's memory is empty before and after."""
    await stub.Clear(pb.ClearRequest(everything=True), timeout=30)
    hints = [pb.PeerHint(node="a", first_block=0, blocks=len(keys))]
    request = pb.LookupRequest(namespace=NAMESPACE, keys=keys, recompute_block_s=10.0, peers=hints)
    began = time.perf_counter()
    found = await stub.Lookup(request, timeout=30)
    answer = await stub.Await(pb.AwaitRequest(lease=found.lease, wait_ms=60_000), timeout=60)
    took = time.perf_counter() - began
    if len(answer.ready) != len(keys):
        raise RuntimeError(f"only {len(answer.ready)} of {len(keys)} blocks came")
    release = pb.ReleaseRequest(leases=[pb.LoadReport(lease=found.lease)])
    await stub.Release(release, timeout=30)
    return len(keys) * size / took


def reader_settings(place: Folders, gib: float) -> KvbmSettings:
    """Of the daemon that fetches."""
    return KvbmSettings(
        id="b",
        port=0,
        events_port=0,
        metrics=False,
        cpu_cache_gb=gib,
        cpu_cache_dir=str(place.memory / "b"),
        scrub_mb_s=0,
        promote_ms=60_000,
        peers="on",
        gate="always",
        etcd_endpoints=("127.0.0.1:1",),
    )


def meet(running: Daemon, address: str) -> None:
    """The reader learns of the other daemon, as by discovery."""
    peers = running.node.peers
    assert peers is not None, "they are on"
    if not peers.works:
        raise RuntimeError(peers.state)
    peers.record(PeerInfo(PeerId("a"), 1, address))


async def one(told: Report, way: str, size: int, arguments: argparse.Namespace) -> None:
    """One transport and one size of blocks."""
    blocks = arguments.mib * (1 << 20) // size
    keys = chain(blocks)
    gib = 1.25 * blocks * size / 2**30 + 0.02
    geometry = pb.Geometry(block_size_tokens=32, shard_bytes=size, ranks=1, layout="bench")
    flags = {"id": "a", "cpu_cache_gb": gib, "scrub_mb_s": 0, "peers": "on"}
    with folders() as place:
        async with (
            Agents().running() as agents,
            other_daemon(place, "a", **flags) as source,
            bare_engine(source.address, NAMESPACE, geometry) as writer,
            daemon(reader_settings(place, gib)) as running,
            bare_engine(running.instance.address, NAMESPACE, geometry),
            open_channel(running.instance.address) as channel,
        ):
            stub = kvbm_pb2_grpc.KvbmServiceStub(channel)
            await writer.save(keys, chained=True, batch=4)
            meet(running, source.tcp)
            await fetched(stub, keys, size)  # connects, and touches all pages
            await agents.rate(size, WINDOW)
            ours: list[float] = []
            theirs: list[float] = []
            used = [0.0, 0.0]
            for _ in turns(arguments.repeat, arguments.seconds):
                marks = [cpu_s()]
                theirs.append(await agents.rate(size, blocks * size))
                marks.append(cpu_s())
                ours.append(await fetched(stub, keys, size))
                marks.append(cpu_s())
                used = [used[0] + marks[1] - marks[0], used[1] + marks[2] - marks[1]]
    words = f"{way}, blocks of {size >> 10} KiB"
    each = [seconds / (len(ours) * blocks * size / 1e9) for seconds in used]
    told.raw[words] = {"fetch": ours, "nixl": theirs, "nixl_fetch_cpu_s_gb": each}
    share = ratio(ours, theirs)
    middle = sorted(ours)[len(ours) // 2] / 1e9, sorted(theirs)[len(theirs) // 2] / 1e9
    note = (
        f"{middle[0]:.2f} of {middle[1]:.2f} GB/s, {each[1]:.2f} and {each[0]:.2f} s of CPU a GB, "
        f"{len(ours)} turns"
    )
    told.add(words, share, goal=GOAL, at_most=False, note=note)


async def measure(arguments: argparse.Namespace) -> Report:
    """All figures."""
    setup_logging("benchmark", level="warning")
    told = Report("Blocks fetched from another daemon / NIXL's own rate between two processes")
    for way, transports in WAYS.items():
        if transports:
            os.environ["UCX_TLS"] = transports
        for size in SIZES:
            await one(told, way, size, arguments)
    os.environ.pop("UCX_TLS", None)
    return told


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, default=TOTAL >> 20, help="MiB of blocks")
    parser.add_argument("--repeat", type=int, default=12, help="turns at most")
    parser.add_argument("--seconds", type=float, default=15, help="of turns, for each row")


if __name__ == "__main__":
    sys.exit(report.main(__doc__, measure, _options))
