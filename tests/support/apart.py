"""Requests through a gateway, prompts computed by one worker, decoded by another: right texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
from forebay.router.v1 import router_pb2

from tests.support.client import RouterClient, StreamResult, chat_body, stream
from tests.support.cluster import MODEL, Cluster
from tests.support.pairs import Pairs
from tests.support.polling import until
from tests.support.words import prose

REQUESTS = 8
TOKENS = 60
_CHAT = "/v1/chat/completions"
_WORDS = 500


def body(number: int, round: int, **extra: Any) -> dict[str, Any]:
    """Each round has prompts of its own, so that nothing of them is cached."""
    return chat_body(
        MODEL,
        prose(50_000 + 100 * round + number, _WORDS),
        max_tokens=TOKENS,
        stream_options={"include_usage": True},
        **extra,
    )


def round_of(number: int) -> list[dict[str, Any]]:
    """All of a round."""
    return [body(n, number) for n in range(REQUESTS)]


async def ask(client: httpx.AsyncClient, one: dict[str, Any], **headers: str) -> StreamResult:
    """One request, to its end."""
    return await stream(client, _CHAT, one, headers=headers)


def start(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]
) -> list[asyncio.Task[StreamResult]]:
    """All at once."""
    return [asyncio.create_task(ask(client, b)) for b in bodies]


async def expected_of(
    client: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], worker: str
) -> list[str]:
    """The texts by one worker that does all of each, one after the other."""
    results = [await ask(client, b, **{"x-forebay-worker": worker}) for b in bodies]
    assert all(r.error is None for r in results)
    return [r.text() for r in results]


def check(results: Sequence[StreamResult], expected: Sequence[str]) -> None:
    """Each one ended well, and said what it should."""
    for number, (result, text) in enumerate(zip(results, expected, strict=True)):
        assert result.error is None and result.done, (number, result.chunks[-2:])
        assert result.finish_reasons() == ["length"]
        assert result.text() == text, number


async def forget(cluster: Cluster, *workers: str) -> None:
    """Empties engines' caches. The router knows of it: else it would count on what was there."""
    await Pairs(cluster).at_rest(*workers)
    await Pairs(cluster).forget(*workers)
    async with RouterClient(cluster.ready("router-0").address) as router:

        async def known() -> int:
            stats = await router.stub.GetIndexStats(router_pb2.GetIndexStatsRequest(), timeout=5)
            return int(stats.entries)

        await until(known, lambda n: n == 0, within_s=10, what="a router that knows no blocks")
