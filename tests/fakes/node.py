"""A kvbm daemon without tiers: real gRPC Snapshot and Prefetch, a real event stream.

Tests move its blocks about, stop its heartbeats and lose its batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2, kvbm_pb2_grpc

from services.common.cards import Instance, InstanceKind
from services.common.events.codec import tier_snapshot_to_proto
from services.common.events.model import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    Snapshot,
    Tier,
    TierBlocks,
    TierRate,
)
from services.common.events.publisher import EventPublisher, open_publisher, publisher_time_us
from services.common.events.tiers import REMOTE_LABEL
from services.common.ids import BlockKey, new_incarnation
from services.common.rpc.server import Service, rpc_server

NAMESPACE = b"\0" * 32
"""That of `fake_worker`."""


class FakeNode(kvbm_pb2_grpc.KvbmServiceServicer):
    """`async with fake_node("n0") as node:`. Keys are plain ints."""

    def __init__(self, instance: Instance, publisher: EventPublisher) -> None:
        self.instance = instance
        self.publisher = publisher
        self.blocks: dict[tuple[bytes, Tier], set[int]] = {}
        """The truth."""
        self.rates: dict[tuple[bytes, Tier], TierRate] = {}
        self.snapshots = 0
        self.beating = True
        self.gate = asyncio.Event()
        """Prefetches wait for it; set at first."""
        self.gate.set()
        self.prefetches: list[kvbm_pb2.PrefetchRequest] = []
        self._losing = 0

    def store(self, tier: Tier, keys: Iterable[int], namespace: bytes = NAMESPACE) -> None:
        """Blocks come to a tier."""
        keys = list(keys)
        self.blocks.setdefault((namespace, tier), set()).update(keys)
        self.publish(BlocksStored(tier, _keys(keys), namespace=namespace))

    def remove(self, tier: Tier, keys: Iterable[int], namespace: bytes = NAMESPACE) -> None:
        """Blocks leave a tier."""
        keys = list(keys)
        self.blocks[namespace, tier].difference_update(keys)
        self.publish(BlocksRemoved(tier, _keys(keys), namespace=namespace))

    def clear(self, tier: Tier, namespace: bytes = NAMESPACE) -> None:
        """A tier is emptied."""
        self.blocks.pop((namespace, tier), None)
        self.publish(BlocksCleared(tier, namespace=namespace))

    def rate(self, tier: Tier, block_s: float, namespace: bytes = NAMESPACE) -> None:
        """A tier was measured."""
        rate = TierRate(tier, 0.0, block_s, namespace)
        self.rates[namespace, tier] = rate
        self.publish(rate)

    def lose(self, batches: int = 1) -> None:
        """The next batches get their numbers but are never sent."""
        self._losing = batches

    def publish(self, event: Event) -> None:
        """Anything at all."""
        if self._losing:
            self._losing -= 1
            self.publisher.sequence += 1
        else:
            self.publisher.publish((event,))

    async def Snapshot(
        self, request: kvbm_pb2.SnapshotRequest, context: Any
    ) -> kvbm_pb2.SnapshotResponse:
        self.snapshots += 1
        return tier_snapshot_to_proto(
            Snapshot(
                self.instance.id,
                self.instance.incarnation,
                self.publisher.sequence,
                tuple(
                    TierBlocks(tier, _keys(keys), namespace=namespace)
                    for (namespace, tier), keys in self.blocks.items()
                ),
                rates=tuple(self.rates.values()),
                time_unix_us=publisher_time_us(),
            )
        )

    async def Prefetch(
        self, request: kvbm_pb2.PrefetchRequest, context: Any
    ) -> kvbm_pb2.PrefetchResponse:
        self.prefetches.append(request)
        await self.gate.wait()
        return kvbm_pb2.PrefetchResponse(promoting=len(request.short_keys))


@asynccontextmanager
async def fake_node(
    node_id: str,
    *,
    port: int = 0,
    events_port: int = 0,
    remote: str = "",
    transfer: str = "",
    heartbeat_s: float = 0.05,
) -> AsyncIterator[FakeNode]:
    """A daemon that serves while the context lasts; registering it is the caller's business."""
    incarnation = new_incarnation()
    async with open_publisher(
        "127.0.0.1", events_port, node_id, incarnation, heartbeat_s=3600
    ) as publisher:
        node = FakeNode(Instance(node_id, InstanceKind.KVBM, incarnation, ""), publisher)
        service = Service(
            kvbm_pb2.DESCRIPTOR.services_by_name["KvbmService"].full_name,
            kvbm_pb2_grpc.add_KvbmServiceServicer_to_server,
            node,
        )
        async with rpc_server("127.0.0.1", port, [service], grace_s=0) as server:
            node.instance = replace(
                node.instance,
                address=f"127.0.0.1:{server.port}",
                events_address=publisher.address,
                labels={REMOTE_LABEL: remote} if remote else {},
                transfer=transfer,
            )
            await server.set_serving(True)
            beats = asyncio.create_task(_beat(node, heartbeat_s))
            try:
                yield node
            finally:
                node.gate.set()
                beats.cancel()
                await asyncio.wait({beats})


async def _beat(node: FakeNode, heartbeat_s: float) -> None:
    while True:
        if node.beating:
            node.publisher.heartbeat()
        await asyncio.sleep(heartbeat_s)


def _keys(keys: Iterable[int]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(k) for k in keys)
