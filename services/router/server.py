"""RouterService over gRPC: messages to domain values, and back. Decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from forebay.router.v1 import router_pb2 as pb
from forebay.router.v1 import router_pb2_grpc
from opentelemetry.trace import Tracer

from services.common.blocks import HashedAdapter, block_keys
from services.common.errors import ForebayError, Internal, Unavailable
from services.common.events.subscriber import FollowStats
from services.common.ids import AttemptId
from services.common.rpc.server import Service
from services.common.telemetry.logging import get_logger
from services.common.telemetry.tracing import extract
from services.router.adapters.messages import (
    candidate_message,
    failure_message,
    given_blocks,
    holder_message,
    node_view,
    placement_message,
    worker_view,
)
from services.router.adapters.metrics import RouterMetrics
from services.router.core.answers import Placement, Prefetch, Query, Refusal
from services.router.core.placement import RouterCore
from services.router.errors import error_of, invalid
from services.router.ports import Clock

log = get_logger(__name__)

_MOST_WAITING = 1024
"""Messages of one gateway read ahead; beyond that its stream waits until some are answered."""
_TOKENS_IN_LOOP = 4096
"""Longer prompts are hashed in a thread."""
_MOST_SEQUENCES = 1024
_DECISIONS_AT_ONCE = 16
"""Decisions before others get their turn; one takes some milliseconds for many workers."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message of a gateway, ready to be decided."""

    message: pb.RouteStreamRequest
    query: Query | ForebayError | None


class _Inbox:
    """Messages between a stream's reader and its writer; bounded: a full one stops the reader."""

    def __init__(self) -> None:
        self._items: deque[_Asked] = deque()
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._closed = False

    async def put(self, item: _Asked) -> None:
        """Adds a message as soon as there is room."""
        while len(self._items) >= _MOST_WAITING:
            self._room.clear()
            await self._room.wait()
        self._items.append(item)
        self._more.set()

    def close(self) -> None:
        """Nothing more is waited for; what is there can still be taken."""
        self._closed = True
        self._more.set()

    async def take(self) -> list[_Asked]:
        """All that has arrived, at least one; none at all means that it is closed and empty."""
        while not self._items and not self._closed:
            self._more.clear()
            await self._more.wait()
        items = list(self._items)
        self._items.clear()
        self._room.set()
        return items


def _leaving() -> Unavailable:
    return Unavailable("this router is draining", reason="DRAINING")


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The five methods. `drain` ends the streams, so that gateways change to another router.

    `hint` takes what daemons shall bring up for a placement; None: they aren't told.
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
    ) -> None:
        self._core = core
        self._clock = clock
        self._metrics = metrics
        self._tracer = tracer
        self._router_id = router_id
        self._policy = policy
        self._new_attempt = new_attempt
        self._streams = streams
        self._hint = hint
        self._draining = False
        self._inboxes: set[_Inbox] = set()

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
            inbox.close()

    async def RouteStream(
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], context: Any
    ) -> AsyncIterator[pb.RouteStreamResponse]:
        """Decides what has arrived, answers, and looks again; one writer."""
        if self._draining:
            raise _leaving()
        inbox = _Inbox()
        self._inboxes.add(inbox)
        self._metrics.stream(1)
        reader = asyncio.create_task(self._read(request_iterator, inbox), name="route reader")
        try:
            while asked := await inbox.take():
                for start in range(0, len(asked), _DECISIONS_AT_ONCE):
                    # What arrived together is decided before anything is awaited.
                    few = asked[start : start + _DECISIONS_AT_ONCE]
                    for answer in [self._answer(one) for one in few]:
                        if answer is not None:
                            yield answer
                    # A long burst must not keep workers' events waiting: they would look silent.
                    await asyncio.sleep(0)
            if self._draining:
                raise _leaving()
        finally:
            self._metrics.stream(-1)
            self._inboxes.discard(inbox)
            reader.cancel()
            await asyncio.wait({reader})

    async def Route(self, request: pb.RouteRequest, context: Any) -> pb.RouteResponse:
        """One placement."""
        query = await self._query(request)
        carrier = dict(context.invocation_metadata() or ())
        if request.traceparent:
            carrier = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        return placement_message(self._place(query, carrier))

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:
        """The scorecard."""
        query = await self._query(request.request)
        card = self._core.explain(query, self._clock())
        if isinstance(card, Refusal):
            raise error_of(card)
        return pb.ExplainResponse(
            policy=card.policy.value,
            prompt_blocks=card.prompt_blocks,
            prompt_tokens=card.prompt_tokens,
            candidates=[candidate_message(row) for row in card.workers],
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
        self, request_iterator: AsyncIterator[pb.RouteStreamRequest], inbox: _Inbox
    ) -> None:
        try:
            async for message in request_iterator:
                query: Query | ForebayError | None = None
                if message.WhichOneof("kind") == "route":
                    try:
                        query = await self._query(message.route)
                    except ForebayError as exc:
                        query = exc
                await inbox.put(_Asked(message, query))
        except grpc.RpcError as exc:
            log.info("gateway's stream broke", why=str(exc))
        except Exception:
            # Boundary of a task: the stream ends with it, instead of waiting for ever.
            log.exception("reading a gateway's stream failed")
        finally:
            inbox.close()

    def _answer(self, asked: _Asked) -> pb.RouteStreamResponse | None:
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
                    return pb.RouteStreamResponse(
                        correlation_id=number, placement=placement_message(placement)
                    )
                case "release":
                    self._release(message.release)
                    return None
                case _:
                    raise invalid("kind: a message must be `route` or `release`", "kind")
        except ForebayError as exc:
            return failure_message(number, exc)
        except Exception:
            # One request's trouble must not end the stream of all: it is logged and answered.
            log.exception("decision failed")
            return failure_message(
                number, Internal("the decision failed; the router's log says why")
            )

    # Words and deeds.

    def _place(self, query: Query, carrier: dict[str, str]) -> Placement:
        if carrier.get("traceparent"):
            with self._tracer.start_as_current_span("route", context=extract(carrier)) as span:
                placement = self._decide(query)
                span.set_attribute("forebay.worker", placement.holder.id)
                span.set_attribute("forebay.attempt_id", placement.attempt_id)
                span.set_attribute(
                    "forebay.predicted_cached_tokens", placement.predicted_cached_tokens
                )
                return placement
        return self._decide(query)

    def _decide(self, query: Query) -> Placement:
        started = time.perf_counter()
        placement = self._core.place(query, self._new_attempt(), self._clock())
        seconds = time.perf_counter() - started
        if isinstance(placement, Refusal):
            self._metrics.decided(self._policy, placement.kind.value.lower(), seconds)
            raise error_of(placement)
        self._metrics.decided(self._policy, "placed", seconds)
        if placement.prefetch is not None and self._hint is not None:
            self._hint(placement.prefetch)
        return placement

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

    async def _query(self, request: pb.RouteRequest) -> Query:
        """The request in the core's words. Raises InvalidRequest that names the field."""
        if not request.model:
            raise invalid("model: a model's name is required, it is empty", "model")
        if request.sequences > _MOST_SEQUENCES:
            raise invalid(
                f"sequences: at most {_MOST_SEQUENCES}, not {request.sequences}", "sequences"
            )
        if request.token_ids:
            keys, tokens, size = await self._hashed(request)
        else:
            keys, tokens, size = given_blocks(request)
        return Query(
            model=request.model,
            prompt_tokens=tokens,
            keys=keys,
            block_size=size,
            excluded=frozenset(request.excluded_workers),
            pinned=request.pinned_worker,
            labels=dict(request.required_labels),
            sequences=request.sequences or 1,
        )

    async def _hashed(self, request: pb.RouteRequest) -> tuple[list[int], int, int]:
        if request.block_hashes:
            raise invalid("token_ids: give block_hashes or token_ids, not both", "token_ids")
        tokens = list(request.token_ids)
        if request.prompt_tokens not in (0, len(tokens)):
            raise invalid(
                f"prompt_tokens: {request.prompt_tokens}, but there are {len(tokens)} token_ids; "
                "leave it out",
                "prompt_tokens",
            )
        worker = self._core.model_worker(request.model, request.block_size_tokens)
        if worker is None:
            # The core knows best how to say that the model is not there.
            return [], len(tokens), request.block_size_tokens
        top = max(tokens)
        if worker.vocab_size and top >= worker.vocab_size:
            raise invalid(
                f"token_ids: id {top} is not below the vocabulary's size {worker.vocab_size}",
                "token_ids",
            )
        size = request.block_size_tokens or worker.block_size
        path = worker.adapters.get(request.model)
        adapter = None if path is None else HashedAdapter(request.model, path)

        def hash_all() -> list[int]:
            return list(block_keys(tokens, size, adapter=adapter, cache_salt=request.cache_salt))

        keys = await asyncio.to_thread(hash_all) if len(tokens) > _TOKENS_IN_LOOP else hash_all()
        return keys, len(tokens), size
