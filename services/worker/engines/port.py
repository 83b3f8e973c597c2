"""The port of an engine: requests in, one hand-over a step out. All on the loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.common.cards import Adapter, HashVector
from services.worker.core.blocks import BlockChange
from services.worker.core.model import FinishReason, PositionLogprobs, Sampling


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine runs. `id` is unique for its life; `token_ids` is prompt and prior output."""

    id: str
    token_ids: Sequence[int]
    sampling: Sampling
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    dp_rank: int | None = None
    kv: Mapping[str, Any] | None = None
    """What a look-up in lower tiers found, for the engine's connector; None: nobody looked."""
    block_hashes: Sequence[bytes] | None = None
    """Of the full blocks of `token_ids`, when they are known; None: the engine makes them."""
    prefill_only: bool = False
    """It ends with its first token, and its KV stays to be taken by another engine."""
    transfer: Mapping[str, Any] | None = None
    """What another engine's prefill of these tokens gave out (`Output.transfer`), to be taken."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought to one request.

    `cached_tokens` (prompt tokens that were not computed) and `queued_s` (seconds until it was
    first scheduled, None when the engine doesn't say) come with a request's first output.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    queued_s: float | None = None
    error: str = ""
    transfer: Mapping[str, Any] | None = None
    """With the end of a prefill: the engine's own parameters for who takes the KV."""
    transferred_tokens: int = 0
    """With `cached_tokens`: those of them whose KV another engine computed for this request."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy a data-parallel rank is after a step; `pending_prefill_tokens` None: not said."""

    running: int
    waiting: int
    used_blocks: int
    pending_prefill_tokens: int | None = None
    dp_rank: int = 0
    held_transfers: int = 0
    """Finished prefills whose KV waits to be taken."""


@dataclass(frozen=True, slots=True)
class TransferNews:
    """How the transfer to one request went; 0 tokens: it failed (`why`), and they are computed."""

    id: str
    tokens: int
    bytes: int
    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class TierNews:
    """What the connector to lower tiers did since the last news."""

    counts: Mapping[str, float]
    """By event: saved_blocks, loaded_blocks, failed_blocks, load_seconds, ..."""
    node: str | None = None
    """Id of the kvbm daemon it is attached to; empty: none; None: as before."""


@dataclass(frozen=True, slots=True)
class Step:
    """One hand-over. `number` counts steps; one between steps (an abort) repeats it, with 0 s."""

    number: int
    seconds: float = 0.0
    outputs: tuple[Output, ...] = ()
    blocks: tuple[BlockChange, ...] = ()
    loads: tuple[EngineLoad, ...] = ()
    tiers: TierNews | None = None
    transfers: tuple[TransferNews, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What an engine serves: constant after its start.

    `identity` holds what gives its KV bytes their meaning apart from the weights, as words;
    `model_dir` is the folder with weights, tokenizer and configuration.
    """

    engine: str
    model_dir: Path
    block_size: int
    total_blocks: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_logprobs: int
    hash_vector: HashVector
    identity: Mapping[str, str]
    adapters: tuple[Adapter, ...] = ()
    dp_size: int = 1
    simulated: bool = False
    """It has no weights, and its text is no model's."""
    transfer: str = ""
    """How other engines can take its KV, and it theirs; empty: not at all."""


class EngineDead(Exception):
    """The engine can't run any more; the process must be started anew. Its text says why."""


class Engine(Protocol):
    """A running engine. Between `submit` and the output with `finish` it owns the request."""

    @property
    def profile(self) -> EngineProfile:
        """What it serves."""
        ...

    @property
    def progress(self) -> int:
        """A number that changes whenever a step has ended; may be read at any time."""
        ...

    def listen(
        self, on_step: Callable[[Step], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        """Hands later steps to `on_step` and the engine's end to `on_death`; replaces listeners."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Takes a request. Raises InvalidRequest (field named) or EngineDead: not taken."""
        ...

    def abort(self, id: str) -> None:
        """Ends a request with the running step; last output ABORT, unless it ended before."""
        ...

    def poke(self) -> None:
        """Lets it do what waits beside requests (its connector's news) though it is idle."""
        ...

    def release_transfer(self, id: str) -> None:
        """Nobody will take the KV of this prefill. Does nothing when that isn't held (any more)."""
        ...

    async def reset_cache(self) -> bool:
        """Forgets all blocks; False, and nothing done, when requests hold some.

        The change (a clear) is handed over before this returns.
        """
        ...
