"""The openai SDK: answers, streams, and its own classes for our errors."""

from typing import Any

import httpx
import openai
import pytest


@pytest.fixture
def sdk() -> Any:
    def make(r: Any, key: str = "none", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://{r.address}/v1",
            api_key=key,
            max_retries=0,
            http_client=httpx.AsyncClient(trust_env=False),
            **options,
        )

    return make


async def test_all_is_understood(rig: Any, sdk: Any) -> None:
    async with rig(sse_keep_alive_s=0.05, interval_s=0.12) as r, sdk(r) as client:
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            n=2,
            logprobs=True,
            top_logprobs=2,
        )
        assert len(chat.choices) == 2 and chat.choices[0].finish_reason == "length"
        assert len(chat.choices[0].logprobs.content) == 3
        assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
        assert chat.usage.prompt_tokens_details.cached_tokens == 0
        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            usage = chunk.usage or usage
        assert text == chat.choices[0].message.content
        assert usage.completion_tokens == 3
        done = await client.completions.create(model="tiny", prompt="hi", max_tokens=2, echo=True)
        assert done.choices[0].text.startswith("hi")
        assert [m.id async for m in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_have_their_class(rig: Any, sdk: Any) -> None:
    async with rig() as r, sdk(r) as client:
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="tiny", messages=messages, temperature=9)
        assert bad.value.body["message"] and bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="no/such", messages=messages, stream=True)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("no/such")
        await r.worker.kill()
        with pytest.raises(openai.InternalServerError) as nobody:
            await client.chat.completions.create(model="tiny", messages=messages)
        assert nobody.value.status_code == 503


async def test_error_in_a_stream_is_raised(rig: Any, sdk: Any) -> None:
    async with rig(interval_s=None) as r, sdk(r) as client:
        task = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=50
        )
        import asyncio

        pending = asyncio.ensure_future(task)
        await r.worker.until(lambda: len(r.worker.running) == 1)
        r.worker.step(2)
        chunks = await pending
        await anext(chunks)
        await r.worker.kill()
        with pytest.raises(openai.APIError, match="No worker"):
            async for _ in chunks:
                pass


async def test_wrong_key(rig: Any, sdk: Any, tmp_path: Any) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('"sk-one" = "tenant"\n')
    async with rig(api_keys_file=str(path)) as r:
        async with sdk(r, "sk-one") as client:
            await client.models.list()
        async with sdk(r, "sk-other") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
