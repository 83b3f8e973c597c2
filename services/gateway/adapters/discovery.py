"""Hands discovery's events to those who care: workers to sessions and models, routers to the router
client.
"""

from __future__ import annotations

import asyncio

from services.common.cards import Instance, InstanceKind
from services.common.discovery import Discovery, Gone, Synced, Up
from services.gateway.adapters.router import Routers
from services.gateway.adapters.workers import Workers
from services.gateway.models import Models


class Directory:
    """What discovery shows. A worker stays known while its connection lives, whatever etcd says."""

    def __init__(
        self, workers: Workers, models: Models, routers: Routers, *, follow_routers: bool
    ) -> None:
        """`follow_routers` False: the routers are given by settings."""
        self._workers = workers
        self._models = models
        self._routers = routers
        self._follow_routers = follow_routers
        self.synced = asyncio.Event()
        """Set when the first list is complete."""
        workers.on_gone(lambda instance: models.remove(instance.id))

    async def run(self, discovery: Discovery) -> None:
        """Follows discovery until cancelled."""
        async for event in discovery.watch():
            if isinstance(event, Up):
                self._up(event.instance)
            elif isinstance(event, Gone):
                self._gone(event)
            elif isinstance(event, Synced):
                self.synced.set()

    def _up(self, instance: Instance) -> None:
        if instance.kind is InstanceKind.WORKER:
            self._workers.update(instance)
            self._models.update(instance)
        elif instance.kind is InstanceKind.ROUTER and self._follow_routers:
            if instance.draining:
                self._routers.leave(instance.id)
            else:
                self._routers.update(instance.id, instance.address)

    def _gone(self, gone: Gone) -> None:
        if gone.kind is InstanceKind.WORKER:
            self._workers.unregister(gone.id, gone.incarnation)
        elif gone.kind is InstanceKind.ROUTER and self._follow_routers:
            self._routers.remove(gone.id)
