"""`forebay kv explain` and `kv pin`: the commands that begin with a prompt."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import config, kvview
from services.cli.errors import StateError, UsageError
from services.cli.kv import (
    Address,
    AsJson,
    Default,
    Namespace,
    Owner,
    StateDir,
    daemon_address,
    emit,
    parse_duration,
    parse_key,
    plain,
    the_namespace,
)

if TYPE_CHECKING:  # imported when needed: they take a while
    from services.cli.adapters.kvbm import Explanation, KvbmClient
    from services.cli.adapters.prompt import HashedPrompt

Text = Annotated[str, typer.Argument(metavar="[PROMPT]", help="A user's message.")]
File = Annotated[
    Path | None,
    typer.Option("--file", exists=True, dir_okay=False, help="The message from a text file."),
]
Request = Annotated[
    Path | None,
    typer.Option(
        "--request",
        exists=True,
        dir_okay=False,
        help="A whole request: the JSON body for /v1/chat/completions or /v1/completions.",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="The text as it is, without the model's chat template.")
]
Tokens = Annotated[str, typer.Option("--tokens", help="Token ids, with commas between.")]
Keys = Annotated[
    str,
    typer.Option("--keys", help="Block hashes in hex, with commas between, from the first on."),
]
ModelName = Annotated[
    str, typer.Option("--model", help="Model or adapter, where the worker serves several names.")
]
ForTenant = Annotated[
    str, typer.Option("--tenant", help="As if this tenant asked: its blocks are salted.")
]
Salt = Annotated[str, typer.Option("--cache-salt", help="The request's cache_salt.")]
Worker = Annotated[
    str, typer.Option("--worker", help="A worker's name, or its host:port: whose cache counts.")
]


def add_commands(app: typer.Typer) -> None:
    """Adds them to `forebay kv`."""
    app.command()(explain)
    app.command()(pin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt as it was given; exactly one form of it."""

    text: str = ""
    file: Path | None = None
    request: Path | None = None
    raw: bool = False
    tokens: str = ""
    keys: str = ""
    model: str = ""
    cache_salt: str = ""

    def __post_init__(self) -> None:
        forms = (self.text, self.file, self.request, self.tokens, self.keys)
        if sum(map(bool, forms)) != 1:
            raise UsageError("give one of: a prompt, --file, --request, --tokens, --keys")

    def body(self) -> dict[str, Any]:
        """The request body that it means. Raises UsageError."""
        if self.request is not None:
            try:
                body = json.loads(self.request.read_text())
            except ValueError as exc:
                raise UsageError(f"{self.request} is not JSON: {exc}") from exc
            if not isinstance(body, dict):
                raise UsageError(f"{self.request} must hold a JSON object")
        elif self.tokens:
            try:
                body = {"prompt": [int(t) for t in self.tokens.split(",")]}
            except ValueError:
                raise UsageError("--tokens must be numbers with commas between") from None
        else:
            text = self.file.read_text() if self.file is not None else self.text
            if self.raw:
                body = {"prompt": text}
            else:
                body = {"messages": [{"role": "user", "content": text}]}
        if self.model:
            body["model"] = self.model
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body

    def hashes(self) -> tuple[bytes, ...]:
        """The hashes given with --keys."""
        return tuple(parse_key(k.strip()) for k in self.keys.split(","))


@dataclass(frozen=True, slots=True)
class Found:
    """A prompt's hashes, and where they came from. `prompt`: None when hashes were given."""

    namespace: bytes
    hashes: tuple[bytes, ...]
    prompt: HashedPrompt | None
    skip_blocks: int = 0


def worker_addresses(state_dir: Path, worker: str) -> dict[str, str]:
    """Address by id of the workers to ask. Raises StateError."""
    from services.cli.up import state

    if ":" in worker:
        return {worker: worker}
    found = state.load(state_dir.absolute())
    running = {
        w.name: w.ready.address
        for w in (found.of_kind("worker") if found else ())
        if w.pid and w.ready.address
    }
    if worker and worker not in running:
        raise StateError(
            f"no worker {worker!r} runs in {state_dir}",
            hint=f"Running: {', '.join(running) or 'none'}. --worker takes host:port too.",
        )
    if not running:
        raise StateError(
            f"no worker runs in {state_dir}, and only a worker knows how its model makes tokens",
            hint="Name one with --worker host:port, or give hashes with --keys.",
        )
    return running


async def find_blocks(
    client: KvbmClient,
    question: Question,
    *,
    state_dir: Path,
    worker: str,
    tenant: str,
    namespace: str,
) -> Found:
    """The prompt's blocks: by a worker's card and tokenizer, or as they were given."""
    from services.cli.adapters.prompt import hash_prompt

    if question.keys:
        return Found(await the_namespace(client, namespace), question.hashes(), None)
    workers = worker_addresses(state_dir, worker)
    prompt = await hash_prompt(
        workers, question.body(), tenant_salt=tenant, cache_dir=config.home() / "files"
    )
    space = await the_namespace(client, namespace) if namespace else prompt.namespace
    skip = prompt.own_blocks[worker] if worker else 0
    return Found(space, prompt.hashes, prompt, skip)


def explain(
    text: Text = "",
    state_dir: StateDir = Default,
    address: Address = "",
    file: File = None,
    request: Request = None,
    raw: Raw = False,
    tokens: Tokens = "",
    keys: Keys = "",
    model: ModelName = "",
    tenant: ForTenant = "",
    cache_salt: Salt = "",
    worker: Worker = "",
    namespace: Namespace = "",
    recompute_ms: Annotated[
        float,
        typer.Option(min=0, help="Milliseconds an engine takes for a block; 0: the daemon's idea."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Says for each block of a prompt where it lies, and why it would or would not be loaded.

    With --worker, blocks that this worker's engine holds itself count as there.
    """
    question = Question(
        text=text, file=file, request=request, raw=raw, tokens=tokens, keys=keys, model=model,
        cache_salt=cache_salt,
    )  # fmt: skip

    from services.cli.adapters.kvbm import open_kvbm

    async def run() -> tuple[Found, Explanation]:
        async with open_kvbm(daemon_address(state_dir, address)) as client:
            found = await find_blocks(
                client,
                question,
                state_dir=state_dir,
                worker=worker,
                tenant=tenant,
                namespace=namespace,
            )
            if not found.hashes:
                raise UsageError("the prompt fills no block: nothing of it can be kept")
            return found, await client.explain(
                found.namespace,
                found.hashes,
                tenant=tenant,
                skip_blocks=found.skip_blocks,
                recompute_block_s=recompute_ms / 1000,
            )

    found, answer = asyncio.run(run())
    prompt = found.prompt
    value = {
        "namespace": found.namespace.hex(),
        "model": prompt.model if prompt else None,
        "tokens": prompt.tokens if prompt else None,
        "block_size_tokens": prompt.block_size if prompt else None,
        "own_blocks": dict(prompt.own_blocks) if prompt else None,
        "hashes": [h.hex() for h in found.hashes],
        **plain(answer),
    }
    emit(
        value,
        as_json=as_json,
        view=lambda: kvview.explanation_view(answer, found.hashes, prompt),
    )


def pin(
    text: Text = "",
    ttl: Annotated[str, typer.Option(help="How long, such as 90s, 15m, 2h, 7d.")] = "1h",
    owner: Owner = "cli",
    state_dir: StateDir = Default,
    address: Address = "",
    file: File = None,
    request: Request = None,
    raw: Raw = False,
    tokens: Tokens = "",
    key: Annotated[
        str, typer.Option("--key", help="Hash of the prefix's last block, instead of a prompt.")
    ] = "",
    model: ModelName = "",
    tenant: ForTenant = "",
    cache_salt: Salt = "",
    worker: Worker = "",
    namespace: Namespace = "",
    as_json: AsJson = False,
) -> None:
    """Keeps a prompt's blocks from being evicted, as far as they are stored, for a time."""
    seconds = parse_duration(ttl)
    question = Question(
        text=text, file=file, request=request, raw=raw, tokens=tokens, keys=key, model=model,
        cache_salt=cache_salt,
    )  # fmt: skip

    from services.cli.adapters.kvbm import open_kvbm

    async def run() -> tuple[str, int]:
        async with open_kvbm(daemon_address(state_dir, address)) as client:
            found = await find_blocks(
                client,
                question,
                state_dir=state_dir,
                worker=worker,
                tenant=tenant,
                namespace=namespace,
            )
            last = found.hashes[-1] if key else await _last_stored(client, found, tenant)
            return last.hex(), await client.pin(found.namespace, last, owner, seconds)

    last, blocks = asyncio.run(run())
    emit(
        {"key": last, "blocks": blocks, "owner": owner, "ttl_s": seconds},
        as_json=as_json,
        view=lambda: f"{blocks} blocks are kept for {ttl} by {owner!r}; the last is {last}",
    )


async def _last_stored(client: KvbmClient, found: Found, tenant: str) -> bytes:
    if not found.hashes:
        raise UsageError("the prompt fills no block: nothing of it can be kept")
    answer = await client.explain(found.namespace, found.hashes, tenant=tenant)
    stored = 0
    for verdict in answer.blocks:
        if not verdict.tiers:
            break
        stored += 1
    if not stored:
        raise UsageError("no block of this prompt is stored yet: there is nothing to keep")
    return found.hashes[stored - 1]
