"""How a request samples: the client's wishes, the model's defaults and the context's limit in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.common.cards import ModelCard
from services.gateway.core.openai import GenerationRequest


@dataclass(frozen=True, slots=True)
class Sampling:
    """forebay.worker.v1.SamplingParams as a domain type, with what the gateway itself does with text.

    Fields up to `allowed_token_ids` go to the worker under the same names (None: leave the field out);
    `stop`, `include_stop_str`, `skip_special_tokens` and `n` are the gateway's own business.
    """

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
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True

    def for_choice(self, index: int) -> Sampling:
        """How choice `index` of n samples: the same, with a seed of its own."""
        raise NotImplementedError

    def resumed(self, prior_tokens: int) -> Sampling:
        """How to go on after `prior_tokens` of output: max_tokens and min_tokens are reduced.

        Raises ValueError when nothing may be produced any more (the choice was finished).
        """
        raise NotImplementedError


def resolve_sampling(request: GenerationRequest, card: ModelCard, prompt_tokens: int) -> Sampling:
    """How `request` samples on the model of `card`, after a prompt of `prompt_tokens`.

    Raises ContextLengthExceeded when there is no room, BadRequest for values out of the model's bounds.
    """
    raise NotImplementedError


def check_token_ids(token_ids: tuple[int, ...], card: ModelCard, param: str = "prompt") -> None:
    """Raises BadRequest when an id is not in the model's vocabulary."""
    raise NotImplementedError
