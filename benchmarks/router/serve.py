"""A router's RPC server over a filled core, in a process of its own, for end-to-end figures:
`python -m benchmarks.router.serve WORKERS CHAINS LENGTH SEED`. Prints its port; ends with stdin.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import uvloop
from opentelemetry.trace import NoOpTracer

from benchmarks.router.load import chain_keys, new_core, stored
from services.common.events.subscriber import FollowStats
from services.common.ids import AttemptId
from services.common.rpc.server import rpc_server
from services.common.telemetry.metrics import new_registry
from services.router.adapters.metrics import RouterMetrics
from services.router.server import RouterServicer


async def serve(workers: int, chains: int, length: int, seed: int) -> None:
    """Serves until stdin ends."""
    core = new_core(workers, 16)
    for batch in stored(chain_keys(chains, length, seed), workers):
        core.apply(batch, 0.0)
    numbers = itertools.count()
    servicer = RouterServicer(
        core,
        lambda: 0.5,
        RouterMetrics(new_registry()),
        NoOpTracer(),
        router_id="bench",
        policy="kv",
        new_attempt=lambda: AttemptId(f"att-{next(numbers)}"),
        streams=FollowStats(),
    )
    async with rpc_server("127.0.0.1", 0, [servicer.service()]) as server:
        print(server.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(*map(int, sys.argv[1:5])))
