"""What dashboards are told of blocks that come up from disk: each once, whoever asked for it."""

from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.events.model import Tier
from tests.support.kvbm import NAMESPACE, chain, engine
from tests.support.polling import until


async def test_prefetched_blocks_count_as_brought_from_disk(rig: Any) -> None:
    """A hint mostly comes before the look-up that it is for: its blocks are the engine's too."""
    async with rig(disk_cache_gb=64 / 1024) as r, engine(r.address) as e:
        space = r.daemon.node.spaces[NAMESPACE]
        keys = chain("p", 8)
        await e.save(keys)

        async def on_disk() -> int:
            await r.daemon.node.moves[NAMESPACE].to_disk(keys)
            return sum(Tier.G3 in t for t in space.catalog.run(keys))

        await until(on_disk, lambda n: n == 8, within_s=10, what="blocks on disk")
        for key in keys[3:]:
            space.catalog.forget(Tier.G2, key, r.daemon.node.now_ms())
        space.apply()
        request = pb.PrefetchRequest(namespace=NAMESPACE, keys=keys)
        assert (await r.stub.Prefetch(request, timeout=5)).promoting == 5

        async def brought() -> int:
            return int(r.counts["onboard_blocks_d2d"])

        await until(brought, lambda n: n == 5, within_s=10, what="blocks brought from disk")
        assert await e.load(keys) == 8
        assert r.counts["onboard_blocks_d2d"] == 5  # and not once more by the look-up
        assert r.counts["onboard_blocks_h2d"] == 8
