"""Workers die and freeze under load: streams go on elsewhere with the same greedy text."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from forebay.router.v1 import router_pb2

from tests.support.client import (
    RouterClient,
    StreamResult,
    WorkerClient,
    cached_tokens,
    chat_body,
    metric,
    stream,
)
from tests.support.cluster import MODEL, Cluster
from tests.support.polling import PROGRESS_S, until
from tests.support.words import prose

pytestmark = pytest.mark.chaos

CHAT = "/v1/chat/completions"
STREAMS = 12
TOKENS = 240


def body(i: int, **extra: Any) -> dict[str, Any]:
    return chat_body(
        MODEL,
        prose(9000 + i, 50),
        max_tokens=TOKENS,
        stream_options={"include_usage": True},
        **extra,
    )


async def start_streams(
    client: httpx.AsyncClient, bodies: list[dict[str, Any]], workers: Sequence[str] = ()
) -> tuple[list[asyncio.Task[StreamResult]], list[StreamResult]]:
    """Streams of which each has shown some tokens; their live results in the same order.

    `workers`: dealt to these in turn, wherever the router would place them.
    """
    live: dict[int, StreamResult] = {}
    tasks = [
        asyncio.create_task(
            stream(
                client,
                CHAT,
                b,
                on_chunk=lambda result, i=i: live.__setitem__(i, result),
                headers={"x-forebay-worker": workers[i % len(workers)]} if workers else {},
            )
        )
        for i, b in enumerate(bodies)
    ]

    async def least() -> int:
        for task in tasks:
            if task.done():
                task.result()
        return (
            min((len(r.chunks) for r in live.values()), default=0)
            if len(live) == len(bodies)
            else 0
        )

    await until(least, lambda n: n >= 8, within_s=PROGRESS_S, what="tokens of every stream")
    assert not any(t.done() for t in tasks), "streams must be long enough for the test"
    return tasks, [live[i] for i in range(len(bodies))]


@pytest.fixture(scope="module")
def reference() -> dict[int, str]:
    """Texts of undisturbed runs, filled by the first test that needs them."""
    return {}


async def undisturbed(client: httpx.AsyncClient, reference: dict[int, str]) -> dict[int, str]:
    if not reference:
        results = await asyncio.gather(*(stream(client, CHAT, body(i)) for i in range(STREAMS)))
        reference.update({i: r.text() for i, r in enumerate(results)})
        assert len(set(reference.values())) == STREAMS, "texts must depend on their prompts"
    return reference


def state(view: router_pb2.WorkerView) -> str:
    return router_pb2.WorkerState.Name(view.state).removeprefix("WORKER_STATE_")


async def test_kill_a_worker_under_load(
    cluster: Cluster,
    client: httpx.AsyncClient,
    router: RouterClient,
    reference: dict[int, str],
    repetition: int,
) -> None:
    expected = await undisturbed(client, reference)
    gateway = cluster.ready("gateway-0").metrics_address
    migrations = await metric(gateway, "forebay_gateway_migrations_total")
    victim = f"worker-{repetition % 2}"
    assert (await router.workers())[victim].indexed_blocks > 0
    tasks, live = await start_streams(client, [body(i) for i in range(STREAMS)])
    assert victim in {r.worker for r in live}
    cluster[victim].kill()
    killed = time.monotonic()

    async def out_of_choice() -> bool:
        workers = await router.workers()
        return victim not in workers or state(workers[victim]) == "SUSPECT"

    await until(out_of_choice, within_s=2, what=f"{victim} out of choice")
    # From here on everyone is served, at once, by the other.
    fresh = await asyncio.gather(
        *(stream(client, CHAT, chat_body(MODEL, f"after {i}", max_tokens=2)) for i in range(8))
    )
    assert all(r.status == 200 and r.finish_reasons() == ["length"] for r in fresh)
    assert victim not in {r.worker for r in fresh}
    results = await asyncio.gather(*tasks)
    moved = [i for i, r in enumerate(results) if r.worker == victim]
    assert moved
    for i, result in enumerate(results):
        assert result.error is None and result.done, (i, result.chunks[-2:])
        assert result.text() == expected[i], f"stream {i} (moved: {i in moved})"
        assert result.finish_reasons() == ["length"]
        assert result.usage is not None
        assert result.usage["completion_tokens"] == TOKENS
        assert result.usage["total_tokens"] == result.usage["prompt_tokens"] + TOKENS
    gaps = [
        min(t for t in results[i].times if t > killed)
        - max(t for t in results[i].times if t <= killed)
        for i in moved
    ]
    assert max(gaps) < 5, f"streams stood still for {max(gaps):.2f} s"
    assert await metric(gateway, "forebay_gateway_migrations_total") >= migrations + len(moved)
    await restart_in_place(cluster, router, victim)


async def restart_in_place(cluster: Cluster, router: RouterClient, victim: str) -> None:
    """65: its sequence starts again at 1, and no ghost of its old blocks is left in the index."""
    cluster[victim].start()
    ready = await cluster[victim].until_ready()
    async with WorkerClient(ready.address) as worker:
        truth = await worker.digest()
    await until(
        router.digests,
        lambda d: d.get(victim) == truth,
        within_s=1.5,
        what=f"index without the ghosts of {victim}",
    )
    view = await until(
        router.workers,
        lambda w: victim in w and state(w[victim]) == "READY",
        within_s=2,
        what=f"{victim} back",
    )
    assert view[victim].worker.incarnation == ready.incarnation


async def test_kill_a_worker_under_plain_requests(
    cluster: Cluster, client: httpx.AsyncClient, reference: dict[int, str]
) -> None:
    """Not streaming: the client sees nothing at all of it."""
    expected = await undisturbed(client, reference)
    plain = [{k: v for k, v in body(i).items() if k != "stream_options"} for i in range(6)]
    tasks = [asyncio.create_task(client.post(CHAT, json=b)) for b in plain]
    await asyncio.sleep(0.5)
    cluster["worker-1"].kill()
    for i, response in enumerate(await asyncio.gather(*tasks)):
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] == expected[i]
        assert answer["usage"]["completion_tokens"] == TOKENS


async def test_what_cannot_be_restored_ends_with_an_error_event(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """49: a seeded stream can't go on elsewhere, and never looks as if it had ended well."""
    bodies = [
        body(i, temperature=1.0, seed=i) | {"max_tokens": 1500}
        if i % 2
        else body(i, presence_penalty=0.5) | {"max_tokens": 1500}
        for i in range(8)
    ]
    tasks, live = await start_streams(client, bodies)
    cluster["worker-0"].kill()
    hit = [i for i, r in enumerate(live) if r.worker == "worker-0"]
    assert hit
    results = dict(zip(hit, await asyncio.gather(*(tasks[i] for i in hit)), strict=True))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for result in results.values():
        assert result.error is not None and set(result.error) == {
            "message",
            "type",
            "param",
            "code",
        }
        assert result.finish_reasons() == []


async def test_freeze_and_thaw_a_worker(
    cluster: Cluster,
    client: httpx.AsyncClient,
    router: RouterClient,
    repetition: int,
) -> None:
    prompt = chat_body(MODEL, prose(9500 + repetition, 200), max_tokens=2)
    first = await client.post(CHAT, json=prompt)
    holder = first.headers["x-forebay-worker"]
    other = {"worker-0": "worker-1", "worker-1": "worker-0"}[holder]
    blocks = (await router.workers())[holder].indexed_blocks
    assert blocks > 0
    bodies = [body(i) for i in range(STREAMS)]
    tasks, live = await start_streams(client, bodies, [holder, other])
    frozen = [i for i, r in enumerate(live) if r.worker == holder]
    assert len(frozen) == STREAMS // 2
    cluster[holder].freeze()
    suspect = await until(
        router.workers,
        lambda w: holder in w and state(w[holder]) == "SUSPECT",
        within_s=2.5,
        what=f"suspect {holder}",
    )
    assert suspect[holder].indexed_blocks >= blocks
    avoided = await client.post(CHAT, json=prompt, timeout=10)
    assert avoided.headers["x-forebay-worker"] == other
    cluster[holder].thaw()
    await until(
        router.workers,
        lambda w: state(w[holder]) == "READY",
        within_s=2.5,
        what=f"{holder} back",
    )
    assert (await router.workers())[holder].indexed_blocks >= blocks
    results = await asyncio.gather(*tasks)
    assert all(r.error is None and r.finish_reasons() == ["length"] for r in results)
    # The blocks were kept and are found: with the other's copy forgotten, only the holder has them.
    async with WorkerClient(cluster.ready(other).address) as worker:
        await until(worker.requests, lambda n: n == 0, within_s=5, what="idle engine")
        await worker.reset_cache()
        truth = await worker.digest()
    await until(
        router.digests, lambda d: d[other] == truth, within_s=2, what=f"index without {other}"
    )
    again = await client.post(CHAT, json=prompt)
    assert again.headers["x-forebay-worker"] == holder
    assert cached_tokens(again.json()["usage"]) > 150
