"""gRPC to a node's kvbm: what it holds and why, as plain values. Hashes are in hex, as people read
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from forebay.common.v1 import common_pb2
from forebay.kvbm.v1 import kvbm_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2_grpc as pb_grpc

from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate

TIERS = {
    "g1": common_pb2.TIER_G1,
    "g2": common_pb2.TIER_G2,
    "g3": common_pb2.TIER_G3,
    "g4": common_pb2.TIER_G4,
}
_NAMES = {number: name for name, number in TIERS.items()}


@dataclass(frozen=True, slots=True)
class TierRow:
    """One tier; meanings and units as TierStats in kvbm.proto."""

    tier: str
    blocks: int
    used_bytes: int
    capacity_bytes: int
    backend: str
    state: str
    quarantined: int
    place: str

    @property
    def share(self) -> float | None:
        """Used share of the capacity; None without a cap."""
        return self.used_bytes / self.capacity_bytes if self.capacity_bytes else None


@dataclass(frozen=True, slots=True)
class TierUse:
    """Blocks in one tier."""

    tier: str
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceRow:
    """One namespace; meanings as NamespaceStats in kvbm.proto."""

    namespace: str
    model: str
    block_size_tokens: int
    block_bytes: int
    layout: str
    workers: tuple[str, ...]
    tiers: tuple[TierUse, ...]
    leases: int
    pins: int
    granted: int


@dataclass(frozen=True, slots=True)
class TenantRow:
    """What one tenant's blocks take."""

    tenant: str
    tiers: tuple[TierUse, ...]


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Another node's daemon; meanings as PeerView in kvbm.proto."""

    node: str
    address: str
    state: str
    fetched_blocks: int
    failures: int


@dataclass(frozen=True, slots=True)
class NodeStats:
    """All figures of one daemon. `counters`: by Prometheus name without prefix."""

    node: str
    incarnation: int
    tiers: tuple[TierRow, ...]
    namespaces: tuple[NamespaceRow, ...]
    tenants: tuple[TenantRow, ...]
    counters: Mapping[str, float]
    adopted_blocks: int
    peers_state: str = ""
    """Whether blocks are exchanged with other nodes, and why not."""
    peers: tuple[PeerRow, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block; meanings as BlockInfo in kvbm.proto."""

    namespace: str
    key: str
    parent: str
    position: int
    tenant: str
    tiers: tuple[str, ...]
    age_s: float
    idle_s: float
    hits: int
    leases: int
    pins: int


@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks, most recently used first, and how many there are in all."""

    blocks: tuple[BlockRow, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a look-up would do with one block of a prompt, and why."""

    position: int
    tiers: tuple[str, ...]
    load: bool
    reason: str
    leases: int
    pins: int
    hits: int
    peer: str = ""
    """Node from whose memory it would come."""


@dataclass(frozen=True, slots=True)
class GateRow:
    """What the gate knows of one tier, or peer; meanings as GateTier in kvbm.proto."""

    tier: str
    latency_s: float
    block_s: float
    samples: int
    refused: bool
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Verdicts in the order of the prompt, and the figures behind them."""

    blocks: tuple[Verdict, ...]
    gate: tuple[GateRow, ...]
    recompute_block_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was, or would be, forgotten."""

    tiers: tuple[TierUse, ...]
    leased_blocks: int

    @property
    def blocks(self) -> int:
        """Copies in all tiers together."""
        return sum(t.blocks for t in self.tiers)


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """How far a scrub is."""

    scanned: int
    total: int
    corrupt: int
    done: bool


class KvbmClient:
    """Asks one daemon. Calls raise ForebayError; `namespace` and keys are bytes, empty for all."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub: pb_grpc.KvbmServiceAsyncStub = pb_grpc.KvbmServiceStub(channel)
        self._timeout_s = timeout_s

    async def stats(self) -> NodeStats:
        """Its figures."""
        try:
            m = await self._stub.Stats(pb.StatsRequest(), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        return NodeStats(
            node=m.node,
            incarnation=m.incarnation,
            tiers=tuple(
                TierRow(
                    tier=_tier(t.tier),
                    blocks=t.blocks,
                    used_bytes=t.used_bytes,
                    capacity_bytes=t.capacity_bytes,
                    backend=t.backend,
                    state=t.state,
                    quarantined=t.quarantined,
                    place=t.place,
                )
                for t in m.tiers
            ),
            namespaces=tuple(_namespace(n) for n in m.namespaces),
            tenants=tuple(TenantRow(t.tenant, _uses(t.tiers)) for t in m.tenants),
            counters=dict(m.counters),
            adopted_blocks=m.adopted_blocks,
            peers_state=m.peers.state,
            peers=tuple(
                PeerRow(p.node, p.address, p.state, p.fetched_blocks, p.failures)
                for p in m.peers.known
            ),
        )

    async def list_blocks(
        self, *, namespace: bytes = b"", tenant: str = "", limit: int = 100
    ) -> BlockList:
        """Blocks, most recently used first."""
        request = pb.ListBlocksRequest(namespace=namespace, tenant=tenant, limit=limit)
        try:
            m = await self._stub.ListBlocks(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        rows = tuple(
            BlockRow(
                namespace=b.namespace.hex(),
                key=b.key.hex(),
                parent=b.parent.hex(),
                position=b.position,
                tenant=b.tenant,
                tiers=tuple(_tier(t) for t in b.tiers),
                age_s=b.age_s,
                idle_s=b.idle_s,
                hits=b.hits,
                leases=b.leases,
                pins=b.pins,
            )
            for b in m.blocks
        )
        return BlockList(rows, m.total)

    async def explain(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        *,
        tenant: str = "",
        skip_blocks: int = 0,
        recompute_block_s: float = 0.0,
    ) -> Explanation:
        """Where each block of a prompt lies, and whether it would be loaded."""
        lookup = pb.LookupRequest(
            namespace=namespace,
            keys=keys,
            tenant=tenant,
            skip_blocks=skip_blocks,
            recompute_block_s=recompute_block_s,
        )
        try:
            m = await self._stub.Explain(pb.ExplainRequest(lookup=lookup), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        return Explanation(
            blocks=tuple(
                Verdict(
                    position=b.position,
                    tiers=tuple(_tier(t) for t in b.tiers),
                    load=b.load,
                    reason=b.reason,
                    leases=b.leases,
                    pins=b.pins,
                    hits=b.hits,
                    peer=b.peer,
                )
                for b in m.blocks
            ),
            gate=tuple(
                GateRow(
                    tier=_tier(g.tier),
                    latency_s=g.latency_s,
                    block_s=g.block_s,
                    samples=g.samples,
                    refused=g.refused,
                    predicted_s=g.predicted_s,
                )
                for g in m.gate
            )
            + tuple(
                GateRow(
                    tier=f"peer {g.node}" if g.node else "any peer",
                    latency_s=g.latency_s,
                    block_s=g.block_s,
                    samples=g.samples,
                    refused=g.refused,
                    predicted_s=g.predicted_s,
                )
                for g in m.peers
            ),
            recompute_block_s=m.recompute_block_s,
            reason=m.reason,
        )

    async def pin(self, namespace: bytes, key: bytes, owner: str, ttl_s: float) -> int:
        """Keeps the prefix that ends with `key` for `ttl_s` seconds; returns its blocks."""
        request = pb.PinRequest(
            namespace=namespace, key=key, owner=owner, ttl_ms=max(1, round(ttl_s * 1000))
        )
        try:
            return (await self._stub.Pin(request, timeout=self._timeout_s)).blocks
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc

    async def unpin(self, owner: str, *, namespace: bytes = b"", key: bytes = b"") -> int:
        """Undoes an owner's pins; returns their number."""
        request = pb.UnpinRequest(namespace=namespace, key=key, owner=owner)
        try:
            return (await self._stub.Unpin(request, timeout=self._timeout_s)).pins
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc

    async def clear(
        self,
        *,
        namespace: bytes = b"",
        tenant: str = "",
        prefix: bytes = b"",
        tiers: Iterable[str] = (),
        everything: bool = False,
        dry_run: bool = False,
    ) -> Cleared:
        """Forgets blocks, or counts them."""
        request = pb.ClearRequest(
            namespace=namespace,
            tenant=tenant,
            prefix=prefix,
            tiers=[TIERS[t] for t in tiers],
            everything=everything,
            dry_run=dry_run,
        )
        try:
            m = await self._stub.Clear(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        return Cleared(_uses(m.cleared), m.leased_blocks)

    async def scrub(
        self, *, namespace: bytes = b"", tiers: Iterable[str] = (), timeout_s: float = 3600.0
    ) -> AsyncIterator[Scrubbed]:
        """Verifies stored blocks; tells how far it is until it is done."""
        request = pb.ScrubRequest(namespace=namespace, tiers=[TIERS[t] for t in tiers])
        try:
            async for m in self._stub.Scrub(request, timeout=timeout_s):
                yield Scrubbed(m.scanned, m.total, m.corrupt, m.done)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc


@asynccontextmanager
async def open_kvbm(address: str, *, timeout_s: float = 10.0) -> AsyncIterator[KvbmClient]:
    """A client of the daemon at host:port or unix:path; each call waits at most `timeout_s`."""
    async with open_channel(address) as channel:
        yield KvbmClient(channel, timeout_s)


def _tier(number: int) -> str:
    return _NAMES.get(number, f"tier-{number}")  # type: ignore[call-overload,no-any-return]


def _uses(counts: Iterable[pb.TierCount]) -> tuple[TierUse, ...]:
    return tuple(TierUse(_tier(c.tier), c.blocks, c.bytes) for c in counts)


def _namespace(n: pb.NamespaceStats) -> NamespaceRow:
    g = n.geometry
    return NamespaceRow(
        namespace=n.namespace.hex(),
        model=n.model,
        block_size_tokens=g.block_size_tokens,
        block_bytes=g.shard_bytes * g.ranks,
        layout=g.layout,
        workers=tuple(n.workers),
        tiers=_uses(n.tiers),
        leases=n.leases,
        pins=n.pins,
        granted=n.granted,
    )
