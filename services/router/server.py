"""RouterService over gRPC: messages to domain values, and back. Decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc
from opentelemetry.trace import Tracer

from services.common.errors import ForebayError, Internal, Unavailable
from services.common.events.subscriber import FollowStats
from services.common.ids import AttemptId
from services.common.rpc.server import Service
from services.common.telemetry.logging import get_logger
from services.common.telemetry.tracing import extract
from services.router.adapters.inbox import Asked, Inbox
from services.router.adapters.messages import (
    candidate_message,
    failure_message,
    holder_message,
    node_view,
    path_message,
    placement_message,
    waiting_message,
    worker_view,
)
from services.router.adapters.metrics import RouterMetrics
from services.router.adapters.queries import query_of
from services.router.core.admission import Admission, AdmissionConfig, Waiting
from services.router.core.answers import Placement, Prefetch, Query, Refusal, RefusalKind
from services.router.core.placement import RouterCore
from services.router.errors import error_of, invalid
from services.router.ports import Clock
from services.router.waiting import WaitingRoom

log = get_logger(__name__)

_DECISIONS_AT_ONCE = 16
"""Decisions before others get their turn; one takes some milliseconds for many workers."""
_ANSWER_S = 0.05
"""Left of a call's deadline for its answer's way back."""
_Carrier = dict[str, str]
"""Trace context."""


def _leaving() -> Unavailable:
    return Unavailable("this router is draining", reason="DRAINING")


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The five methods. `drain` ends the streams, so that gateways change to another router.

    `hint` takes what daemons shall bring up for a placement; None: they aren't told. `admission`
    bounds waits; unless given, all is placed at once. Then call `news` when workers have told
    something, and `tick` a few times a second.
    """

    def __init__(
        self,
        core: RouterCore,
        clock: Clock,
        metrics: RouterMetrics,
        tracer: Tracer,
        *,
        router_id: str,
        policy: str,
        new_attempt: Callable[[], AttemptId],
        streams: FollowStats,
        hint: Callable[[Prefetch], None] | None = None,
        admission: AdmissionConfig | None = None,
    ) -> None:
        self._core = core
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._router_id = router_id
        self._policy = policy
        limits = admission or AdmissionConfig(max_wait_s=0)
        self._admission = Admission(core, limits, new_attempt)
        self._room = WaitingRoom(self._admission, clock, metrics)
        self._streams = streams
        self._hint = hint
        self._draining = False
        self._inboxes: set[Inbox] = set()

    def service(self) -> Service:
        """Itself, as a gRPC server takes it."""
        return Service(
            pb.DESCRIPTOR.services_by_name["RouterService"].full_name,
            router_pb2_grpc.add_RouterServiceServicer_to_server,
            self,
        )

    def drain(self) -> None:
        """Ends all streams with UNAVAILABLE (DRAINING), and lets no new one in."""
        self._draining = True
        for inbox in self._inboxes:
            # Without an answer: another router is asked then.
            self._leave(inbox)
            inbox.end()
        self._room.send_away(_leaving())

    def news(self) -> None:
        """Workers have told something: soon those who wait are decided anew."""
        self._room.news()

    def tick(self) -> None:
        """Time has passed: waits end, and gateways that wait see that we live."""
        self._room.tick()
        for inbox in self._inboxes:
            inbox.sign()

    async def RouteStream(
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Any
    ) -> AsyncIterator[pb.RouteStreamResponse]:
        """Decides what has arrived, answers, and looks again; one writer."""
        if self._draining:
            raise _leaving()
        inbox = Inbox()
        self._inboxes.add(inbox)
        self._metrics.stream(1)
        reader = asyncio.create_task(self._read(request_iterator, inbox), name="route reader")
        try:
            while True:
                asked, ready = await inbox.take()
                if not asked and not ready:
                    break
                for answer in ready:
                    yield answer
                for start in range(0, len(asked), _DECISIONS_AT_ONCE):
                    # What arrived together is decided before anything is awaited.
                    few = asked[start : start + _DECISIONS_AT_ONCE]
                    for reply in [self._answer(one, inbox) for one in few]:
                        if reply is not None:
                            yield reply
                    # A long burst must not keep workers' events waiting: they would look silent.
                    await asyncio.sleep(0)
            if self._draining:
                raise _leaving()
        finally:
            self._metrics.stream(-1)
            self._inboxes.discard(inbox)
            self._leave(inbox)
            reader.cancel()
            await asyncio.wait({reader})

    async def Route(self, request: pb.RouteRequest, context: Any) -> pb.RouteResponse:
        """One placement."""
        query = await query_of(request, self._core)
        carrier = dict(context.invocation_metadata() or ())
        if request.traceparent:
            carrier = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        if not request.deadline_ms and (left_s := context.time_remaining()) is not None:
            query = replace(query, patience_s=max(0.0, left_s - _ANSWER_S))
        placement = self._place(query, carrier)
        if isinstance(placement, Waiting):
            placement = await self._wait(placement.number, query, carrier)
        return placement_message(placement)

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """The scorecard."""
        query = await query_of(request.request, self._core)
        now, limit_s = self._clock(), self._admission.limit_s
        card = self._core.explain(query, now, limit_s, self._admission.taken(now))
        if isinstance(card, Refusal):
            raise error_of(card)
        wait_s, would_wait = self._admission.outlook(query, now)
        return pb.ExplainResponse(
            policy=card.policy.value,
            prompt_blocks=card.prompt_blocks,
            prompt_tokens=card.prompt_tokens,
            candidates=[candidate_message(row) for row in card.workers],
            predicted_wait_s=wait_s,
            max_wait_s=0.0 if limit_s == float("inf") else limit_s,
            would_wait=would_wait,
            waiting_requests=len(self._admission),
            whole=path_message(card.whole),
            apart=path_message(card.apart),
        )

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Any
    ) -> pb.ListWorkersResponse:
        """The workers as this router sees them."""
        views = [worker_view(w) for w in self._core.workers(self._clock())]
        return pb.ListWorkersResponse(
            workers=views, policy=self._policy, router_id=self._router_id, nodes=self._nodes()
        )

    async def GetIndexStats(
        self, request: pb.GetIndexStatsRequest, context: Any
    ) -> pb.GetIndexStatsResponse:
        """Size and digests of the index."""
        stats = self._core.index_stats()
        return pb.GetIndexStatsResponse(
            blocks=stats.blocks,
            entries=stats.entries,
            capacity_entries=stats.capacity_entries,
            refused_entries=stats.refused_entries,
            holders=len(stats.digests),
            gaps=self._streams.gaps,
            snapshots=self._streams.snapshots,
            events=stats.events,
            unknown_events=stats.unknown_events,
            digests=[
                pb.HolderDigest(
                    holder=holder_message(holder),
                    sequence=sequence,
                    blocks=digest.blocks,
                    xor=digest.xor,
                )
                for holder, sequence, digest in stats.digests
            ],
            tier_entries=stats.tier_entries,
            tier_capacity_entries=stats.tier_capacity_entries,
            tier_refused_entries=stats.tier_refused_entries,
            nodes=self._nodes(),
        )

    def _nodes(self) -> list[pb.NodeView]:
        return [node_view(n) for n in self._core.nodes.nodes(self._clock())]

    # Streams.

    async def _read(
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], inbox: Inbox
    ) -> None:
        try:
            async for message in request_iterator:
                query: Query | ForebayError | None = None
                if message.WhichOneof("kind") == "route":
                    try:
                        query = await query_of(message.route, self._core)
                    except ForebayError as exc:
                        query = exc
                await inbox.put(Asked(message, query))
        except grpc.RpcError as exc:
            log.info("gateway's stream broke", why=str(exc))
        except Exception:
            # Boundary of a task: the stream ends with it, instead of waiting for ever.
            log.exception("reading a gateway's stream failed")
        finally:
            inbox.close()

    def _answer(self, asked: Asked, inbox: Inbox) -> pb.RouteStreamResponse | None:
        message = asked.message
        number = message.correlation_id
        try:
            match message.WhichOneof("kind"):
                case "route":
                    if isinstance(asked.query, ForebayError):
                        raise asked.query
                    assert asked.query is not None
                    r = message.route
                    carrier = {"traceparent": r.traceparent, "tracestate": r.tracestate}
                    placement = self._place(asked.query, carrier)
                    if isinstance(placement, Waiting):
                        return self._wait_on(inbox, number, placement, asked.query, carrier)
                    return pb.RouteStreamResponse(
                        correlation_id=number, placement=placement_message(placement)
                    )
                case "release":
                    self._release(message.release)
                    return None
                case "cancel":
                    self._cancel(inbox, number)
                    return None
                case _:
                    raise invalid("kind: a message must be `route`, `release` or `cancel`", "kind")
        except ForebayError as exc:
            return failure_message(number, exc)
        except Exception:
            # One request's trouble must not end the stream of all: it is logged and answered.
            log.exception("decision failed")
            return failure_message(
                number, Internal("the decision failed; the router's log says why")
            )

    # Words and deeds.

    def _place(self, query: Query, carrier: _Carrier) -> Placement | Waiting:
        if carrier.get("traceparent"):
            with self._tracer.start_as_current_span("route", context=extract(carrier)) as span:
                placement = self._decide(query)
                if isinstance(placement, Waiting):
                    span.set_attribute("forebay.waits", True)
                    return placement
                span.set_attribute("forebay.worker", placement.holder.id)
                span.set_attribute("forebay.attempt_id", placement.attempt_id)
                span.set_attribute(
                    "forebay.predicted_cached_tokens", placement.predicted_cached_tokens
                )
                if placement.prefill is not None:
                    span.set_attribute("forebay.prefill_worker", placement.prefill.holder.id)
                return placement
        return self._decide(query)

    def _decide(self, query: Query) -> Placement | Waiting:
        started = time.perf_counter()
        answer = self._admission.ask(query, self._clock())
        seconds = time.perf_counter() - started
        if isinstance(answer, Waiting):
            self._metrics.decided(self._policy, "waits", seconds)
            return answer
        if isinstance(answer, Refusal):
            self._metrics.decided(self._policy, answer.kind.value.lower(), seconds)
            if answer.kind is RefusalKind.OVERLOADED:
                heavy = self._admission.heavy(query.tenant)
                self._metrics.overloaded(query.tenant, heavy)
            raise error_of(answer)
        self._metrics.decided(self._policy, "placed", seconds)
        self._carry_out(answer)
        return answer

    def _carry_out(self, placement: Placement) -> None:
        leg = placement.prefill
        self._metrics.placed(leg.transfer_tokens if leg else None)
        if placement.prefetch is not None and self._hint is not None:
            self._hint(placement.prefetch)

    # Those who wait.

    async def _wait(self, number: int, query: Query, carrier: _Carrier) -> Placement:
        """A call waits for its placement; it ends by the queue's limits at the latest."""
        call: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()

        def tell(answer: Placement | ForebayError, waited_s: float) -> None:
            if call.done():
                # Its client has gone this moment.
                if isinstance(answer, Placement):
                    self._take_back(answer)
            elif isinstance(answer, ForebayError):
                call.set_exception(answer)
            else:
                self._placed_late(answer, carrier, waited_s)
                call.set_result(answer)

        self._room.enter(number, query, tell)
        try:
            return await call
        except asyncio.CancelledError:
            told = not self._room.leave(number)
            if told and not call.cancelled() and call.exception() is None:
                # Placed, and nobody there any more.
                self._take_back(call.result())
            raise

    def _take_back(self, placement: Placement) -> None:
        for attempt_id in placement.attempt_ids:
            self._core.release(attempt_id)

    def _wait_on(
        self, inbox: Inbox, correlation: int, waiting: Waiting, query: Query, carrier: _Carrier
    ) -> pb.RouteStreamResponse:
        """A stream's question waits; the answer comes with those of later ones."""

        def tell(answer: Placement | ForebayError, waited_s: float) -> None:
            inbox.waiting.pop(correlation, None)
            if isinstance(answer, ForebayError):
                inbox.answer(failure_message(correlation, answer))
                return
            self._placed_late(answer, carrier, waited_s)
            inbox.answer(
                pb.RouteStreamResponse(
                    correlation_id=correlation, placement=placement_message(answer)
                )
            )

        former = inbox.waiting.pop(correlation, None)
        if former is not None:
            # Its number was not unique; one of the two can be answered.
            self._room.leave(former)
        inbox.waiting[correlation] = waiting.number
        self._room.enter(waiting.number, query, tell)
        return waiting_message(correlation, waiting.predicted_s, waiting.most_s)

    def _leave(self, inbox: Inbox) -> None:
        """A stream is over for those who wait on it."""
        for number in inbox.waiting.values():
            self._room.leave(number)
        inbox.waiting.clear()
        for attempt_id in inbox.unsent():
            self._core.release(AttemptId(attempt_id))

    def _cancel(self, inbox: Inbox, correlation: int) -> None:
        number = inbox.waiting.pop(correlation, None)
        if number is not None:
            self._room.leave(number)

    def _placed_late(self, placement: Placement, carrier: _Carrier, waited_s: float) -> None:
        self._carry_out(placement)
        if carrier.get("traceparent"):
            name = "route after a wait"
            with self._tracer.start_as_current_span(name, context=extract(carrier)) as span:
                span.set_attribute("forebay.worker", placement.holder.id)
                span.set_attribute("forebay.attempt_id", placement.attempt_id)
                span.set_attribute("forebay.waited_s", waited_s)

    def _release(self, release: pb.ReleasePlacement) -> None:
        if release.attempt_id:
            self._core.release(AttemptId(release.attempt_id))
        worker = release.worker
        if (
            release.worker_unreachable
            and worker.id
            and self._core.refused(worker.id, worker.incarnation, self._clock())
        ):
            log.warning("worker unreachable, says a gateway", worker=worker.id)
