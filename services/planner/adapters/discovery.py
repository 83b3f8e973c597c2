"""Discovery records of workers: read, translated, handed on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from services.common.cards import Instance, InstanceKind
from services.common.discovery import DiscoveryEvent, Gone, Synced, Up
from services.common.telemetry.logging import get_logger
from services.planner.adapters.events import Followers
from services.planner.core.measures import GroupKey, WorkerInfo
from services.planner.core.watch import Watch
from services.planner.ports import Clock

log = get_logger(__name__)


class Watcher(Protocol):
    """The part of discovery that is needed."""

    def watch(self, kind: InstanceKind | None = None) -> AsyncIterator[DiscoveryEvent]:
        """Records and their changes, without end."""


def worker_info(instance: Instance) -> WorkerInfo:
    """A worker's record in the core's words. Raises ValueError when it can't be right."""
    card = instance.card
    if card is None or not card.model:
        raise ValueError("it has no model card with a model")
    if not instance.incarnation:
        raise ValueError("its incarnation is 0")
    return WorkerInfo(
        id=instance.id,
        incarnation=instance.incarnation,
        address=instance.address,
        group=GroupKey(card.model, card.namespace, instance.transfer),
        role=instance.role,
        draining=instance.draining,
    )


async def watch_workers(
    discovery: Watcher, watch: Watch, followers: Followers, clock: Clock
) -> None:
    """Carries records into the read model for ever."""
    async for event in discovery.watch(InstanceKind.WORKER):
        match event:
            case Up(instance=instance):
                try:
                    info = worker_info(instance)
                except ValueError as exc:
                    log.warning("worker record ignored", worker=instance.id, why=str(exc))
                    continue
                log.info("worker record", worker=info.id, role=info.role, draining=info.draining)
                watch.record(info, clock())
                followers.follow(info.id, instance.address, instance.events_address)
            case Gone(id=worker_id, incarnation=incarnation):
                log.info("worker record vanished", worker=worker_id, incarnation=incarnation)
                watch.record_vanished(worker_id, incarnation)
            case Synced():
                log.debug("worker records read")
