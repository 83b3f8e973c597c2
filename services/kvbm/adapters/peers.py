"""Calls to the daemons of other nodes, and their records as discovery tells them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Protocol, TypeVar

import grpc
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.arena import Geometry
from services.common.cards import InstanceKind
from services.common.discovery import DiscoveryEvent, Gone, Up
from services.common.rpc.channel import open_channel
from services.common.telemetry.logging import get_logger
from services.kvbm.adapters.messages import geometry_message
from services.kvbm.core.peers import PeerId, PeerInfo
from services.kvbm.tiers.peer import TRANSFER, Peers
from services.kvbm.tiers.port import Export, Exported, PeerError

log = get_logger(__name__)
_MOST_CHANNELS = 64
_CLOSE_S = 1.0
T = TypeVar("T")


class GrpcPeers:
    """Implements PeerCalls. Loop's thread only."""

    def __init__(self, node: str, incarnation: int) -> None:
        self._node = node
        self._incarnation = incarnation
        self._channels: dict[str, tuple[grpc.aio.Channel, Any]] = {}
        """Least recently used first."""
        self._closing: set[asyncio.Task[None]] = set()

    async def locate(
        self,
        address: str,
        namespace: bytes,
        geometry: Geometry,
        keys: Sequence[bytes],
        timeout_s: float,
    ) -> int:
        """See PeerCalls."""
        request = pb.LocateRequest(
            namespace=namespace, geometry=geometry_message(geometry), keys=keys
        )
        answer = await _answer(self._stub(address).Locate(request, timeout=timeout_s))
        return min(int(answer.blocks), len(keys))

    async def export(
        self,
        address: str,
        namespace: bytes,
        geometry: Geometry,
        keys: Sequence[bytes],
        short_keys: Sequence[int],
        known_agent: str,
        timeout_s: float,
    ) -> Export:
        """See PeerCalls."""
        request = pb.ExportRequest(
            namespace=namespace,
            geometry=geometry_message(geometry),
            keys=keys,
            short_keys=short_keys,
            node=self._node,
            incarnation=self._incarnation,
            agent=known_agent,
        )
        answer = await _answer(self._stub(address).Export(request, timeout=timeout_s))
        return Export(
            answer.export,
            answer.expires_ms,
            answer.agent,
            answer.agent_metadata,
            [Exported(b.header, b.address, b.length) for b in answer.blocks],
            answer.available,
            answer.reason,
        )

    async def end(
        self,
        address: str,
        exports: Sequence[int],
        namespace: bytes,
        bad_keys: Sequence[bytes],
        timeout_s: float,
    ) -> None:
        """See PeerCalls."""
        request = pb.EndExportRequest(exports=exports, namespace=namespace, bad_keys=bad_keys)
        await _answer(self._stub(address).EndExport(request, timeout=timeout_s))

    async def close(self) -> None:
        """See PeerCalls."""
        for channel, _ in self._channels.values():
            await channel.close()
        self._channels.clear()
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)

    def _stub(self, address: str) -> Any:
        known = self._channels.pop(address, None)
        if known is None:
            channel = open_channel(address)
            known = channel, kvbm_pb2_grpc.KvbmServiceStub(channel)
        self._channels[address] = known
        if len(self._channels) > _MOST_CHANNELS:
            oldest, _ = self._channels.pop(next(iter(self._channels)))
            task = asyncio.create_task(oldest.close(_CLOSE_S), name="kvbm peer channel end")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return known[1]


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as exc:
        code = exc.code().name.lower().replace("_", "-")
        raise PeerError(f"{code}: {exc.details()}") from exc


class Watcher(Protocol):
    """The part of Discovery that is used here."""

    def watch(self, kind: InstanceKind | None = None) -> AsyncIterator[DiscoveryEvent]:
        """See Discovery."""
        ...


async def watch_peers(discovery: Watcher, peers: Peers) -> None:
    """Carries other daemons' records into the book for ever."""
    async for event in discovery.watch(InstanceKind.KVBM):
        match event:
            case Up(instance=instance):
                id = PeerId(instance.id)
                if instance.transfer == TRANSFER and instance.address:
                    peers.record(PeerInfo(id, instance.incarnation, instance.address))
                else:
                    peers.gone(id, instance.incarnation)
            case Gone(id=id, incarnation=incarnation):
                peers.gone(PeerId(id), incarnation)
            case _:
                log.debug("peers' records read")
