"""gRPC to routers and workers: what they know, as plain values."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from forebay.common.v1 import common_pb2
from forebay.router.v1 import router_pb2, router_pb2_grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.cards import Holder, Role, role_from_proto, role_to_proto
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate

_STATES = {
    router_pb2.WORKER_STATE_JOINING: "joining",
    router_pb2.WORKER_STATE_READY: "ready",
    router_pb2.WORKER_STATE_SUSPECT: "suspect",
    router_pb2.WORKER_STATE_DRAINING: "draining",
}


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker as a router sees it; meanings and units as WorkerView in router.proto."""

    holder: Holder
    model: str
    address: str
    state: str
    running: int
    waiting: int
    booked: int
    indexed_blocks: int
    total_blocks: int
    used_blocks: int
    silence_s: float
    placements: int
    prompt_tokens: int
    cached_tokens: int
    role: str = "both"
    held_transfers: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of finished requests' prompt tokens that were cached; None before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class WorkerList:
    """All workers of one router."""

    router_id: str
    policy: str
    workers: tuple[WorkerRow, ...]


@dataclass(frozen=True, slots=True)
class Digest:
    """G1 blocks of one holder, condensed: their number, and the XOR of their keys."""

    holder: Holder
    sequence: int
    blocks: int
    xor: int

    def same_blocks(self, other: Digest) -> bool:
        """Whether both speak of the same blocks of the same holder."""
        return (self.holder, self.blocks, self.xor) == (other.holder, other.blocks, other.xor)


class RouterClient:
    """Asks one router. Calls raise ForebayError."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(
            channel
        )
        self._timeout_s = timeout_s

    async def list_workers(self) -> WorkerList:
        """The workers it knows, in order of id."""
        try:
            answer = await self._stub.ListWorkers(
                router_pb2.ListWorkersRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        rows = tuple(
            WorkerRow(
                holder=Holder.from_proto(w.worker),
                model=w.model,
                address=w.address,
                state=_STATES.get(w.state, "unknown"),
                running=w.running_requests,
                waiting=w.waiting_requests,
                booked=w.booked_requests,
                indexed_blocks=w.indexed_blocks,
                total_blocks=w.total_blocks,
                used_blocks=w.used_blocks,
                silence_s=w.silence_s,
                placements=w.placements,
                prompt_tokens=w.prompt_tokens,
                cached_tokens=w.cached_tokens,
                role=role_from_proto(w.role) or Role.BOTH,
                held_transfers=w.held_transfers,
            )
            for w in answer.workers
        )
        return WorkerList(answer.router_id, answer.policy, rows)

    async def digests(self) -> dict[str, Digest]:
        """What its index holds of each worker, by worker id."""
        try:
            answer = await self._stub.GetIndexStats(
                router_pb2.GetIndexStatsRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        return {
            d.holder.id: Digest(Holder.from_proto(d.holder), d.sequence, d.blocks, d.xor)
            for d in answer.digests
        }


class WorkerClient:
    """Asks one worker. Calls raise ForebayError."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(
            channel
        )
        self._timeout_s = timeout_s

    async def digest(self) -> Digest:
        """Its own G1 blocks."""
        try:
            answer = await self._stub.Snapshot(
                worker_pb2.SnapshotRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        xor = count = 0
        for tier in answer.blocks:
            if tier.tier == common_pb2.TIER_G1:
                count += len(tier.block_hashes)
                for key in tier.block_hashes:
                    xor ^= key
        return Digest(Holder(answer.publisher, answer.incarnation), answer.sequence, count, xor)

    async def reset_cache(self) -> int:
        """Forgets its cached blocks; returns their number."""
        try:
            answer = await self._stub.ResetCache(
                worker_pb2.ResetCacheRequest(), timeout=self._timeout_s
            )
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        return answer.blocks

    async def set_role(self, role: Role) -> Role:
        """Changes its role; returns the one before."""
        request = worker_pb2.SetRoleRequest(role=role_to_proto(role))
        try:
            answer = await self._stub.SetRole(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
        return role_from_proto(answer.previous) or Role.BOTH


@asynccontextmanager
async def open_router(address: str, *, timeout_s: float = 2.0) -> AsyncIterator[RouterClient]:
    """A client of the router at host:port; each call waits at most `timeout_s`."""
    async with open_channel(address) as channel:
        yield RouterClient(channel, timeout_s)


@asynccontextmanager
async def open_worker(address: str, *, timeout_s: float = 10.0) -> AsyncIterator[WorkerClient]:
    """A client of the worker at host:port; each call waits at most `timeout_s`."""
    async with open_channel(address) as channel:
        yield WorkerClient(channel, timeout_s)


async def is_serving(address: str, *, timeout_s: float = 2.0) -> bool:
    """Whether the gRPC server at host:port says SERVING."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=False
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
