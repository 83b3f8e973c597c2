"""What a worker refuses, and how it names it."""

import math
from dataclasses import replace
from typing import Any

import pytest

from services.worker.core.model import Generation, Sampling
from services.worker.core.validation import Limits, adapter_of, check

LIMITS = Limits(
    model="org/tiny",
    adapters=frozenset({"twist"}),
    vocab_size=100,
    max_model_len=64,
    max_logprobs=20,
)
GOOD = Generation("r", "att", "org/tiny", tuple(range(10)), Sampling(max_tokens=4))


def sampled(**more: Any) -> Generation:
    return replace(GOOD, sampling=replace(GOOD.sampling, **more))


@pytest.mark.parametrize(
    "generation",
    [
        GOOD,
        replace(GOOD, model=""),
        replace(GOOD, model="twist"),
        replace(GOOD, adapter="twist"),
        replace(GOOD, adapter="twist", model="twist"),
        replace(GOOD, prompt=(99,) * 63),
        replace(GOOD, dp_rank=0),
        # Beyond the context: it ends there with "length".
        sampled(max_tokens=10_000),
        sampled(temperature=0.0, top_p=1.0, min_p=1.0, top_k=7),
        sampled(logit_bias={99: -100.0}, allowed_token_ids=(1,), stop_token_ids=(0,)),
        sampled(logprobs=20, prompt_logprobs=0),
        replace(sampled(temperature=0.0, seed=3), prior_output=(1, 2)),
        replace(sampled(repetition_penalty=1.3, min_tokens=2), prior_output=(1, 2)),
    ],
)
def test_good_requests_pass(generation: Generation) -> None:
    assert check(generation, LIMITS) is None


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (replace(GOOD, prompt=()), "prompt_token_ids"),
        (replace(GOOD, prompt=(100,)), "prompt_token_ids"),
        (replace(GOOD, prompt=(1,) * 64), "prompt_token_ids"),
        (replace(GOOD, prompt=(1,) * 60, prior_output=(1,) * 4), "prompt_token_ids"),
        (replace(GOOD, prior_output=(100,)), "prior_output_token_ids"),
        (replace(GOOD, dp_rank=1), "dp_rank"),
        (sampled(max_tokens=0), "max_tokens"),
        (sampled(min_tokens=5), "min_tokens"),
        (sampled(temperature=-0.1), "temperature"),
        (sampled(temperature=math.nan), "temperature"),
        (sampled(temperature=math.inf), "temperature"),
        (sampled(temperature=2.1), "temperature"),
        (sampled(top_p=0.0), "top_p"),
        (sampled(top_p=1.1), "top_p"),
        (sampled(min_p=-0.1), "min_p"),
        (sampled(presence_penalty=2.5), "presence_penalty"),
        (sampled(frequency_penalty=-3.0), "frequency_penalty"),
        (sampled(repetition_penalty=0.0), "repetition_penalty"),
        (sampled(logit_bias={100: 1.0}), "logit_bias"),
        (sampled(logit_bias={1: math.nan}), "logit_bias"),
        (sampled(logit_bias={1: 101.0}), "logit_bias"),
        (sampled(allowed_token_ids=(5, 100)), "allowed_token_ids"),
        (sampled(stop_token_ids=(4_000_000_000,)), "stop_token_ids"),
        (sampled(logprobs=21), "logprobs"),
        (sampled(prompt_logprobs=21), "prompt_logprobs"),
    ],
)
def test_mistakes_name_their_field(generation: Generation, field: str) -> None:
    failure = check(generation, LIMITS)
    assert failure is not None
    assert (failure.code, failure.reason, failure.field) == (3, "INVALID_REQUEST", field)
    assert field in failure.message or "prompt" in failure.message


@pytest.mark.parametrize(
    "generation",
    [replace(GOOD, model="other"), replace(GOOD, adapter="other"), replace(GOOD, model="Twist")],
)
def test_unknown_names(generation: Generation) -> None:
    failure = check(generation, LIMITS)
    assert failure is not None
    assert (failure.code, failure.reason) == (5, "MODEL_NOT_FOUND")


@pytest.mark.parametrize(
    ("generation", "field"),
    [
        (sampled(seed=1), "seed"),
        (sampled(temperature=0.0, presence_penalty=0.1), "presence_penalty"),
        (sampled(frequency_penalty=-0.1), "frequency_penalty"),
        (sampled(prompt_logprobs=0), "prompt_logprobs"),
    ],
)
def test_state_that_cannot_be_restored(generation: Generation, field: str) -> None:
    failure = check(replace(generation, prior_output=(1, 2)), LIMITS)
    assert failure is not None
    assert (failure.code, failure.reason, failure.field) == (9, "RESUME_UNSUPPORTED", field)
    assert check(generation, LIMITS) is None


def test_what_is_not_built_is_refused() -> None:
    failure = check(replace(GOOD, unbuilt=("kv_lease", "transfer")), LIMITS)
    assert failure is not None
    assert (failure.code, failure.reason, failure.field) == (9, "UNSUPPORTED", "kv_lease")


def test_prompt_logprobs_must_fit_into_a_message() -> None:
    wide = replace(LIMITS, max_model_len=10**6)
    generation = replace(sampled(prompt_logprobs=20), prompt=(1,) * 100_000)
    failure = check(generation, wide)
    assert failure is not None
    assert failure.field == "prompt_logprobs"


def test_model_may_name_the_adapter() -> None:
    assert adapter_of(replace(GOOD, model="twist"), LIMITS) == "twist"
    assert adapter_of(GOOD, LIMITS) == ""
    assert adapter_of(replace(GOOD, adapter="twist"), LIMITS) == "twist"
