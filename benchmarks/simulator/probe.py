"""Runs an engine behind the port through prompts and batches, and notes what its steps took."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.simulator.fit import Sample
from services.worker.core.model import Sampling
from services.worker.engines.port import Engine, EngineDead, EngineRequest, Step

STEP_TIMEOUT_S = 120.0
"""Longest wait for all that one experiment brings."""
DECODE_STEPS = 16


@dataclass(slots=True)
class Probe:
    """One engine; experiments one after the other."""

    engine: Engine
    samples: list[Sample] = field(default_factory=list)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _salt: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def prompt(self, length: int) -> None:
        """A prompt of its own: each of its chunks is a sample."""
        heard = await self._run([length], 1)
        left = length
        for step in heard:
            after = step.loads[-1].pending_prefill_tokens if step.loads else None
            if after is None:
                raise RuntimeError("this engine does not tell what is still to be computed")
            chunk, before = left - after, length - left
            left = after
            if chunk > 0 and step.seconds > 0:
                pairs = chunk * (before + chunk / 2)
                self.samples.append(Sample(chunk, pairs, 1, 0, step.seconds))

    async def batch(self, requests: int, context: int) -> None:
        """Requests of one length that decode together: each step with all of them is a sample."""
        heard = await self._run([context] * requests, DECODE_STEPS + 1)
        made: dict[str, int] = {}
        for step in heard:
            alone = all(made.get(o.id) for o in step.outputs)
            tokens = sum(len(o.token_ids) for o in step.outputs)
            if alone and tokens == len(step.outputs) == requests and step.seconds > 0:
                read = sum(context + made[o.id] - 1 for o in step.outputs)
                self.samples.append(Sample(requests, 0, requests, read, step.seconds))
            for output in step.outputs:
                made[output.id] = made.get(output.id, 0) + len(output.token_ids)

    async def _run(self, lengths: Sequence[int], tokens: int) -> list[Step]:
        """Runs fresh prompts to their ends; returns all steps from then."""
        profile = self.engine.profile
        waiting = {f"probe-{next(self._ids)}": length for length in lengths}
        heard: list[Step] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_step(step: Step) -> None:
            heard.append(step)
            for output in step.outputs:
                if output.finish is not None:
                    waiting.pop(output.id, None)
            if not waiting and not done.done():
                done.set_result(None)

        def on_death(dead: EngineDead) -> None:
            if not done.done():
                done.set_exception(dead)

        self.engine.listen(on_step, on_death)
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        for id, length in list(waiting.items()):
            salt = next(self._salt)
            ids = [3 + (salt * 7919 + i * 31) % (profile.vocab_size - 3) for i in range(length)]
            request = EngineRequest(id, ids, sampling, cache_salt=f"probe-{salt}")
            self.engine.submit(request)
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await done
        return heard


async def measure(
    engine: Engine, *, prompts: Sequence[int], batches: Sequence[tuple[int, int]], rounds: int
) -> list[Sample]:
    """Samples of prompts (tokens) and batches (requests, context), each `rounds` times.

    What the engine can't hold is left out.
    """
    probe = Probe(engine)
    profile = engine.profile
    capacity = profile.total_blocks * profile.block_size
    for _ in range(rounds):
        for length in prompts:
            if length + 1 < profile.max_model_len:
                await probe.prompt(length)
        for requests, context in batches:
            whole = context + DECODE_STEPS + 1 + profile.block_size
            if whole < profile.max_model_len and requests * whole <= capacity:
                await probe.batch(requests, context)
    return probe.samples
