"""KvbmService over gRPC: messages to domain values, and back. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc

from services.common.errors import InvalidRequest
from services.common.events.publisher import EventPublisher
from services.common.rpc.server import Service
from services.kvbm.adapters.messages import (
    TIERS,
    ask_of,
    block_info,
    checked_keys,
    explanation_message,
    geometry_message,
    geometry_of,
    hints_of,
    leased_message,
    loaded_of,
    peer_stats,
    results_message,
    seconds_of,
    slot_message,
    slot_of,
    snapshot_message,
    tier_counts,
    tiers_of,
)
from services.kvbm.core.model import Owner
from services.kvbm.curator import LISTED, Curator
from services.kvbm.errors import peers_off
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.node import Filled, Node
from services.kvbm.readers import Readers
from services.kvbm.space import Space
from services.kvbm.tiers.exports import MOST_KEYS, Exports, leading

MOST_FILLED = 4096
MOST_LISTED = 10_000
MOST_WAIT_S = 60.0


class KvbmServicer(kvbm_pb2_grpc.KvbmServiceServicer):
    """All methods; each is one call of the domain."""

    def __init__(
        self,
        node: Node,
        readers: Readers,
        curator: Curator,
        publisher: EventPublisher,
        metrics: KvbmMetrics,
    ) -> None:
        self._node = node
        self._readers = readers
        self._curator = curator
        self._publisher = publisher
        self._metrics = metrics

    def service(self) -> Service:
        """Itself, as a gRPC server takes it."""
        return Service(
            pb.DESCRIPTOR.services_by_name["KvbmService"].full_name,
            kvbm_pb2_grpc.add_KvbmServiceServicer_to_server,
            self,
        )

    # Engines.

    async def Attach(self, request: pb.AttachRequest, context: Any) -> pb.AttachResponse:
        """A new attachment."""
        attached, lock, arena = await self._node.attach(
            request.namespace,
            geometry_of(request.geometry),
            request.rank,
            request.worker,
            former=request.former_owner,
            g1_bytes=request.g1_bytes,
            model=request.model,
        )
        return pb.AttachResponse(
            owner=attached.owner,
            lock_path=lock,
            arena_path=arena,
            incarnation=self._node.incarnation,
            node=self._node.id,
            verify=self._node.settings.verify,
        )

    async def Detach(self, request: pb.DetachRequest, context: Any) -> pb.DetachResponse:
        """The end of one."""
        self._node.detach(Owner(request.owner))
        return pb.DetachResponse()

    async def Grant(self, request: pb.GrantRequest, context: Any) -> pb.GrantResponse:
        """Empty slots."""
        slots = self._node.grant(request.owner, request.count)
        return pb.GrantResponse(
            slots=[slot_message(s) for s in slots], incarnation=self._node.incarnation
        )

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        """Filled slots."""
        if len(request.filled) > MOST_FILLED:
            raise InvalidRequest(f"more than {MOST_FILLED} slots in one commit", field="filled")
        filled = [
            Filled(
                slot_of(one.slot),
                self._node.block(one.key, one.parent, one.position, one.tenant)
                if one.key
                else None,
                one.checksum,
            )
            for one in request.filled
        ]
        results, slots = self._node.commit(request.owner, filled, request.grant)
        return pb.CommitResponse(
            results=results_message(results),
            slots=[slot_message(s) for s in slots],
            incarnation=self._node.incarnation,
        )

    # Readers.

    async def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:
        """What is there of a prompt."""
        found = self._readers.lookup(ask_of(request))
        return pb.LookupResponse(
            lease=found.lease,
            expires_ms=found.expires_ms,
            first_block=found.first,
            ready=[leased_message(b) for b in found.ready],
            promoting=found.promoting,
            stored_blocks=found.stored,
            incarnation=self._node.incarnation,
            reason=found.reason,
        )

    async def Await(self, request: pb.AwaitRequest, context: Any) -> pb.AwaitResponse:
        """A lease after its promotions."""
        most_s = min(request.wait_ms / 1000, MOST_WAIT_S, context.time_remaining() or MOST_WAIT_S)
        ready, promoting = await self._readers.wait(request.lease, most_s * 0.95)
        return pb.AwaitResponse(
            ready=[leased_message(b) for b in ready],
            promoting=promoting,
            incarnation=self._node.incarnation,
        )

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """The end of leases."""
        return pb.ReleaseResponse(
            released=self._readers.release([loaded_of(r) for r in request.leases])
        )

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        """A hint."""
        return pb.PrefetchResponse(
            promoting=self._readers.prefetch(
                request.namespace,
                list(request.keys),
                list(request.short_keys),
                hints_of(request.peers),
                seconds_of(request.recompute_block_s, "recompute_block_s"),
            )
        )

    # Peers.

    async def Locate(self, request: pb.LocateRequest, context: Any) -> pb.LocateResponse:
        """How much is here."""
        _, space = self._for_peer(request.namespace, request.geometry)
        keys = checked_keys(request.keys)
        return pb.LocateResponse(
            blocks=leading(space, keys) if space else 0, incarnation=self._node.incarnation
        )

    async def Export(self, request: pb.ExportRequest, context: Any) -> pb.ExportResponse:
        """Blocks into the window."""
        exports, space = self._for_peer(request.namespace, request.geometry)
        answer = pb.ExportResponse(incarnation=self._node.incarnation)
        if space is None:
            return answer
        keys = checked_keys(request.keys) or space.long_keys(request.short_keys[:MOST_KEYS])
        export = await exports.export(space, keys[:MOST_KEYS], request.agent)
        answer.export, answer.expires_ms = export.id, export.expires_ms
        answer.agent, answer.agent_metadata = export.agent, export.metadata
        answer.available, answer.reason = export.available, export.reason
        for block in export.blocks:
            answer.blocks.add(header=block.header, address=block.address, length=block.length)
        return answer

    async def EndExport(self, request: pb.EndExportRequest, context: Any) -> pb.EndExportResponse:
        """The end of exports."""
        peers = self._node.peers
        if peers is None:
            return pb.EndExportResponse()
        self._readers.suspect(request.namespace, checked_keys(request.bad_keys))
        return pb.EndExportResponse(ended=peers.exports.end(request.exports))

    def _for_peer(self, namespace: bytes, geometry: pb.Geometry) -> tuple[Exports, Space | None]:
        """The window, and what a peer may ask about: None unless its blocks are the same here."""
        peers = self._node.peers
        if peers is None or not peers.works:
            why = self._node.settings.peers_off if peers is None else peers.state
            raise peers_off(why)
        space = self._node.spaces.get(namespace)
        if space is not None and space.geometry != geometry_of(geometry):
            space = None
        return peers.exports, space

    # People.

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        """Keeps a prefix."""
        blocks = self._curator.pin(request.namespace, request.key, request.owner, request.ttl_ms)
        return pb.PinResponse(blocks=blocks)

    async def Unpin(self, request: pb.UnpinRequest, context: Any) -> pb.UnpinResponse:
        """Undoes pins."""
        return pb.UnpinResponse(
            pins=self._curator.unpin(request.namespace, request.key, request.owner)
        )

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearResponse:
        """Forgets blocks."""
        cleared, leased = await self._curator.clear(
            request.namespace,
            request.tenant,
            request.prefix,
            tiers_of(request.tiers),
            everything=request.everything,
            dry_run=request.dry_run,
        )
        return pb.ClearResponse(cleared=tier_counts(cleared), leased_blocks=leased)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """Reasons."""
        return explanation_message(self._curator.explain(ask_of(request.lookup)))

    async def ListBlocks(
        self, request: pb.ListBlocksRequest, context: Any
    ) -> pb.ListBlocksResponse:
        """Blocks, for people."""
        limit = min(request.limit or LISTED, MOST_LISTED)
        answer = pb.ListBlocksResponse()
        now = self._node.now_ms()
        for space, view in self._curator.blocks(request.namespace, request.tenant):
            if answer.total < limit:
                answer.blocks.append(block_info(space, view, self._node.tenants, now))
            answer.total += 1
            if answer.total % 10_000 == 0:
                await asyncio.sleep(0)
        return answer

    async def Scrub(
        self, request: pb.ScrubRequest, context: Any
    ) -> AsyncIterator[pb.ScrubResponse]:
        """Verifies now."""
        async for p in self._curator.scrub(request.namespace, tiers_of(request.tiers)):
            yield pb.ScrubResponse(scanned=p.scanned, total=p.total, corrupt=p.corrupt, done=p.done)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> pb.SnapshotResponse:
        """All blocks at one sequence: nothing is awaited in between."""
        return snapshot_message(self._node, self._publisher.sequence)

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsResponse:
        """Figures."""
        node = self._node
        answer = pb.StatsResponse(
            node=node.id,
            incarnation=node.incarnation,
            adopted_blocks=node.adopted_blocks,
            counters={k: float(v) for k, v in self._metrics.counts.items()},
        )
        backends = {
            1: (node.host.backend, str(node.settings.arena_dir)),
            2: (node.disk.backend, node.disk.place) if node.disk else ("", ""),
            3: (node.remote.backend, node.remote.place) if node.remote else ("", ""),
        }
        for tier, (blocks, used, capacity, health) in node.totals().items():
            backend, place = backends[tier.value - 1]
            quarantined = sum(s.count(tier).quarantined for s in node.spaces.values())
            answer.tiers.add(
                tier=TIERS[tier],
                blocks=blocks,
                used_bytes=used,
                capacity_bytes=capacity,
                backend=backend,
                state="ok" if health.ok else f"degraded: {health.why}",
                quarantined=quarantined,
                place=place,
            )
        for space in node.spaces.values():
            counts = space.catalog.counts()
            size = space.geometry.payload_bytes
            answer.namespaces.add(
                namespace=space.namespace,
                model=space.model,
                geometry=geometry_message(space.geometry),
                workers=[a.worker for a in node.attached.values() if a.space is space],
                tiers=tier_counts(
                    {t: (n.blocks, n.blocks * size) for t, n in counts.tiers.items()}
                ),
                leases=counts.leases,
                pins=counts.pins,
                granted=counts.granted,
            )
        by_tenant: dict[int, dict[Any, tuple[int, int]]] = {}
        for (tenant, tier), used in node.quota.use().items():
            if tenant:
                by_tenant.setdefault(tenant, {})[tier] = (0, used)
        for tenant, tiers in by_tenant.items():
            name = node.tenants.get(tenant, f"{tenant:016x}")
            answer.tenants.add(tenant=name, tiers=tier_counts(tiers))
        answer.peers.CopyFrom(peer_stats(node.peers, node.settings.peers_off))
        return answer
