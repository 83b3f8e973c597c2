"""Wiring of a process of simulated workers: one engine, port and record each, the rest in common.

Each is a worker like any other, to gateways, routers and discovery. One whose engine dies comes
back with a new incarnation, as a supervisor would bring it back. Whatever shows says that it is a
simulator: the card, a label, the figures, the log.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass

import zmq
from prometheus_client import Gauge

from services.common.cards import Instance
from services.common.discovery import open_discovery
from services.common.events.publisher import EventPublisher
from services.common.ids import new_id
from services.common.lifecycle import Lifecycle
from services.common.telemetry.logging import get_logger
from services.common.telemetry.metrics import metrics_server, new_registry
from services.worker.adapters.files import DigestCache
from services.worker.adapters.groupmetrics import WorkerFigures
from services.worker.adapters.simulator import SimulatorServicer, service_of
from services.worker.app import Given, StoppedEarly, worker
from services.worker.cardset import CardSet, build_cards
from services.worker.config import WorkerSettings
from services.worker.engines.sim.core.faults import Fault
from services.worker.engines.sim.core.filling import documents
from services.worker.engines.sim.engine import SimEngine
from services.worker.engines.sim.faulty import FaultRunner, FaultyPublisher
from services.worker.engines.sim.folder import SimulatedModel, simulated_model
from services.worker.errors import EngineStopped
from services.worker.ports import Registrar

STARTS_AT_ONCE = 16
RESTART_PAUSE_S = 0.5
log = get_logger(__name__)


async def main(
    settings: WorkerSettings, life: Lifecycle, *, registrar: Registrar | None = None
) -> None:
    """Serves with all simulated workers of the settings until a stop is asked for.

    `registrar` replaces etcd, for tests.
    """
    model = await asyncio.to_thread(simulated_model, settings)
    log.warning(
        "these workers are SIMULATORS: nothing is computed, their text is no model's",
        workers=settings.sim_workers,
        profile=model.config.profile.name,
        source=model.config.profile.source,
        speedup=settings.sim_speedup,
    )
    # Each has one; beside them, those of its context.
    zmq.Context.instance().set(zmq.MAX_SOCKETS, max(1023, 2 * settings.sim_workers))
    async with AsyncExitStack() as stack:
        registry, figures = new_registry(), WorkerFigures()
        registry.register(figures)
        port = stack.enter_context(metrics_server(registry, settings.host, settings.metrics_port))
        cards = await asyncio.to_thread(build_cards, settings.name, model.profile, DigestCache())
        if registrar is None:
            registrar = await stack.enter_async_context(open_discovery(settings))
        group = _Group(settings, life, model, cards, figures, registrar, settings.advertised(port))
        async with asyncio.TaskGroup() as tasks:
            for number in range(settings.sim_workers):
                tasks.create_task(group.keep(number), name=f"simulated worker {number}")
            tasks.create_task(group.announce(), name="readiness")


@dataclass
class _Group:
    """The workers of this process. Loop's thread only."""

    settings: WorkerSettings
    life: Lifecycle
    model: SimulatedModel
    cards: CardSet
    figures: WorkerFigures
    registrar: Registrar
    metrics_address: str

    def __post_init__(self) -> None:
        self._name = self.settings.id or new_id("worker")
        self._starting = asyncio.Semaphore(STARTS_AT_ONCE)
        self._instances: dict[int, Instance] = {}
        self._changed = asyncio.Event()
        self._faults: tuple[Fault, ...] = self.settings.faults
        self._serving_s = 0.0

    async def announce(self) -> None:
        """Says that the process is ready when all its workers are."""
        while len(self._instances) < self.settings.sim_workers and not self.life.stopping:
            self._changed.clear()
            await self._changed.wait()
        if self._instances:
            ordered = [self._instances[n] for n in sorted(self._instances)]
            self.life.ready(ordered[0], self.settings.ready_file, ordered)

    async def keep(self, number: int) -> None:
        """Lives of one worker until a stop is asked for."""
        try:
            while not self.life.stopping:
                try:
                    await self._live(number)
                except StoppedEarly:
                    log.info("stopped before it was ready", worker=self._id(number))
                except EngineStopped as exc:
                    log.warning("a simulated worker died", worker=self._id(number), why=exc.message)
                    await asyncio.sleep(RESTART_PAUSE_S)
        finally:
            self._changed.set()

    def _id(self, number: int) -> str:
        return self._name if self.settings.sim_workers == 1 else f"{self._name}.{number}"

    async def _live(self, number: int) -> None:
        id, settings = self._id(number), self.settings
        changes: dict[str, object] = {
            "id": id,
            "labels": {**settings.labels, "engine": "simulator"},
        }
        if settings.sim_workers > 1:
            changes |= {"port": 0, "events_port": 0}
        engine = SimEngine(
            self.model.profile,
            self.model.config,
            self.model.vocabulary,
            speedup=settings.sim_speedup,
            name=id,
        )
        streams: list[FaultyPublisher] = []

        def between(publisher: EventPublisher) -> FaultyPublisher:
            streams.append(FaultyPublisher(publisher, random.Random(number)))
            return streams[0]

        registry = self.figures.registry(id)
        profile = self.model.config.profile.name
        Gauge(
            "forebay_worker_simulator",
            "1: this worker is a simulator.",
            ("profile",),
            registry=registry,
        ).labels(profile).set(1)
        Gauge(
            "forebay_worker_simulator_lost_seconds",
            "Time by which the simulator could not keep up.",
            registry=registry,
        ).set_function(lambda: engine.lost_s)
        servicer = SimulatorServicer()
        given = Given(
            engine,
            self.registrar,
            registry,
            self.metrics_address,
            self.cards,
            between,
            [service_of(servicer)],
        )
        faults = None
        try:
            async with AsyncExitStack() as stack:
                async with self._starting:
                    running = await stack.enter_async_context(
                        worker(settings.model_copy(update=changes), self.life, given)
                    )
                if settings.sim_fill_blocks:
                    place = settings.sim_fill_first + number
                    engine.fill(documents(place, settings.sim_fill_blocks))
                loop = asyncio.get_running_loop()
                self._serving_s = self._serving_s or loop.time()
                faults = FaultRunner(
                    id,
                    [f for f in self._faults if f.concerns(number)],
                    engine,
                    streams[0],
                    elapsed_s=loop.time() - self._serving_s,
                    again=number in self._instances,
                )
                servicer.inject = faults.inject
                self._instances[number] = running.instance
                self._changed.set()
                await running.run(self.life, settings.drain_timeout_s)
        finally:
            if faults is not None:
                faults.close()
            engine.close()
            self.figures.remove(id)
