"""A kvbm process: what is made, in which order it starts, and how it stops.

Memory and disk are taken over before anybody can ask. It stops the other way round, and leaves
every block for the next.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from services.common.cards import Instance, InstanceKind
from services.common.discovery import open_discovery
from services.common.events.publisher import EventPublisher, open_publisher
from services.common.events.tiers import REMOTE_LABEL
from services.common.ids import new_incarnation
from services.common.lifecycle import Lifecycle
from services.common.loops import keep_going
from services.common.net import is_loopback
from services.common.rpc.server import RpcServer, rpc_server
from services.common.telemetry.logging import get_logger
from services.common.telemetry.metrics import metrics_server, new_registry
from services.common.telemetry.tracing import tracing
from services.kvbm.adapters.peers import GrpcPeers, watch_peers
from services.kvbm.caretaker import Caretaker
from services.kvbm.config import KvbmSettings
from services.kvbm.core.peers import PeerBook
from services.kvbm.curator import Curator
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.movers.nixl_peers import PeerAgent, remove_leftovers
from services.kvbm.movers.readerlock import wait_for_end
from services.kvbm.node import Node
from services.kvbm.owners import Owners
from services.kvbm.readers import Readers
from services.kvbm.server import KvbmServicer
from services.kvbm.tiers.disk import open_disk_tier
from services.kvbm.tiers.exports import Exports
from services.kvbm.tiers.host import HostTier
from services.kvbm.tiers.janitor import run_janitor
from services.kvbm.tiers.object import RemoteTier, open_object_tier
from services.kvbm.tiers.peer import TRANSFER, Peers
from services.kvbm.tiers.port import DiskTier, ObjectTier

FORMER_S = 30.0
"""How long a start waits for the end of processes that a former life has left."""
LINGER_S = 0.2
"""How long a stopping daemon answers on, while others read that it leaves."""
log = get_logger(__name__)


@dataclass(slots=True)
class Daemon:
    """A daemon that serves."""

    instance: Instance
    node: Node
    readers: Readers
    caretaker: Caretaker
    rpc: RpcServer


async def main(settings: KvbmSettings, life: Lifecycle) -> None:
    """Serves until a stop is asked for; all blocks stay."""
    async with (
        daemon(settings) as running,
        open_discovery(settings) as discovery,
        asyncio.TaskGroup() as tasks,
    ):
        loops = running.caretaker.start(tasks)
        if isinstance(remote := running.node.remote, RemoteTier):
            tidying = run_janitor(remote, running.instance.id, discovery)
            loops.append(tasks.create_task(tidying, name="janitor"))
        if (peers := running.node.peers) is not None and peers.works:
            watching = partial(watch_peers, discovery, peers)
            loops.append(tasks.create_task(keep_going(watching, "peers"), name="peers"))
        async with discovery.registered(running.instance) as record:
            await running.rpc.set_serving(True)
            life.ready(running.instance, settings.ready_file)
            await life.wait_stop()
            await running.rpc.set_serving(False)
            if discovery.connected:
                await record.update(replace(running.instance, draining=True))
            await asyncio.sleep(min(LINGER_S, settings.drain_timeout_s))
        for loop in loops:
            loop.cancel()


@asynccontextmanager
async def daemon(settings: KvbmSettings) -> AsyncIterator[Daemon]:
    """A daemon that answers while the context lasts; its own work and its record are the caller's.

    Raises Unavailable (PORT_TAKEN), or OSError when memory or disk can't be had.
    """
    id = settings.id or f"kvbm-{socket.gethostname()}"
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        registry = new_registry()
        metrics = KvbmMetrics(registry)
        metrics_port = 0
        if settings.metrics:
            metrics_port = stack.enter_context(
                metrics_server(registry, settings.host, settings.metrics_port)
            )
        stack.enter_context(tracing("kvbm", id, settings.otlp_endpoint))
        publisher = await stack.enter_async_context(
            open_publisher(
                settings.host,
                settings.events_port,
                id,
                incarnation,
                advertise_host=settings.advertise_host,
            )
        )
        node = await _node(stack, settings, id, incarnation, publisher, metrics)
        readers = Readers(node, metrics)
        caretaker = Caretaker(node, readers, metrics)
        curator = Curator(node, readers, caretaker)
        servicer = KvbmServicer(node, readers, curator, publisher, metrics)
        rpc = await stack.enter_async_context(
            rpc_server(settings.host, settings.port, [servicer.service()], socket=settings.socket)
        )
        instance = Instance(
            id=id,
            kind=InstanceKind.KVBM,
            incarnation=incarnation,
            address=settings.advertised(rpc.port),
            events_address=publisher.address,
            metrics_address=settings.advertised(metrics_port) if metrics_port else "",
            labels={REMOTE_LABEL: shared} if (shared := settings.shared_storage) else {},
            transfer=TRANSFER if node.peers is not None and node.peers.works else "",
        )
        yield Daemon(instance, node, readers, caretaker, rpc)


async def _node(
    stack: AsyncExitStack,
    settings: KvbmSettings,
    id: str,
    incarnation: int,
    publisher: EventPublisher,
    metrics: KvbmMetrics,
) -> Node:
    owners = Owners(settings.arena_dir)
    stack.callback(owners.close)
    host = HostTier(settings.arena_dir, settings.g2_bytes, settings.arena_share)
    stack.push_async_callback(host.close)
    if settings.purge:
        log.info("removed, as asked", arenas=await host.purge())
    disk = await _disk(stack, settings)
    remote = await _remote(stack, settings)
    peers = _peers(settings, id, incarnation, metrics)
    node = Node(
        id, incarnation, settings, host, owners, disk, remote, publisher.publish, metrics, peers
    )
    stack.push_async_callback(node.close)
    # What a former life's agents may still write into is nobody's until they are dead.
    await asyncio.to_thread(wait_for_end, settings.arena_dir, FORMER_S)
    await asyncio.to_thread(remove_leftovers, settings.arena_dir)
    starting = asyncio.create_task(peers.start()) if peers is not None else None
    await node.adopt()
    if starting is not None:
        await starting
    return node


def _peers(settings: KvbmSettings, id: str, incarnation: int, metrics: KvbmMetrics) -> Peers | None:
    if settings.peers_off:
        return None
    loopback = is_loopback(settings.host)
    return Peers(
        PeerBook(id),
        GrpcPeers(id, incarnation),
        Exports(
            settings.peer_window_bytes,
            metrics,
            Node.now_ms,
            new_agent=partial(PeerAgent, settings.arena_dir, loopback=loopback),
        ),
        metrics,
        timeout_s=settings.peer_timeout_s,
        new_agent=partial(PeerAgent, settings.arena_dir, writes=True, loopback=loopback),
    )


async def _disk(stack: AsyncExitStack, settings: KvbmSettings) -> DiskTier | None:
    if not settings.g3_bytes:
        return None
    return await stack.enter_async_context(
        open_disk_tier(
            settings.disk_folder,
            settings.g3_bytes,
            settings.disk_free_bytes,
            nixl=settings.nixl,
            direct=settings.direct_io,
            gds=settings.nixl_backend_gds,
            purge=settings.purge,
        )
    )


async def _remote(stack: AsyncExitStack, settings: KvbmSettings) -> ObjectTier | None:
    if not settings.remote_url:
        return None
    return await stack.enter_async_context(
        open_object_tier(
            settings.remote_url,
            settings.remote_endpoint,
            settings.remote_region,
            settings.remote_access_key,
            settings.remote_secret_key,
            run_blocks=settings.remote_run_blocks,
            timeout_s=settings.remote_timeout_s,
            ttl_s=settings.remote_ttl_s,
            nixl=settings.nixl,
            file_mover=None,
            direct=settings.direct_io,
        )
    )
