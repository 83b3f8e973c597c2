"""A process of simulated workers in the test's own loop, and what routers hear of one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common.cards import Instance
from services.common.events.codec import snapshot_from_proto
from services.common.events.model import Batch, Snapshot
from services.common.events.subscriber import Apply, FollowStats, Reset, follow
from services.common.lifecycle import Lifecycle
from services.common.rpc.channel import open_channel
from services.worker import simulated
from services.worker.config import WorkerSettings
from tests.fakes.discovery import FakeDiscovery
from tests.models import default_cache_dir, tiny_model
from tests.support.polling import until


@dataclass
class Group:
    discovery: FakeDiscovery
    life: Lifecycle
    done: asyncio.Task[None]
    ready_file: Path

    def instance(self, id: str) -> Instance:
        """The newest state of a worker's record."""
        return [i for i in self.discovery.registered_instances if i.id == id][-1]

    def lives(self, id: str) -> list[int]:
        """Incarnations of a worker, oldest first."""
        mine = [i.incarnation for i in self.discovery.registered_instances if i.id == id]
        return list(dict.fromkeys(mine))


@asynccontextmanager
async def group(tmp_path: Path, workers: int = 3, **settings: Any) -> AsyncIterator[Group]:
    """Simulated workers that serve; they are `w.0`, `w.1` ..., and one alone is `w`."""
    discovery, life, ready = FakeDiscovery(), Lifecycle(), tmp_path / "ready.json"
    made = WorkerSettings(
        model=str(tiny_model(default_cache_dir())),
        served_model_name="tiny",
        port=0,
        events_port=0,
        metrics_port=0,
        engine="sim",
        sim_workers=workers,
        sim_output_tokens=0,
        ready_file=str(ready),
        **{"id": "w", "sim_speedup": 20, **settings},
    )
    done = asyncio.create_task(simulated.main(made, life, registrar=discovery))
    try:

        async def serving() -> bool:
            assert not done.done() or done.result() is None
            return ready.exists()

        await until(serving, within_s=20, what="a ready group")
        yield Group(discovery, life, done, ready)
    finally:
        life.stop()
        await asyncio.wait({done}, timeout=20)
        assert done.done()
    assert done.exception() is None


async def snapshot(instance: Instance) -> Snapshot:
    async with open_channel(instance.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        return snapshot_from_proto(await stub.Snapshot(pb.SnapshotRequest(), timeout=5))


@asynccontextmanager
async def heard(instance: Instance) -> AsyncIterator[tuple[list[Batch], FollowStats]]:
    """The batches that a router would hear, from a first snapshot on."""
    batches: list[Batch] = []
    stats = FollowStats()
    joined = asyncio.Event()

    async def listen() -> None:
        stream = follow(
            instance.events_address, instance.id, lambda: snapshot(instance), stats=stats
        )
        async with aclosing(stream):
            async for item in stream:
                if isinstance(item, Reset):
                    joined.set()
                elif isinstance(item, Apply):
                    batches.append(item.batch)

    task = asyncio.create_task(listen())
    try:
        async with asyncio.timeout(10):
            await joined.wait()
        yield batches, stats
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
