"""Who is alive and where: lease-bound instance records in etcd.

Key /forebay/{cluster}/{kind}/{id}, value the InstanceRecord as protobuf JSON. A record that
vanishes is a hint and no more: etcd may come back empty while everybody lives.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from forebay.common.v1 import common_pb2
from google.protobuf import json_format

from services.common.cards import Instance, InstanceKind
from services.common.etcd.claim import claim, resign
from services.common.etcd.client import EtcdClient, open_etcd
from services.common.etcd.config import EtcdConfig
from services.common.etcd.lease import LeasedKey, leased_key
from services.common.etcd.watch import Deleted, Put, watch_prefix
from services.common.settings import ServiceSettings
from services.common.telemetry.logging import get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Up:
    """A record is new or has changed."""

    instance: Instance


@dataclass(frozen=True, slots=True)
class Gone:
    """A record vanished: a hint. Nobody whose connection or events live is dropped for it."""

    kind: InstanceKind
    id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The first list is complete. Told once."""


DiscoveryEvent = Up | Gone | Synced


class Registration:
    """This process's own record."""

    def __init__(self, leased: LeasedKey) -> None:
        self._leased = leased

    async def update(self, instance: Instance, *, timeout_s: float = 2.0) -> None:
        """Changes the record, say to `draining=True`.

        Returns when etcd has it, or after `timeout_s`; then it follows as soon as etcd is back.
        """
        await self._leased.set(_encode(instance))
        await self._leased.wait_stored(timeout_s)

    async def stored(self, timeout_s: float) -> bool:
        """Waits until etcd has the record; False when that took too long."""
        return await self._leased.wait_stored(timeout_s)


class Discovery:
    """The records of one cluster; use `open_discovery`."""

    def __init__(self, client: EtcdClient, cluster: str, lease_ttl_s: float) -> None:
        self._client = client
        self._cluster = cluster
        self._root = f"/forebay/{cluster}/"
        self._lease_ttl_s = lease_ttl_s

    @property
    def connected(self) -> bool:
        """Whether etcd answered last time it was asked."""
        return self._client.connected

    async def watch(self, kind: InstanceKind | None = None) -> AsyncIterator[DiscoveryEvent]:
        """All records (of one kind), then every change, for ever.

        Survives outages, restarts, compaction and loss of etcd; tells differences only. Unreadable
        records are logged and skipped.
        """
        prefix = self._root if kind is None else f"{self._root}{kind}/"
        seen: dict[bytes, Instance] = {}
        events = watch_prefix(self._client, prefix.encode())
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Put):
                    instance = self._decode(event.key, event.value)
                    if instance is not None and seen.get(event.key) != instance:
                        seen[event.key] = instance
                        yield Up(instance)
                elif isinstance(event, Deleted):
                    gone = seen.pop(event.key, None)
                    if gone is not None:
                        yield Gone(gone.kind, gone.id, gone.incarnation)
                else:
                    yield Synced()

    @asynccontextmanager
    async def registered(self, instance: Instance) -> AsyncIterator[Registration]:
        """Keeps the record in etcd while the context lasts, from as soon as etcd can be reached.

        After the loss of the lease (or of all of etcd's data) it is put again.
        """
        key = self._key(instance)
        async with leased_key(self._client, key, _encode(instance), self._lease_ttl_s) as leased:
            yield Registration(leased)

    async def claim(self, job: str, who: str, ttl_s: float) -> bool:
        """Whether `who` is the one of this cluster that does `job` in the next `ttl_s`.

        The time counts from before the call. Raises EtcdUnavailable or EtcdRefused.
        """
        return await claim(self._client, self._job_key(job), who.encode(), ttl_s)

    async def resign(self, job: str, who: str) -> None:
        """Gives a claimed job up, if `who` has it. Raises EtcdUnavailable or EtcdRefused."""
        await resign(self._client, self._job_key(job), who.encode())

    def _job_key(self, job: str) -> bytes:
        return f"/forebay-jobs/{self._cluster}/{job}".encode()

    def _key(self, instance: Instance) -> bytes:
        return f"{self._root}{instance.kind}/{instance.id}".encode()

    def _decode(self, key: bytes, value: bytes) -> Instance | None:
        try:
            record = json_format.Parse(
                value, common_pb2.InstanceRecord(), ignore_unknown_fields=True
            )
            instance = Instance.from_proto(record)
            if self._key(instance) != key:
                raise ValueError(f"it speaks of {instance.kind} {instance.id!r}")
        except (json_format.ParseError, ValueError) as exc:
            log.warning("unreadable record skipped", key=key.decode(errors="replace"), why=str(exc))
            return None
        return instance


def _encode(instance: Instance) -> bytes:
    return json_format.MessageToJson(instance.to_proto(), indent=None).encode()


@asynccontextmanager
async def open_discovery(settings: ServiceSettings) -> AsyncIterator[Discovery]:
    """Discovery as the settings say. Raises EtcdRefused when TLS files can't be used."""
    config = EtcdConfig(
        endpoints=settings.etcd_endpoints,
        user=settings.etcd_user,
        password=settings.etcd_password,
        ca_file=settings.etcd_ca_file,
        cert_file=settings.etcd_cert_file,
        key_file=settings.etcd_key_file,
    )
    async with open_etcd(config) as client:
        yield Discovery(client, settings.cluster, settings.lease_ttl_s)
