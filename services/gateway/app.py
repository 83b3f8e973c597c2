"""The only place where a gateway is wired; owns the tasks, the order of start, drain and stop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from services.common.cards import Holder, Instance, InstanceKind, ModelCard
from services.common.discovery import Discovery, open_discovery
from services.common.ids import new_id, new_incarnation
from services.common.lifecycle import Lifecycle
from services.common.loops import keep_going
from services.common.net import advertised_host, host_port
from services.common.telemetry.logging import get_logger
from services.common.telemetry.metrics import metrics_server, new_registry
from services.common.telemetry.tracing import tracing
from services.gateway.adapters.cards import load_tokenizer
from services.gateway.adapters.discovery import Directory
from services.gateway.adapters.limits import raise_file_limit
from services.gateway.adapters.router import Routers
from services.gateway.adapters.tokenizer import Tokenizer
from services.gateway.adapters.workers import LinkState, Workers
from services.gateway.config import GatewaySettings
from services.gateway.http.app import GatewayApp
from services.gateway.http.auth import load_keys
from services.gateway.http.health import InstanceView
from services.gateway.http.server import http_server
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.pipeline import Pipeline
from services.gateway.placement import RoutedPlacer
from services.gateway.ports import Candidate

log = get_logger(__name__)

_SYNC_S = 3.0
_FIRST_MODELS_S = 15.0
_TICK_S = 0.5


OpenDiscovery = Callable[[GatewaySettings], AbstractAsyncContextManager[Discovery]]


async def main(
    settings: GatewaySettings, life: Lifecycle, discover: OpenDiscovery = open_discovery
) -> None:
    """Serves until `life` is told to stop, then drains."""
    keys = load_keys(settings.api_keys_file) if settings.api_keys_file else None
    gateway_id = settings.id or new_id("gateway")
    raise_file_limit(settings.max_in_flight)
    registry = new_registry()
    metrics = GatewayMetrics(registry)

    workers = Workers(
        gateway_id,
        connect_timeout_s=settings.connect_timeout_s,
        silence_timeout_s=settings.silence_timeout_s,
        stall_timeout_s=settings.stall_timeout_s,
    )
    routers = Routers(timeout_s=settings.router_timeout_s)
    for number, address in enumerate(settings.router_addresses):
        routers.update(f"router-{number}", address)
    cache = _cache_dir(settings)

    async def load(address: str, card: ModelCard) -> Tokenizer:
        return await load_tokenizer(address, card, cache)

    models = Models(load, lambda reason: metrics.cards_refused.labels(reason).inc())

    def candidates(model: str) -> list[Candidate]:
        found = []
        for instance in models.workers(model):
            link = workers.get(instance.id)
            if link is not None and not instance.draining:
                holder = Holder(instance.id, instance.incarnation)
                up = link.state is LinkState.UP
                found.append(
                    Candidate(
                        holder,
                        instance.address,
                        up,
                        link.in_flight,
                        instance.labels,
                        instance.role,
                    )
                )
        return found

    placer = RoutedPlacer(
        routers,
        candidates,
        lambda reason: metrics.router_fallback.labels(reason).inc(),
        random.Random(),
    )
    pipeline = Pipeline(
        placer, workers, metrics, gateway_id=gateway_id, max_migrations=settings.max_migrations
    )
    directory = Directory(workers, models, routers, follow_routers=not settings.router_addresses)

    def instances() -> list[InstanceView]:
        return [*_worker_views(workers), *_router_views(routers)]

    with (
        metrics_server(registry, settings.host, settings.metrics_port) as metrics_port,
        tracing("gateway", gateway_id, settings.otlp_endpoint) as tracer,
    ):
        web = GatewayApp(settings, models, pipeline, metrics, tracer, keys, instances)
        async with discover(settings) as discovery, asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(directory.run(discovery), name="discovery"),
                tasks.create_task(routers.run(), name="routers"),
                tasks.create_task(_start(web, directory, models), name="start"),
            ]
            try:
                async with http_server(
                    web,
                    settings.host,
                    settings.port,
                    backlog=settings.backlog,
                    keep_alive_s=settings.http_keep_alive_s,
                    grace_s=settings.drain_timeout_s,
                ) as server:
                    gauges = partial(
                        _gauges, metrics, workers, routers, models, lambda: server.connections
                    )
                    background.append(
                        tasks.create_task(keep_going(gauges, "gauges"), name="gauges")
                    )
                    host = advertised_host(settings.host, settings.advertise_host)
                    instance = Instance(
                        id=gateway_id,
                        kind=InstanceKind.GATEWAY,
                        incarnation=new_incarnation(),
                        address=host_port(host, server.port),
                        metrics_address=host_port(host, metrics_port),
                    )
                    async with discovery.registered(instance) as registration:
                        await _first(background[2], life)
                        life.ready(instance, settings.ready_file)
                        await life.wait_stop()
                        web.draining = True
                        log.info("draining", in_flight=web.in_flight)
                        await registration.update(replace(instance, draining=True))
                        await asyncio.sleep(settings.drain_notice_s)
                    asyncio.get_running_loop().call_later(settings.drain_timeout_s, web.end_all)
            finally:
                for task in background:
                    task.cancel()
                models.close()
                await workers.close()


def _cache_dir(settings: GatewaySettings) -> Path:
    if settings.model_cache_dir:
        return Path(settings.model_cache_dir)
    return Path.home() / ".cache" / "forebay" / "models"


async def _start(web: GatewayApp, directory: Directory, models: Models) -> None:
    """Says that we know what there is, once we do (or should by now)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SYNC_S):
            await directory.synced.wait()
    with suppress(TimeoutError):
        async with asyncio.timeout(_FIRST_MODELS_S):
            await models.settled()
    web.starting = False


async def _first(start: asyncio.Task[None], life: Lifecycle) -> None:
    stop = asyncio.ensure_future(life.wait_stop())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()


async def _gauges(
    metrics: GatewayMetrics,
    workers: Workers,
    routers: Routers,
    models: Models,
    connections: Callable[[], int],
) -> None:
    while True:
        metrics.router_up.set(routers.up)
        metrics.workers_up.set(sum(link.state is LinkState.UP for link in workers.links()))
        metrics.models.set(len(models.served()))
        metrics.connections.set(connections())
        await asyncio.sleep(_TICK_S)


def _worker_views(workers: Workers) -> list[InstanceView]:
    return [
        InstanceView(
            component="worker",
            id=link.id,
            address=link.instance.address,
            connected=link.state is LinkState.UP,
            model=link.instance.card.model if link.instance.card else "",
            incarnation=link.instance.incarnation,
            draining=link.instance.draining,
            in_flight=link.in_flight,
        )
        for link in workers.links()
    ]


def _router_views(routers: Routers) -> list[InstanceView]:
    return [
        InstanceView("router", router_id, address, router_id == routers.current)
        for router_id, address in sorted(routers.targets.items())
    ]
