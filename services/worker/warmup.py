"""One request before the first: it pays for what engines do at first use, and leaves no trace."""

from __future__ import annotations

import asyncio

from services.worker.core.model import Sampling
from services.worker.engines.port import Engine, EngineDead, EngineRequest, Step
from services.worker.errors import EngineStartError

WARM_UP_TIMEOUT_S = 300.0


async def warm_up(engine: Engine) -> str:
    """Runs short requests with sampling and log probabilities, then forgets their blocks.

    One for the model and one for each adapter: a broken adapter shows here. Returns the id of the
    kvbm daemon that the engine's connector was attached to by then, empty for none. Raises
    EngineStartError when the engine does not answer.
    """
    profile = engine.profile
    nodes = [""]
    for adapter in ("", *(a.name for a in profile.adapters)):
        await _ask(engine, adapter, nodes)
    if not await engine.reset_cache():
        raise EngineStartError("the engine can't forget its first requests")
    return nodes[-1]


async def _ask(engine: Engine, adapter: str, nodes: list[str]) -> None:
    profile = engine.profile
    done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ends: list[str] = []

    def on_step(step: Step) -> None:
        if step.tiers is not None and step.tiers.node is not None:
            nodes.append(step.tiers.node)
        ends.extend(o.error for o in step.outputs if o.finish is not None)
        # Its blocks are free when the engine says so: with its next step at the latest.
        free = any(load.running == load.used_blocks == 0 for load in step.loads)
        if ends and (free or ends[0]) and not done.done():
            done.set_result(ends[0])

    def on_death(dead: EngineDead) -> None:
        if not done.done():
            done.set_result(str(dead))

    engine.listen(on_step, on_death)
    length = max(1, min(2 * profile.block_size + 1, profile.max_model_len - 2))
    prompt = [i % profile.vocab_size for i in range(length)]
    sampling = Sampling(
        max_tokens=2,
        temperature=0.7,
        top_p=0.9,
        seed=1,
        ignore_eos=True,
        logprobs=min(1, profile.max_logprobs),
    )
    engine.submit(EngineRequest(f"warm-up:{adapter}", prompt, sampling, adapter=adapter))
    try:
        async with asyncio.timeout(WARM_UP_TIMEOUT_S):
            error = await done
            if error:
                what = f"for adapter {adapter!r}" if adapter else "for the model"
                raise EngineStartError(f"the engine failed its first request {what}: {error}")
    except TimeoutError as exc:
        raise EngineStartError(
            f"the engine did not answer its first request within {WARM_UP_TIMEOUT_S:g} s"
        ) from exc
