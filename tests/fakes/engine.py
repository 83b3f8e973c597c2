"""An engine without a model: deterministic, context-sensitive, with the blocks and steps of one.

The next token is a digest of all tokens before it (and of the adapter), so that a wrong or missing
token changes everything after it. Blocks are found, stored and evicted by the real block hash. It
runs the contract suite of the real engines (tests/contract/test_engine.py).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.common.blocks import HashedAdapter, block_hashes, block_keys
from services.common.cards import Adapter, HashVector
from services.common.errors import InvalidRequest
from services.common.ids import BlockKey
from services.worker.core.blocks import AllDropped, BlockChange, CopiesAdded, CopiesDropped
from services.worker.core.model import FinishReason, PositionLogprobs
from services.worker.engines.port import (
    EngineDead,
    EngineLoad,
    EngineProfile,
    EngineRequest,
    Output,
    Step,
    TierNews,
)
from tests.models import EOS_ID, VOCAB_SIZE, default_cache_dir, tiny_model

CANDIDATES = 24
"""Tokens that have any likelihood at a position, best first."""


@dataclass(slots=True)
class _Run:
    request: EngineRequest
    tokens: list[int]
    prompt_len: int
    adapter: HashedAdapter | None
    computed: int = 0
    cached: int | None = None
    produced: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    """Full blocks that this run holds."""


class FakeEngine:
    """The port's Engine; use `open_fake_engine`. `step_s` is the length of a step."""

    def __init__(
        self,
        *,
        model_dir: Path | None = None,
        block_size: int = 32,
        total_blocks: int = 1024,
        max_model_len: int = 8192,
        max_batched_tokens: int = 256,
        max_running: int = 32,
        step_s: float = 0.0,
        adapters: Sequence[Adapter] = (),
        tiers: TierNews | None = None,
    ) -> None:
        example = [(i * 31 + 7) % VOCAB_SIZE for i in range(2 * block_size)]
        self._profile = EngineProfile(
            engine="fake 1",
            model_dir=model_dir or tiny_model(default_cache_dir()),
            block_size=block_size,
            total_blocks=total_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS_ID,),
            max_logprobs=20,
            hash_vector=HashVector(
                tuple(example),
                "fake",
                tuple(block_hashes(example, block_size, cache_salt="fake")),
            ),
            identity={"engine": "fake", "block_size": str(block_size)},
            adapters=tuple(adapters),
        )
        self._budget = max_batched_tokens
        self._max_running = max_running
        self.step_s = step_s
        self._tiers = tiers
        self._waiting: list[_Run] = []
        self._running: list[_Run] = []
        self._aborts: list[str] = []
        # Cached blocks, least recently used first, with the number of runs that hold each.
        self._blocks: OrderedDict[BlockKey, int] = OrderedDict()
        self._steps = 0
        self._draws = 0
        self._work = asyncio.Event()
        self._gate = asyncio.Event()
        self._gate.set()
        self._dead: EngineDead | None = None
        self._on_step: Callable[[Step], None] = lambda step: None
        self._on_death: Callable[[EngineDead], None] = lambda dead: None

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    @property
    def progress(self) -> int:
        return self._steps

    @property
    def held(self) -> frozenset[BlockKey]:
        """The truth: keys of all cached blocks."""
        return frozenset(self._blocks)

    def listen(
        self, on_step: Callable[[Step], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        self._on_step, self._on_death = on_step, on_death
        if self._dead is not None:
            on_death(self._dead)

    def submit(self, request: EngineRequest) -> None:
        if self._dead is not None:
            raise self._dead
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
        served = next((a for a in self._profile.adapters if a.name == request.adapter), None)
        adapter = HashedAdapter(served.name, served.path) if served else None
        self._waiting.append(
            _Run(request, list(request.token_ids), len(request.token_ids), adapter)
        )
        self._waiting.sort(key=lambda run: run.request.priority)
        self._work.set()

    def abort(self, id: str) -> None:
        self._aborts.append(id)
        self._work.set()

    def poke(self) -> None:
        """Nothing waits beside requests."""

    async def reset_cache(self) -> bool:
        if self._dead is not None:
            raise self._dead
        if self._running or self._waiting:
            return False
        self._blocks.clear()
        self._on_step(Step(self._steps, blocks=(AllDropped(),), loads=(self._load(),)))
        return True

    # For tests.

    def pause(self) -> None:
        """Steps stop, as in an engine that hangs."""
        self._gate.clear()

    def resume(self) -> None:
        """Steps go on."""
        self._gate.set()

    def die(self, why: str = "killed by a test") -> None:
        """The engine dies."""
        self._dead = EngineDead(why)
        self._on_death(self._dead)

    async def run(self) -> None:
        """Steps while there is work, until cancelled or dead."""
        while self._dead is None:
            self._work.clear()
            await self._gate.wait()
            if not (self._running or self._waiting or self._aborts):
                await self._work.wait()
                continue
            await asyncio.sleep(self.step_s)
            if self._dead is None and self._gate.is_set():
                self._do_step()

    def _do_step(self) -> None:
        outputs = self._apply_aborts()
        if outputs:
            self._on_step(Step(self._steps, outputs=tuple(outputs), loads=(self._load(),)))
        if not (self._running or self._waiting):
            return
        self._steps += 1
        changes: list[BlockChange] = []
        outputs = []
        budget = self._budget
        while self._waiting and len(self._running) < self._max_running:
            run = self._waiting.pop(0)
            run.cached = run.computed = self._look_up(run)
            self._running.append(run)
        for run in list(self._running):
            todo = min(len(run.tokens) - run.computed, budget)
            if todo <= 0:
                continue
            budget -= todo
            run.computed += todo
            self._store(run, changes)
            if run.computed == len(run.tokens):
                outputs.append(self._produce(run))
        self._on_step(
            Step(
                self._steps,
                self.step_s or 1e-6,
                tuple(outputs),
                tuple(changes),
                (self._load(),),
                self._tiers,
            )
        )

    def _apply_aborts(self) -> list[Output]:
        outputs = []
        aborts, self._aborts = self._aborts, []
        for id in aborts:
            run = next((r for r in (*self._running, *self._waiting) if r.request.id == id), None)
            if run is not None:
                self._release(run)
                outputs.append(Output(id, finish=FinishReason.ABORT))
        return outputs

    def _look_up(self, run: _Run) -> int:
        if run.request.sampling.prompt_logprobs is not None:
            return 0
        size = self._profile.block_size
        keys = self._keys(run)[: (run.prompt_len - 1) // size]
        for key in keys:
            if key not in self._blocks:
                break
            self._hold(run, key)
        return len(run.keys) * size

    def _keys(self, run: _Run) -> list[BlockKey]:
        return block_keys(
            run.tokens[: run.computed] if run.cached is not None else run.tokens,
            self._profile.block_size,
            adapter=run.adapter,
            cache_salt=run.request.cache_salt,
        )

    def _hold(self, run: _Run, key: BlockKey) -> None:
        self._blocks[key] = self._blocks.get(key, 0) + 1
        self._blocks.move_to_end(key)
        run.keys.append(key)

    def _store(self, run: _Run, changes: list[BlockChange]) -> None:
        added = []
        for key in self._keys(run)[len(run.keys) :]:
            if key not in self._blocks:
                added.append(key)
            self._hold(run, key)
        while len(self._blocks) > self._profile.total_blocks:
            victim = next((k for k, users in self._blocks.items() if not users), None)
            if victim is None:
                break
            del self._blocks[victim]
            changes.append(CopiesDropped((victim,)))
        if added:
            changes.append(CopiesAdded(tuple(added)))

    def _release(self, run: _Run) -> None:
        for key in run.keys:
            self._blocks[key] -= 1
        run.keys.clear()
        for runs in (self._running, self._waiting):
            if run in runs:
                runs.remove(run)

    def _produce(self, run: _Run) -> Output:
        s = run.request.sampling
        first = run.produced == 0
        ranked = self._ranked(run)
        position = _position(run, ranked, self._choose(run, ranked))
        token = position.token_id
        run.tokens.append(token)
        run.produced += 1
        finish = None
        if token in s.stop_token_ids or (token == EOS_ID and not s.ignore_eos):
            finish = FinishReason.STOP
        elif run.produced >= s.max_tokens or len(run.tokens) >= self._profile.max_model_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._release(run)
        return Output(
            id=run.request.id,
            token_ids=(token,),
            logprobs=() if s.logprobs is None else (_cut(position, s.logprobs),),
            prompt_logprobs=self._prompt_logprobs(run) if first else (),
            finish=finish,
            stop_token_id=token if finish and token in s.stop_token_ids else None,
            cached_tokens=run.cached if first else None,
            queued_s=0.0 if first else None,
        )

    def _prompt_logprobs(self, run: _Run) -> tuple[PositionLogprobs, ...]:
        wanted = run.request.sampling.prompt_logprobs
        if wanted is None:
            return ()
        tokens = run.request.token_ids
        return tuple(
            _cut(_position(run, _digest_order(tokens[:i], run.adapter), tokens[i]), wanted)
            for i in range(1, len(tokens))
        )

    def _ranked(self, run: _Run) -> list[int]:
        s = run.request.sampling
        order: Iterable[int] = _digest_order(run.tokens, run.adapter)
        if s.allowed_token_ids:
            # All that are allowed, in an order that the context decides.
            shift = next(iter(order))
            order = sorted(s.allowed_token_ids, key=lambda t: (t * 7919 + shift) % VOCAB_SIZE)
        banned = {t for t, bias in s.logit_bias.items() if bias <= -50}
        if run.produced < s.min_tokens:
            banned |= {EOS_ID, *s.stop_token_ids}
        pushed = [t for t, bias in s.logit_bias.items() if bias >= 50]
        ranked = [t for t in dict.fromkeys((*pushed, *order)) if t not in banned]
        return ranked or [0]

    def _choose(self, run: _Run, ranked: list[int]) -> int:
        s = run.request.sampling
        if s.temperature == 0 or s.logit_bias:
            return ranked[0]
        self._draws += 1
        draw = s.seed if s.seed is not None else self._draws
        text = f"{draw}:{run.produced}".encode()
        return ranked[hashlib.blake2b(text).digest()[0] % len(ranked)]

    def _load(self) -> EngineLoad:
        runs = (*self._running, *self._waiting)
        used = {key for run in self._running for key in run.keys}
        partial = sum(1 for r in self._running if r.computed % self._profile.block_size)
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            used_blocks=len(used) + partial,
            pending_prefill_tokens=sum(max(0, r.prompt_len - r.computed) for r in runs),
        )


def _digest_order(tokens: Sequence[int], adapter: HashedAdapter | None) -> list[int]:
    text = f"{list(tokens)}{adapter.name if adapter else ''}".encode()
    raw = hashlib.shake_128(text).digest(4 * CANDIDATES)
    numbers = (int.from_bytes(raw[i : i + 2], "big") for i in range(0, len(raw), 2))
    # Ids below 3 are special: they don't come by chance.
    ids = dict.fromkeys(3 + n % (VOCAB_SIZE - 3) for n in numbers)
    return list(ids)[:CANDIDATES]


def _position(run: _Run, ranked: list[int], token: int) -> PositionLogprobs:
    rank = ranked.index(token) + 1 if token in ranked else VOCAB_SIZE
    return PositionLogprobs(
        token_id=token,
        logprob=-0.5 * rank,
        rank=rank,
        top_token_ids=tuple(ranked),
        top_logprobs=tuple(-0.5 * (i + 1) for i in range(len(ranked))),
    )


def _cut(p: PositionLogprobs, wanted: int) -> PositionLogprobs:
    return PositionLogprobs(
        p.token_id, p.logprob, p.rank, p.top_token_ids[:wanted], p.top_logprobs[:wanted]
    )


@asynccontextmanager
async def open_fake_engine(**options: object) -> AsyncIterator[FakeEngine]:
    """A running fake engine; options as in FakeEngine."""
    engine = FakeEngine(**options)  # type: ignore[arg-type]
    task = asyncio.create_task(engine.run(), name="fake engine")
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.wait({task})
