"""A router process: what is made, in which order it starts, and how it stops."""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial

from services.common.cards import Instance, InstanceKind
from services.common.discovery import Discovery, open_discovery
from services.common.ids import AttemptId, new_id, new_incarnation
from services.common.lifecycle import Lifecycle
from services.common.loops import keep_going
from services.common.net import advertised_host, host_port
from services.common.rpc.server import rpc_server
from services.common.telemetry.logging import get_logger
from services.common.telemetry.metrics import metrics_server, new_registry
from services.common.telemetry.tracing import tracing
from services.router.adapters.discovery import watch_nodes, watch_workers
from services.router.adapters.events import Followers
from services.router.adapters.garbage import Collections, watched_collections
from services.router.adapters.metrics import RouterMetrics
from services.router.adapters.prefetch import Prefetcher
from services.router.config import RouterSettings
from services.router.core.placement import RouterCore
from services.router.server import RouterServicer

log = get_logger(__name__)

_TICK_S = 0.25
_SWEEP_ENTRIES = 2_000
"""Index entries of removed workers that are freed in one go: a millisecond or two."""
_LINGER_S = 0.5
"""How long a draining router answers on, while gateways read that it leaves."""


async def main(settings: RouterSettings, life: Lifecycle) -> None:
    """Serves until a stop is asked for, then drains."""
    router_id = settings.id or new_id("router")
    registry = new_registry()
    metrics = RouterMetrics(registry)
    core = RouterCore(settings.core_config(), random.Random(settings.seed or None))
    clock = time.monotonic
    with (
        tracing("router", router_id, settings.otlp_endpoint) as tracer,
        metrics_server(registry, settings.host, settings.metrics_port) as metrics_port,
        watched_collections() as collections,
    ):
        async with (
            open_discovery(settings) as discovery,
            Followers(
                {InstanceKind.WORKER: core, InstanceKind.KVBM: core.nodes},
                clock,
                snapshots_at_once=settings.snapshots_at_once,
                snapshot_timeout_s=settings.snapshot_timeout_s,
                on_report=metrics.report,
            ) as followers,
            Prefetcher(core.nodes.address, metrics.prefetched) as prefetcher,
        ):
            servicer = RouterServicer(
                core,
                clock,
                metrics,
                tracer,
                router_id=router_id,
                policy=settings.policy.value,
                new_attempt=lambda: AttemptId(new_id("att")),
                streams=followers.stats,
                hint=prefetcher.hint if settings.prefetch else None,
                admission=settings.admission_config(),
            )
            followers.on_news = servicer.news
            async with (
                rpc_server(settings.host, settings.port, [servicer.service()]) as server,
                asyncio.TaskGroup() as tasks,
            ):
                synced = asyncio.Event()
                background = [
                    tasks.create_task(
                        watch_workers(discovery, core, followers, clock, synced), name="discovery"
                    ),
                    tasks.create_task(
                        watch_nodes(discovery, core.nodes, followers, clock), name="kvbm discovery"
                    ),
                    tasks.create_task(
                        keep_going(
                            partial(
                                _tick, core, servicer, followers, metrics, discovery, collections
                            ),
                            "tick",
                        ),
                        name="tick",
                    ),
                ]
                await _first_list(life, synced, settings.discovery_grace_s)
                host = advertised_host(settings.host, settings.advertise_host)
                instance = Instance(
                    id=router_id,
                    kind=InstanceKind.ROUTER,
                    incarnation=new_incarnation(),
                    address=host_port(host, server.port),
                    metrics_address=host_port(host, metrics_port),
                )
                async with discovery.registered(instance) as registration:
                    if not life.stopping:
                        await server.set_serving(True)
                        life.ready(instance, settings.ready_file)
                    await life.wait_stop()
                    await server.set_serving(False)
                    if discovery.connected:
                        await registration.update(_draining(instance))
                    await asyncio.sleep(min(_LINGER_S, settings.drain_timeout_s))
                    servicer.drain()
                for task in background:
                    task.cancel()


async def _first_list(life: Lifecycle, synced: asyncio.Event, grace_s: float) -> None:
    """Waits for the first list of workers, but not for ever."""
    waits = {asyncio.create_task(synced.wait()), asyncio.create_task(life.wait_stop())}
    await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    if not synced.is_set() and not life.stopping:
        log.warning("etcd does not answer; serving without its records", waited_s=grace_s)


async def _tick(
    core: RouterCore,
    servicer: RouterServicer,
    followers: Followers,
    metrics: RouterMetrics,
    discovery: Discovery,
    collections: Collections,
) -> None:
    """Lets time pass in the core, and shows its figures."""
    while True:
        now = time.monotonic()
        for worker_id in core.tick(now):
            log.warning("worker gone", worker=worker_id)
            followers.unfollow(InstanceKind.WORKER, worker_id)
        for node_id in core.nodes.tick(now):
            log.warning("kvbm daemon gone", kvbm=node_id)
            followers.unfollow(InstanceKind.KVBM, node_id)
        while core.sweep(_SWEEP_ENTRIES):  # noqa: ASYNC110 - gives way, waits for nothing
            await asyncio.sleep(0)
        collections.tend()
        servicer.tick()
        metrics.observe(
            core.index_stats(digests=False),
            followers.stats,
            core.statuses(now),
            core.nodes.nodes(now),
            core.bookings,
            core.expired_bookings,
            discovery.connected,
        )
        await asyncio.sleep(_TICK_S)


def _draining(instance: Instance) -> Instance:
    return Instance(
        id=instance.id,
        kind=instance.kind,
        incarnation=instance.incarnation,
        address=instance.address,
        metrics_address=instance.metrics_address,
        draining=True,
    )
