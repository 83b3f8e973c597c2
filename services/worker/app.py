"""Wiring of a worker: start order, drain, stop.

Ports open first (a taken one shows at once), then the engine starts and warms up, then the worker
says that it serves, in health and in discovery. It stops the other way round.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from services.common.cards import Holder, Instance, InstanceKind, Role
from services.common.discovery import open_discovery
from services.common.events.publisher import EventPublisher, open_publisher
from services.common.ids import new_id, new_incarnation
from services.common.lifecycle import Lifecycle
from services.common.loops import keep_going
from services.common.rpc.server import RpcServer, Service, rpc_server
from services.common.telemetry.logging import get_logger
from services.common.telemetry.metrics import metrics_server, new_registry
from services.common.telemetry.tracing import tracing
from services.worker.adapters.files import DigestCache
from services.worker.adapters.kvbm import open_kvbm
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.cardset import CardSet, build_cards
from services.worker.config import WorkerSettings
from services.worker.engines.port import Engine
from services.worker.errors import EngineStopped
from services.worker.ports import Publisher, Registered, Registrar
from services.worker.server import WorkerServicer, service_of
from services.worker.service import Options, WorkerService
from services.worker.warmup import warm_up

LAST_WORDS_S = 0.5
"""Time for open sessions to send what they have, before the server closes."""
T = TypeVar("T")
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """What a worker gets instead of making it itself: in tests, and with others in one process."""

    engine: Engine | None = None
    registrar: Registrar | None = None
    registry: CollectorRegistry | None = None
    """For its figures; then somebody else serves them, at `metrics_address`."""
    metrics_address: str = ""
    cards: CardSet | None = None
    """Of the engine, when they are known."""
    publisher: Callable[[EventPublisher], Publisher] | None = None
    """Stands between the worker and its event stream."""
    services: Sequence[Service] = ()
    """Served on its port beside its own."""


class StoppedEarly(Exception):
    """A stop was asked for while the engine started."""


async def main(
    settings: WorkerSettings,
    life: Lifecycle,
    *,
    engine: Engine | None = None,
    registrar: Registrar | None = None,
) -> None:
    """Serves until a stop is asked for; raises EngineStopped when the engine dies.

    `engine` and `registrar` replace vLLM and etcd, for tests.
    """
    try:
        async with worker(settings, life, Given(engine, registrar)) as running:
            life.ready(running.instance, settings.ready_file)
            await running.run(life, settings.drain_timeout_s)
    except StoppedEarly:
        log.info("stopped before the engine was ready")


@dataclass(slots=True)
class Worker:
    """A worker that serves."""

    instance: Instance
    service: WorkerService
    rpc: RpcServer
    record: Registered
    metrics: WorkerMetrics
    told: tuple[bool, str, Role]
    """What was last said of `serving`, `kvbm` and `role`."""

    async def run(self, life: Lifecycle, drain_timeout_s: float) -> None:
        """Serves until a stop is asked for, then drains. Raises EngineStopped."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(keep_going(self.service.watch, "watchdog"), name="watchdog"),
                group.create_task(self._announce(), name="announcer"),
            ]
            stop = group.create_task(life.wait_stop(), name="stop")
            ends: set[asyncio.Future[Any]] = {stop, self.service.dead}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not self.service.dead.done():
                log.info("draining", requests=self.service.requests)
                self.service.begin_drain()
                await self._tell()
                await self.service.drain(drain_timeout_s, abort_rest=True)
            for task in tasks:
                task.cancel()
        if self.service.dead.done():
            await self._tell()
            await asyncio.sleep(LAST_WORDS_S)
            raise EngineStopped(f"the engine died: {self.service.dead.result()}")
        # Aborts of the rest take until the running step ends.
        await self.service.drain(LAST_WORDS_S, abort_rest=False)

    async def _announce(self) -> None:
        while True:
            await self.service.changed.wait()
            self.service.changed.clear()
            await self._tell()

    async def _tell(self) -> None:
        serving, kvbm, role = self.service.serving, self.service.kvbm, self.service.role
        told, self.told = self.told, (serving, kvbm, role)
        if self.told == told:
            return
        if serving != told[0]:
            log.info("serving" if serving else "not serving")
            self.metrics.serving.set(serving)
            await self.rpc.set_serving(serving)
        self.instance = replace(self.instance, draining=not serving, kvbm=kvbm, role=role)
        await self.record.update(self.instance)


@asynccontextmanager
async def worker(
    settings: WorkerSettings, life: Lifecycle, given: Given | None = None
) -> AsyncIterator[Worker]:
    """A worker that serves and is registered, while the context lasts.

    Raises StoppedEarly when a stop is asked for before it serves.
    """
    given = given or Given()
    id = settings.id or new_id("worker")
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        registry, metrics_address = given.registry, given.metrics_address
        if registry is None:
            registry = new_registry()
            metrics_address = settings.advertised(
                stack.enter_context(metrics_server(registry, settings.host, settings.metrics_port))
            )
        metrics = WorkerMetrics(registry)
        tracer = stack.enter_context(tracing(settings.service, id, settings.otlp_endpoint))
        servicer = WorkerServicer(settings.backlog_tokens)
        rpc = await stack.enter_async_context(
            rpc_server(settings.host, settings.port, [service_of(servicer), *given.services])
        )
        publisher = await stack.enter_async_context(
            open_publisher(
                settings.host,
                settings.events_port,
                id,
                incarnation,
                advertise_host=settings.advertise_host,
            )
        )
        engine = given.engine
        if engine is None:
            # Its modules name vLLM's: a worker with another engine does without them.
            from services.worker.engines.vllm import open_vllm

            named = settings.model_copy(update={"id": id})
            engine = await _unless_stopped(life, stack.enter_async_context(open_vllm(named)))
        cards, node = await _unless_stopped(life, _prepare(engine, settings, given.cards))
        tiers = None
        if settings.kvbm:
            tiers = await stack.enter_async_context(
                open_kvbm(settings.kvbm, cards.card.namespace, settings.kvbm_timeout_s, metrics)
            )
        service = WorkerService(
            engine,
            cards,
            Holder(id, incarnation),
            given.publisher(publisher) if given.publisher else publisher,
            metrics,
            tracer,
            Options(
                max_requests=settings.max_requests,
                watchdog_s=settings.watchdog_s,
                load_report_interval_s=settings.load_report_interval_s,
                digest_interval_s=settings.digest_interval_s,
                transfer_lease_s=settings.transfer_lease_s,
                role=settings.role,
            ),
            tiers,
        )
        stack.callback(service.close)
        service.kvbm = node
        servicer.attach(service)
        instance = Instance(
            id=id,
            kind=InstanceKind.WORKER,
            incarnation=incarnation,
            address=settings.advertised(rpc.port),
            events_address=publisher.address,
            metrics_address=metrics_address,
            role=settings.role,
            card=cards.card,
            labels=settings.labels,
            dp_size=engine.profile.dp_size,
            kvbm=node,
            transfer=engine.profile.transfer,
        )
        registrar = given.registrar
        if registrar is None:
            registrar = await stack.enter_async_context(open_discovery(settings))
        await rpc.set_serving(True)
        metrics.serving.set(True)
        record = await stack.enter_async_context(registrar.registered(instance))
        yield Worker(instance, service, rpc, record, metrics, (True, node, settings.role))


async def _prepare(
    engine: Engine, settings: WorkerSettings, cards: CardSet | None
) -> tuple[CardSet, str]:
    """The cards of a warm engine, and the kvbm that it is attached to."""
    if cards is None:
        cards = await asyncio.to_thread(build_cards, settings.name, engine.profile, DigestCache())
    return cards, await warm_up(engine)


async def _unless_stopped(life: Lifecycle, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises StoppedEarly when a stop is asked for before it is there."""
    start = asyncio.create_task(work, name="start")
    stop = asyncio.create_task(life.wait_stop(), name="stop")
    await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not start.done():
        start.cancel()
        await asyncio.wait({start})
        raise StoppedEarly
    return start.result()
