"""The point of it all: a prefix is found again on the worker that has it, and by nobody else."""

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.client import (
    Json,
    RouterClient,
    cached_tokens,
    chat_body,
    completion_body,
    http_client,
    stream,
)
from tests.support.cluster import MODEL, Cluster
from tests.support.words import prose

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BLOCK = 32


async def ask(
    client: httpx.AsyncClient, body: Json, path: str = CHAT, **options: Any
) -> tuple[Json, str, int, int]:
    """Answer, worker, predicted and real cached tokens."""
    response = await client.post(path, json=body, **options)
    assert response.status_code == 200, response.text
    answer = response.json()
    predicted = int(response.headers["x-forebay-predicted-cached-tokens"])
    real = cached_tokens(answer["usage"])
    assert int(response.headers["x-forebay-cached-tokens"]) == real
    return answer, response.headers["x-forebay-worker"], predicted, real


async def test_67_a_conversation_stays_where_its_blocks_are(client: httpx.AsyncClient) -> None:
    turns: list[str] = [prose(1, 300)]
    seen: list[tuple[str, int, int, int]] = []
    for turn in range(4):
        body = chat_body(MODEL, *turns, max_tokens=40)
        answer, worker, predicted, real = await ask(client, body)
        seen.append((worker, predicted, real, answer["usage"]["prompt_tokens"]))
        turns += [answer["choices"][0]["message"]["content"], prose(100 + turn, 30)]
        # Others come in between and must not pull it away.
        for i in range(2):
            await ask(client, chat_body(MODEL, prose(1000 + 10 * turn + i, 60), max_tokens=2))
    assert len({worker for worker, *_ in seen}) == 1, seen
    (_, _, first, _), *later = seen
    assert first < BLOCK
    for (_, predicted, real, _), (_, _, _, before) in zip(later, seen, strict=False):
        assert real >= before - BLOCK, f"turns reuse all full blocks of the prompt before: {seen}"
        assert predicted == real, seen


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
async def test_66_cache_salts_keep_apart_and_share_within(
    client: httpx.AsyncClient, api: str
) -> None:
    text = prose(20 + len(api), 200)

    async def cached(**extra: Any) -> int:
        make = chat_body if api == CHAT else completion_body
        return (await ask(client, make(MODEL, text, max_tokens=2, **extra), api))[3]

    assert await cached(cache_salt="a") == 0
    assert await cached(cache_salt="a") > 4 * BLOCK
    assert await cached(cache_salt="b") == 0
    assert await cached() == 0
    assert await cached() > 4 * BLOCK
    assert await cached(cache_salt="b") > 4 * BLOCK


async def test_tenants_never_share(cluster: Cluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"sk-a": "alpha", "sk-a2": "alpha", "sk-b": "beta"}))
    cluster.start_gateway("gateway-tenants", api_keys_file=keys)
    await cluster["gateway-tenants"].until_ready()
    text = prose(30, 200)
    async with http_client(cluster.url("gateway-tenants")) as client:

        async def cached(key: str, **extra: Any) -> int:
            headers = {"authorization": f"Bearer {key}"}
            body = chat_body(MODEL, text, max_tokens=2, **extra)
            return (await ask(client, body, headers=headers))[3]

        assert await cached("sk-a") == 0
        assert await cached("sk-a2") > 4 * BLOCK, "two keys of one tenant share"
        assert await cached("sk-b") == 0
        assert await cached("sk-b") > 4 * BLOCK
        assert await cached("sk-a", cache_salt="s") == 0
        assert await cached("sk-b", cache_salt="s") == 0, "the same salt of another tenant"
        assert await cached("sk-a2", cache_salt="s") > 4 * BLOCK
    async with http_client(cluster.url()) as open_client:
        assert (await ask(open_client, chat_body(MODEL, text, max_tokens=2)))[3] == 0


async def test_68_predicted_is_what_the_engine_finds(client: httpx.AsyncClient) -> None:
    """A varied workload: growing conversations, completions of text and ids, parts, salts, n."""
    rng = random.Random(7)
    ids = [rng.randrange(300, 2000) for _ in range(700)]
    bodies: list[tuple[str, Json]] = []
    for i in range(6):
        base = prose(200 + i % 3, 120 + 40 * (i % 3))
        extra: Json = {"max_tokens": 3}
        parts = [{"type": "text", "text": base}, {"type": "text", "text": f" part {i}"}]
        bodies += [
            (CHAT, chat_body(MODEL, base, "an answer", f"and {i}?", **extra)),
            (CHAT, chat_body(MODEL, base, "an answer", f"and {i}?", "yes", "more?", **extra)),
            (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": parts}], **extra}),
            (CHAT, chat_body(MODEL, base, n=2, **extra)),
            (CHAT, chat_body(MODEL, base, cache_salt=f"s{i % 2}", **extra)),
            (CHAT, chat_body(MODEL, base, chat_template_kwargs={"add_thing": True}, **extra)),
            (
                CHAT,
                {
                    "model": MODEL,
                    "messages": [
                        {"role": "developer", "content": base},
                        {"role": "user", "content": "go"},
                    ],
                    **extra,
                },
            ),
            (COMPLETIONS, completion_body(MODEL, base, **extra)),
            (COMPLETIONS, completion_body(MODEL, ids[: 100 + 90 * i], **extra)),
        ]
    hits = 0
    for path, body in bodies:
        for _ in range(2):
            answer, worker, predicted, real = await ask(client, body, path)
            n = body.get("n", 1)
            # Of several answers, the later ones find what the first has computed meanwhile.
            assert predicted == real or (n > 1 and real >= predicted), (
                path,
                worker,
                predicted,
                real,
                answer["usage"],
                body,
            )
            hits += real > 0
    assert hits > len(bodies), "most of these are hits"


async def test_18_developer_and_20_tool_turns_reach_the_prompt(
    client: httpx.AsyncClient, tiny_model_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model_path / "tokenizer.json"))

    def length(text: str) -> int:
        return len(tokenizer.encode(text).ids)

    async def prompt_tokens(messages: list[Json]) -> int:
        body = {"model": MODEL, "messages": messages, "max_tokens": 2}
        return int((await ask(client, body))[0]["usage"]["prompt_tokens"])

    user = {"role": "user", "content": "hi"}
    plain = await prompt_tokens([user])
    assert plain == length("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    brief = "Be brief, and answer in one sentence."
    with_developer = await prompt_tokens([{"role": "developer", "content": brief}, user])
    assert with_developer - plain in {
        length(f"<|im_start|>{role}\n{brief}<|im_end|>\n") for role in ("developer", "system")
    }
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[Json] = [
        user,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    kept = await prompt_tokens(turns)
    assert kept > plain + length("<|im_start|>tool\n42<|im_end|>\n"), "the call is in the prompt"


async def test_24_parts_are_the_same_tokens_as_a_string(client: httpx.AsyncClient) -> None:
    text = prose(50, 150)
    string = await ask(client, chat_body(MODEL, text, max_tokens=4))
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}, {"type": "text", "text": text[half:]}]
    body = {**chat_body(MODEL, "", max_tokens=4), "messages": [{"role": "user", "content": parts}]}
    split = await ask(client, body)
    # The template joins parts without anything between them, so the tokens are those of the string.
    assert split[0]["usage"]["prompt_tokens"] == string[0]["usage"]["prompt_tokens"]
    assert split[1] == string[1] and split[3] >= string[0]["usage"]["prompt_tokens"] - BLOCK
    assert split[0]["choices"][0]["message"] == string[0]["choices"][0]["message"]


async def test_69_a_burst_of_equal_prefixes_is_shared_out(client: httpx.AsyncClient) -> None:
    prefix = prose(60, 80)
    bodies = [chat_body(MODEL, f"{prefix} {i}", max_tokens=1) for i in range(64)]
    results = await asyncio.gather(*(stream(client, CHAT, body) for body in bodies))
    shares = Counter(r.worker for r in results)
    assert len(shares) == 2 and max(shares.values()) <= 2 * min(shares.values()), shares


async def test_index_equals_the_workers_truth(
    cluster: Cluster, client: httpx.AsyncClient, router: RouterClient
) -> None:
    from tests.support.client import WorkerClient
    from tests.support.polling import until

    await asyncio.gather(
        *(ask(client, chat_body(MODEL, prose(70 + i, 250), max_tokens=8)) for i in range(40))
    )
    for name in ("worker-0", "worker-1"):
        async with WorkerClient(cluster.ready(name).address) as worker:
            truth = await worker.digest()
            assert truth[0] > 0
            await until(
                router.digests,
                lambda digests, name=name, truth=truth: digests[name] == truth,  # type: ignore[misc]
                within_s=2,
                what=f"index of {name} that equals {truth}",
            )
