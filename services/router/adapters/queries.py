"""Questions of gateways and callers, checked, in the core's words. Tokens are hashed here."""

from __future__ import annotations

import asyncio

from forebay.router.v1 import router_pb2 as pb

from services.common.blocks import HashedAdapter, block_keys
from services.router.adapters.messages import given_blocks
from services.router.core.answers import Query
from services.router.core.placement import RouterCore
from services.router.errors import invalid

_TOKENS_IN_LOOP = 4096
"""Longer prompts are hashed in a thread."""
_MOST_SEQUENCES = 1024
_LONGEST_SESSION = 256


async def query_of(request: pb.RouteRequest, core: RouterCore) -> Query:
    """The request in the core's words. Raises InvalidRequest that names the field."""
    if not request.model:
        raise invalid("model: a model's name is required, it is empty", "model")
    if request.sequences > _MOST_SEQUENCES:
        raise invalid(f"sequences: at most {_MOST_SEQUENCES}, not {request.sequences}", "sequences")
    if len(request.session_id) > _LONGEST_SESSION:
        raise invalid(f"session_id: at most {_LONGEST_SESSION} characters", "session_id")
    if request.token_ids:
        keys, tokens, size = await _hashed(request, core)
    else:
        keys, tokens, size = given_blocks(request)
    return Query(
        model=request.model,
        prompt_tokens=tokens,
        keys=keys,
        block_size=size,
        excluded=frozenset(request.excluded_workers),
        pinned=request.pinned_worker,
        rank=request.pinned_rank if request.HasField("pinned_rank") else None,
        labels=dict(request.required_labels),
        tenant=request.tenant,
        session=request.session_id,
        sequences=request.sequences or 1,
        priority=request.priority,
        admitted=request.admitted,
        whole=request.whole,
        patience_s=request.deadline_ms / 1000 if request.deadline_ms else float("inf"),
    )


async def _hashed(request: pb.RouteRequest, core: RouterCore) -> tuple[list[int], int, int]:
    if request.block_hashes:
        raise invalid("token_ids: give block_hashes or token_ids, not both", "token_ids")
    tokens = list(request.token_ids)
    if request.prompt_tokens not in (0, len(tokens)):
        raise invalid(
            f"prompt_tokens: {request.prompt_tokens}, but there are {len(tokens)} token_ids; "
            "leave it out",
            "prompt_tokens",
        )
    worker = core.model_worker(request.model, request.block_size_tokens)
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
