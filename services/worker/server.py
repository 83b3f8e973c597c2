"""worker.v1.WorkerService over gRPC: messages in, domain, messages out. No decisions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
from forebay.worker.v1 import worker_pb2 as pb
from forebay.worker.v1 import worker_pb2_grpc

from services.common.cards import role_from_proto, role_to_proto
from services.common.errors import (
    ForebayError,
    Internal,
    InvalidRequest,
    Overloaded,
    Unavailable,
    error_from_number,
)
from services.common.events.codec import snapshot_to_proto
from services.common.ids import new_id
from services.common.rpc.server import Service
from services.common.telemetry.logging import get_logger
from services.worker.adapters import messages
from services.worker.service import WorkerService
from services.worker.session import Session

SNAPSHOTS_AT_ONCE = 4
SIGN_S = 1.0
"""A gateway that hears nothing else of us hears that we live, so often."""
DRAIN_MARGIN_S = 0.2
"""A drain answers this long before its call's deadline."""
log = get_logger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves whatever `attach` brought; UNAVAILABLE (STARTING) before."""

    def __init__(self, share_limit: int) -> None:
        self._share_limit = share_limit
        self._attached: WorkerService | None = None
        self._snapshots = 0

    def attach(self, service: WorkerService) -> None:
        """Serves `service` from now on: the port is open before the engine is ready."""
        self._attached = service

    @property
    def _service(self) -> WorkerService:
        if self._attached is None:
            raise Unavailable("the engine is starting", reason="STARTING")
        return self._attached

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Context
    ) -> AsyncIterator[pb.SessionResponse]:
        """All requests of one gateway."""
        service = self._service
        # No deadline: a session waits for its gateway, and keepalive ends a dead connection.
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        if first.WhichOneof("kind") != "open":
            raise InvalidRequest("the first message of a session must be `open`", field="open")
        service.check_open(first.open.worker_incarnation)
        service.refuse()
        session = Session(service, first.open.gateway_id, self._share_limit)
        # The generator may be left suspended when the call breaks: this callback runs in any case.
        _when_done(context, session.close)
        reader = asyncio.create_task(_read(request_iterator, session), name="session reader")
        try:
            async for frame in session.frames(SIGN_S):
                yield messages.frame(frame)
        finally:
            session.close()
            reader.cancel()
            await asyncio.wait({reader})

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One request."""
        generation = messages.generation(request)
        metadata = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        generation = replace(
            generation,
            request_id=generation.request_id or new_id("req"),
            traceparent=generation.traceparent or metadata.get("traceparent", ""),
            tracestate=generation.tracestate or metadata.get("tracestate", ""),
        )
        session = Session(self._service, "", self._share_limit)
        _when_done(context, session.close)
        try:
            await session.start(generation)
            session.end()
            async for frame in session.frames():
                for delta in frame.deltas:
                    failure = delta.failure
                    if failure is not None:
                        raise error_from_number(
                            failure.code, failure.reason, failure.message, field=failure.field
                        )
                    yield pb.GenerateResponse(delta=messages.delta(delta))
        finally:
            session.close()

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotResponse:
        """Blocks and requests at one sequence."""
        if self._snapshots >= SNAPSHOTS_AT_ONCE:
            raise Overloaded("too many snapshots at once", retry_after_s=0.1)
        self._snapshots += 1
        try:
            snapshot = self._service.snapshot()
            return await asyncio.to_thread(snapshot_to_proto, snapshot)
        finally:
            self._snapshots -= 1

    async def GetModelCard(
        self, request: pb.GetModelCardRequest, context: Context
    ) -> pb.GetModelCardResponse:
        """The model card."""
        service = self._service
        return pb.GetModelCardResponse(
            card=service.cards.card.to_proto(), worker=service.holder.to_proto()
        )

    async def GetModelFile(
        self, request: pb.GetModelFileRequest, context: Context
    ) -> AsyncIterator[pb.GetModelFileResponse]:
        """A file of the card."""
        for chunk in self._service.cards.file(request.name).chunks():
            yield pb.GetModelFileResponse(chunk=chunk)

    async def ResetCache(
        self, request: pb.ResetCacheRequest, context: Context
    ) -> pb.ResetCacheResponse:
        """Forgets cached blocks."""
        return pb.ResetCacheResponse(blocks=await self._service.reset_cache())

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Takes nothing new and waits for what runs."""
        limits = [request.timeout_ms / 1000] if request.timeout_ms else []
        remaining = context.time_remaining()
        if remaining is not None:
            limits.append(max(0.0, remaining - DRAIN_MARGIN_S))
        left = await self._service.drain(
            min(limits) if limits else None, abort_rest=request.abort_rest
        )
        return pb.DrainResponse(
            remaining_requests=left, remaining_transfers=self._service.held_transfers
        )

    async def SetRole(self, request: pb.SetRoleRequest, context: Context) -> pb.SetRoleResponse:
        """Changes the routing label."""
        role = role_from_proto(request.role)
        if role is None:
            raise InvalidRequest(
                f"role is {request.role}; it must be ROLE_BOTH, ROLE_PREFILL or ROLE_DECODE",
                field="role",
            )
        return pb.SetRoleResponse(previous=role_to_proto(self._service.set_role(role)))


def _when_done(context: Context, function: Callable[[], None]) -> None:
    # The stubs want a class of their own that does not exist at run time.
    context.add_done_callback(lambda _: function())  # type: ignore[arg-type]


async def _read(requests: AsyncIterator[pb.SessionRequest], session: Session) -> None:
    """Takes a gateway's messages until it sends no more; then the session ends by itself."""
    try:
        async for message in requests:
            kind = message.WhichOneof("kind")
            if kind == "generate":
                await _start(message.generate, session)
            elif kind == "abort":
                session.abort(message.abort.request_id)
            elif kind == "release":
                session.release(message.release.request_id)
            else:
                raise InvalidRequest(f"a session can't take {kind or 'an empty message'!r} here")
        session.end()
    except ForebayError as exc:
        session.end(exc)
    except Exception as exc:  # the task's boundary: the session ends with an error
        log.exception("a session's reader failed", gateway=session.gateway_id)
        session.end(Internal(f"the session failed: {type(exc).__name__}"))


async def _start(request: pb.GenerateRequest, session: Session) -> None:
    # An answer under such a name would be taken for another request's: the session can't go on.
    session.check_name(request.request_id)
    try:
        await session.start(messages.generation(request))
    except ForebayError as exc:
        session.refuse(request.request_id, exc)


def service_of(servicer: WorkerServicer) -> Service:
    """The servicer as the RPC server takes it."""
    return Service(
        "forebay.worker.v1.WorkerService",
        worker_pb2_grpc.add_WorkerServiceServicer_to_server,
        servicer,
    )
