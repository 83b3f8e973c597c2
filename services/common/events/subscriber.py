"""The receiving end of an event stream: ZMQ SUB, joined with snapshots.

ZMQ reconnects by itself. Reading is by demand: a consumer that is slow lets ZMQ's queue fill (to
RECEIVE_LIMIT), then the publisher's, which drops; the hole is seen and repaired by a snapshot.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable

import zmq

from services.common.errors import ForebayError
from services.common.events.codec import decode
from services.common.events.join import (
    Apply,
    FollowStats,
    Heard,
    Instruction,
    Join,
    Reset,
    StreamItem,
    TakeSnapshot,
)
from services.common.events.model import Batch, Snapshot
from services.common.telemetry.logging import get_logger

__all__ = ["Apply", "FollowStats", "Heard", "Reset", "StreamItem", "follow"]

RECEIVE_LIMIT = 10_000
"""Messages that ZMQ keeps for us before it stops reading."""

_BATCHES_AT_ONCE = 64
"""Batches after which others get their turn of the loop."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

log = get_logger(__name__)


async def follow(
    address: str,
    publisher: str,
    take_snapshot: Callable[[], Awaitable[Snapshot]],
    *,
    stats: FollowStats,
    max_buffered: int = 10_000,
    snapshot_timeout_s: float = 10.0,
) -> AsyncGenerator[StreamItem, None]:
    """Follows the stream of `publisher` at `address` (tcp://host:port), until closed.

    First comes Heard, then a Reset as soon as the snapshot is there, then Apply after Apply
    without gaps. When the stream breaks, Heard again until the next Reset. Nothing at all while
    the publisher is silent: how long that may last is the caller's decision. A snapshot that
    fails or takes longer than `snapshot_timeout_s` is tried again, with growing pauses.
    """
    join = Join(stats, max_buffered)
    snapshots = _Snapshots(publisher, take_snapshot, snapshot_timeout_s)
    inbox = _Inbox(address, publisher, stats)
    taken = 0
    try:
        while True:
            instructions: list[Instruction]
            if snapshots.done:
                snapshot = snapshots.take()
                instructions = (
                    join.on_snapshot_failed() if snapshot is None else join.on_snapshot(snapshot)
                )
            elif (batch := inbox.get()) is not None:
                instructions = join.on_batch(batch)
                taken += 1
                if taken % _BATCHES_AT_ONCE == 0:
                    await asyncio.sleep(0)
            else:
                await inbox.wait(snapshots.task)
                continue
            for instruction in instructions:
                if isinstance(instruction, TakeSnapshot):
                    snapshots.start()
                else:
                    yield instruction
            if join.live:
                snapshots.reset()
    finally:
        inbox.close()
        await snapshots.close()


class _Snapshots:
    """The snapshot in flight, at most one, and the pauses between attempts."""

    def __init__(
        self, publisher: str, take: Callable[[], Awaitable[Snapshot]], timeout_s: float
    ) -> None:
        self._publisher = publisher
        self._take = take
        self._timeout_s = timeout_s
        self._pause_s = 0.0
        self.task: asyncio.Task[Snapshot | None] | None = None

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    def start(self) -> None:
        """Begins an attempt, after a pause unless it is the first."""
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, self._pause_s * 2))
        self.task = asyncio.create_task(self._fetch(pause_s), name=f"snapshot {self._publisher}")

    def take(self) -> Snapshot | None:
        """What the attempt brought; None: it failed."""
        assert self.task is not None
        task, self.task = self.task, None
        return None if task.cancelled() else task.result()

    def reset(self) -> None:
        """The stream is whole again. The next pause is short, but there is one: a stream that
        loses batches all the time must not be all snapshots.
        """
        self._pause_s = min(self._pause_s, _FIRST_PAUSE_S)

    async def _fetch(self, pause_s: float) -> Snapshot | None:
        await asyncio.sleep(pause_s)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._take()
        except (ForebayError, TimeoutError) as exc:
            log.info("snapshot failed", publisher=self._publisher, why=str(exc) or "too slow")
        except Exception:
            # The boundary of a task that must go on whatever the caller's function does.
            log.exception("snapshot failed", publisher=self._publisher)
        return None

    async def close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait({self.task})


class _Inbox:
    """The SUB socket, read without waiting; `wait` waits for more."""

    def __init__(self, address: str, publisher: str, stats: FollowStats) -> None:
        self._publisher = publisher
        self._topic = publisher.encode()
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        for option, value in (
            (zmq.RCVHWM, RECEIVE_LIMIT),
            (zmq.LINGER, 0),
            (zmq.IPV6, 1),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1_000),
            # A peer that vanished without a word is given up, and connected to anew.
            (zmq.HEARTBEAT_IVL, 2_000),
            (zmq.HEARTBEAT_TIMEOUT, 6_000),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._socket.connect(address)
        self._fd: int = self._socket.getsockopt(zmq.FD)

    def get(self) -> Batch | None:
        """The next readable batch of our publisher; None when there is none now."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            # Topics are matched by prefix: "w1" brings those of "w10" as well.
            if parts[0] != self._topic:
                continue
            try:
                batch = decode(parts[-1])
            except ValueError as exc:
                self._stats.unreadable += 1
                log.warning("event message skipped", publisher=self._publisher, why=str(exc))
                continue
            if batch.publisher == self._publisher:
                return batch
            self._stats.unreadable += 1

    async def wait(self, other: asyncio.Future[Snapshot | None] | None) -> None:
        """Returns when there may be more to get, or `other` is done.

        Call only when `get` gave None: ZMQ's descriptor tells changes, not states.
        """
        readable = self._loop.create_future()
        self._loop.add_reader(self._fd, _wake, readable)
        try:
            await asyncio.wait(
                {readable} if other is None else {readable, other},
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._loop.remove_reader(self._fd)
            readable.cancel()

    def close(self) -> None:
        self._socket.close()


def _wake(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)
