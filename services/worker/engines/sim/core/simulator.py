"""The simulated engine: continuous batching over a block pool, as vLLM's scheduler does it.

Each step takes the running requests first (a token for a decode, a chunk for a prompt), then
waiting ones in order of priority and arrival, while tokens, seats and blocks last. A waiting
request starts with what its prefix finds in the pool, and only when the rest of its prompt fits. A
running one that needs a block when none is free pushes the last in order back into the queue; that
one starts again. Blocks can be hit from the step on that fills them. A request whose KV another
engine has waits for its transfer with all its blocks, and then goes before those that wait without.

Drive it so: `advance(now)` up to `next_time()`, `submit` and `abort` in between. A step's length
comes from the timing profile, so time is the caller's: real, sped up, or a replay's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

from services.common.ids import BlockKey
from services.worker.core.blocks import AllDropped, BlockChange, CopiesAdded, CopiesDropped
from services.worker.engines.sim.core.lower import LowerTier
from services.worker.engines.sim.core.model import (
    SimConfig,
    SimEnd,
    SimLoad,
    SimOutput,
    SimRequest,
    SimStep,
    SimTransfer,
)
from services.worker.engines.sim.core.pool import BlockPool
from services.worker.engines.sim.core.run import Run
from services.worker.engines.sim.core.transfers import Transfers

Sample = Callable[[str], bool]
"""Told that a request (by id) gets its next token; answers whether that one ends it. It may add
keys to the request for blocks that are full now."""


class Simulator:
    """One engine. `sample` None: each request gets as many tokens as it asked for."""

    def __init__(
        self, config: SimConfig, sample: Sample | None = None, lower: LowerTier | None = None
    ) -> None:
        """`lower` None: there is no tier below its own blocks."""
        self.config = config
        self.lower = lower
        self.slow = 1.0
        """Steps take this many times as long as the profile says, from the next one on."""
        self.steps = 0
        """Steps ended."""
        self.pool = BlockPool(config.capacity_blocks)
        self._sample = sample
        self._runs: dict[str, Run] = {}
        self._waiting: list[Run] = []
        self._running: list[Run] = []
        self._loading: list[tuple[float, Run]] = []
        """Waiting requests whose blocks are on their way up, by the time when these are there."""
        self._lane_free = -math.inf
        """When the last load ends."""
        self._transfers = Transfers(config.profile)
        self._received: list[SimTransfer] = []
        self._arrived: list[Run] = []
        """Requests whose transfer is over, and which are in no step yet."""
        self._unsaved: list[BlockKey] = []
        """Blocks that the running step fills, for the lower tier."""
        self._arrivals = 0
        self._pending = 0
        """Prompt tokens to be computed, of all requests."""
        self._aborts: list[str] = []
        self._changes: list[BlockChange] = []
        self._held_until = -math.inf
        # The running step; all of it is 0 or empty between steps.
        self._batch: list[Run] = []
        self._began = 0.0
        self._ends: float | None = None
        self._count = 0
        self._first_s = 0.0
        self._later_s = 0.0
        """In a run of equal steps, by how much each takes longer than the one before."""
        self._prefill_tokens = 0
        self._preempted = 0
        """Since the last step was told."""

    # What callers do.

    def submit(self, request: SimRequest, now: float) -> None:
        """Takes a request; it may be in the step that begins next.

        Raises ValueError for one that is too long, too short, or named like one that runs, or
        whose transfer is longer than its prompt.
        """
        longest = self.config.longest
        if not 0 < request.prompt_tokens < longest:
            raise ValueError(f"a prompt has 1 to {longest - 1} tokens, not {request.prompt_tokens}")
        if not 0 <= request.transfer_tokens <= request.prompt_tokens:
            raise ValueError(f"{request.transfer_tokens} tokens can't be transferred")
        if request.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if request.id in self._runs:
            raise ValueError(f"request {request.id} runs already")
        self._arrivals += 1
        limit = min(request.prompt_tokens + request.max_tokens, longest)
        run = Run(request, (request.priority, self._arrivals), now, limit)
        self._runs[request.id] = run
        self._pending += request.prompt_tokens
        heapq.heappush(self._waiting, run)
        self._wake(now)

    def abort(self, id: str, now: float) -> None:
        """Ends a request when the running step ends; nothing happens when it ended before."""
        if id in self._runs:
            self._aborts.append(id)
            self._wake(now)

    def hold(self, until: float) -> None:
        """No step ends or begins before `until`, as in an engine that hangs."""
        self._held_until = until
        if self._ends is not None:
            self._ends = max(self._ends, until)

    def next_time(self) -> float | None:
        """When `advance` has something to do next; None: not before the next request."""
        return self._ends

    def advance(self, now: float) -> list[SimStep]:
        """Ends all steps that end by `now`, each followed by the next; returns them in order."""
        done: list[SimStep] = []
        while self._ends is not None and self._ends <= now:
            at = self._ends
            if self._batch:
                done.append(self._end(at))
            if self._aborts and (aborted := self._apply_aborts(at)) is not None:
                done.append(aborted)
            self._begin(at)
        return done

    def reset(self, now: float) -> SimStep | None:
        """Forgets all blocks; None, and nothing done, while requests use some or wait."""
        if self._runs or not self.pool.clear():
            return None
        self._changes.append(AllDropped())
        return self._between(now, [])

    def fill(self, keys: Sequence[BlockKey], now: float) -> SimStep:
        """Holds these blocks, a chain, as if a request had computed them.

        Raises ValueError when there are more than blocks without use.
        """
        if len(keys) > self.pool.free:
            raise ValueError(f"{len(keys)} blocks don't fit: {self.pool.free} are free")
        dropped: list[BlockKey] = []
        blocks = self.pool.take(len(keys), dropped)
        if dropped:
            self._changes.append(CopiesDropped(tuple(dropped)))
        for block, key in zip(blocks, keys, strict=True):
            self.pool.name(block, key)
        self.pool.release(blocks)
        self._changes.append(CopiesAdded(tuple(keys)))
        return self._between(now, [])

    def load(self) -> SimLoad:
        """How busy it is now."""
        return SimLoad(
            running=len(self._running),
            waiting=len(self._runs) - len(self._running),
            used_blocks=self.pool.used,
            pending_prefill_tokens=self._pending,
        )

    # A step's life.

    def _wake(self, now: float) -> None:
        """Lets a step begin at `now` when none runs; a run of steps ends with the one that runs."""
        if self._ends is None or not self._batch:
            at = max(now, self._held_until)
            self._ends = at if self._ends is None else min(self._ends, at)
        elif self._count > 1 and now < self._ends:
            self._cut(now)

    def _cut(self, now: float) -> None:
        """Shortens a run of equal steps to the one that runs at `now`."""
        count, ends = 0, self._began
        while not count or (ends <= now and count < self._count):
            ends += self._first_s + count * self._later_s
            count += 1
        if count < self._count:
            self._count = count
            self._ends = max(ends, self._held_until)

    def _begin(self, now: float) -> None:
        self._count = self._prefill_tokens = 0
        if not self._runs:
            self._ends = None
            return
        profile = self.config.profile
        while self._loading and self._loading[0][0] <= now:
            heapq.heappush(self._waiting, heapq.heappop(self._loading)[1])
        self._receive(now)
        batch, tokens, pairs, kv_tokens, decodes = self._schedule(now)
        if not batch:
            times = [self._loading[0][0]] if self._loading else []
            if (arrival := self._transfers.next_time()) is not None:
                times.append(arrival)
            assert times, "requests are there, and none can run"
            self._ends = max(min(times), self._held_until)
            return
        self._batch = batch
        self._began = now
        self._count = 1
        seconds = profile.step_s(tokens, pairs, len(batch), kv_tokens) * self.slow
        self._first_s, self._later_s = seconds, profile.kv_token_s * decodes * self.slow
        ends = now + seconds
        if decodes == len(batch) == len(self._runs) and self.config.coalesce_s > seconds:
            count = self._run_length(seconds)
            if count > 1:
                self._count = count
                ends = now + count * seconds + self._later_s * (count * (count - 1) / 2)
        self._ends = max(ends, self._held_until)

    def _run_length(self, seconds: float) -> int:
        """How many steps alike can follow; takes the blocks that they fill."""
        size = self.config.block_size
        count = max(1, int(self.config.coalesce_s / seconds))
        for run in self._batch:
            count = min(count, run.limit - run.total)
        if count < 2:
            return 1
        wanted = [-(-(run.computed + count) // size) - len(run.blocks) for run in self._batch]
        if sum(n for n in wanted if n > 0) > self.pool.free:
            return 1
        for run, blocks in zip(self._batch, wanted, strict=True):
            if blocks > 0:
                self._take(run, blocks)
        return count

    def _schedule(self, now: float) -> tuple[list[Run], int, float, int, int]:
        """The next step: who is in it, its tokens, pairs, tokens of KV read, and its decodes."""
        size, budget = self.config.block_size, self.config.max_batched_tokens
        batch: list[Run] = []
        running = self._running
        position = 0
        pushed_out = False
        while position < len(running) and budget > 0:
            run = running[position]
            todo = min(run.total - run.computed, budget)
            need = -(-(run.computed + todo) // size) - len(run.blocks)
            if need > self.pool.free:
                last = max(running)
                if last.todo:
                    batch.remove(last)
                    budget += last.todo
                at = running.index(last)
                if at < position:
                    position -= 1
                self._preempt(last)
                pushed_out = True
                continue
            if need > 0:
                self._take(run, need)
            run.todo = todo
            self._name(run, run.computed + todo)
            budget -= todo
            batch.append(run)
            position += 1
        if not pushed_out or not batch:
            self._admit(batch, budget, now)
        tokens = kv_tokens = decodes = 0
        pairs = 0.0
        for run in batch:
            tokens += run.todo
            if run.todo == 1 and run.produced:
                decodes += 1
                kv_tokens += run.computed
            else:
                self._prefill_tokens += run.todo
                pairs += run.todo * (run.computed + run.todo / 2)
        return batch, tokens, pairs, kv_tokens, decodes

    def _admit(self, batch: list[Run], budget: int, now: float) -> None:
        """Lets waiting requests into the step, first in order first, until one does not fit."""
        size = self.config.block_size
        while self._arrived and budget > 0 and len(self._running) < self.config.max_running:
            run = heapq.heappop(self._arrived)
            if not run.ended:
                budget -= self._start(run, batch, budget)
        while self._waiting and budget > 0 and len(self._running) < self.config.max_running:
            run = self._waiting[0]
            if run.ended:
                heapq.heappop(self._waiting)
                continue
            hits: list[int] = []
            keys: Sequence[BlockKey] = ()
            if not run.request.recompute:
                # The last token is computed: the next one comes from it.
                usable = (run.total - 1) // size
                keys = run.request.keys
                keys = keys if len(keys) <= usable else keys[:usable]
                hits = self.pool.match(keys)
                if self._comes(run, len(hits) * size):
                    if not self._transfer(run, hits, now):
                        return
                    continue
                if self.lower is not None and not run.looked and self._load(run, keys, hits, now):
                    heapq.heappop(self._waiting)
                    continue
            whole = -(-run.total // size) - len(hits)
            if whole + self.pool.idle_among(hits) > self.pool.free:
                return
            heapq.heappop(self._waiting)
            self.pool.share(hits)
            run.blocks = hits
            run.named = len(hits)
            up = max(0, run.loaded - len(hits))
            if up:
                self._take(run, up)
                self._name(run, run.loaded * size, saved=True)
            self._compute(run, len(run.blocks) * size)
            if run.cached is None:
                run.cached, run.lower = run.computed, up
                run.queued_s = now - run.submitted
            budget -= self._start(run, batch, budget)

    def _start(self, run: Run, batch: list[Run], budget: int) -> int:
        """Puts a request with blocks for what it needn't compute into the step; its tokens."""
        run.todo = min(run.total - run.computed, budget)
        need = -(-(run.computed + run.todo) // self.config.block_size) - len(run.blocks)
        if need > 0:
            self._take(run, need)
        self._name(run, run.computed + run.todo)
        self._running.append(run)
        batch.append(run)
        return run.todo

    def _comes(self, run: Run, found: int) -> bool:
        """Whether another engine has more of it than was found here, and was not asked yet."""
        return run.transferred is None and min(run.request.transfer_tokens, run.total - 1) > found

    def _transfer(self, run: Run, hits: list[int], now: float) -> bool:
        """Lets a waiting request have what another engine holds; False: its blocks don't fit."""
        size = self.config.block_size
        whole = -(-run.total // size) - len(hits)
        if whole + self.pool.idle_among(hits) > self.pool.free:
            return False
        heapq.heappop(self._waiting)
        self.pool.share(hits)
        run.blocks = list(hits)
        run.named = len(hits)
        self._take(run, whole)
        found = len(hits) * size
        # The last token is computed: the next one comes from it.
        self._compute(run, min(run.request.transfer_tokens, run.total - 1))
        run.transferred = run.computed - found
        run.cached = run.computed
        run.queued_s = now - run.submitted
        self._transfers.begin(run, run.request.transfer_tokens - found, now)
        return True

    def _receive(self, now: float) -> None:
        """Takes what has arrived: from here on prefixes can hit it."""
        for run, news in self._transfers.ended(now):
            if not run.ended:
                self._received.append(news)
                self._name(run, run.request.transfer_tokens)
                heapq.heappush(self._arrived, run)

    def _load(self, run: Run, keys: Sequence[BlockKey], hits: Sequence[int], now: float) -> bool:
        """Whether blocks come up for it: some that it lacks, quicker than it computes them."""
        assert self.lower is not None
        run.looked = True
        up = self.lower.match(keys[len(hits) :])
        compute_s = up * self.config.block_size * self.config.profile.token_s * self.slow
        ready = max(now, self._lane_free) + self.lower.load_s(up)
        if not up or ready - now >= compute_s:
            return False
        self.lower.touch(keys[: len(hits) + up])
        self._lane_free = ready
        run.loaded = len(hits) + up
        heapq.heappush(self._loading, (ready, run))
        return True

    def _preempt(self, run: Run) -> None:
        self._running.remove(run)
        self._preempted += 1
        self._give_back(run)
        heapq.heappush(self._waiting, run)

    def _end(self, now: float) -> SimStep:
        batch, self._batch = self._batch, []
        self.steps += self._count
        if self._unsaved:
            assert self.lower is not None
            self.lower.save(self._unsaved)
            self._unsaved.clear()
        outputs: list[SimOutput] = []
        ended = False
        for run in batch:
            self._compute(run, run.computed + run.todo)
            run.todo = 0
            if run.computed == run.total:
                output = self._produce(run)
                outputs.append(output)
                if output.end is not None:
                    ended = True
        if ended:
            self._running = [run for run in self._running if not run.ended]
        return self._told(now, outputs)

    def _produce(self, run: Run) -> SimOutput:
        """The next token, or as many as there are steps in a run of them."""
        sample = self._sample
        end: SimEnd | None = None
        tokens = self._count
        if sample is None:
            run.total += tokens
        else:
            for made in range(1, tokens + 1):
                run.total += 1
                if sample(run.request.id):
                    end, tokens = SimEnd.STOP, made
                    break
        run.computed = run.total - 1
        first = not run.produced
        run.produced += tokens
        if self._count > 1:
            self._name(run, run.computed)
        if end is None and run.total >= run.limit:
            end = SimEnd.LENGTH
        if end is not None:
            self._forget(run)
        return SimOutput(
            run.request.id,
            tokens,
            end,
            run.cached if first else None,
            run.queued_s if first else None,
            run.lower * self.config.block_size if first else 0,
            (run.transferred or 0) if first else 0,
        )

    def _apply_aborts(self, now: float) -> SimStep | None:
        outputs: list[SimOutput] = []
        aborts, self._aborts = self._aborts, []
        for id in aborts:
            run = self._runs.get(id)
            if run is None:
                continue
            if run in self._running:
                self._running.remove(run)
            self._forget(run)
            outputs.append(SimOutput(id, end=SimEnd.ABORT))
        return self._between(now, outputs) if outputs else None

    def _between(self, now: float, outputs: list[SimOutput]) -> SimStep:
        """News that belong to no step: those of a running one come with its end."""
        changes, self._changes = self._changes, []
        received, self._received = self._received, []
        step = SimStep(self.steps, 0, now, now, outputs, changes, self.load())
        step.transfers = received
        return step

    def _told(self, now: float, outputs: list[SimOutput]) -> SimStep:
        changes, self._changes = self._changes, []
        preempted, self._preempted = self._preempted, 0
        received, self._received = self._received, []
        return SimStep(
            self.steps,
            self._count,
            self._began,
            now,
            outputs,
            changes,
            self.load(),
            self._prefill_tokens,
            preempted,
            received,
        )

    # Blocks.

    def _take(self, run: Run, count: int) -> None:
        dropped: list[BlockKey] = []
        run.blocks.extend(self.pool.take(count, dropped))
        if dropped:
            self._changes.append(CopiesDropped(tuple(dropped)))

    def _name(self, run: Run, computed: int, *, saved: bool = False) -> None:
        """Full blocks up to `computed` tokens can be hit from now on; `saved`: they came up."""
        full = min(computed // self.config.block_size, len(run.request.keys))
        if full <= run.named:
            return
        keys = tuple(run.request.keys[run.named : full])
        for block, key in zip(run.blocks[run.named : full], keys, strict=True):
            self.pool.name(block, key)
        run.named = full
        self._changes.append(CopiesAdded(keys))
        if self.lower is not None and not saved:
            self._unsaved.extend(keys)

    def _compute(self, run: Run, computed: int) -> None:
        prompt = run.request.prompt_tokens
        if run.computed < prompt:
            self._pending -= min(computed, prompt) - run.computed
        run.computed = computed

    def _give_back(self, run: Run) -> None:
        self.pool.release(run.blocks)
        run.blocks = []
        run.named = run.todo = run.loaded = 0
        run.looked = False
        prompt = run.request.prompt_tokens
        self._pending += min(run.computed, prompt)
        run.computed = 0

    def _forget(self, run: Run) -> None:
        self._give_back(run)
        self._pending -= run.request.prompt_tokens
        run.ended = True
        del self._runs[run.request.id]

    def check_invariants(self) -> None:
        """Raises AssertionError when the engine contradicts itself."""
        self.pool.check_invariants()
        waiting = [run for run in self._waiting if not run.ended]
        waiting += [run for _, run in self._loading if not run.ended]
        assert all(not run.blocks for run in waiting), "a waiting request keeps blocks"
        taken = [run for run in [*self._transfers.runs(), *self._arrived] if not run.ended]
        count = len(waiting) + len(taken) + len(self._running)
        assert count == len(self._runs), "a request is lost or double"
        used = {block for run in [*self._running, *taken] for block in run.blocks}
        assert len(used) == self.pool.used, "a block is in use by nobody"
        prompts = [(r.request.prompt_tokens, r.computed) for r in self._runs.values()]
        assert self._pending == sum(max(0, p - c) for p, c in prompts), "pending tokens are off"
        assert (self._ends is None) == (not self._runs and not self._aborts)
        for run in self._running:
            size = self.config.block_size
            assert run.computed <= run.total <= run.limit
            assert len(run.blocks) * size >= run.computed + run.todo
            assert run.named <= len(run.blocks)
