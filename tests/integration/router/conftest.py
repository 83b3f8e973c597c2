"""A real router in this process, on a real etcd, with fake workers around it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc

from services.common.cards import Instance
from services.common.discovery import Discovery, Registration, open_discovery
from services.common.lifecycle import Lifecycle, Phase
from services.common.rpc.channel import open_channel
from services.router import app
from services.router.config import RouterSettings
from tests.fakes.worker import FakeWorker, fake_worker
from tests.support.etcd import Etcd


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@dataclass
class Router:
    """A running router and a stub of it."""

    address: str
    metrics_address: str
    stub: Any
    life: Lifecycle
    running: asyncio.Task[None]

    async def workers(self) -> dict[str, Any]:
        answer = await self.stub.ListWorkers(pb.ListWorkersRequest(), timeout=5)
        return {w.worker.id: w for w in answer.workers}

    async def states(self) -> dict[str, str]:
        return {
            id: pb.WorkerState.Name(w.state).removeprefix("WORKER_STATE_")
            for id, w in (await self.workers()).items()
        }

    async def stats(self) -> Any:
        return await self.stub.GetIndexStats(pb.GetIndexStatsRequest(), timeout=5)

    async def digests(self) -> dict[str, tuple[int, int]]:
        return {d.holder.id: (d.blocks, d.xor) for d in (await self.stats()).digests}

    async def route(self, keys: list[int], tokens: int = 0, **fields: Any) -> Any:
        request = pb.RouteRequest(
            **{
                "model": "m",
                "block_size_tokens": 16,
                "block_hashes": keys,
                "prompt_tokens": tokens or len(keys) * 16 + 1,
            }
            | fields
        )
        return await self.stub.Route(request, timeout=5)


async def until(
    what: str, probe: Callable[[], Awaitable[object]], want: object, timeout_s: float = 5.0
) -> None:
    """Asks again until the answer is `want`."""
    got: object = None
    try:
        async with asyncio.timeout(timeout_s):
            while (got := await probe()) != want:  # noqa: ASYNC110 - asks another process
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what} is {got!r} after {timeout_s} s, not {want!r}") from None


class Cluster:
    """Starts routers and workers that find each other in one etcd."""

    def __init__(self, etcd: Etcd, folder: Path, stack: AsyncExitStack) -> None:
        self.etcd, self.folder, self.stack = etcd, folder, stack
        self.name = folder.name
        self.registrations: dict[str, Registration] = {}
        self.discovery: Discovery | None = None

    def settings(self, **changes: Any) -> RouterSettings:
        defaults: dict[str, Any] = {
            "etcd_endpoints": (self.etcd.endpoint,),
            "cluster": self.name,
            "port": 0,
            "metrics_port": 0,
            "id": "router-0",
            "lease_ttl_s": 2.0,
            "seed": 1,
        }
        settings = defaults | changes
        settings["ready_file"] = str(self.folder / f"{settings['id']}.json")
        return RouterSettings(**settings)

    async def router(self, **changes: Any) -> Router:
        router = await self.stack.enter_async_context(running_router(self.settings(**changes)))
        return router

    async def worker(self, worker_id: str, **changes: Any) -> FakeWorker:
        """A registered worker."""
        worker = await self.stack.enter_async_context(fake_worker(worker_id, **changes))
        await self.register(worker.instance)
        return worker

    async def register(self, instance: Instance, stack: AsyncExitStack | None = None) -> None:
        if self.discovery is None:
            self.discovery = await self.stack.enter_async_context(open_discovery(self.settings()))
        self.registrations[instance.id] = await (stack or self.stack).enter_async_context(
            self.discovery.registered(instance)
        )


@asynccontextmanager
async def running_router(settings: RouterSettings) -> AsyncIterator[Router]:
    """app.main as __main__ runs it, without signals."""
    life = Lifecycle()
    running = asyncio.create_task(app.main(settings, life))
    try:
        async with asyncio.timeout(15):
            while life.phase is not Phase.READY:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
        ready = json.loads(await asyncio.to_thread(Path(settings.ready_file).read_text))
        async with open_channel(ready["address"]) as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            yield Router(ready["address"], ready["metrics_address"], stub, life, running)
    finally:
        life.stop()
        await asyncio.wait_for(running, 15)


@pytest.fixture
async def cluster(etcd: Etcd, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(etcd, tmp_path, stack)
