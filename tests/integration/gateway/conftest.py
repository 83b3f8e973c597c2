"""A real gateway in the test's own loop, on port 0, before scripted workers and routers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.lifecycle import Lifecycle, Phase
from services.gateway import app
from services.gateway.config import GatewaySettings
from tests.fakes.discovery import FakeDiscovery
from tests.fakes.router import FakeRouter, choose
from tests.fakes.token_worker import TokenWorker
from tests.support.client import http_client, metrics
from tests.support.polling import until


@dataclass
class Rig:
    """A gateway, what stands behind it, and a client."""

    workers: list[TokenWorker]
    router: FakeRouter | None
    discovery: FakeDiscovery
    life: Lifecycle
    task: asyncio.Task[None]
    client: httpx.AsyncClient
    address: str
    metrics_address: str
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def worker(self) -> TokenWorker:
        return self.workers[0]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    async def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics; 0 when there is none."""
        samples = await metrics(self.metrics_address)
        return samples.get((f"forebay_gateway_{name}", frozenset(labels.items())), 0.0)

    async def lose(self, worker: TokenWorker) -> None:
        """Kills a worker. The gateway has seen it: connections are refused, no session breaks."""
        await worker.kill()
        left = len(self.workers) - 1
        await until(
            lambda: self.metric("workers_connected"), lambda n: n == left, within_s=5, what="a loss"
        )


RigFactory = Callable[..., Any]


@pytest.fixture
def rig(tiny_model_path: Path, tmp_path: Path) -> RigFactory:
    """`async with rig(workers=2) as r:`; further arguments are settings."""

    @asynccontextmanager
    async def make(
        workers: int | list[TokenWorker] = 1,
        *,
        router: bool | FakeRouter = True,
        interval_s: float | None = 0.0,
        wait: bool = True,
        **settings: Any,
    ) -> AsyncIterator[Rig]:
        async with AsyncExitStack() as stack:
            if isinstance(workers, int):
                workers = [
                    TokenWorker(f"w{i}", tiny_model_path, interval_s=interval_s)
                    for i in range(workers)
                ]
            for worker in workers:
                await stack.enter_async_context(worker)
            instances = [w.instance for w in workers]
            fake: FakeRouter | None = None
            if router:
                fake = (
                    router
                    if isinstance(router, FakeRouter)
                    else FakeRouter("r0", lambda request: choose(request, instances))
                )
                await stack.enter_async_context(fake)
            discovery = FakeDiscovery(*instances, *([fake.instance] if fake else []))

            @asynccontextmanager
            async def discover(_: GatewaySettings) -> AsyncIterator[Any]:
                yield discovery

            merged: dict[str, Any] = {
                "id": "g0",
                "port": 0,
                "metrics_port": 0,
                "drain_timeout_s": 5.0,
                "model_cache_dir": str(tmp_path / "models"),
                **settings,
            }
            life = Lifecycle()
            task = asyncio.create_task(app.main(GatewaySettings(**merged), life, discover))
            await until(lambda: _started(life, task), within_s=30, what="ready gateway")
            if task.done():
                task.result()
            instance = discovery.registered_instances[0]
            client = await stack.enter_async_context(http_client(f"http://{instance.address}"))
            made = Rig(
                workers,
                fake,
                discovery,
                life,
                task,
                client,
                instance.address,
                instance.metrics_address,
            )
            if wait and workers:
                await until(lambda: _ready(client), within_s=10, what="ready worker")
            try:
                yield made
            finally:
                await client.aclose()
                life.stop()
                async with asyncio.timeout(20):
                    await task

    return make


async def _ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


async def _started(life: Lifecycle, task: asyncio.Task[None]) -> bool:
    return life.phase is Phase.READY or task.done()
