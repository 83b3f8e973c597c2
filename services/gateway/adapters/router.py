"""Routers: one stream to any one of them, another when it breaks or keeps us waiting."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from enum import StrEnum
from typing import Any

from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc as pb_grpc

from services.common.cards import Holder
from services.common.errors import Overloaded, Unavailable, error_from_number
from services.common.ids import AttemptId
from services.common.rpc.channel import open_channel
from services.common.rpc.stream import send
from services.common.telemetry.logging import get_logger
from services.gateway.adapters.connect import Unreachable, connected, why_ended
from services.gateway.ports import Ask, PlacedBy, Placement

log = get_logger(__name__)

_MAX_QUEUED = 4096
_BACKOFF_S = (0.1, 1.0)
_LOOKS = 4
"""Silence is judged in so many looks, not by a clock alone: when our own loop lags, answers that
have arrived are read between two looks, and no router is blamed for our being slow."""
_PATIENCE = 10
"""One question may wait so many timeouts at a router that does answer others."""


class NoRouter(Unavailable):
    """No router answered; `reason` says why (NO_ROUTER, ROUTER_TIMEOUT, ROUTER_BUSY)."""

    default_reason = "NO_ROUTER"


class _Lost(Exception):
    """The stream that carried a question broke."""


class _Silent(_Lost):
    """The router answers nothing at all."""


class _State(StrEnum):
    IDLE = "idle"  # no router is known
    CONNECTING = "connecting"
    UP = "up"
    AWAY = "away"  # none of the known ones answers


class Routers:
    """A client of any one router. `run` keeps the stream; `place` asks over it."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._targets: dict[str, str] = {}
        self._failed: set[str] = set()
        self._vanished: set[str] = set()
        self._state = _State.IDLE
        self._changed = asyncio.Event()
        self._known = asyncio.Event()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[pb.RouteStreamResponse]] = {}
        self._timers: dict[int, asyncio.Timeout] = {}
        self._outbox: deque[pb.RouteStreamRequest] = deque()
        self._filled = asyncio.Event()
        self._heard = 0
        self._leave = asyncio.Event()
        self.current = ""
        """Id of the router in use; empty without one."""

    @property
    def up(self) -> bool:
        """Whether a router is connected."""
        return self._state is _State.UP

    @property
    def targets(self) -> dict[str, str]:
        """Known routers: id to address."""
        return dict(self._targets)

    def update(self, router_id: str, address: str) -> None:
        """A router's record, new or changed."""
        self._targets[router_id] = address
        self._failed.discard(router_id)
        self._vanished.discard(router_id)
        if self._state is _State.IDLE:
            self._set(_State.CONNECTING)
        self._known.set()

    def remove(self, router_id: str) -> None:
        """A router's record vanished. One that is connected is used on while it lives."""
        if router_id == self.current:
            self._vanished.add(router_id)
            return
        self._targets.pop(router_id, None)
        if not self._targets:
            self._known.clear()
            self._set(_State.IDLE)

    def leave(self, router_id: str) -> None:
        """A router drains: change to another one."""
        if router_id == self.current:
            self._leave.set()
        self._targets.pop(router_id, None)
        if not self._targets:
            self._known.clear()

    async def run(self) -> None:
        """Keeps a stream to some router; until cancelled."""
        pause = _BACKOFF_S[0]
        while True:
            await self._known.wait()
            # One that has not failed since we were last connected goes first.
            router_id = min(self._targets, key=lambda r: (r in self._failed, random.random()))
            if self._state is not _State.AWAY:
                self._set(_State.CONNECTING)
            silent = False
            try:
                await self._converse(router_id, self._targets[router_id])
            except (_Lost, Unreachable) as exc:
                was_up = self._state is _State.UP
                silent = isinstance(exc, _Silent)
                if was_up or router_id not in self._failed:
                    log.warning("router stream down", router=router_id, why=str(exc))
                self._failed.add(router_id)
            except Exception as exc:
                # Without this task every placement would be a guess until we are restarted.
                was_up = self._state is _State.UP
                log.error("router stream failed", router=router_id, exc_info=exc)
                self._failed.add(router_id)
            alone = len(self._targets) < 2
            self._drop_pending(silent=silent and alone)
            if router_id in self._vanished:
                self._vanished.discard(router_id)
                self.remove(router_id)
            if not self._targets:
                self._set(_State.IDLE)
            elif was_up and not (silent and alone):
                self._set(_State.CONNECTING)
                pause = _BACKOFF_S[0]
            elif self._failed.issuperset(self._targets):
                self._set(_State.AWAY)
                await asyncio.sleep(pause * random.uniform(0.7, 1.3))
                pause = min(pause * 2, _BACKOFF_S[1])

    async def place(self, ask: Ask) -> Placement:
        """A router's decision.

        Raises NoRouter when none answers in time, else what the router refused with: Overloaded,
        Unavailable (NO_WORKER), NotFound (MODEL_NOT_FOUND), InvalidRequest. A router that lets it
        wait for room says so, and for how long at most; it is given that time.
        """
        for _ in range(2):
            await self._connected()
            if len(self._outbox) >= _MAX_QUEUED:
                raise NoRouter("the router takes nothing", reason="ROUTER_BUSY")
            number = next(self._numbers)
            question = pb.RouteStreamRequest(correlation_id=number, route=_to_route(ask))
            answer: asyncio.Future[pb.RouteStreamResponse]
            answer = self._pending[number] = asyncio.get_running_loop().create_future()
            self._post(question)
            try:
                async with asyncio.timeout(_PATIENCE * self._timeout_s) as timer:
                    self._timers[number] = timer
                    return _to_placement(await answer)
            except _Lost:
                continue
            except TimeoutError:
                raise NoRouter("the router keeps us waiting", reason="ROUTER_TIMEOUT") from None
            finally:
                self._pending.pop(number, None)
                self._timers.pop(number, None)
                if not answer.done() or answer.cancelled():
                    self._cancel(number)
        raise NoRouter("the router's stream broke twice")

    def release(self, placement: Placement, *, unreachable: bool = False) -> None:
        """Takes a placement back, if a router is there to hear it; bookings expire anyway. A
        prefill leg's is a placement of its own.
        """
        if self._state is not _State.UP or len(self._outbox) >= _MAX_QUEUED:
            return
        self._release(
            pb.ReleasePlacement(
                attempt_id=placement.attempt_id if placement.placed_by is PlacedBy.ROUTER else "",
                worker_unreachable=unreachable,
                worker=placement.worker.to_proto(),
            )
        )

    def _release(self, release: pb.ReleasePlacement) -> None:
        self._post(pb.RouteStreamRequest(correlation_id=next(self._numbers), release=release))

    def _cancel(self, number: int) -> None:
        """Takes a question back that may be waiting at the router."""
        if self._state is _State.UP and len(self._outbox) < _MAX_QUEUED:
            self._post(pb.RouteStreamRequest(correlation_id=number, cancel=pb.CancelRoute()))

    async def _connected(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._state is _State.CONNECTING:
                    await self._changed.wait()
        except TimeoutError:
            raise NoRouter(
                f"no router connected in {self._timeout_s:g} s", reason="ROUTER_TIMEOUT"
            ) from None
        if self._state is not _State.UP:
            raise NoRouter("no router is there")

    async def _converse(self, router_id: str, address: str) -> None:
        """Carries questions and answers until the stream ends; then raises _Lost or Unreachable."""
        async with open_channel(address) as channel:
            await connected(channel, address, self._timeout_s)
            call: Any = pb_grpc.RouterServiceStub(channel).RouteStream()
            self._leave.clear()
            self._outbox.clear()
            self.current = router_id
            self._failed.clear()
            self._set(_State.UP)
            log.info("router stream up", router=router_id, address=address)
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._write(call), name="router-writer")
                    tasks.create_task(self._watch_leave(), name="router-leave")
                    tasks.create_task(self._watch_silence(), name="router-silence")
                    async for message in call:
                        self._take(message)
                    raise _Lost("the router closed the stream")
            except BaseExceptionGroup as group:
                kind = _Silent if group.subgroup(_Silent) else _Lost
                raise kind(why_ended(group, _Lost)) from None
            finally:
                self.current = ""
                call.cancel()

    def _take(self, message: pb.RouteStreamResponse) -> None:
        self._heard += 1
        answer = self._pending.get(message.correlation_id)
        if message.HasField("waiting"):
            timer = self._timers.get(message.correlation_id)
            if timer is not None and message.waiting.at_most_ms and not timer.expired():
                most_s = message.waiting.at_most_ms / 1000 + _PATIENCE * self._timeout_s
                timer.reschedule(asyncio.get_running_loop().time() + most_s)
            return
        if answer is not None and not answer.done():
            answer.set_result(message)
        elif message.HasField("placement"):
            # Nobody waits any more: the bookings must not stand.
            p = message.placement
            for attempt_id in filter(None, (p.attempt_id, p.prefill_attempt_id)):
                self._release(pb.ReleasePlacement(attempt_id=attempt_id))

    async def _write(self, call: Any) -> None:
        while True:
            while self._outbox:
                await send(call, self._outbox.popleft())
            self._filled.clear()
            await self._filled.wait()

    async def _watch_leave(self) -> None:
        await self._leave.wait()
        raise _Lost("left for another router")

    async def _watch_silence(self) -> None:
        """Leaves a router that answers nothing though it is asked: it may be stopped."""
        heard, looks = self._heard, 0
        while looks < _LOOKS:
            await asyncio.sleep(self._timeout_s / _LOOKS)
            waiting = any(not answer.done() for answer in self._pending.values())
            looks = looks + 1 if waiting and self._heard == heard else 0
            heard = self._heard
        raise _Silent(f"no answer in {self._timeout_s:g} s")

    def _post(self, message: pb.RouteStreamRequest) -> None:
        self._outbox.append(message)
        self._filled.set()

    def _set(self, state: _State) -> None:
        if state is not self._state:
            self._state = state
            self._changed.set()
            self._changed = asyncio.Event()

    def _drop_pending(self, *, silent: bool) -> None:
        """Ends all waits: to ask again, or, for the only router's silence, to go without."""
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(
                    NoRouter(f"no answer in {self._timeout_s:g} s", reason="ROUTER_TIMEOUT")
                    if silent
                    else _Lost()
                )


def _to_route(ask: Ask) -> pb.RouteRequest:
    return pb.RouteRequest(
        request_id=ask.request_id,
        model=ask.model,
        block_size_tokens=ask.block_size,
        block_hashes=ask.keys,
        prompt_tokens=ask.tokens,
        expected_output_tokens=ask.expected_output,
        tenant=ask.tenant,
        excluded_workers=sorted(ask.excluded | ask.wishes.excluded),
        pinned_worker=ask.wishes.worker,
        pinned_rank=ask.wishes.rank,
        required_labels=ask.wishes.labels,
        session_id=ask.wishes.session,
        priority=ask.priority,
        deadline_ms=ask.deadline_ms,
        admitted=ask.admitted,
        sequences=ask.sequences,
        whole=ask.whole,
        traceparent=ask.trace.get("traceparent", ""),
        tracestate=ask.trace.get("tracestate", ""),
    )


def _to_placement(message: pb.RouteStreamResponse) -> Placement:
    if message.HasField("failure"):
        f = message.failure
        if f.reason == "OVERLOADED":
            raise Overloaded(f.message, reason=f.reason, retry_after_s=f.retry_after_ms / 1000)
        raise error_from_number(f.code, f.reason, f.message)
    p = message.placement
    return Placement(
        attempt_id=AttemptId(p.attempt_id),
        worker=Holder.from_proto(p.worker),
        address=p.address,
        predicted_cached_tokens=p.predicted_cached_tokens,
        placed_by=PlacedBy.ROUTER,
        prefill=_to_prefill(p) if p.HasField("prefill_worker") else None,
    )


def _to_prefill(p: pb.RouteResponse) -> Placement:
    return Placement(
        attempt_id=AttemptId(p.prefill_attempt_id),
        worker=Holder.from_proto(p.prefill_worker),
        address=p.prefill_address,
        predicted_cached_tokens=p.predicted_prefill_cached_tokens,
        placed_by=PlacedBy.ROUTER,
    )
