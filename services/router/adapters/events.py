"""Event streams of workers and kvbm daemons: a follower each, snapshots by gRPC, into the core."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import grpc
from forebay.kvbm.v1 import kvbm_pb2, kvbm_pb2_grpc
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.common.cards import InstanceKind
from services.common.errors import Unavailable
from services.common.events.codec import snapshot_from_proto, tier_snapshot_from_proto
from services.common.events.model import Batch, Snapshot
from services.common.events.subscriber import (
    Apply,
    FollowStats,
    Heard,
    Reset,
    allow_streams,
    follow,
)
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.common.telemetry.logging import get_logger
from services.router.core.answers import Report
from services.router.ports import Clock

log = get_logger(__name__)

MOST_STREAMS = 16_384
"""Workers and daemons that a router can follow."""
_RESTART_PAUSE_S = 1.0
_BLOCKS_AT_ONCE = 2_000
"""Blocks of a snapshot that are taken over in one go: one or two milliseconds."""


class ReadModel(Protocol):
    """What takes the news of one kind of publisher: RouterCore, or its table of daemons."""

    def heard(self, publisher: str, incarnation: int, now: float, /) -> bool:
        """It lives."""

    def resetting(self, snapshot: Snapshot, now: float, step: int, /) -> Iterator[bool]:
        """It holds exactly this; taken over in steps of so many blocks."""

    def apply(self, batch: Batch, now: float, /) -> tuple[Report, ...]:
        """What is new."""

    def doubted(self, publisher: str, /) -> bool:
        """Whether its snapshot is called for, because it says to have other blocks."""

    def refused(self, publisher: str, incarnation: int, now: float, /) -> bool:
        """It refused a connection."""


Fetch = Callable[[grpc.aio.Channel, float], Awaitable[Snapshot]]
"""Gets a publisher's snapshot over a channel, within so many seconds."""


async def _worker_snapshot(channel: grpc.aio.Channel, timeout_s: float) -> Snapshot:
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    return snapshot_from_proto(await stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=timeout_s))


async def _tier_snapshot(channel: grpc.aio.Channel, timeout_s: float) -> Snapshot:
    stub = kvbm_pb2_grpc.KvbmServiceStub(channel)
    return tier_snapshot_from_proto(
        await stub.Snapshot(kvbm_pb2.SnapshotRequest(), timeout=timeout_s)
    )


_FETCHES: dict[InstanceKind, Fetch] = {
    InstanceKind.WORKER: _worker_snapshot,
    InstanceKind.KVBM: _tier_snapshot,
}


@dataclass(frozen=True, slots=True)
class _Follower:
    address: str
    events_address: str
    task: asyncio.Task[None]


class Followers:
    """Follows the streams of all known workers and daemons. Use as an async context manager."""

    def __init__(
        self,
        models: dict[InstanceKind, ReadModel],
        clock: Clock,
        *,
        snapshots_at_once: int,
        snapshot_timeout_s: float,
        on_report: Callable[[Report], None],
    ) -> None:
        self._models = models
        self._clock = clock
        self._room = asyncio.Semaphore(snapshots_at_once)
        self._snapshot_timeout_s = snapshot_timeout_s
        self._on_report = on_report
        self._followers: dict[tuple[InstanceKind, str], _Follower] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.on_news: Callable[[], None] = lambda: None
        """Called after any news has been taken over: what waits for room may go on."""
        self.stats = FollowStats()
        """Over all streams, ended ones included."""

    async def __aenter__(self) -> Followers:
        allow_streams(MOST_STREAMS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for kind, publisher in list(self._followers):
            self.unfollow(kind, publisher)
        if self._ending:
            await asyncio.wait(self._ending)

    def follow(self, kind: InstanceKind, publisher: str, address: str, events_address: str) -> None:
        """Follows a stream at these addresses from now on."""
        known = self._followers.get((kind, publisher))
        if known is not None:
            if (known.address, known.events_address) == (address, events_address):
                return
            self.unfollow(kind, publisher)
        if not events_address:
            log.warning("no events are published; it will look silent", **{kind: publisher})
            return
        task = asyncio.create_task(
            self._keep_following(kind, publisher, address, events_address),
            name=f"follow {kind} {publisher}",
        )
        self._followers[kind, publisher] = _Follower(address, events_address, task)

    def unfollow(self, kind: InstanceKind, publisher: str) -> None:
        """Stops following a stream."""
        follower = self._followers.pop((kind, publisher), None)
        if follower is not None:
            follower.task.cancel()
            self._ending.add(follower.task)
            follower.task.add_done_callback(self._ending.discard)

    async def _keep_following(
        self, kind: InstanceKind, publisher: str, address: str, events_address: str
    ) -> None:
        while True:
            try:
                await self._follow(kind, publisher, address, events_address)
            except Exception:
                # Boundary of a supervised task: whatever broke, the stream is followed anew.
                log.exception("following broke", **{kind: publisher})
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _follow(
        self, kind: InstanceKind, publisher: str, address: str, events_address: str
    ) -> None:
        model, fetch = self._models[kind], _FETCHES[kind]
        async with open_channel(address) as channel:

            async def take_snapshot() -> Snapshot:
                async with self._room:
                    try:
                        return await fetch(channel, self._snapshot_timeout_s)
                    except grpc.RpcError as exc:
                        error = translate(exc)
                        # Without a reason of its own it was the connection that failed.
                        if (
                            isinstance(error, Unavailable)
                            and error.reason == Unavailable.default_reason
                        ):
                            model.refused(publisher, 0, self._clock())
                        raise error from exc

            stream = follow(
                events_address,
                publisher,
                take_snapshot,
                stats=self.stats,
                # Waiting for room comes on top of the call's own deadline.
                snapshot_timeout_s=self._snapshot_timeout_s * 12,
                doubted=lambda: model.doubted(publisher),
            )
            async with aclosing(stream):
                async for item in stream:
                    now = self._clock()
                    match item:
                        case Apply(batch=batch):
                            for report in model.apply(batch, now):
                                self._on_report(report)
                        case Reset(snapshot=snapshot):
                            for _ in model.resetting(snapshot, now, _BLOCKS_AT_ONCE):
                                # A large one must not keep decisions and others' news waiting.
                                await asyncio.sleep(0)
                            log.info(
                                "snapshot taken",
                                **{kind: publisher},
                                incarnation=snapshot.incarnation,
                                sequence=snapshot.sequence,
                                blocks=sum(len(part.keys) for part in snapshot.blocks),
                            )
                        case Heard(incarnation=incarnation):
                            model.heard(publisher, incarnation, now)
                    self.on_news()
