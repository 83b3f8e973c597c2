"""Wires one planner together, and takes it through its life."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

from services.common.cards import Instance, InstanceKind
from services.common.discovery import Discovery, open_discovery
from services.common.ids import new_id, new_incarnation
from services.common.lifecycle import Lifecycle
from services.common.loops import keep_going
from services.common.rpc.server import rpc_server
from services.common.telemetry.logging import get_logger
from services.common.telemetry.metrics import metrics_server, new_registry
from services.planner.adapters.discovery import watch_workers
from services.planner.adapters.election import Election
from services.planner.adapters.events import Followers
from services.planner.adapters.metrics import PlannerMetrics
from services.planner.adapters.roles import set_role
from services.planner.config import PlannerSettings
from services.planner.core.policy import Policy
from services.planner.core.watch import Watch
from services.planner.planner import Planner

log = get_logger(__name__)


async def main(settings: PlannerSettings, life: Lifecycle) -> None:
    """Plans until a stop is asked for, then lets another take over."""
    planner_id, incarnation = settings.id or new_id("planner"), new_incarnation()
    registry = new_registry()
    metrics = PlannerMetrics(registry)
    clock = time.monotonic
    watch = Watch(settings.watch_config())
    with metrics_server(registry, settings.host, settings.metrics_port) as metrics_port:
        async with (
            open_discovery(settings) as discovery,
            Followers(
                watch,
                clock,
                snapshots_at_once=settings.snapshots_at_once,
                snapshot_timeout_s=settings.snapshot_timeout_s,
            ) as followers,
            rpc_server(settings.host, settings.port, []) as server,
            asyncio.TaskGroup() as tasks,
        ):
            who = f"{planner_id}/{incarnation:x}"
            election = Election(discovery, who, settings.lease_ttl_s, clock)
            planner = Planner(
                watch,
                Policy(settings.policy_config(), settings.targets()),
                election,
                set_role,
                metrics,
                clock,
                models=settings.models,
                dry_run=settings.dry_run,
                set_role_timeout_s=settings.set_role_timeout_s,
                on_gone=followers.unfollow,
            )
            background = [
                tasks.create_task(
                    watch_workers(discovery, watch, followers, clock), name="discovery"
                ),
                tasks.create_task(keep_going(election.run, "election"), name="election"),
                tasks.create_task(
                    keep_going(
                        partial(
                            _rounds,
                            planner,
                            settings.interval_s,
                            partial(_observe, metrics, election, discovery, followers, watch),
                        ),
                        "planning",
                    ),
                    name="planning",
                ),
            ]
            instance = Instance(
                id=planner_id,
                kind=InstanceKind.PLANNER,
                incarnation=incarnation,
                address=settings.advertised(server.port),
                metrics_address=settings.advertised(metrics_port),
            )
            async with discovery.registered(instance) as registration:
                await server.set_serving(True)
                life.ready(instance, settings.ready_file)
                await life.wait_stop()
                await server.set_serving(False)
                for task in background:
                    task.cancel()
                # Only when no round runs any more: nothing is moved without the claim.
                await asyncio.wait(background)
                if discovery.connected:
                    await registration.update(replace(instance, draining=True))
                    await election.resign()


async def _rounds(planner: Planner, interval_s: float, observe: partial[None]) -> None:
    """One round after the other, at equal distances."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        await planner.round()
        observe()
        due = max(due + interval_s, loop.time())
        await asyncio.sleep(due - loop.time())


def _observe(
    metrics: PlannerMetrics,
    election: Election,
    discovery: Discovery,
    followers: Followers,
    watch: Watch,
) -> None:
    metrics.observe(election.active, discovery.connected, followers.stats, watch.orphans)
