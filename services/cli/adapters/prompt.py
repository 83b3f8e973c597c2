"""A prompt to block hashes, exactly as a gateway makes them: by a worker's card and its files.

The one place where the command line uses more of the gateway than its core: a second way to make
tokens would be one that can differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import msgspec
from forebay.common.v1 import common_pb2
from forebay.worker.v1 import worker_pb2, worker_pb2_grpc

from services.cli.errors import RequestFailed, UsageError
from services.common.blocks import HashedAdapter, block_hashes, block_key
from services.common.cards import ModelCard
from services.common.rpc.channel import open_channel
from services.common.rpc.errors import translate
from services.gateway.adapters.cards import CardRefused, FilesUnavailable, load_tokenizer
from services.gateway.adapters.tokenizer import Tokenizer
from services.gateway.core.openai import parse_chat, parse_completion
from services.gateway.core.salt import effective_salt
from services.gateway.errors import ApiError

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt's full blocks. `own_blocks`: how many of them, from the first on, each worker's
    engine holds itself (G1), by worker id.
    """

    model: str
    namespace: bytes
    block_size: int
    tokens: int
    hashes: tuple[bytes, ...]
    own_blocks: Mapping[str, int]


async def hash_prompt(
    workers: Mapping[str, str], body: Mapping[str, Any], *, tenant_salt: str, cache_dir: Path
) -> HashedPrompt:
    """The blocks of an OpenAI request body (`messages`, or a `prompt` of text or token ids).

    `workers`: address by id; the first one's model, or adapter that `body` names, is meant. Raises
    UsageError for a wrong body, ForebayError or RequestFailed when no worker can be asked.
    """
    address = next(iter(workers.values()))
    card = await _card(address)
    name = str(body.get("model") or card.model)
    if not card.serves(name):
        raise UsageError(f"the worker at {address} serves {card.model!r}, not {name!r}")
    raw = msgspec.json.encode({**body, "model": name})
    adapter = card.adapter(name) if name != card.model else None
    try:
        tokenizer = await load_tokenizer(address, card, cache_dir)
    except (FilesUnavailable, CardRefused) as exc:
        raise RequestFailed(f"no tokenizer from the worker at {address}: {exc}") from exc
    try:
        tokens, salt = _tokens(raw, body, tokenizer)
    except ApiError as exc:
        raise UsageError(exc.message) from exc
    finally:
        tokenizer.close()
    hashes = block_hashes(
        tokens,
        card.block_size,
        adapter=HashedAdapter(adapter.name, adapter.path) if adapter else None,
        cache_salt=effective_salt(tenant_salt, salt),
    )
    return HashedPrompt(
        model=name,
        namespace=card.namespace,
        block_size=card.block_size,
        tokens=len(tokens),
        hashes=tuple(hashes),
        own_blocks={id: await _own_prefix(at, hashes) for id, at in workers.items()},
    )


def _tokens(
    raw: bytes, body: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[list[int], str | None]:
    if "messages" in body:
        chat = parse_chat(raw)
        text = tokenizer.render_chat(
            chat.messages,
            now=datetime.now().astimezone(),
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            kwargs=chat.chat_template_kwargs,
        )
        tokens = tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)
        return tokens, chat.cache_salt
    request = parse_completion(raw)
    (prompt, *more) = request.prompt
    if more:
        raise UsageError("one prompt at a time")
    if isinstance(prompt, str):
        tokens = tokenizer.encode(prompt, add_special_tokens=request.add_special_tokens)
    else:
        tokens = list(prompt)
    return tokens, request.cache_salt


async def _card(address: str) -> ModelCard:
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.GetModelCard(worker_pb2.GetModelCardRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
    return ModelCard.from_proto(answer.card)


async def _own_prefix(address: str, hashes: list[bytes]) -> int:
    """How many leading blocks a worker's engine holds now."""
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.Snapshot(worker_pb2.SnapshotRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            raise translate(exc) from exc
    held = {k for t in answer.blocks if t.tier == common_pb2.TIER_G1 for k in t.block_hashes}
    count = 0
    while count < len(hashes) and block_key(hashes[count]) in held:
        count += 1
    return count
