"""What routers know of a daemon is what it holds: digests tell, and a snapshot mends."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.blocks import block_key
from services.common.events.codec import tier_snapshot_from_proto
from services.common.events.model import BlocksDigest, Snapshot, Tier
from services.common.events.subscriber import Apply, FollowStats, Heard, Reset, follow
from services.router.core.lives import Liveness
from services.router.core.nodes import NodeInfo, NodeTable
from tests.support.kvbm import NAMESPACE, chain, engine
from tests.support.polling import until


class Reader:
    """A router's table of daemons, fed by one of them."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        instance = rig.daemon.instance
        self.id, self.events_address = instance.id, instance.events_address
        self.table = NodeTable(Liveness(), 1 << 20)
        self.table.record(NodeInfo(self.id, instance.incarnation, instance.address), 0.0)
        self.compared = {Tier.G2: 0, Tier.G3: 0, Tier.G4: 0}
        """Digests of something heard so far."""
        self.stats = FollowStats()

    async def snapshot(self) -> Snapshot:
        return tier_snapshot_from_proto(await self.rig.stub.Snapshot(pb.SnapshotRequest()))

    async def run(self) -> None:
        stream = follow(
            self.events_address,
            self.id,
            self.snapshot,
            stats=self.stats,
            doubted=lambda: self.table.doubted(self.id),
        )
        async with aclosing(stream):
            async for item in stream:
                now = time.monotonic()
                match item:
                    case Apply(batch=batch):
                        self.table.apply(batch, now)
                        for event in batch.events:
                            if isinstance(event, BlocksDigest) and event.blocks:
                                self.compared[event.tier] += 1
                    case Reset(snapshot=snapshot):
                        self.table.reset(snapshot, now)
                    case Heard(incarnation=incarnation):
                        self.table.heard(self.id, incarnation, now)


@asynccontextmanager
async def reader(rig: Any) -> AsyncIterator[Reader]:
    found = Reader(rig)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_router_knows_what_the_daemon_holds_whatever_comes_and_goes(
    rig: Any, tmp_path: Path
) -> None:
    tiers = {
        "disk_cache_gb": 1 / 32,
        "remote_url": f"file://{tmp_path}/remote",
        "remote_run_blocks": 4,
    }
    async with (
        rig(digest_interval_s=0.05, **tiers) as r,
        engine(r.address) as worker,
        reader(r) as known,
    ):
        for number in range(12):
            keys = chain(f"chain {number}", 48)
            await worker.save(keys)
            await worker.load(keys)
            if number % 4 == 3:
                await r.stub.Clear(pb.ClearRequest(namespace=NAMESPACE, prefix=keys[8]))
        before = dict(known.compared)

        async def compared() -> int:
            return min(known.compared[tier] - before[tier] for tier in before)

        await until(compared, lambda n: n > 3, within_s=10, what="digests of all tiers")
        assert known.table.drifts == 0
        assert known.stats.snapshots == 1


async def test_a_difference_is_found_and_mended(rig: Any) -> None:
    keys = chain("mended", 8)
    async with rig(digest_interval_s=0.05) as r, engine(r.address) as worker:
        await worker.save(keys)
        async with reader(r) as known:

            async def blocks() -> int:
                return sum(v.digest.blocks for n in known.table.nodes(0.0) for v in n.tiers)

            whole = await until(blocks, lambda n: n >= len(keys), within_s=5, what="all blocks")
            holding = known.table._nodes[known.id].holdings[NAMESPACE]
            holding.remove(Tier.G2, {block_key(keys[3])})
            assert await blocks() < whole
            await until(blocks, lambda n: n >= whole, within_s=5, what="all blocks again")
            assert known.table.drifts >= 1
            assert known.stats.snapshots == 2
