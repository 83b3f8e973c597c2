"""Discovery records of workers and kvbm daemons: read, translated, handed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from services.common.cards import Instance, InstanceKind
from services.common.discovery import DiscoveryEvent, Gone, Synced, Up
from services.common.events.tiers import REMOTE_LABEL
from services.common.telemetry.logging import get_logger
from services.common.tenancy import tenants_of
from services.router.adapters.events import Followers
from services.router.core.nodes import NodeInfo, NodeTable
from services.router.core.placement import RouterCore
from services.router.core.workers import WorkerInfo, WorkerRole
from services.router.ports import Clock

log = get_logger(__name__)

_MOST_RANKS = 1024


class Watcher(Protocol):
    """The part of discovery that is needed."""

    def watch(self, kind: InstanceKind | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Records and their changes, without end."""


def worker_info(instance: Instance) -> WorkerInfo:
    """A worker's record in the core's words. Raises ValueError when it can't be routed to."""
    card = instance.card
    if card is None or not card.model or not card.block_size:
        raise ValueError("it has no model card with a model and a block size")
    if instance.dp_size > _MOST_RANKS:
        raise ValueError(f"it claims {instance.dp_size} data-parallel ranks")
    if not instance.incarnation:
        raise ValueError("its incarnation is 0")
    return WorkerInfo(
        id=instance.id,
        incarnation=instance.incarnation,
        address=instance.address,
        model=card.model,
        block_size=card.block_size,
        total_blocks=card.total_blocks,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        adapters={a.name: a.path for a in card.adapters},
        labels=dict(instance.labels),
        tenants=tenants_of(instance.labels),
        role=WorkerRole(instance.role.value),
        draining=instance.draining,
        dp_size=instance.dp_size,
        kvbm=instance.kvbm,
        namespace=card.namespace,
        transfer=instance.transfer,
    )


def node_info(instance: Instance) -> NodeInfo:
    """A daemon's record in the core's words. Raises ValueError when it can't be right."""
    if not instance.incarnation:
        raise ValueError("its incarnation is 0")
    return NodeInfo(
        id=instance.id,
        incarnation=instance.incarnation,
        address=instance.address,
        remote=instance.labels.get(REMOTE_LABEL, ""),
        draining=instance.draining,
        transfer=instance.transfer,
    )


async def watch_workers(
    discovery: Watcher,
    core: RouterCore,
    followers: Followers,
    clock: Clock,
    synced: asyncio.Event,
) -> None:
    """Carries records into the core for ever; sets `synced` when the first list is complete."""
    async for event in discovery.watch(InstanceKind.WORKER):
        match event:
            case Up(instance=instance):
                try:
                    info = worker_info(instance)
                except ValueError as exc:
                    log.warning("worker record ignored", worker=instance.id, why=str(exc))
                    continue
                who = {"worker": info.id, "incarnation": info.incarnation}
                log.info("worker record", **who, model=info.model, draining=info.draining)
                if core.record(info, clock()):
                    followers.follow(
                        InstanceKind.WORKER, info.id, instance.address, instance.events_address
                    )
                else:
                    log.warning("worker record is of a former life; do two share an id?", **who)
            case Gone(id=worker_id, incarnation=incarnation):
                log.info("worker record vanished", worker=worker_id, incarnation=incarnation)
                core.record_vanished(worker_id, incarnation)
            case Synced():
                core.synced()
                synced.set()


async def watch_nodes(
    discovery: Watcher, nodes: NodeTable, followers: Followers, clock: Clock
) -> None:
    """Carries daemons' records into the table for ever."""
    async for event in discovery.watch(InstanceKind.KVBM):
        match event:
            case Up(instance=instance):
                who = {"kvbm": instance.id, "incarnation": instance.incarnation}
                try:
                    info = node_info(instance)
                except ValueError as exc:
                    log.warning("kvbm record ignored", **who, why=str(exc))
                    continue
                log.info("kvbm record", **who, draining=info.draining)
                if nodes.record(info, clock()):
                    followers.follow(
                        InstanceKind.KVBM, info.id, instance.address, instance.events_address
                    )
                else:
                    log.warning("kvbm record is of a former life; do two share an id?", **who)
            case Gone(id=node_id, incarnation=incarnation):
                log.info("kvbm record vanished", kvbm=node_id, incarnation=incarnation)
                nodes.record_vanished(node_id, incarnation)
            case Synced():
                log.debug("kvbm records read")
