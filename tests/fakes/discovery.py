"""Discovery without etcd: a test says who is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.common.cards import Instance, InstanceKind
from services.common.discovery import DiscoveryEvent, Gone, Synced, Up


class FakeRegistration:
    """A record that changes at once."""

    def __init__(self, discovery: "FakeDiscovery") -> None:
        self._discovery = discovery

    async def update(self, instance: Instance, *, timeout_s: float = 2.0) -> None:
        self._discovery.registered_instances.append(instance)

    async def stored(self, timeout_s: float) -> bool:
        return True


class FakeDiscovery:
    """Same methods as services.common.discovery.Discovery."""

    connected = True

    def __init__(self, *instances: Instance) -> None:
        self._instances = {i.id: i for i in instances}
        self._watchers: list[asyncio.Queue[DiscoveryEvent]] = []
        self.registered_instances: list[Instance] = []
        """Every state of every record that was registered, in order."""

    def put(self, instance: Instance) -> None:
        """A record appears or changes."""
        self._instances[instance.id] = instance
        self._tell(Up(instance))

    def drop(self, instance: Instance) -> None:
        """A record vanishes."""
        self._instances.pop(instance.id, None)
        self._tell(Gone(instance.kind, instance.id, instance.incarnation))

    async def watch(self, kind: InstanceKind | None = None) -> AsyncIterator[DiscoveryEvent]:
        queue: asyncio.Queue[DiscoveryEvent] = asyncio.Queue()
        for instance in self._instances.values():
            queue.put_nowait(Up(instance))
        queue.put_nowait(Synced())
        self._watchers.append(queue)
        while True:
            yield await queue.get()

    @asynccontextmanager
    async def registered(self, instance: Instance) -> AsyncIterator[FakeRegistration]:
        self.registered_instances.append(instance)
        yield FakeRegistration(self)

    def _tell(self, event: DiscoveryEvent) -> None:
        for queue in self._watchers:
            queue.put_nowait(event)
