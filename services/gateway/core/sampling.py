"""How a request samples: the client's wishes, the model's defaults, the context's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.common.cards import ModelCard
from services.gateway.core.openai import CompletionRequest, GenerationRequest
from services.gateway.errors import BadRequest, ContextLengthExceeded

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; chat's is what fits."""
_SEED_MASK = (1 << 63) - 1
_LEAST_TOP_P = 1e-9


@dataclass(frozen=True, slots=True)
class Sampling:
    """forebay.worker.v1.SamplingParams as a domain type, and what the gateway does with text.

    Fields up to `allowed_token_ids` go to the worker under the same names (None: leave the field
    out); `stop`, `include_stop_str`, `skip_special_tokens` and `n` are the gateway's own business.
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
        """How choice `index` of n samples: the same, with seed + index as its own seed."""
        if index == 0 or self.seed is None:
            return self
        return replace(self, seed=(self.seed + index) & _SEED_MASK)

    def prefill(self) -> Sampling:
        """How a prefill leg samples: one token, that nobody sees.

        Nothing that only shapes output goes along (seed, penalties, biases, log probabilities, ends
        and stops), so that the leg can't end otherwise than by its limit. The decode leg has all.
        """
        return Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)

    def resumed(self, prior_tokens: int) -> Sampling:
        """How to go on after `prior_tokens` of output: max_tokens and min_tokens are reduced.

        Raises ValueError when nothing may be produced any more (the choice was finished).
        """
        if prior_tokens >= self.max_tokens:
            raise ValueError(f"{prior_tokens} tokens are out, and max_tokens is {self.max_tokens}")
        return replace(
            self,
            max_tokens=self.max_tokens - prior_tokens,
            min_tokens=max(0, self.min_tokens - prior_tokens),
        )


def resolve_sampling(request: GenerationRequest, card: ModelCard, prompt_tokens: int) -> Sampling:
    """How `request` samples on the model of `card`, after a prompt of `prompt_tokens`.

    What the request leaves out comes from the model's generation defaults, then from OpenAI's.
    Raises ContextLengthExceeded when there is no room, BadRequest for values out of the model's
    bounds.
    """
    max_tokens = _max_tokens(request, card, prompt_tokens)
    logprobs = request.wanted_logprobs
    if logprobs is not None and logprobs > card.max_logprobs:
        raise BadRequest(
            f"This model gives at most {card.max_logprobs} log probabilities at each position.",
            param="top_logprobs" if request.prompt_param == "messages" else "logprobs",
            code="invalid_value",
        )
    check_token_ids(tuple(request.logit_bias or ()), card, "logit_bias")
    check_token_ids(request.stop_token_ids, card, "stop_token_ids")
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise BadRequest(
                "Invalid value for 'allowed_token_ids': must not be empty.",
                param="allowed_token_ids",
                code="invalid_value",
            )
        check_token_ids(request.allowed_token_ids, card, "allowed_token_ids")
    defaults = card.defaults
    return Sampling(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        temperature=_first(request.temperature, defaults.temperature, 1.0),
        # OpenAI allows 0, engines want more than nothing: this keeps the likeliest token only.
        top_p=max(_LEAST_TOP_P, _first(request.top_p, defaults.top_p, 1.0)),
        top_k=max(0, int(_first(request.top_k, defaults.top_k, 0))),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        presence_penalty=_first(request.presence_penalty, None, 0.0),
        frequency_penalty=_first(request.frequency_penalty, None, 0.0),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        # Engines read -1 as "no seed"; a client that names a seed wants it kept, so none is
        # negative.
        seed=None if request.seed is None else request.seed & _SEED_MASK,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        logit_bias=dict(request.logit_bias or {}),
        allowed_token_ids=request.allowed_token_ids or (),
        n=request.n,
        stop=request.stop,
        include_stop_str=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
    )


def resolve_each(
    request: GenerationRequest, card: ModelCard, prompt_tokens: Sequence[int]
) -> list[Sampling]:
    """As resolve_sampling, for several prompts; what they share is checked once."""
    first = resolve_sampling(request, card, prompt_tokens[0])
    others = (_max_tokens(request, card, length) for length in prompt_tokens[1:])
    return [first, *(replace(first, max_tokens=most) for most in others)]


def _max_tokens(request: GenerationRequest, card: ModelCard, prompt_tokens: int) -> int:
    most = _wanted_or_fitting(request, card, prompt_tokens)
    if request.min_tokens > most:
        raise BadRequest(
            f"Invalid value for 'min_tokens': must not be greater than the {most} tokens "
            "that may be produced.",
            param="min_tokens",
            code="invalid_value",
        )
    return most


def _wanted_or_fitting(request: GenerationRequest, card: ModelCard, prompt_tokens: int) -> int:
    limit, where = card.max_model_len, request.prompt_param
    if prompt_tokens < 1:
        raise BadRequest(
            f"Invalid value for '{where}': it has no tokens.", param=where, code="invalid_value"
        )
    room = limit - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens, and the prompt has "
            f"{prompt_tokens}. Please shorten the {where}.",
            param=where,
        )
    wanted = request.output_limit
    if wanted is None:
        return min(COMPLETION_MAX_TOKENS, room) if isinstance(request, CompletionRequest) else room
    if wanted > room:
        # A number with a million digits is nothing to print.
        shown = str(wanted) if wanted < 2**63 else "far more"
        raise ContextLengthExceeded(
            f"Invalid value for '{request.output_limit_param}': this model's maximum context "
            f"length is {limit} tokens, of which the prompt takes {prompt_tokens}; {shown} "
            f"were asked for and at most {room} fit.",
            param=request.output_limit_param,
        )
    return wanted


def check_length(least_tokens: int, card: ModelCard, param: str) -> None:
    """Raises ContextLengthExceeded for a text that has too many tokens before it is encoded."""
    if least_tokens >= card.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {card.max_model_len} tokens, "
            f"and the prompt has more than {least_tokens - 1}. Please shorten the {param}.",
            param=param,
        )


def check_token_ids(token_ids: Sequence[int], card: ModelCard, param: str = "prompt") -> None:
    """Raises BadRequest when an id is not in the model's vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < card.vocab_size):
        raise BadRequest(
            f"Invalid value for '{param}': token ids must be from 0 to {card.vocab_size - 1}.",
            param=param,
            code="invalid_value",
        )


def _first(given: float | None, of_model: float | None, otherwise: float) -> float:
    if given is not None:
        return given
    return otherwise if of_model is None else of_model
