import json
from typing import Any

import pytest

from services.common.cards import GenerationDefaults, ModelCard
from services.gateway.core.openai import parse_chat, parse_completion
from services.gateway.core.sampling import (
    Sampling,
    check_length,
    check_token_ids,
    resolve_each,
    resolve_sampling,
)
from services.gateway.errors import BadRequest, ContextLengthExceeded


def card(**fields: Any) -> ModelCard:
    return ModelCard(
        model="m", namespace=b"", block_size=32, max_model_len=100, vocab_size=1000, **fields
    )


def resolve(prompt_tokens: int = 10, on: ModelCard | None = None, **fields: Any) -> Sampling:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return resolve_sampling(parse_chat(json.dumps(body).encode()), on or card(), prompt_tokens)


def complete(prompt_tokens: int = 10, **fields: Any) -> Sampling:
    body = {"model": "m", "prompt": "hi", **fields}
    return resolve_sampling(parse_completion(json.dumps(body).encode()), card(), prompt_tokens)


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        resolve(**fields)
    return caught.value


def test_openais_defaults() -> None:
    assert resolve() == Sampling(max_tokens=90)


def test_the_models_defaults_hold_where_the_request_is_silent() -> None:
    defaults = GenerationDefaults(0.6, 0.9, 20, 0.05, 1.1)
    sampling = resolve(on=card(defaults=defaults))
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 20)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
    sampling = resolve(
        on=card(defaults=defaults),
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=0,
        repetition_penalty=1,
    )
    assert sampling == Sampling(max_tokens=90, temperature=0)


@pytest.mark.parametrize("limit", [91, 10**9, 10**30, 10**400])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_case_26_more_than_fits(field: str, limit: int) -> None:
    error = refused(**{field: limit})
    assert isinstance(error, ContextLengthExceeded)
    assert error.param == field
    assert len(error.message) < 300


def test_case_26_what_just_fits() -> None:
    assert resolve(max_tokens=90).max_tokens == 90


def test_case_27_the_limit() -> None:
    assert resolve(max_tokens=None).max_tokens == 90
    assert resolve(max_tokens=8, max_completion_tokens=2).max_tokens == 2
    assert complete().max_tokens == 16
    assert complete(prompt_tokens=95).max_tokens == 5


@pytest.mark.parametrize("prompt_tokens", [100, 101, 10**6])
def test_case_28_a_prompt_too_long(prompt_tokens: int) -> None:
    error = refused(prompt_tokens=prompt_tokens, stream=True)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert resolve(prompt_tokens=99).max_tokens == 1


def test_case_28_a_prompt_too_long_to_be_encoded() -> None:
    check_length(99, card(), "messages")
    with pytest.raises(ContextLengthExceeded) as caught:
        check_length(100, card(), "messages")
    assert caught.value.param == "messages"


def test_a_prompt_of_nothing() -> None:
    with pytest.raises(BadRequest) as caught:
        complete(prompt_tokens=0)
    assert caught.value.param == "prompt"


def test_case_30_greedy_choices() -> None:
    sampling = resolve(n=2, temperature=0)
    assert (sampling.n, sampling.temperature) == (2, 0)


@pytest.mark.parametrize("bias", [{"999999": 5}, {"1000": 5}])
def test_case_42_bias_beyond_the_vocabulary(bias) -> None:
    assert refused(logit_bias=bias).param == "logit_bias"
    assert resolve(logit_bias={"999": 5}).logit_bias == {999: 5.0}


def test_ids_beyond_the_vocabulary() -> None:
    assert refused(stop_token_ids=[1000]).param == "stop_token_ids"
    assert refused(allowed_token_ids=[1, 1000]).param == "allowed_token_ids"
    assert refused(allowed_token_ids=[]).param == "allowed_token_ids"
    with pytest.raises(BadRequest) as caught:
        check_token_ids((-1,), card())
    assert caught.value.param == "prompt"


def test_min_tokens_within_the_limit() -> None:
    assert refused(min_tokens=5, max_tokens=4).param == "min_tokens"
    assert resolve(min_tokens=4, max_tokens=4).min_tokens == 4


def test_the_model_bounds_log_probabilities() -> None:
    few = card(max_logprobs=3)
    assert resolve(on=few, logprobs=True, top_logprobs=3).logprobs == 3
    assert refused(on=few, logprobs=True, top_logprobs=4).param == "top_logprobs"


def test_each_choice_has_its_own_seed() -> None:
    sampling = resolve(n=3, seed=7)
    assert [sampling.for_choice(i).seed for i in range(3)] == [7, 8, 9]
    assert resolve(n=2).for_choice(1).seed is None


@pytest.mark.parametrize("seed", [-1, -2, -(2**63), 2**63 - 1, 0])
def test_a_seed_stays_a_seed_and_an_int64(seed: int) -> None:
    sampling = resolve(n=2, seed=seed)
    for i in range(2):
        got = sampling.for_choice(i).seed
        # -1 means "no seed" to engines.
        assert got is not None
        assert 0 <= got < 2**63
    assert sampling.for_choice(0).seed != sampling.for_choice(1).seed


def test_top_p_of_nothing_is_the_likeliest_token() -> None:
    assert 0 < resolve(top_p=0).top_p < 1e-6
    assert resolve(top_k=-1).top_k == 0


def test_resuming_reduces_the_limits() -> None:
    sampling = resolve(max_tokens=10, min_tokens=4)
    assert (sampling.resumed(3).max_tokens, sampling.resumed(3).min_tokens) == (7, 1)
    assert (sampling.resumed(9).max_tokens, sampling.resumed(9).min_tokens) == (1, 0)
    assert sampling.resumed(0) == sampling
    with pytest.raises(ValueError, match="max_tokens"):
        sampling.resumed(10)


def test_each_prompt_has_its_own_room() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "logit_bias": {"5": 1}, "min_tokens": 3}
    request = parse_completion(json.dumps(body).encode())
    first, second = resolve_each(request, card(), [10, 95])
    assert first == resolve_sampling(request, card(), 10)
    assert second == resolve_sampling(request, card(), 95) and second.max_tokens == 5
    # What all share is looked at once, however many prompts there are.
    assert second.logit_bias is first.logit_bias
    with pytest.raises(BadRequest) as caught:
        resolve_each(request, card(), [10, 98])
    assert caught.value.param == "min_tokens"
