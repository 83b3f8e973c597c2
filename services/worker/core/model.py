"""Values of the worker's domain: what a request asks for, and what news of it look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample; meanings, units and bounds as in worker.proto's SamplingParams."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Handle:
    """KV that another worker computed and holds; meanings as in worker.proto's TransferHandle."""

    source: str
    """Id of that worker."""
    source_incarnation: int
    namespace: bytes
    params: bytes
    way: str
    tokens: int
    request_id: str
    expires_s: float = 0.0
    source_rank: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One request as a caller states it; `unbuilt` names fields that are not supported yet."""

    request_id: str
    attempt_id: str
    model: str
    prompt: Sequence[int]
    sampling: Sampling
    prior_output: Sequence[int] = ()
    cache_salt: str = ""
    adapter: str = ""
    tenant: str = ""
    priority: int = 0
    deadline_s: float = 0.0
    traceparent: str = ""
    tracestate: str = ""
    dp_rank: int | None = None
    client_request_id: str = ""
    prefill_only: bool = False
    transfer: Handle | None = None
    unbuilt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """A position: its token with log probability and rank (from 1), and the likeliest tokens."""

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed: a google.rpc.Code number, a reason, a text, and a field at fault."""

    code: int
    reason: str
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one request, named by its caller's request id. The last one has `finish`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int | None = None
    failure: Failure | None = None
    transfer: Handle | None = None
    transferred_tokens: int = 0

    @property
    def cost(self) -> int:
        """Its size in numbers to be sent, for bounds on backlog and frames."""
        positions = (*self.logprobs, *self.prompt_logprobs)
        return 1 + len(self.token_ids) + sum(3 + 2 * len(p.top_token_ids) for p in positions)
