"""A checked request to a job: model, token ids, block keys and sampling. Nothing is sent yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from services.common.blocks import HashedAdapter, block_keys
from services.common.ids import BlockKey
from services.gateway.core.openai import ChatRequest, CompletionRequest, GenerationRequest
from services.gateway.core.salt import effective_salt
from services.gateway.core.sampling import (
    Sampling,
    check_length,
    check_token_ids,
    resolve_each,
)
from services.gateway.errors import ModelNotFound, NoWorker
from services.gateway.models import Models, Served
from services.gateway.ports import NO_WISHES, Wishes

_INLINE_TOKENS = 2048
"""Longer prompts are hashed in a thread: 64 blocks of 32 cost about 0.2 ms."""
_LOADING_S = 3.0
"""Longest wait for a model that is just being loaded."""
_INLINE_CHARS = 8192
_INLINE_MESSAGES = 128
"""Conversations of more text or messages are rendered in a thread."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: what the shell knows of a request beside its body."""

    request_id: str
    deadline: float
    """On the loop's clock, in seconds."""
    tenant: str = ""
    tenant_salt: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    wishes: Wishes = NO_WISHES


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. `keys` are those of its full blocks."""

    ids: Sequence[int]
    keys: Sequence[BlockKey]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Job:
    """All that is needed to run a request. Choice `p * n + i` is the i-th of prompt p."""

    served: Served
    prompts: tuple[Prompt, ...]
    n: int
    salt: str
    """The engine's cache salt; empty: none."""
    caller: Caller
    priority: int = 0
    restartable: bool = False
    """True while nothing is shown before the end: a choice that can't be resumed may start anew."""


async def resolve_model(models: Models, name: str, *, starting: bool) -> Served:
    """The model of that name, waited for while it is being loaded.

    Raises ModelNotFound, or NoWorker while it may still turn up.
    """
    served = models.resolve(name)
    if served is None and models.loading(name):
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOADING_S):
                await models.settled(name)
        served = models.resolve(name)
    if served is not None:
        return served
    if models.loading(name) or starting:
        raise NoWorker(f"The model {name[:200]!r} is not ready yet.", retry_after_s=2)
    if models.may_return(name):
        raise NoWorker(f"No worker serves the model {name[:200]!r} now.", retry_after_s=2)
    raise ModelNotFound(name)


async def prepare_chat(
    models: Models, request: ChatRequest, caller: Caller, *, starting: bool
) -> Job:
    """A chat's job. Raises BadRequest, ModelNotFound or NoWorker."""
    served = await resolve_model(models, request.model, starting=starting)
    tokenizer = served.tokenizer
    now = datetime.now().astimezone()

    def render() -> str:
        return tokenizer.render_chat(
            request.messages,
            now=now,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            kwargs=request.chat_template_kwargs,
        )

    text = await asyncio.to_thread(render) if _is_long(request) else render()
    check_length(tokenizer.least_tokens(text), served.card, request.prompt_param)
    ids = await tokenizer.encode_async(text, add_special_tokens=request.add_special_tokens)
    return await _job(served, request, [ids], caller)


async def prepare_completion(
    models: Models, request: CompletionRequest, caller: Caller, *, starting: bool
) -> Job:
    """A completion's job, one prompt for each entry. Raises as prepare_chat does."""
    served = await resolve_model(models, request.model, starting=starting)
    prompts: list[Sequence[int]] = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            least = served.tokenizer.least_tokens(prompt)
            check_length(least, served.card, request.prompt_param)
            prompts.append(
                await served.tokenizer.encode_async(
                    prompt, add_special_tokens=request.add_special_tokens
                )
            )
        else:
            check_token_ids(prompt, served.card)
            prompts.append(prompt)
    return await _job(served, request, prompts, caller)


def _is_long(request: ChatRequest) -> bool:
    """Whether rendering takes more than a moment: by text, messages, or what has no known size."""
    if len(request.messages) > _INLINE_MESSAGES or request.chat_template_kwargs:
        return True
    return (
        any(m.tool_calls for m in request.messages)
        or sum(
            len(m.text) + len(m.reasoning_content or "") + len(m.name or "")
            for m in request.messages
        )
        > _INLINE_CHARS
    )


async def hash_blocks(served: Served, ids: Sequence[int], salt: str) -> list[BlockKey]:
    """Keys of the full blocks of `ids`, as the engine will compute them."""
    adapter = HashedAdapter(served.adapter.name, served.adapter.path) if served.adapter else None
    if len(ids) <= _INLINE_TOKENS:
        return block_keys(ids, served.card.block_size, adapter=adapter, cache_salt=salt)
    return await asyncio.to_thread(
        block_keys, ids, served.card.block_size, adapter=adapter, cache_salt=salt
    )


async def _job(
    served: Served, request: GenerationRequest, prompts: Sequence[Sequence[int]], caller: Caller
) -> Job:
    salt = effective_salt(caller.tenant_salt, request.cache_salt)
    samplings = resolve_each(request, served.card, [len(ids) for ids in prompts])
    ready = []
    hashed = 0
    for ids, sampling in zip(prompts, samplings, strict=True):
        ready.append(Prompt(ids, await hash_blocks(served, ids, salt), sampling))
        hashed += len(ids)
        if hashed > _INLINE_TOKENS:
            # Many short prompts are as long as a long one: let others run in between.
            hashed = 0
            await asyncio.sleep(0)
    return Job(
        served=served,
        prompts=tuple(ready),
        n=request.n,
        salt=salt,
        caller=caller,
        priority=request.priority,
        restartable=not request.stream,
    )
