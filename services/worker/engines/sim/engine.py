"""The simulated engine behind the port, on the loop's clock: one timer, no thread.

Simulated time runs `speedup` times as fast as the loop's. All that the port hears is in real
seconds. When the process can't keep up, simulated time is stretched, not squeezed: nothing is made
up for, and `lost_s` tells how much.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.blocks import HashedAdapter, block_hashes, block_key, next_block_hash
from services.common.errors import InvalidRequest
from services.common.ids import BlockKey
from services.common.telemetry.logging import get_logger
from services.worker.core.model import FinishReason, PositionLogprobs
from services.worker.engines.port import (
    EngineDead,
    EngineLoad,
    EngineProfile,
    EngineRequest,
    Output,
    Step,
    TransferNews,
)
from services.worker.engines.sim.core.handle import handle
from services.worker.engines.sim.core.model import (
    SimConfig,
    SimEnd,
    SimOutput,
    SimRequest,
    SimStep,
    SimTransfer,
)
from services.worker.engines.sim.core.simulator import Simulator
from services.worker.engines.sim.core.timing import TRANSFER_BYTES_PER_S
from services.worker.engines.sim.core.tokens import TokenStream, Vocabulary, prompt_positions

LATE_S = 0.25
"""Real seconds by which it may lag before simulated time is stretched."""
log = get_logger(__name__)
_FINISH = {
    SimEnd.STOP: FinishReason.STOP,
    SimEnd.LENGTH: FinishReason.LENGTH,
    SimEnd.ABORT: FinishReason.ABORT,
}


@dataclass(slots=True)
class _Live:
    request: EngineRequest
    stream: TokenStream
    adapter: HashedAdapter | None
    tail: list[int]
    """Tokens after the last full block."""
    last_hash: bytes | None
    """Of the last full block; None: there is none yet."""
    keys: list[BlockKey]
    fresh: list[int] = field(default_factory=list)
    """Tokens of the running step."""
    positions: list[PositionLogprobs] = field(default_factory=list)
    stop_token_id: int | None = None
    handle: dict[str, Any] | None = None
    """What a prefill-only request ends with."""


class SimEngine:
    """The port's Engine. Needs a running loop; `close` stops its timer."""

    def __init__(
        self,
        profile: EngineProfile,
        config: SimConfig,
        vocabulary: Vocabulary,
        *,
        speedup: float = 1.0,
        name: str = "",
    ) -> None:
        """`name` is its worker's, for the log."""
        self._name = name
        self._profile = profile
        self._vocabulary = vocabulary
        self._speedup = speedup
        self._loop = asyncio.get_running_loop()
        self._epoch = self._loop.time()
        self._sim = Simulator(config, self._sample)
        self._token_s = config.profile.transfer_token_s
        self._live: dict[str, _Live] = {}
        self._draws = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._dead: EngineDead | None = None
        self._on_step: Callable[[Step], None] = lambda step: None
        self._on_death: Callable[[EngineDead], None] = lambda dead: None
        self.lost_s = 0.0
        """Real seconds by which simulated time was stretched."""

    @property
    def profile(self) -> EngineProfile:
        """What it serves."""
        return self._profile

    @property
    def progress(self) -> int:
        """Steps done."""
        return self._sim.steps

    @property
    def held(self) -> frozenset[BlockKey]:
        """The truth: keys of all blocks that a prefix can hit."""
        return frozenset(self._sim.pool.held())

    def listen(
        self, on_step: Callable[[Step], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        """Hands every later step to `on_step`, and the engine's end to `on_death`."""
        self._on_step, self._on_death = on_step, on_death
        if self._dead is not None:
            on_death(self._dead)

    def submit(self, request: EngineRequest) -> None:
        """Takes a request. Raises InvalidRequest or EngineDead."""
        if self._dead is not None:
            raise self._dead
        self._check(request)
        s, size = request.sampling, self._profile.block_size
        tokens = request.token_ids
        adapter = next(
            (
                HashedAdapter(a.name, a.path)
                for a in self._profile.adapters
                if a.name == request.adapter
            ),
            None,
        )
        hashes = request.block_hashes
        if hashes is None:
            hashes = block_hashes(tokens, size, adapter=adapter, cache_salt=request.cache_salt)
        keys = [block_key(h) for h in hashes]
        own = handle(tokens, hashes, size)
        # One of other tokens, or in words that we don't know, is as good as none.
        transfer_tokens = len(tokens) if request.transfer == own else 0
        stream = TokenStream(
            self._vocabulary, tokens, s, adapter=request.adapter, draw=next(self._draws)
        )
        self._live[request.id] = _Live(
            request,
            stream,
            adapter,
            list(tokens[len(hashes) * size :]),
            hashes[-1] if hashes else None,
            keys,
            handle=own if request.prefill_only else None,
        )
        sim = SimRequest(
            request.id,
            len(tokens),
            1 if request.prefill_only else s.max_tokens,
            keys,
            request.priority,
            recompute=s.prompt_logprobs is not None,
            transfer_tokens=transfer_tokens,
        )
        self._sim.submit(sim, self._now())
        self._arm()

    def abort(self, id: str) -> None:
        """Ends a request when the running step ends."""
        if self._dead is None:
            self._sim.abort(id, self._now())
            self._arm()

    def poke(self) -> None:
        """Nothing waits beside requests: there is no connector."""

    def release_transfer(self, id: str) -> None:
        """Nothing: what a prefill-only request left is not held beyond its end."""

    async def reset_cache(self) -> bool:
        """Forgets all blocks, unless requests hold some. Raises EngineDead."""
        if self._dead is not None:
            raise self._dead
        step = self._sim.reset(self._now())
        if step is None:
            return False
        self._tell(step)
        return True

    def fill(self, documents: Iterable[Sequence[BlockKey]]) -> None:
        """Holds these chains of blocks, as if requests had computed them."""
        for keys in documents:
            self._tell(self._sim.fill(keys, self._now()))

    def close(self) -> None:
        """Stops it for good; nothing is told any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # Faults on request.

    def stall(self, seconds: float) -> None:
        """No step ends for so many (real) seconds."""
        self._sim.hold(self._now() + seconds * self._speedup)
        self._arm()

    def slow(self, factor: float) -> None:
        """Steps take `factor` times as long from the next one on."""
        self._sim.slow = factor

    def die(self, why: str) -> None:
        """The engine can't run any more."""
        if self._dead is None:
            self._dead = EngineDead(why)
            self.close()
            self._on_death(self._dead)

    # Time.

    def _now(self) -> float:
        """Simulated seconds; never past what is still to be told."""
        now = (self._loop.time() - self._epoch) * self._speedup
        due = self._sim.next_time()
        return now if due is None else min(now, due)

    def _arm(self) -> None:
        due = self._sim.next_time()
        if due is None or self._dead is not None:
            self.close()
            return
        at = self._epoch + due / self._speedup
        if self._timer is not None:
            if self._timer_at == at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        """Ends the step that is due, one in a turn of the loop: others get their turns too."""
        self._timer = None
        due = self._sim.next_time()
        if due is None or self._dead is not None:
            return
        late_s = self._loop.time() - self._epoch - due / self._speedup
        if late_s > LATE_S:
            if not self.lost_s:
                log.warning(
                    "the simulator can't keep up; its time runs slower",
                    worker=self._name,
                    late_s=late_s,
                )
            self._epoch += late_s
            self.lost_s += late_s
        for step in self._sim.advance(due):
            self._tell(step)
        self._arm()

    # News.

    def _sample(self, id: str) -> bool:
        live = self._live[id]
        s = live.request.sampling
        if s.logprobs is None:
            token = live.stream.next()
        else:
            position = live.stream.next_position()
            live.positions.append(position)
            token = position.token_id
        live.fresh.append(token)
        live.tail.append(token)
        if len(live.tail) == self._profile.block_size:
            self._fill(live)
        if live.request.prefill_only:
            return False
        if token in s.stop_token_ids:
            live.stop_token_id = token
        return live.stream.ends(token)

    def _fill(self, live: _Live) -> None:
        """The tail is a full block."""
        if live.last_hash is None:
            salt = live.request.cache_salt
            (hash,) = block_hashes(live.tail, len(live.tail), adapter=live.adapter, cache_salt=salt)
        else:
            hash = next_block_hash(live.last_hash, live.tail, adapter=live.adapter)
        live.last_hash = hash
        live.keys.append(block_key(hash))
        live.tail.clear()

    def _tell(self, step: SimStep) -> None:
        load = step.load
        self._on_step(
            Step(
                step.number,
                (step.ended - step.began) / self._speedup,
                tuple(self._output(output) for output in step.outputs),
                tuple(step.changes),
                (
                    EngineLoad(
                        load.running, load.waiting, load.used_blocks, load.pending_prefill_tokens
                    ),
                ),
                transfers=tuple(self._transfer(transfer) for transfer in step.transfers),
            )
        )

    def _transfer(self, transfer: SimTransfer) -> TransferNews:
        """In whole blocks, as an engine brings them; bytes are those of the time on such a wire."""
        size = self._profile.block_size
        tokens = -(-transfer.tokens // size) * size
        bytes = round(tokens * self._token_s * TRANSFER_BYTES_PER_S)
        return TransferNews(transfer.id, tokens, bytes, transfer.seconds / self._speedup)

    def _output(self, output: SimOutput) -> Output:
        live = self._live[output.id]
        tokens, positions = tuple(live.fresh), tuple(live.positions)
        live.fresh.clear()
        live.positions.clear()
        if output.end is not None:
            del self._live[output.id]
        first = output.cached_tokens is not None
        return Output(
            id=output.id,
            token_ids=tokens,
            logprobs=positions,
            prompt_logprobs=self._prompt_logprobs(live.request) if first else (),
            finish=None if output.end is None else _FINISH[output.end],
            stop_token_id=live.stop_token_id if output.end is SimEnd.STOP else None,
            transfer=live.handle if output.end is SimEnd.LENGTH else None,
            transferred_tokens=output.transferred_tokens,
            cached_tokens=output.cached_tokens,
            queued_s=None if output.queued_s is None else output.queued_s / self._speedup,
        )

    def _prompt_logprobs(self, request: EngineRequest) -> tuple[PositionLogprobs, ...]:
        wanted = request.sampling.prompt_logprobs
        if wanted is None:
            return ()
        return prompt_positions(self._vocabulary, request.token_ids, wanted, request.adapter)

    def _check(self, request: EngineRequest) -> None:
        s = request.sampling
        for name, ids in (
            ("prompt_token_ids", request.token_ids),
            ("logit_bias", s.logit_bias),
            ("allowed_token_ids", s.allowed_token_ids),
            ("stop_token_ids", s.stop_token_ids),
        ):
            if max(ids, default=0) >= self._profile.vocab_size:
                raise InvalidRequest(f"{name} is out of the vocabulary", field=name)
        if len(request.token_ids) >= self._profile.max_model_len:
            raise InvalidRequest("the prompt is too long", field="prompt_token_ids")
