"""The worker's shell around one engine: takes requests, hands out news, publishes what happened.

Everything runs on the loop's thread. Mirror and book change in the same call that publishes, so
that a snapshot taken between two calls is exact at the last sequence.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.trace import Tracer

from services.common.blocks import HashedAdapter, block_hashes, block_key
from services.common.cards import Holder, Role
from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ForebayError,
    Overloaded,
    Unavailable,
    error_from_number,
)
from services.common.events.model import Event, Snapshot
from services.common.events.publisher import publisher_time_us
from services.common.ids import AttemptId, BlockKey, new_id
from services.common.telemetry.logging import get_logger
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.adapters.spans import RequestSpan
from services.worker.cardset import CardSet
from services.worker.core.blocks import BlockMirror
from services.worker.core.loads import LoadBook
from services.worker.core.model import (
    Delta,
    Failure,
    FinishReason,
    Generation,
    Handle,
    Sampling,
)
from services.worker.core.rates import PrefillRate
from services.worker.core.requests import RequestBook
from services.worker.core.validation import Limits, adapter_of, check
from services.worker.core.watchdog import Watchdog
from services.worker.engines.port import (
    Engine,
    EngineDead,
    EngineRequest,
    Output,
    Step,
    TierNews,
    TransferNews,
)
from services.worker.live import Live
from services.worker.ports import Publisher, Question, Sink, Tiers
from services.worker.reports import LoadReports
from services.worker.transfers import Transfers

HASH_OFF_LOOP_TOKENS = 16_384
"""Longer prompts are hashed in a thread: 2.6 us a block is 1.3 ms of the loop for this many."""
_PREFILL = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
"""How a prefill leg samples the one token that nobody sees."""
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """Bounds of the shell; meanings as in the settings of the same names."""

    max_requests: int = 2048
    watchdog_s: float = 60.0
    load_report_interval_s: float = 0.03
    digest_interval_s: float = 5.0
    transfer_lease_s: float = 10.0
    role: Role = Role.BOTH


def _named(adapter: HashedAdapter | None) -> tuple[str, str]:
    return (adapter.name, adapter.path) if adapter else ("", "")


def failure_of(exc: ForebayError) -> Failure:
    """An error as it travels inside a delta."""
    field = exc.metadata.get("field", "")
    return Failure(exc.code.value[0], exc.reason, exc.message, field)


class WorkerService:
    """One engine's requests and blocks, as others see them. Loop's thread only."""

    def __init__(
        self,
        engine: Engine,
        cards: CardSet,
        holder: Holder,
        publisher: Publisher,
        metrics: WorkerMetrics,
        tracer: Tracer,
        options: Options | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        """`tiers` None: there are none below the engine's own cache."""
        self.cards = cards
        self.holder = holder
        self._engine = engine
        self._publisher = publisher
        self._metrics = metrics
        self._tracer = tracer
        self._options = options or Options()
        self._tiers = tiers
        self._rate = PrefillRate()
        self.kvbm = ""
        """Id of the kvbm daemon that the engine is attached to; empty: none."""
        card = cards.card
        self._limits = Limits(
            model=card.model,
            adapters=frozenset(a.name for a in card.adapters),
            vocab_size=card.vocab_size,
            max_model_len=card.max_model_len,
            max_logprobs=card.max_logprobs,
            dp_size=engine.profile.dp_size,
            transfer=engine.profile.transfer,
        )
        self.role = self._options.role
        """The routing label; `set_role` changes it."""
        self._transfers = Transfers(
            holder,
            card.namespace,
            engine.profile.transfer,
            self._options.transfer_lease_s,
            metrics,
        )
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count(1)
        self._book = RequestBook()
        self._mirror = BlockMirror()
        self._live: dict[str, Live] = {}
        self._step = 0
        ranks = max(1, engine.profile.dp_size)
        loads = LoadBook(
            ranks, engine.profile.total_blocks // ranks, self._options.load_report_interval_s
        )
        self._loads = LoadReports(loads, self._book.pending_prefill_tokens, metrics, self._publish)
        self._digest_timer = self._loop.call_later(
            self._options.digest_interval_s, self._tell_digests
        )
        self._watchdog = Watchdog(self._options.watchdog_s)
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False
        self.dead: asyncio.Future[EngineDead] = self._loop.create_future()
        self.changed = asyncio.Event()
        """Set whenever `serving`, `kvbm` or `role` may have changed."""
        engine.listen(self._on_step, self._on_death)

    @property
    def serving(self) -> bool:
        """Whether new requests are welcome."""
        return not (self.draining or self._watchdog.stuck or self.dead.done())

    @property
    def requests(self) -> int:
        """Requests admitted and not finished."""
        return len(self._book)

    @property
    def step(self) -> int:
        """The engine's step counter, as last heard."""
        return self._step

    def refuse(self) -> None:
        """Raises Unavailable (DRAINING, ENGINE_DEAD) when nothing new is taken."""
        if self.dead.done():
            raise Unavailable(
                "the engine is dead; the worker is about to end", reason="ENGINE_DEAD"
            )
        if self.draining:
            raise Unavailable("this worker drains and takes nothing new", reason="DRAINING")

    async def start(self, generation: Generation, sink: Sink) -> str:
        """Starts a request, whose news go to `sink`; returns the id for `abort`.

        Raises InvalidRequest, NotFound, FailedPrecondition, Overloaded or Unavailable; then the
        sink hears nothing.
        """
        try:
            return await self._start(generation, sink)
        except ForebayError as exc:
            self._metrics.refused.labels(exc.reason).inc()
            raise

    async def _start(self, generation: Generation, sink: Sink) -> str:
        received_s = self._loop.time()
        self.refuse()
        if (wrong := check(generation, self._limits)) is not None:
            raise error_from_number(wrong.code, wrong.reason, wrong.message, field=wrong.field)
        tokens = (*generation.prompt, *generation.prior_output)
        hashed = self._adapter(generation)
        hashes = await self._hashes(tokens, hashed, generation.cache_salt)
        keys = [block_key(h) for h in hashes]
        transfer = self._transfers.take(generation, tokens, _named(hashed))
        kv = await self._look_up(hashes, keys, len(tokens), generation, transfer is not None)
        try:
            return self._submit(generation, sink, tokens, hashes, keys, kv, transfer, received_s)
        except BaseException:
            if kv is not None and self._tiers is not None:
                self._tiers.release(kv)
            raise

    def _submit(
        self,
        generation: Generation,
        sink: Sink,
        tokens: Sequence[int],
        hashes: Sequence[bytes],
        keys: Sequence[BlockKey],
        kv: Mapping[str, Any] | None,
        transfer: Mapping[str, Any] | None,
        received_s: float,
    ) -> str:
        # What came before may have taken a while: look again.
        self.refuse()
        if sink.closed:
            raise Unavailable("the caller left", reason="CALLER_GONE")
        if len(self._book) >= self._options.max_requests:
            raise Overloaded(f"this worker has {len(self._book)} requests, as many as it may")
        attempt = AttemptId(generation.attempt_id or new_id("att"))
        id = f"{next(self._ids)}:{attempt}"
        try:
            self._engine.submit(
                EngineRequest(
                    id=id,
                    token_ids=tokens,
                    sampling=_PREFILL if generation.prefill_only else generation.sampling,
                    cache_salt=generation.cache_salt,
                    adapter=adapter_of(generation, self._limits),
                    priority=generation.priority,
                    dp_rank=generation.dp_rank,
                    kv=kv,
                    block_hashes=hashes,
                    prefill_only=generation.prefill_only,
                    transfer=transfer,
                )
            )
        except EngineDead as exc:
            raise Unavailable(f"the engine is dead: {exc}", reason="ENGINE_DEAD") from exc
        live = Live(
            sink=sink,
            span=RequestSpan(self._tracer, generation, attempt),
            received_s=received_s,
            prompt_tokens=len(tokens),
            attempt=attempt,
            generation=generation,
            tokens=tokens if generation.prefill_only else (),
        )
        if generation.deadline_s > 0:
            live.timer = self._loop.call_later(generation.deadline_s, self._expire, id)
        self._live[id] = live
        self._idle.clear()
        max_new = min(generation.sampling.max_tokens, self._limits.max_model_len - len(tokens))
        # What the engine has of the prompt itself does not travel.
        travels = transfer is not None
        have = self._mirror.run(keys, generation.dp_rank or 0) if travels else 0
        event = self._book.admit(
            id,
            attempt,
            len(tokens),
            1 if generation.prefill_only else max_new,
            keys,
            generation.dp_rank or 0,
            # At least one, which says that the handle is used.
            max(1, len(tokens) - have * self.cards.card.block_size) if travels else 0,
            generation.prefill_only,
        )
        self._metrics.admitted.inc()
        self._metrics.requests.set(len(self._book))
        self._publisher.publish((event,))
        return id

    async def _hashes(
        self, tokens: Sequence[int], adapter: HashedAdapter | None, salt: str
    ) -> list[bytes]:
        size = self.cards.card.block_size
        if len(tokens) <= HASH_OFF_LOOP_TOKENS:
            return block_hashes(tokens, size, adapter=adapter, cache_salt=salt)
        return await asyncio.to_thread(block_hashes, tokens, size, adapter=adapter, cache_salt=salt)

    async def _look_up(
        self,
        hashes: Sequence[bytes],
        keys: Sequence[BlockKey],
        tokens: int,
        of: Generation,
        travels: bool,
    ) -> Mapping[str, Any] | None:
        """What lower tiers have of a prompt; the last token is always computed.

        `travels`: a transfer brings all of it, so nothing is loaded: one source serves a request.
        """
        if self._tiers is None:
            return None
        size, rank = self.cards.card.block_size, of.dp_rank
        # For log probabilities of its prompt an engine computes all of it.
        usable = (tokens - 1) // size if of.sampling.prompt_logprobs is None else 0
        several = self._engine.profile.dp_size > 1
        have = 0 if several and rank is None else self._mirror.run(keys[:usable], rank or 0)
        return await self._tiers.look_up(
            Question(
                keys=hashes[:usable],
                have=have,
                recompute_block_s=self._rate.seconds(size),
                wait_s=self._rate.seconds(self._book.pending_prefill_tokens()),
                tenant=of.tenant,
                only_stored=travels,
            )
        )

    def abort(self, id: str, failure: Failure | None = None) -> None:
        """Ends a request early, if it still runs. `failure` goes with its last delta."""
        live = self._live.get(id)
        if live is not None:
            live.failure = live.failure or failure
            self._engine.abort(id)

    def release_transfer(self, request_id: str) -> None:
        """Lets go of the KV of a prefill leg that nobody will take, if it is known."""
        if (id := self._transfers.released(request_id)) is not None:
            self._engine.release_transfer(id)

    def set_role(self, role: Role) -> Role:
        """Changes the routing label; returns the one before. Raises FailedPrecondition
        (NO_TRANSFER) for an engine that can't hand its KV to others.
        """
        if role is not Role.BOTH and not self._engine.profile.transfer:
            raise FailedPrecondition(
                f"this worker's engine can't hand KV to others, so its role can't be {role};"
                " start it with --transfer nixl",
                reason="NO_TRANSFER",
            )
        before, self.role = self.role, role
        if before is not role:
            log.info("the role is changed", role=role, before=before)
            self.changed.set()
        return before

    @property
    def held_transfers(self) -> int:
        """Finished prefills whose KV waits to be taken."""
        return self._loads.held_transfers

    def _expire(self, id: str) -> None:
        self.abort(id, failure_of(DeadlineExceeded("the request's deadline passed")))

    def snapshot(self) -> Snapshot:
        """Blocks, requests and load, exact at the publisher's last sequence."""
        return Snapshot(
            publisher=self.holder.id,
            incarnation=self.holder.incarnation,
            sequence=self._publisher.sequence,
            blocks=self._mirror.blocks(),
            requests=self._book.requests(),
            load=self._loads.first,
            time_unix_us=publisher_time_us(),
        )

    async def reset_cache(self) -> int:
        """Forgets all cached blocks; returns how many. Raises FailedPrecondition (CACHE_IN_USE)."""
        self.refuse_dead()
        blocks = len(self._mirror)
        try:
            done = await self._engine.reset_cache()
        except EngineDead as exc:
            raise Unavailable(f"the engine is dead: {exc}", reason="ENGINE_DEAD") from exc
        if not done:
            raise FailedPrecondition(
                "requests hold blocks; nothing was reset", reason="CACHE_IN_USE"
            )
        return blocks

    def refuse_dead(self) -> None:
        """Raises Unavailable (ENGINE_DEAD) when the engine is gone; draining is fine."""
        if self.dead.done():
            self.refuse()

    def begin_drain(self) -> None:
        """Takes nothing new from now on."""
        if not self.draining:
            self.draining = True
            self.changed.set()

    async def drain(self, timeout_s: float | None, *, abort_rest: bool) -> int:
        """Takes nothing new and waits for what runs, and for what others still take of its KV;
        returns how many requests are left.
        """
        self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                while self.held_transfers and not self.dead.done():
                    self._loads.changed.clear()
                    await self._loads.changed.wait()
        except TimeoutError:
            log.warning(
                "requests are left at the end of the drain",
                requests=len(self._book),
                held_transfers=self.held_transfers,
            )
        if abort_rest:
            for id in self._book.ids():
                self.abort(id)
        return len(self._book)

    async def watch(self) -> None:
        """Watches over the engine's progress until cancelled."""
        interval_s = min(1.0, self._options.watchdog_s / 4)
        while True:
            was = self._watchdog.stuck
            stuck = self._watchdog.observe(
                self._loop.time(), busy=bool(self._live), progress=self._engine.progress
            )
            if stuck != was:
                log.error("the engine is stuck") if stuck else log.info("the engine goes on")
                self._metrics.stuck.set(stuck)
                self.changed.set()
            if self._tiers is not None and not self._live:
                # Its connector may have been attached anew meanwhile.
                self._engine.poke()
            await asyncio.sleep(interval_s)

    def _on_step(self, step: Step) -> None:
        self._step = step.number
        if step.seconds:
            self._metrics.steps.observe(step.seconds)
        if step.tiers is not None:
            self._on_tiers(step.tiers, step.seconds)
        events: list[Event] = [*self._mirror.apply(step.blocks)]
        for news in step.transfers:
            events.extend(self._on_transfer(news))
        for output in step.outputs:
            events.extend(self._on_output(step.number, output))
        for load in step.loads:
            self._loads.take(load, step.number)
        events.extend(self._loads.due())
        self._publish(events)

    def _on_transfer(self, news: TransferNews) -> Sequence[Event]:
        self._transfers.ended(news)
        live = self._live.get(news.id)
        ended = live.transferred(news, self.cards.card.block_size) if live is not None else None
        if news.why and ended is not None:
            self._book.untransferred(news.id)
        return () if ended is None else (ended,)

    def _on_tiers(self, news: TierNews, seconds: float) -> None:
        self._rate.observe(news.counts.get("prefill_tokens", 0), seconds)
        self._metrics.tiers(news)
        if news.node is not None and news.node != self.kvbm:
            self.kvbm = news.node
            self.changed.set()

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            self._publisher.publish(events)
        self._metrics.requests.set(len(self._book))
        self._metrics.blocks.set(len(self._mirror))
        self._metrics.unknown_drops.set(self._mirror.unknown_drops)
        if not self._book:
            self._idle.set()

    def _on_output(self, step: int, output: Output) -> Sequence[Event]:
        live = self._live.get(output.id)
        if live is None:
            return ()
        cached_tokens = live.take(output, self._loop.time(), self._metrics)
        delta = live.delta(output, cached_tokens, self._handle(output, live))
        events = self._book.advance(
            output.id,
            len(output.token_ids),
            cached_tokens,
            finished=output.finish is not None,
            aborted=output.finish in (FinishReason.ABORT, FinishReason.ERROR),
            transferred_tokens=live.transferred_tokens,
        )
        if output.finish is not None:
            self._forget(output.id, output.finish)
        live.sink.push(step, delta)
        return events

    def _handle(self, output: Output, live: Live) -> Handle | None:
        if output.transfer is None or output.finish in (FinishReason.ABORT, FinishReason.ERROR):
            return None
        if live.sink.closed:
            # Its gateway is gone, and with it whoever could name a decode worker.
            self._engine.release_transfer(output.id)
            return None
        adapter = self._adapter(live.generation)
        return self._transfers.give(
            output.id, live.generation, live.tokens, _named(adapter), output.transfer
        )

    def _adapter(self, generation: Generation) -> HashedAdapter | None:
        adapter = self.cards.card.adapter(adapter_of(generation, self._limits))
        return HashedAdapter(adapter.name, adapter.path) if adapter else None

    def _forget(self, id: str, finish: FinishReason) -> None:
        self._live.pop(id).end(finish, self._loop.time())
        self._metrics.finished.labels(finish).inc()

    def _tell_digests(self) -> None:
        """So that routers see whether they know what the engine holds."""
        self._digest_timer = self._loop.call_later(
            self._options.digest_interval_s, self._tell_digests
        )
        self._publish(self._mirror.digests())

    def _on_death(self, dead: EngineDead) -> None:
        if self.dead.done():
            return
        self.dead.set_result(dead)
        log.error("the engine is dead", error=str(dead), requests=len(self._live))
        failure = Failure(14, "ENGINE_DEAD", "the engine died; another worker can go on")
        events: list[Event] = []
        for id, live in list(self._live.items()):
            events.extend(self._book.advance(id, 0, None, finished=True, aborted=True))
            self._forget(id, FinishReason.ERROR)
            live.sink.push(
                self._step,
                Delta(live.generation.request_id, finish=FinishReason.ERROR, failure=failure),
            )
        self._loads.clear()
        events.extend(self._loads.due())
        self._publish(events)
        self.changed.set()

    def close(self) -> None:
        """Stops the timers."""
        self._loads.close()
        self._digest_timer.cancel()
        for live in self._live.values():
            live.stop_timer()

    def check_open(self, worker_incarnation: int) -> None:
        """Raises FailedPrecondition (WRONG_INCARNATION) when another life of it is meant."""
        if worker_incarnation not in (0, self.holder.incarnation):
            raise FailedPrecondition(
                f"worker {self.holder.id!r} was started anew; look it up again",
                reason="WRONG_INCARNATION",
            )

    def session_opened(self) -> None:
        """Counts a session."""
        self._metrics.sessions.inc()

    def session_closed(self) -> None:
        """Counts the end of a session."""
        self._metrics.sessions.dec()
