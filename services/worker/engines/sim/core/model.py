"""Values that go into the simulated engine and come out of it. Times in seconds, on any clock."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import StrEnum

from services.common.ids import BlockKey
from services.worker.core.blocks import BlockChange
from services.worker.engines.sim.core.timing import TimingProfile


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The machine that is simulated; meanings as those of vLLM's arguments of like names."""

    profile: TimingProfile
    capacity_blocks: int
    """KV blocks of the engine (G1)."""
    block_size: int = 16
    """Tokens of a block."""
    max_batched_tokens: int = 8192
    """Most tokens of a step: longer prompts are cut into chunks."""
    max_running: int = 256
    """Most requests in a step."""
    max_model_len: int = 0
    """Longest prompt plus output in tokens; 0: as much as fits into all blocks."""
    coalesce_s: float = 0.0
    """Steps that only decode, with nobody waiting, are told together up to this many seconds:
    cheaper to run, equal in time. 0: each alone."""

    def __post_init__(self) -> None:
        for name in ("capacity_blocks", "block_size", "max_batched_tokens", "max_running"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.max_model_len <= self.capacity_blocks * self.block_size:
            raise ValueError(
                f"max_model_len is {self.max_model_len}; {self.capacity_blocks} blocks of"
                f" {self.block_size} tokens can't hold such a request"
            )

    @property
    def longest(self) -> int:
        """Longest prompt plus output in tokens."""
        return self.max_model_len or self.capacity_blocks * self.block_size


@dataclass(slots=True)
class SimRequest:
    """What the engine runs. `id` is unique for its life."""

    id: str
    prompt_tokens: int
    max_tokens: int
    """It ends after so many new tokens, unless its sampler ends it before."""
    keys: MutableSequence[BlockKey] = field(default_factory=list)
    """Of the prompt's full blocks. A sampler may add those of blocks that output fills; without
    them no prefix hits these."""
    priority: int = 0
    """Lower ones first."""
    recompute: bool = False
    """The whole prompt is computed, whatever is cached."""
    transfer_tokens: int = 0
    """So many of the prompt's tokens come from another engine, unless they are cached here."""


class SimEnd(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class SimOutput:
    """What a step brought to one request. With its first output come the two below."""

    id: str
    tokens: int = 0
    end: SimEnd | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were not computed."""
    queued_s: float | None = None
    """From submission until it was first scheduled."""
    loaded_tokens: int = 0
    """Of the cached tokens, those that came up from a lower tier; with the first output."""
    transferred_tokens: int = 0
    """Of the cached tokens, those that came from another engine; with the first output."""


@dataclass(slots=True)
class SimTransfer:
    """KV that came from another engine."""

    id: str
    """Of the request that it was for."""
    tokens: int
    seconds: float
    """On the wire."""


@dataclass(slots=True)
class SimLoad:
    """How busy the engine is."""

    running: int
    waiting: int
    used_blocks: int
    pending_prefill_tokens: int


@dataclass(slots=True)
class SimStep:
    """A step that has ended, or several equal ones (`count`), or an abort between steps (0)."""

    number: int
    """Steps ended so far."""
    count: int
    began: float
    ended: float
    outputs: list[SimOutput]
    changes: list[BlockChange]
    load: SimLoad
    prefill_tokens: int = 0
    """Prompt tokens that it computed."""
    preempted: int = 0
    """Requests that lost their blocks and start again."""
    transfers: list[SimTransfer] = field(default_factory=list)
    """Those that ended."""
