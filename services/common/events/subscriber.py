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

__all__ = ["Apply", "FollowStats", "Heard", "Reset", "StreamItem", "allow_streams", "follow"]

RECEIVE_LIMIT = 10_000
"""Messages that ZMQ keeps for us before it stops reading."""

# As plain numbers: enumerations cost as much as what they name.
_EVENTS, _RCVMORE = int(zmq.EVENTS), int(zmq.RCVMORE)
_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
_BATCHES_AT_ONCE = 64
"""Batches after which others get their turn of the loop."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_CALM_S = 5.0
"""A stream that was whole for so long has forgotten its troubles."""

log = get_logger(__name__)


def allow_streams(count: int) -> None:
    """Lets this process follow so many; by itself ZMQ allows 1,023 sockets. Before the first."""
    zmq.Context.instance().set(zmq.MAX_SOCKETS, count)


async def follow(
    address: str,
    publisher: str,
    take_snapshot: Callable[[], Awaitable[Snapshot]],
    *,
    stats: FollowStats,
    max_buffered: int = 10_000,
    snapshot_timeout_s: float = 10.0,
    doubted: Callable[[], bool] = lambda: False,
) -> AsyncGenerator[StreamItem, None]:
    """Follows the stream of `publisher` at `address` (tcp://host:port), until closed.

    First comes Heard, then a Reset as soon as the snapshot is there, then Apply after Apply
    without gaps. When the stream breaks, Heard again until the next Reset; and Heard for what is
    known already, since that is a sign of life, too. Nothing at all while the publisher is silent:
    how long that may last is the caller's decision. A snapshot that fails or takes longer than
    `snapshot_timeout_s` is tried again, with growing pauses; so are snapshots for a stream that
    needs one after the other. `doubted` is asked after each item: true means that the consumer has
    reason to doubt its state, and a snapshot is taken.
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
            if doubted():
                for instruction in join.on_doubt():
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
        self._loop = asyncio.get_running_loop()
        self._pause_s = 0.0
        self._whole_since: float | None = None
        self.task: asyncio.Task[Snapshot | None] | None = None

    @property
    def done(self) -> bool:
        return self.task is not None and self.task.done()

    def start(self) -> None:
        """Begins an attempt, after a pause unless it is the first."""
        if self._whole_since is not None and self._loop.time() - self._whole_since > _CALM_S:
            self._pause_s = min(self._pause_s, _FIRST_PAUSE_S)
        self._whole_since = None
        pause_s = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, self._pause_s * 2))
        self.task = asyncio.create_task(self._fetch(pause_s), name=f"snapshot {self._publisher}")

    def take(self) -> Snapshot | None:
        """What the attempt brought; None: it failed."""
        assert self.task is not None
        task, self.task = self.task, None
        return None if task.cancelled() else task.result()

    def reset(self) -> None:
        """The stream is whole. The next pause is short when it has been so for a while: one that
        loses batches, or lies, all the time must not be all snapshots.
        """
        if self._whole_since is None:
            self._whole_since = self._loop.time()

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
        self._waiter: asyncio.Future[None] | None = None
        self._watched = False

    def _readable(self) -> bool:
        """Whether a message is there. Asking is what arms ZMQ's descriptor for the next one."""
        return bool(self._socket.get(_EVENTS) & _POLLIN)  # type: ignore[operator]

    def _wake(self) -> None:
        if self._waiter is None or self._waiter.done():
            # Nobody asks now, and the descriptor would call again and again.
            self._loop.remove_reader(self._fd)
            self._watched = False
        elif self._readable():  # it tells of a message more than once
            self._waiter.set_result(None)

    def get(self) -> Batch | None:
        """The next readable batch of our publisher; None when there is none now."""
        while self._readable():
            topic = part = self._socket.recv(_NOBLOCK)
            while self._socket.get(_RCVMORE):
                part = self._socket.recv(_NOBLOCK)
            # Topics are matched by prefix: "w1" brings those of "w10" as well.
            if topic != self._topic:
                continue
            try:
                batch = decode(part)
            except ValueError as exc:
                self._stats.unreadable += 1
                log.warning("event message skipped", publisher=self._publisher, why=str(exc))
                continue
            if batch.publisher == self._publisher:
                return batch
            self._stats.unreadable += 1
        return None

    async def wait(self, other: asyncio.Future[Snapshot | None] | None) -> None:
        """Returns when there may be more to get, or `other` is done.

        Call only when `get` gave None: ZMQ's descriptor tells changes, not states.
        """
        self._waiter = waiter = self._loop.create_future()
        if not self._watched:
            # Kept from message to message: a thousand streams bring thousands of them a second.
            self._loop.add_reader(self._fd, self._wake)
            self._watched = True
        try:
            if other is None:
                await waiter
            else:
                await asyncio.wait({waiter, other}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiter = None
            waiter.cancel()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close()
