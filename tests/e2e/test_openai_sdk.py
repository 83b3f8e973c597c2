"""The openai Python SDK, as users run it."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.models import EOS_ID
from tests.support.cluster import MODEL, Cluster

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three rivers."}]


@pytest.fixture
async def sdk(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{cluster.url()}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_chat(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=12, temperature=0
    )
    assert answer.object == "chat.completion" and answer.model == MODEL and answer.id
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


async def test_chat_stream(sdk: AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0
    )
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, reasons, usage = "", [], None
    async for chunk in stream:
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert reasons == ["length"]
    assert usage is not None and usage.completion_tokens == 20


async def test_completion(sdk: AsyncOpenAI) -> None:
    answer = await sdk.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=10, temperature=0
    )
    assert answer.object == "text_completion" and answer.choices[0].text
    stream = await sdk.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=10, temperature=0, stream=True
    )
    text = "".join([c.choices[0].text async for c in stream if c.choices])
    assert text == answer.choices[0].text
    several = await sdk.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=2, temperature=0
    )
    assert [c.index for c in several.choices] == [0, 1]
    ids = await sdk.completions.create(model=MODEL, prompt=[300, 301, 302], max_tokens=2)
    assert ids.usage is not None and ids.usage.prompt_tokens == 3


async def test_several_choices(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, n=2, temperature=1.2
    )
    first, second = answer.choices
    assert (first.index, second.index) == (0, 1)
    assert first.message.content != second.message.content
    assert answer.usage is not None and answer.usage.completion_tokens == 24


async def test_seeds(sdk: AsyncOpenAI) -> None:
    async def run(seed: int) -> str | None:
        answer = await sdk.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, temperature=1.2, seed=seed
        )
        return answer.choices[0].message.content

    a, again, b = await asyncio.gather(run(1), run(1), run(2))
    assert a == again != b


async def test_logprobs(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content) == 5
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
        assert [t.logprob for t in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    old = await sdk.completions.create(
        model=MODEL, prompt="Once", max_tokens=4, temperature=0, logprobs=2
    )
    listed = old.choices[0].logprobs
    assert listed is not None and listed.tokens is not None and len(listed.tokens) == 4
    assert listed.token_logprobs is not None and len(listed.token_logprobs) == 4
    assert listed.text_offset == sorted(listed.text_offset or [])


async def test_stop(sdk: AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=5,
        temperature=0,
        logit_bias={str(EOS_ID): 100},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content in ("", None)
    assert answer.usage is not None and answer.usage.completion_tokens == 1
    whole = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0
    )
    text = whole.choices[0].message.content
    assert text is not None
    stopped = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=30, temperature=0, stop=[text[10:20]]
    )
    assert stopped.choices[0].message.content == text[: text.index(text[10:20])]
    assert stopped.choices[0].finish_reason == "stop"


async def test_models(sdk: AsyncOpenAI) -> None:
    listed = [m.id async for m in sdk.models.list()]
    assert listed == [MODEL]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("org/none")


async def test_11_errors(sdk: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=0)
    assert isinstance(bad.value.body, dict)
    assert bad.value.body["message"] and bad.value.body["param"] == "max_tokens"
    assert bad.value.param == "max_tokens" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as tools:
        await sdk.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert "tools" in str(tools.value)
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as missing:
            await sdk.chat.completions.create(model="no/such", messages=MESSAGES, stream=stream)
        assert missing.value.code == "model_not_found" and missing.value.param == "model"
        with pytest.raises(openai.BadRequestError) as long:
            await sdk.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "word " * 20_000}],
                stream=stream,
            )
        assert long.value.code == "context_length_exceeded"


async def test_leaving_a_stream_closes_it(sdk: AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3000, temperature=0, stream=True
    )
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 3:
            break
    await stream.close()
    # The cluster fixture's end checks that the engines are idle.
