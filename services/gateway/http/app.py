"""The ASGI application: paths to handlers, and what applies to all of them (keys, CORS, errors,
limits).

It is raw ASGI: for a stream of 64 chunks that costs a third less CPU than a framework's routing and
responses, and there are eight paths. Whatever goes wrong under any path is answered in OpenAI's
shape.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Span, Tracer

from services.common.ids import new_id
from services.common.telemetry.logging import bind_context, get_logger
from services.common.telemetry.tracing import extract, inject
from services.gateway.config import GatewaySettings
from services.gateway.core.choice import ChoiceDelta
from services.gateway.core.openai import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from services.gateway.errors import (
    ApiError,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    UpstreamFailed,
)
from services.gateway.http.auth import ApiKeys, Tenant
from services.gateway.http.chat import ChatChunks, whole_chat
from services.gateway.http.completions import CompletionChunks, whole_completion
from services.gateway.http.exchange import Exchange
from services.gateway.http.guard import ClientGone, Guard
from services.gateway.http.health import InstanceView, health
from services.gateway.http.models import model_list, one_model
from services.gateway.http.sse import Chunks, stream
from services.gateway.http.wishes import wishes_of
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.pipeline import Generation, Pipeline, Update
from services.gateway.ports import NO_WISHES
from services.gateway.prepare import Caller, Job, prepare_chat, prepare_completion

log = get_logger(__name__)

_INLINE_BODY_BYTES = 256 << 10
"""Longer bodies are parsed in a thread."""
_CLIENT_GONE = 499

Handler = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """What lives at a path. `label` names it in metrics."""

    label: str
    methods: Mapping[str, Handler]
    open: bool = False
    """True: no key needed."""


class GatewayApp:
    """Everything that HTTP clients can reach."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: Models,
        pipeline: Pipeline,
        metrics: GatewayMetrics,
        tracer: Tracer,
        keys: ApiKeys | None,
        instances: Callable[[], list[InstanceView]],
    ) -> None:
        self._settings = settings
        self._models = models
        self._pipeline = pipeline
        self._metrics = metrics
        self._tracer = tracer
        self._keys = keys
        self._instances = instances
        self._running: set[Guard] = set()
        self.starting = True
        """True until discovery's first list is known: an unknown model may still turn up."""
        self.draining = False
        """True: readiness says no, and connections are closed after their answers."""
        get = self._get
        self._routes = {
            "/v1/chat/completions": Route(
                "/v1/chat/completions", {"POST": self._generate(self._chat)}
            ),
            "/v1/completions": Route("/v1/completions", {"POST": self._generate(self._completion)}),
            "/v1/models": Route("/v1/models", get(lambda _: (200, model_list(models)))),
            "/health": Route("/health", get(lambda _: self._health()), open=True),
            "/live": Route("/live", get(lambda _: (200, {"status": "live"})), open=True),
            "/ready": Route("/ready", get(lambda _: self._ready()), open=True),
        }
        self._one_model = Route(
            "/v1/models/{id}",
            get(lambda x: (200, one_model(models, x.path.removeprefix("/v1/models/")))),
        )

    @property
    def in_flight(self) -> int:
        """Generations being served."""
        return len(self._running)

    def end_all(self) -> None:
        """Ends what still runs, with an error: the time for a drain is over."""
        for guard in list(self._running):
            guard.end(UpstreamFailed("The gateway is shutting down.", status=503, code="shutdown"))

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        if self.draining:
            exchange.extra_headers["connection"] = "close"
        with bind_context(request_id=exchange.request_id):
            await self._serve(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        route = self._find(exchange.path)
        started = time.monotonic()
        exchange.route = route.label if route else "other"
        try:
            self._cors(exchange)
            if exchange.method == "OPTIONS":
                await self._options(exchange, route)
            else:
                if route is None or not route.open:
                    exchange.tenant = self._authenticate(exchange)
                if route is None:
                    raise NotFound(f"Nothing is at {exchange.path[:200]!r}.")
                method = "GET" if exchange.method == "HEAD" else exchange.method
                handler = route.methods.get(method)
                if handler is None:
                    raise MethodNotAllowed(exchange.method, _allowed(route))
                await handler(exchange)
        except ClientGone:
            exchange.status = _CLIENT_GONE
        except ApiError as exc:
            await self._fail(exchange, exc)
        except Exception as exc:
            log.error("unexpected error in a request", path=exchange.route, exc_info=exc)
            await self._fail(
                exchange, UpstreamFailed("Internal error; the gateway's log says more.")
            )
        self._metrics.requests.labels(exchange.route, exchange.model, str(exchange.status)).inc()
        if exchange.model:
            self._metrics.duration.labels(exchange.route, exchange.model).observe(
                time.monotonic() - started
            )
        log.debug("request", path=exchange.route, method=exchange.method, status=exchange.status)

    async def _fail(self, exchange: Exchange, error: ApiError) -> None:
        if error.status >= 500:
            log.warning("request failed", status=error.status, code=error.code, why=error.message)
        await exchange.fail(error)
        exchange.status = error.status

    def _find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        if route is None and path.startswith("/v1/models/"):
            return self._one_model
        return route

    def _authenticate(self, exchange: Exchange) -> Tenant:
        if self._keys is None:
            return Tenant()
        return self._keys.tenant(exchange.headers.get("authorization", ""))

    def _cors(self, exchange: Exchange) -> None:
        origins = self._settings.cors_origins
        origin = exchange.headers.get("origin", "")
        if origins:
            exchange.extra_headers["vary"] = "Origin"
        if not origin or not ("*" in origins or origin in origins):
            return
        exchange.extra_headers["access-control-allow-origin"] = "*" if "*" in origins else origin
        exchange.extra_headers["access-control-expose-headers"] = (
            "x-request-id, x-forebay-worker, x-forebay-prefill-worker, "
            "x-forebay-predicted-cached-tokens, x-forebay-cached-tokens, retry-after"
        )

    async def _options(self, exchange: Exchange, route: Route | None) -> None:
        allowed = ", ".join(_allowed(route)) if route else "OPTIONS"
        headers = {"allow": allowed}
        if "access-control-allow-origin" in exchange.extra_headers:
            wanted = exchange.headers.get("access-control-request-headers", "")
            headers |= {
                "access-control-allow-methods": allowed,
                "access-control-allow-headers": wanted or "authorization, content-type",
                "access-control-max-age": "600",
            }
        await exchange.respond(204, headers=headers)

    def _get(self, answer: Callable[[Exchange], tuple[int, object]]) -> dict[str, Handler]:
        async def handler(exchange: Exchange) -> None:
            status, value = answer(exchange)
            await exchange.respond_json(value, status=status)

        return {"GET": handler}

    def _health(self) -> tuple[int, object]:
        return health(self._instances(), self._routes)

    def _ready(self) -> tuple[int, object]:
        if self.draining:
            return 503, {"status": "draining"}
        if self.starting:
            return 503, {"status": "starting"}
        served = [s.name for s in self._models.served()]
        usable = any(i.component == "worker" and i.connected for i in self._instances())
        if not served or not usable:
            return 503, {"status": "no worker"}
        return 200, {"status": "ready", "models": served}

    def _generate(self, handler: Callable[[Exchange, bytes, float], Awaitable[None]]) -> Handler:
        """Wraps a handler of generations: body, deadline, and an end when the client goes."""

        async def guarded(exchange: Exchange) -> None:
            if len(self._running) >= self._settings.max_in_flight:
                raise Overloaded("This gateway serves all that it can.", status=503)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._settings.request_timeout_s
            guard = Guard()
            self._running.add(guard)
            self._metrics.in_flight.inc()
            watcher: asyncio.Task[None] | None = None
            timer = loop.call_at(
                deadline,
                guard.end,
                UpstreamFailed("The request took too long.", status=504, code="timeout"),
            )
            try:
                with guard:
                    body = await exchange.body(
                        self._settings.max_body_bytes, self._settings.body_timeout_s
                    )
                    watcher = loop.create_task(_watch(exchange, guard))
                    await handler(exchange, body, deadline)
            finally:
                timer.cancel()
                if watcher is not None:
                    watcher.cancel()
                self._running.discard(guard)
                self._metrics.in_flight.dec()
                if guard.reason is not None:
                    self._metrics.aborts.labels(_word(guard.reason)).inc()

        return guarded

    async def _chat(self, exchange: Exchange, body: bytes, deadline: float) -> None:
        request = (
            await asyncio.to_thread(parse_chat, body)
            if len(body) > _INLINE_BODY_BYTES
            else parse_chat(body)
        )

        async def prepare(caller: Caller) -> Job:
            return await prepare_chat(self._models, request, caller, starting=self.starting)

        await self._run(exchange, request, prepare, deadline, "chatcmpl", ChatChunks, whole_chat)

    async def _completion(self, exchange: Exchange, body: bytes, deadline: float) -> None:
        request = (
            await asyncio.to_thread(parse_completion, body)
            if len(body) > _INLINE_BODY_BYTES
            else parse_completion(body)
        )

        async def prepare(caller: Caller) -> Job:
            return await prepare_completion(self._models, request, caller, starting=self.starting)

        await self._run(
            exchange, request, prepare, deadline, "cmpl", CompletionChunks, whole_completion
        )

    async def _run(
        self,
        exchange: Exchange,
        request: ChatRequest | CompletionRequest,
        prepare: Callable[[Caller], Awaitable[Job]],
        deadline: float,
        id_prefix: str,
        chunks: Any,
        whole: Any,
    ) -> None:
        wishes = wishes_of(exchange.headers) if self._settings.routing_headers else NO_WISHES
        with self._tracer.start_as_current_span(
            "gateway.request", context=extract(exchange.headers)
        ) as span:
            caller = Caller(
                request_id=exchange.request_id,
                deadline=deadline,
                tenant=exchange.tenant.name,
                tenant_salt=exchange.tenant.salt,
                trace=inject(),
                wishes=wishes,
            )
            job = await prepare(caller)
            exchange.model = job.served.name
            watch = _Stopwatch(
                self._metrics,
                job,
                arrival=deadline - self._settings.request_timeout_s,
                streaming=request.stream,
            )
            completion_id, created = new_id(id_prefix), int(time.time())
            async with self._pipeline.run(job) as generation:
                if request.stream:
                    rendered: Chunks = chunks(request, generation, completion_id, created)
                    self._metrics.streams.inc()
                    try:
                        await stream(
                            exchange,
                            generation,
                            rendered,
                            headers=lambda: self._headers(generation),
                            include_usage=request.include_usage,
                            keep_alive_s=self._settings.sse_keep_alive_s,
                            observe=watch.saw,
                        )
                    finally:
                        self._metrics.streams.dec()
                        watch.count(generation)
                        _describe(span, generation)
                    return
                pieces: list[list[ChoiceDelta]] = [[] for _ in range(len(job.prompts) * job.n)]
                try:
                    while not generation.finished:
                        updates = await generation.updates()
                        watch.saw(updates)
                        for update in updates:
                            if update.anew:
                                pieces[update.index].clear()
                            pieces[update.index].append(update.delta)
                finally:
                    watch.count(generation)
                _describe(span, generation)
                headers = self._headers(generation)
                if headers:
                    headers["x-forebay-cached-tokens"] = str(generation.usage.cached_tokens)
                body = whole(request, generation, pieces, completion_id, created)
                await exchange.respond_json(body, headers=headers)

    def _headers(self, generation: Generation) -> dict[str, str]:
        if not self._settings.response_headers:
            return {}
        headers = {
            "x-forebay-worker": _workers(generation),
            "x-forebay-predicted-cached-tokens": str(generation.predicted_cached_tokens),
        }
        if prefilled_by := _prefill_workers(generation):
            headers["x-forebay-prefill-worker"] = prefilled_by
        return headers


class _Stopwatch:
    """Times and counts one generation for the metrics."""

    def __init__(
        self, metrics: GatewayMetrics, job: Job, *, arrival: float, streaming: bool
    ) -> None:
        self._metrics = metrics
        self._model = job.served.name
        self._clock = asyncio.get_running_loop().time
        self._arrival = arrival
        self._begun = False
        self._last: dict[int, float] = {}
        # Of an answer that is not streamed only its beginning and its end are seen.
        self._inter_token = metrics.inter_token.labels(self._model) if streaming else None

    def saw(self, updates: list[Update]) -> None:
        """Some news came."""
        now = self._clock()
        if not self._begun:
            self._begun = True
            self._metrics.ttft.labels(self._model).observe(now - self._arrival)
        if self._inter_token is None:
            return
        for update in updates:
            last = self._last.get(update.index)
            if last is not None:
                self._inter_token.observe(now - last)
            self._last[update.index] = now

    def count(self, generation: Generation) -> None:
        """The generation is over, however it ended."""
        usage, m, model = generation.usage, self._metrics, self._model
        m.output_tokens.labels(model).inc(usage.completion_tokens)
        if not self._begun:
            return
        m.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        m.cached_tokens.labels(model).inc(usage.cached_tokens)
        predicted = generation.predicted_cached_tokens
        m.predicted_cached_tokens.labels(model).inc(predicted)
        difference = predicted - usage.cached_tokens
        m.overpredicted.labels(model).observe(max(0, difference))
        m.underpredicted.labels(model).observe(max(0, -difference))


async def _watch(exchange: Exchange, guard: Guard) -> None:
    await exchange.disconnected()
    guard.end(ClientGone())


def _word(reason: Exception) -> str:
    if isinstance(reason, ClientGone):
        return "client"
    return (reason.code or "error") if isinstance(reason, ApiError) else "error"


def _workers(generation: Generation) -> str:
    """The workers of the prompts, each once, in order."""
    return ",".join(dict.fromkeys(p.worker.id for p in generation.placements))


def _prefill_workers(generation: Generation) -> str:
    """The workers that prefilled for them, each once, in order; empty: none did."""
    return ",".join(dict.fromkeys(generation.prefilled_by))


def _describe(span: Span, generation: Generation) -> None:
    span.set_attribute("forebay.worker", _workers(generation))
    if prefilled_by := _prefill_workers(generation):
        span.set_attribute("forebay.prefill_worker", prefilled_by)


def _allowed(route: Route) -> list[str]:
    methods = {*route.methods, "OPTIONS"}
    if "GET" in methods:
        methods.add("HEAD")
    return sorted(methods)
