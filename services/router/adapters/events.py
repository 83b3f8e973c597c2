"""Workers' event streams: one follower for each worker, snapshots by gRPC, all into the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.errors import Unavailable
from services.common.events.codec import snapshot_from_proto
from services.common.events.model import Snapshot
from services.common.events.subscriber import Apply, FollowStats, Heard, Reset, follow
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.common.telemetry.logging import get_logger
from services.router.core.answers import Outcome
from services.router.core.placement import RouterCore
from services.router.ports import Clock

log = get_logger(__name__)

_RESTART_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Follower:
    address: str
    events_address: str
    task: asyncio.Task[None]


class Followers:
    """Follows the streams of all known workers. Use as an async context manager."""

    def __init__(
        self,
        core: RouterCore,
        clock: Clock,
        *,
        snapshots_at_once: int,
        snapshot_timeout_s: float,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._core = core
        self._clock = clock
        self._room = asyncio.Semaphore(snapshots_at_once)
        self._snapshot_timeout_s = snapshot_timeout_s
        self._on_outcome = on_outcome
        self._followers: dict[str, _Follower] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.stats = FollowStats()
        """Over all streams, ended ones included."""

    async def __aenter__(self) -> Followers:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker_id in list(self._followers):
            self.unfollow(worker_id)
        if self._ending:
            await asyncio.wait(self._ending)

    def follow(self, worker_id: str, address: str, events_address: str) -> None:
        """Follows a worker's stream at these addresses from now on."""
        known = self._followers.get(worker_id)
        if known is not None:
            if (known.address, known.events_address) == (address, events_address):
                return
            self.unfollow(worker_id)
        if not events_address:
            log.warning("worker publishes no events; it will look silent", worker=worker_id)
            return
        task = asyncio.create_task(
            self._keep_following(worker_id, address, events_address), name=f"follow {worker_id}"
        )
        self._followers[worker_id] = _Follower(address, events_address, task)

    def unfollow(self, worker_id: str) -> None:
        """Stops following a worker."""
        follower = self._followers.pop(worker_id, None)
        if follower is not None:
            follower.task.cancel()
            self._ending.add(follower.task)
            follower.task.add_done_callback(self._ending.discard)

    async def _keep_following(self, worker_id: str, address: str, events_address: str) -> None:
        while True:
            try:
                await self._follow(worker_id, address, events_address)
            except Exception:
                # Boundary of a supervised task: whatever broke, this worker is followed anew.
                log.exception("following broke", worker=worker_id)
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _follow(self, worker_id: str, address: str, events_address: str) -> None:
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)

            async def take_snapshot() -> Snapshot:
                async with self._room:
                    return await self._snapshot(worker_id, stub)

            stream = follow(
                events_address,
                worker_id,
                take_snapshot,
                stats=self.stats,
                # Waiting for room comes on top of the call's own deadline.
                snapshot_timeout_s=self._snapshot_timeout_s * 12,
            )
            async with aclosing(stream):
                async for item in stream:
                    now = self._clock()
                    match item:
                        case Apply(batch=batch):
                            for outcome in self._core.apply(batch, now):
                                self._on_outcome(outcome)
                        case Reset(snapshot=snapshot):
                            self._core.reset(snapshot, now)
                            log.info(
                                "snapshot taken",
                                worker=worker_id,
                                incarnation=snapshot.incarnation,
                                sequence=snapshot.sequence,
                                blocks=sum(len(part.keys) for part in snapshot.blocks),
                            )
                        case Heard(incarnation=incarnation):
                            self._core.heard(worker_id, incarnation, now)

    async def _snapshot(self, worker_id: str, stub: worker_pb2_grpc.WorkerServiceStub) -> Snapshot:
        try:
            answer = await stub.Snapshot(  # type: ignore[misc]
                worker_pb2.SnapshotRequest(), timeout=self._snapshot_timeout_s
            )
        except grpc.RpcError as exc:
            error = translate(exc)
            # Without a reason of the worker's own it was the connection that failed.
            if isinstance(error, Unavailable) and error.reason == Unavailable.default_reason:
                self._core.refused(worker_id, 0, self._clock())
            raise error from exc
        return snapshot_from_proto(answer)
