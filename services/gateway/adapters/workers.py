"""Sessions with workers: one bidirectional stream for each, all requests of this gateway on it.

Each worker has a link: a task that connects, writes what is queued, deals out what comes in, and
connects again. When the stream breaks, every sequence on it hears WorkerLost at once.

KV that a prefill leg left there is let go of when its sequence is aborted, unless the request that
names it has been written to some worker: from then on that worker and the lease answer for it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any

import grpc
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc as pb_grpc

from services.common.cards import Instance
from services.common.rpc.channel import open_channel
from services.common.rpc.stream import StreamEnded, send
from services.common.telemetry.logging import get_logger
from services.gateway.adapters.connect import Unreachable, connected, why_ended
from services.gateway.adapters.generate import merge, to_generate, to_release, transfer_of
from services.gateway.ports import Inbox, Placement, Transfer, Work, WorkerLost

log = get_logger(__name__)

_MAX_QUEUED = 4096
"""Sequences waiting to be written to one worker; beyond, the worker counts as lost for the next
one.
"""
_BACKOFF_S = (0.1, 2.0)
_CLOSED = "the session was closed"


class SessionEnded(Exception):
    """A session that was up has ended; says why."""


class LinkState(StrEnum):
    """How we stand with a worker."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


class WorkerLink:
    """The session with one life of one worker."""

    def __init__(
        self,
        instance: Instance,
        gateway_id: str,
        *,
        connect_timeout_s: float,
        silence_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self.instance = instance
        self._connect_timeout_s = connect_timeout_s
        self.registered = True
        """Whether discovery has it now; without it the link lives as long as its connection."""
        self.state = LinkState.CONNECTING
        self._gateway_id = gateway_id
        self._silence_timeout_s = silence_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._running: dict[str, Inbox] = {}
        self._transfers: dict[str, Transfer] = {}
        """What ended prefill legs have left here, by the leg's id."""
        self._outbox: deque[Work | str | Transfer] = deque()
        """What is to be sent: sequences, ids of those to be aborted, KV to let go of."""
        self._filled = asyncio.Event()
        self._changed = asyncio.Event()
        self._retry = asyncio.Event()
        self._last_news = 0.0
        self._last_sign = 0.0
        """When the last sign of life came; 0: this session has given none yet."""
        self._why_down = "not connected yet"
        self._refused = False

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.instance.id

    @property
    def in_flight(self) -> int:
        """Our sequences there."""
        return len(self._running)

    async def run(self) -> None:
        """Keeps the session until cancelled, or until the worker is gone from discovery and
        connection alike.
        """
        loop = asyncio.get_running_loop()
        backoff = _BACKOFF_S[0]
        try:
            while True:
                self._retry.clear()
                self._set(LinkState.CONNECTING)
                started = loop.time()
                try:
                    await self._converse()
                except Unreachable as exc:
                    self._fall(str(exc), refused=exc.refused)
                except SessionEnded as exc:
                    self._fall(str(exc), refused=False)
                except Exception as exc:
                    log.error("worker session failed", worker=self.id, exc_info=exc)
                    self._fall(f"{type(exc).__name__}", refused=False)
                if loop.time() - started > _BACKOFF_S[1]:
                    backoff = _BACKOFF_S[0]
                if not self.registered:
                    return
                pause = backoff * random.uniform(0.7, 1.3)
                backoff = min(backoff * 2, _BACKOFF_S[1])
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._retry.wait()
        finally:
            # Nobody may wait for a link that nobody serves.
            self._fall(_CLOSED, refused=False)

    async def up(self, timeout_s: float) -> None:
        """Waits for the connection; raises WorkerLost when it is refused or takes too long."""
        if self.state is LinkState.UP:
            return
        if self.state is LinkState.DOWN:
            # What failed a moment ago may be back: try at once rather than after the backoff.
            self.look_again()
            self._set(LinkState.CONNECTING)
        try:
            async with asyncio.timeout(timeout_s):
                while self.state is LinkState.CONNECTING:
                    await self._changed.wait()
        except TimeoutError:
            raise WorkerLost(f"worker {self.id} could not be reached in {timeout_s:g} s") from None
        if self.state is LinkState.DOWN:
            raise WorkerLost(f"worker {self.id}: {self._why_down}", refused=self._refused)

    def look_again(self) -> None:
        """Tries to connect now rather than after the pause."""
        self._retry.set()

    def submit(self, works: Sequence[Work], inbox: Inbox) -> None:
        """Queues sequences, all or none. Raises WorkerLost when the session is not up or its queue
        is full.
        """
        if self.state is not LinkState.UP:
            raise WorkerLost(f"worker {self.id}: {self._why_down}", refused=self._refused)
        if len(self._outbox) >= _MAX_QUEUED:
            raise WorkerLost(f"worker {self.id} takes nothing: {_MAX_QUEUED} messages wait for it")
        if not self._running:
            self._last_news = asyncio.get_running_loop().time()
        for work in works:
            self._running[work.request_id] = inbox
            self._post(work)

    def abort(self, request_id: str) -> bool:
        """Ends a sequence; False when it doesn't run here. Of a prefill leg that has ended, lets go
        of what it left.
        """
        transfer = self._transfers.pop(request_id, None)
        if transfer is not None and not transfer.given:
            self._post(transfer)
        if self._running.pop(request_id, None) is None:
            return False
        # Never refused: at most one for each sequence that was queued, so bounded with those.
        self._post(request_id)
        return True

    def _post(self, item: Work | str | Transfer) -> None:
        self._outbox.append(item)
        self._filled.set()

    def _set(self, state: LinkState) -> None:
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    def _fall(self, why: str, *, refused: bool) -> None:
        if why != _CLOSED and (self.state is LinkState.UP or why != self._why_down):
            log.warning("worker session down", worker=self.id, why=why, in_flight=self.in_flight)
        self._why_down, self._refused = why, refused
        self._set(LinkState.DOWN)
        self._outbox.clear()
        self._transfers.clear()
        running, self._running = self._running, {}
        for request_id, inbox in running.items():
            news = inbox.of(request_id)
            news.error = WorkerLost(f"worker {self.id}: {why}")
            inbox.wake(request_id, news)

    async def _converse(self) -> None:
        async with open_channel(self.instance.address) as channel:
            await connected(channel, self.instance.address, self._connect_timeout_s)
            call: Any = pb_grpc.WorkerServiceStub(channel).Session()
            try:
                opening = pb.SessionOpen(
                    gateway_id=self._gateway_id, worker_incarnation=self.instance.incarnation
                )
                await send(call, pb.SessionRequest(open=opening), timeout_s=self._connect_timeout_s)
                self._last_sign = 0.0
                self._set(LinkState.UP)
                log.info("worker session up", worker=self.id, address=self.instance.address)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(call), name=f"session-writer-{self.id}")
                    tasks.create_task(self._watch(), name=f"session-watch-{self.id}")
                    await self._read(call)
                    raise SessionEnded("the worker closed the session")
            except grpc.RpcError as exc:
                raise SessionEnded(exc.details() or exc.code().name) from exc
            except StreamEnded as exc:
                raise SessionEnded(str(exc)) from exc
            except BaseExceptionGroup as group:
                raise SessionEnded(why_ended(group, SessionEnded)) from None
            finally:
                call.cancel()

    async def _read(self, call: Any) -> None:
        loop = asyncio.get_running_loop()
        async for frame in call:
            if not frame.deltas:
                self._last_sign = loop.time()
                continue
            self._last_news = loop.time()
            for delta in frame.deltas:
                inbox = self._running.get(delta.request_id)
                if inbox is None:  # aborted a moment ago
                    if (unwanted := transfer_of(delta)) is not None:
                        self._post(unwanted)
                    continue
                news = inbox.of(delta.request_id)
                merge(news, delta)
                if news.transfer is not None:
                    self._transfers[delta.request_id] = news.transfer
                inbox.wake(delta.request_id, news)
                if delta.finish_reason:
                    del self._running[delta.request_id]

    async def _write(self, call: Any) -> None:
        while True:
            while self._outbox:
                # Long prompts become messages one by one, with others' turns in between.
                item = self._outbox.popleft()
                if isinstance(item, str):
                    abort = pb.AbortRequest(request_id=item)
                    await send(call, pb.SessionRequest(abort=abort))
                elif isinstance(item, Transfer):
                    await send(call, pb.SessionRequest(release=to_release(item)))
                elif item.request_id in self._running:
                    if item.transfer is not None:
                        item.transfer.given = True
                    await send(call, pb.SessionRequest(generate=to_generate(item)))
            self._filled.clear()
            await self._filled.wait()

    async def _watch(self) -> None:
        """Ends a session whose worker gives no sign of life, or no news of what runs on it."""
        loop = asyncio.get_running_loop()
        limits = [s for s in (self._silence_timeout_s, self._stall_timeout_s) if s]
        while limits:
            before = loop.time()
            await asyncio.sleep(min(limits) / 8)
            now = loop.time()
            if now - before > min(limits) / 2:
                continue  # it is we who slept: what came meanwhile is not read yet
            if self._running and (why := self._silent(now)):
                raise SessionEnded(why)

    def _silent(self, now: float) -> str:
        """Why a session is to be ended, if its worker has been silent for too long."""
        quiet_s, stalled_s = now - max(self._last_news, self._last_sign), now - self._last_news
        # One that has given no sign of life yet is of a version that gives none.
        signs = self._last_sign and self._silence_timeout_s
        if signs and quiet_s > self._silence_timeout_s:
            return f"no sign of life for {self._silence_timeout_s:g} s"
        if self._stall_timeout_s and stalled_s > self._stall_timeout_s:
            return f"no news for {self._stall_timeout_s:g} s"
        return ""


class Workers:
    """The links with all workers that discovery has shown and whose connection lives."""

    def __init__(
        self,
        gateway_id: str,
        *,
        connect_timeout_s: float,
        silence_timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._gateway_id = gateway_id
        self._connect_timeout_s = connect_timeout_s
        self._silence_timeout_s = silence_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._where: dict[str, WorkerLink] = {}
        self._gone: list[Callable[[Instance], None]] = []

    def on_gone(self, listener: Callable[[Instance], None]) -> None:
        """Calls `listener` with a worker's last record when it is dropped for good."""
        self._gone.append(listener)

    def update(self, instance: Instance) -> None:
        """A worker's record, new or changed. Another incarnation replaces the link: the old life is
        over.
        """
        link = self._links.get(instance.id)
        task = self._tasks.get(link) if link is not None else None
        alive = task is not None and not task.done()
        if link is not None and alive and link.instance.incarnation == instance.incarnation:
            link.instance = instance
            link.registered = True
            return
        if task is not None:
            task.cancel()
        link = WorkerLink(
            instance,
            self._gateway_id,
            connect_timeout_s=self._connect_timeout_s,
            silence_timeout_s=self._silence_timeout_s,
            stall_timeout_s=self._stall_timeout_s,
        )
        self._links[instance.id] = link
        task = asyncio.get_running_loop().create_task(link.run(), name=f"link-{instance.id}")
        self._tasks[link] = task
        task.add_done_callback(lambda done: self._ended(link, done))

    def unregister(self, worker_id: str, incarnation: int) -> None:
        """Its record vanished: only a hint. The link is dropped when its connection is gone as
        well.
        """
        link = self._links.get(worker_id)
        if link is not None and link.instance.incarnation == incarnation:
            link.registered = False
            if link.state is not LinkState.UP:
                # It ends when that fails. Not cancelled: the record may be back before it ended.
                link.look_again()

    def links(self) -> Iterable[WorkerLink]:
        """All links, in order of id."""
        return [self._links[key] for key in sorted(self._links)]

    def get(self, worker_id: str) -> WorkerLink | None:
        """The link with a worker."""
        return self._links.get(worker_id)

    async def start(self, placement: Placement, works: Sequence[Work], inbox: Inbox) -> None:
        """Sends sequences to the worker of `placement`. Raises WorkerLost."""
        link = self._links.get(placement.worker.id)
        if link is None:
            raise WorkerLost(
                f"worker {placement.worker.id} is not known here", reason="UNKNOWN_WORKER"
            )
        try:
            await link.up(self._connect_timeout_s)
        except WorkerLost as exc:
            if link.instance.incarnation != placement.worker.incarnation:
                # What refused us is another life of it than the one that the router speaks of.
                raise WorkerLost(exc.message) from exc
            raise
        link.submit(works, inbox)
        for work in works:
            self._where[work.request_id] = link

    def abort(self, request_id: str) -> None:
        """Ends a sequence wherever it runs, or forgets it. Idempotent, never blocks."""
        link = self._where.pop(request_id, None)
        if link is not None:
            link.abort(request_id)

    async def close(self) -> None:
        """Ends all sessions; what still runs on them hears WorkerLost."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, link: WorkerLink, task: asyncio.Task[None]) -> None:
        self._tasks.pop(link, None)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("worker link failed", worker=link.id, exc_info=exc)
        if self._links.get(link.id) is link:
            del self._links[link.id]
            log.info("worker gone", worker=link.id)
            for listener in self._gone:
                listener(link.instance)
