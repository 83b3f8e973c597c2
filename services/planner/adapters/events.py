"""Event streams of workers: a follower each, snapshots by gRPC, into the read model."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

import grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.events.codec import snapshot_from_proto
from services.common.events.model import Snapshot
from services.common.events.subscriber import (
    Apply,
    FollowStats,
    Heard,
    Reset,
    allow_streams,
    follow,
)
from services.common.loops import keep_going
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.common.telemetry.logging import get_logger
from services.planner.core.watch import Watch
from services.planner.ports import Clock

log = get_logger(__name__)

MOST_STREAMS = 16_384
"""Workers that a planner can follow."""


@dataclass(frozen=True, slots=True)
class _Follower:
    address: str
    events_address: str
    task: asyncio.Task[None]


class Followers:
    """Follows the streams of all known workers. Use as an async context manager."""

    def __init__(
        self, watch: Watch, clock: Clock, *, snapshots_at_once: int, snapshot_timeout_s: float
    ) -> None:
        self._watch = watch
        self._clock = clock
        self._room = asyncio.Semaphore(snapshots_at_once)
        self._snapshot_timeout_s = snapshot_timeout_s
        self._followers: dict[str, _Follower] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.stats = FollowStats()
        """Over all streams, ended ones included."""

    async def __aenter__(self) -> Followers:
        allow_streams(MOST_STREAMS)
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
            log.warning("no events are published; it will look silent", worker=worker_id)
            return
        task = asyncio.create_task(
            keep_going(lambda: self._follow(worker_id, address, events_address), "follow"),
            name=f"follow {worker_id}",
        )
        self._followers[worker_id] = _Follower(address, events_address, task)

    def unfollow(self, worker_id: str) -> None:
        """Stops following a worker."""
        follower = self._followers.pop(worker_id, None)
        if follower is not None:
            follower.task.cancel()
            self._ending.add(follower.task)
            follower.task.add_done_callback(self._ending.discard)

    async def _follow(self, worker_id: str, address: str, events_address: str) -> None:
        async with open_channel(address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)

            async def take_snapshot() -> Snapshot:
                async with self._room:
                    try:
                        answer = await stub.Snapshot(
                            worker_pb2.SnapshotRequest(), timeout=self._snapshot_timeout_s
                        )
                    except grpc.RpcError as exc:
                        raise translate(exc) from exc
                return snapshot_from_proto(answer)

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
                            self._watch.apply(batch, now)
                        case Reset(snapshot=snapshot):
                            self._watch.reset(snapshot, now)
                        case Heard(incarnation=incarnation):
                            self._watch.heard(worker_id, incarnation, now)
