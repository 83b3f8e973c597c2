"""Is a request one that this worker can run? A client's mistakes are found here, not in the engine.

An answer is a Failure to be sent back, with google.rpc.Code numbers, or None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.worker.core.model import Failure, Generation, Sampling

MAX_PROMPT_LOGPROB_NUMBERS = 4_000_000
"""All prompt log probabilities travel in one message, which must stay below the message limit."""
_INVALID_ARGUMENT, _NOT_FOUND, _FAILED_PRECONDITION = 3, 5, 9


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model allows."""

    model: str
    adapters: frozenset[str]
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    dp_size: int = 1
    transfer: str = ""
    """How its KV can be taken; empty: not at all."""


def check(generation: Generation, limits: Limits) -> Failure | None:
    """The first thing that is wrong with a request, if any.

    Reasons: INVALID_REQUEST (with the field), MODEL_NOT_FOUND, RESUME_UNSUPPORTED for prior output
    whose sampling state can't be restored, UNSUPPORTED for what is not built yet.
    """
    for problems in (_unbuilt, _apart, _name, _prompt, _sampling, _resume, _rank):
        for failure in problems(generation, limits):
            return failure
    return None


def adapter_of(generation: Generation, limits: Limits) -> str:
    """Name of the adapter to apply, empty for the base model. `model` may name an adapter too."""
    if generation.adapter:
        return generation.adapter
    return generation.model if generation.model in limits.adapters else ""


def _invalid(field: str, message: str) -> Failure:
    return Failure(_INVALID_ARGUMENT, "INVALID_REQUEST", message, field)


def _unbuilt(generation: Generation, limits: Limits) -> Iterator[Failure]:
    for field in generation.unbuilt:
        yield Failure(
            _FAILED_PRECONDITION,
            "UNSUPPORTED",
            f"{field} is set, but this version of the worker does not support it",
            field,
        )


def _apart(generation: Generation, limits: Limits) -> Iterator[Failure]:
    if generation.prefill_only and not limits.transfer:
        yield Failure(
            _FAILED_PRECONDITION,
            "NO_TRANSFER",
            "prefill_only is set, but this worker's engine can't hand KV to others",
            "prefill_only",
        )
    if generation.prefill_only and generation.transfer is not None:
        yield _invalid("transfer", "a prefill leg takes no transfer")


def _name(generation: Generation, limits: Limits) -> Iterator[Failure]:
    adapter = adapter_of(generation, limits)
    if adapter and adapter not in limits.adapters:
        message = f"this worker serves no adapter {adapter!r}"
        yield Failure(_NOT_FOUND, "MODEL_NOT_FOUND", message, "adapter")
    if generation.model not in ("", limits.model, adapter):
        message = f"this worker serves {limits.model!r}, not {generation.model!r}"
        yield Failure(_NOT_FOUND, "MODEL_NOT_FOUND", message, "model")


def _prompt(generation: Generation, limits: Limits) -> Iterator[Failure]:
    if not generation.prompt:
        yield _invalid("prompt_token_ids", "the prompt needs at least one token")
    yield from _ids("prompt_token_ids", generation.prompt, limits)
    yield from _ids("prior_output_token_ids", generation.prior_output, limits)
    total = len(generation.prompt) + len(generation.prior_output)
    if total >= limits.max_model_len:
        yield _invalid(
            "prompt_token_ids",
            f"prompt and prior output have {total} tokens; the model's context is"
            f" {limits.max_model_len} tokens, and at least one must be left for the answer",
        )


def _ids(field: str, ids: Iterable[int], limits: Limits) -> Iterator[Failure]:
    highest = max(ids, default=0)
    if highest >= limits.vocab_size:
        yield _invalid(
            field,
            f"{field} has the id {highest}; the model's vocabulary has {limits.vocab_size} ids",
        )


def _sampling(generation: Generation, limits: Limits) -> Iterator[Failure]:
    s: Sampling = generation.sampling
    if s.max_tokens < 1:
        yield _invalid("max_tokens", "max_tokens must be at least 1")
    if s.min_tokens > s.max_tokens:
        yield _invalid(
            "min_tokens", f"min_tokens is {s.min_tokens}, more than max_tokens ({s.max_tokens})"
        )
    yield from _range("temperature", s.temperature, 0.0, 2.0)
    yield from _range("top_p", s.top_p, 0.0, 1.0, open_low=True)
    yield from _range("min_p", s.min_p, 0.0, 1.0)
    yield from _range("presence_penalty", s.presence_penalty, -2.0, 2.0)
    yield from _range("frequency_penalty", s.frequency_penalty, -2.0, 2.0)
    yield from _range("repetition_penalty", s.repetition_penalty, 0.0, math.inf, open_low=True)
    yield from _ids("stop_token_ids", s.stop_token_ids, limits)
    yield from _ids("allowed_token_ids", s.allowed_token_ids, limits)
    yield from _ids("logit_bias", s.logit_bias, limits)
    for bias in s.logit_bias.values():
        yield from _range("logit_bias", bias, -100.0, 100.0)
    for field, wanted in (("logprobs", s.logprobs), ("prompt_logprobs", s.prompt_logprobs)):
        if wanted is not None and wanted > limits.max_logprobs:
            yield _invalid(
                field, f"{field} is {wanted}; this model gives at most {limits.max_logprobs}"
            )
    if s.prompt_logprobs is not None:
        numbers = len(generation.prompt) * (3 + 2 * s.prompt_logprobs)
        if numbers > MAX_PROMPT_LOGPROB_NUMBERS:
            yield _invalid(
                "prompt_logprobs",
                f"prompt_logprobs over {len(generation.prompt)} prompt tokens would not fit into"
                " one answer; ask for fewer, or for a shorter prompt",
            )


def _range(
    field: str, value: float, low: float, high: float, *, open_low: bool = False
) -> Iterator[Failure]:
    fits = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not fits:
        left = f"more than {low:g}" if open_low else f"at least {low:g}"
        right = f" and at most {high:g}" if math.isfinite(high) else ""
        yield _invalid(field, f"{field} is {value}; it must be {left}{right}")


def _resume(generation: Generation, limits: Limits) -> Iterator[Failure]:
    s = generation.sampling
    if not generation.prior_output:
        return
    lost = {
        "seed": s.seed is not None and s.temperature > 0,
        "presence_penalty": s.presence_penalty != 0,
        "frequency_penalty": s.frequency_penalty != 0,
        "prompt_logprobs": s.prompt_logprobs is not None,
    }
    for field, is_lost in lost.items():
        if is_lost:
            yield Failure(
                _FAILED_PRECONDITION,
                "RESUME_UNSUPPORTED",
                f"a request with {field} can't go on from prior output:"
                " the engine can't restore its state",
                field,
            )


def _rank(generation: Generation, limits: Limits) -> Iterator[Failure]:
    rank = generation.dp_rank
    if rank is not None and not 0 <= rank < limits.dp_size:
        yield _invalid(
            "dp_rank",
            f"dp_rank is {rank}; this engine has {limits.dp_size} rank(s), counted from 0",
        )
