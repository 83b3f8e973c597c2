"""A look-up of 512 blocks, over real gRPC: `python -m benchmarks.kvbm.lookup [--json]`.

An engine without a model fills a daemon's memory; then clients ask for the whole chain, get a lease
on all of it, and give that back (untimed). Over loopback TCP and a Unix socket; one client alone,
and eight at once in one process, as in a worker's shell.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time

from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from benchmarks import report
from benchmarks.kvbm.bare import bare_engine
from benchmarks.kvbm.rig import daemon, folders
from benchmarks.report import Report, percentile
from services.common.rpc.channel import open_channel

BLOCKS = 512
NAMESPACE = hashlib.sha256(b"benchmark").digest()
GEOMETRY = pb.Geometry(block_size_tokens=32, shard_bytes=8192, ranks=1, layout="bench")
TOGETHER = 8
WARM = 20


def chain(blocks: int) -> list[bytes]:
    """Hashes of a prompt's blocks."""
    keys, last = [], bytes(32)
    for number in range(blocks):
        last = hashlib.sha256(last + number.to_bytes(8, "big")).digest()
        keys.append(last)
    return keys


async def seconds_of(address: str, keys: list[bytes], clients: int, count: int) -> list[float]:
    """Seconds of each look-up, by so many clients at once."""
    request = pb.LookupRequest(namespace=NAMESPACE, keys=keys, recompute_block_s=1.0)
    seconds: list[float] = []

    async def client() -> None:
        async with open_channel(address) as channel:
            stub = kvbm_pb2_grpc.KvbmServiceStub(channel)
            for number in range(WARM + count // clients):
                began = time.perf_counter()
                found = await stub.Lookup(request, timeout=10)
                took = time.perf_counter() - began
                if len(found.ready) != len(keys):
                    raise RuntimeError(f"only {len(found.ready)} blocks are ready")
                release = pb.ReleaseRequest(leases=[pb.LoadReport(lease=found.lease)])
                await stub.Release(release, timeout=10)
                if number >= WARM:
                    seconds.append(took)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())
    return seconds


async def measure(arguments: argparse.Namespace) -> Report:
    """All figures."""
    told = Report(f"Look-up of {BLOCKS} blocks, in milliseconds (no goal is set)")
    keys = chain(BLOCKS)
    with folders() as place:
        async with (
            daemon(place, cpu_cache_gb=0.03, gate="always", scrub_mb_s=0) as kvbm,
            bare_engine(kvbm.address, NAMESPACE, GEOMETRY) as engine,
        ):
            await engine.save(keys, chained=True)
            for clients in (1, TOGETHER):
                for name, address in (("TCP", kvbm.tcp), ("Unix socket", kvbm.address)):
                    before = kvbm.process.cpu_s
                    seconds = await seconds_of(address, keys, clients, arguments.count)
                    calls = len(seconds) + clients * WARM
                    cpu_ms = (kvbm.process.cpu_s - before) / calls * 1000
                    words = f"{name}, {'idle' if clients == 1 else f'{clients} at once'}"
                    told.raw[words] = seconds
                    told.add(f"{words}, p50", percentile(seconds, 50) * 1000, unit=" ms")
                    note = f"the daemon's CPU, give-back included: {cpu_ms:.2f} ms"
                    p99 = percentile(seconds, 99) * 1000
                    told.add(f"{words}, p99", p99, unit=" ms", note=note)
    return told


if __name__ == "__main__":
    sys.exit(
        report.main(__doc__, measure, lambda p: p.add_argument("--count", type=int, default=1000))
    )
