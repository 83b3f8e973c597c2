"""Router, etcd and event streams fail: clients see nothing, and what was known comes back."""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest
from forebay.events.v1 import events_pb2
from forebay.router.v1 import router_pb2
from forebay.worker.v1 import worker_pb2

from tests.models import tiny_adapter
from tests.support.client import (
    RouterClient,
    WorkerClient,
    cached_tokens,
    chat_body,
    http_client,
    metric,
)
from tests.support.cluster import MODEL, Cluster
from tests.support.errors import openai_error
from tests.support.etcd import Etcd
from tests.support.polling import until
from tests.support.proxies import EventProxy, proxy_flags, worker_proxies
from tests.support.words import prose

pytestmark = pytest.mark.chaos

CHAT = "/v1/chat/completions"
OUTAGE_S = 20.0
"""How long etcd is away: past every lease in the cluster."""


async def truths(cluster: Cluster) -> dict[str, tuple[int, int]]:
    found = {}
    for name in ("worker-0", "worker-1"):
        async with WorkerClient(cluster.ready(name).address) as worker:
            found[name] = await worker.digest()
    return found


@asynccontextmanager
async def steady_load(client: httpx.AsyncClient, clients: int = 3) -> AsyncIterator[list[float]]:
    """Requests one after the other from several clients; at the end none may have failed.

    Yields the list of their durations, which grows.
    """
    stop = asyncio.Event()
    durations: list[float] = []

    async def one(number: int) -> None:
        i = 0
        while not stop.is_set():
            i += 1
            started = time.monotonic()
            text = prose(random.Random(number * 10_000 + i).randrange(50), 40)
            response = await client.post(CHAT, json=chat_body(MODEL, text, max_tokens=8))
            assert response.status_code == 200, response.text
            durations.append(time.monotonic() - started)
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(one(number))
        try:
            yield durations
        finally:
            stop.set()


async def test_restart_the_router(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    prompt = chat_body(MODEL, prose(11_000 + repetition, 250), max_tokens=2)
    first = await client.post(CHAT, json=prompt)
    holder = first.headers["x-forebay-worker"]
    gateway = cluster.ready("gateway-0").metrics_address
    async with steady_load(client):
        cluster["router-0"].kill()
        await asyncio.sleep(0.5)
        cluster["router-0"].start()
        ready = await cluster["router-0"].until_ready()
    started = time.monotonic()
    async with RouterClient(ready.address) as router:

        async def index_is_right() -> bool:
            return await router.digests() == await truths(cluster)

        await until(index_is_right, within_s=2, what="index that equals the workers' truth")

        await until(
            lambda: metric(gateway, "forebay_gateway_router_connected"),
            within_s=max(0.2, 2 - (time.monotonic() - started)),
            what="gateway that asks the router again",
        )
    again = await client.post(CHAT, json=prompt)  # asked once: an answer elsewhere would be a copy
    predicted = int(again.headers["x-forebay-predicted-cached-tokens"])
    real = cached_tokens(again.json()["usage"])
    assert again.headers["x-forebay-worker"] == holder
    assert abs(predicted - real) <= 32 and real > 200


async def test_no_router_means_least_loaded(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    address = cluster.ready("gateway-0").metrics_address
    name = "forebay_gateway_router_fallback_total"
    before = await metric(address, name)
    async with steady_load(client) as durations:
        cluster["router-0"].kill()
        seen = len(durations)
        await until(
            lambda: metric(address, name),
            lambda n: n > before,
            within_s=5,
            what="placements without a router",
        )
        served: set[str] = set()
        for burst in range(3):
            answers = await asyncio.gather(
                *(
                    client.post(CHAT, json=chat_body(MODEL, f"{burst} {i}", max_tokens=20))
                    for i in range(8)
                )
            )
            assert all(a.status_code == 200 for a in answers)
            served |= {a.headers["x-forebay-worker"] for a in answers}
        assert served == {"worker-0", "worker-1"}, "load is shared without a router as well"
        assert len(durations) > seen
        assert max(durations[seen:]) < 5


async def test_no_worker_is_a_503_with_retry_after(cluster: Cluster) -> None:
    cluster.start_gateway("gateway-alone", cluster="empty")
    await cluster["gateway-alone"].until_ready()
    async with http_client(cluster.url("gateway-alone")) as client:
        for stream in (False, True):
            body = chat_body(MODEL, "hi", max_tokens=2, stream=stream)
            response = await client.post(CHAT, json=body)
            assert response.status_code == 503, response.text
            openai_error(response)
            assert int(response.headers["retry-after"]) >= 1
        assert (await client.get("/v1/models")).json()["data"] == []
        assert (await client.get("/live")).status_code == 200


async def test_stop_etcd(
    cluster: Cluster,
    client: httpx.AsyncClient,
    router: RouterClient,
    etcd: Etcd,
    repetition: int,
) -> None:
    """Every second time it comes back empty."""
    prefix = "/forebay/default/"
    records = set(etcd.keys(prefix))
    assert len(records) == 4
    workers = {w: v.worker.incarnation for w, v in (await router.workers()).items()}
    indexed = {w: v.indexed_blocks for w, v in (await router.workers()).items()}
    async with steady_load(client) as durations:
        etcd.kill()
        stopped = time.monotonic()
        try:
            while time.monotonic() < stopped + OUTAGE_S:
                await all_there(router, workers)
                await asyncio.sleep(0.2)
            assert len(durations) > 20, "serving went on"
        finally:
            if repetition % 2:
                etcd.wipe()
            etcd.start(wait=False)  # here: what a thread starts dies with the thread
            await asyncio.to_thread(etcd.wait_healthy)

        async def registered() -> set[str]:
            await all_there(router, workers)
            return set(await asyncio.to_thread(etcd.keys, prefix))

        await until(
            registered, lambda k: k == records, within_s=10, what="all records", every_s=0.2
        )
        # Beyond the end of every old lease, should etcd have kept them.
        again = time.monotonic()
        while time.monotonic() < again + 4:
            assert await registered() == records
            await asyncio.sleep(0.2)
        assert max(durations) < 5
    after = await router.workers()
    assert all(after[w].indexed_blocks >= indexed[w] * 0.9 for w in indexed), "blocks were kept"


async def all_there(router: RouterClient, incarnations: dict[str, int]) -> None:
    """Nobody was removed, or replaced by a new life of itself."""
    seen = {w: v.worker.incarnation for w, v in (await router.workers()).items()}
    assert seen == incarnations


async def test_no_worker_left_is_a_503_with_retry_after(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    for name in ("worker-0", "worker-1"):
        cluster[name].kill()
    killed = time.monotonic()
    while time.monotonic() < killed + 5:  # beyond the end of their leases
        response = await client.post(CHAT, json=chat_body(MODEL, "anyone?", max_tokens=2))
        assert response.status_code == 503, response.text
        openai_error(response)
        assert int(response.headers["retry-after"]) >= 1
        await asyncio.sleep(0.5)
    assert (await client.get("/health")).status_code == 503


def has_events(envelope: bytes) -> bool:
    return bool(events_pb2.Envelope.FromString(envelope).events)


@pytest.fixture(scope="module")
def lossy(
    session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EventProxy]:
    """A third worker, which others reach through proxies only, and which serves an adapter."""
    folder = tmp_path_factory.mktemp("adapter")
    with worker_proxies() as (tcp, events):
        session_cluster.start_worker(
            "worker-lossy",
            adapters=f"twist={tiny_adapter(folder)}",
            adapter_root=tmp_path_factory.mktemp("links"),
            **proxy_flags(tcp, events),
        )
        session_cluster.keep("worker-lossy")
        session_cluster["worker-lossy"].wait_ready()
        yield events
        session_cluster.forget("worker-lossy")


_NUMBERS = itertools.count()


class Lossy:
    """What the tests do with the third worker."""

    def __init__(self, worker: WorkerClient, router: RouterClient, proxy: EventProxy) -> None:
        self.worker, self.router, self.proxy = worker, router, proxy

    async def work(self, requests: int) -> None:
        """Fills blocks: each request has a prompt of its own."""
        for _ in range(requests):
            number = next(_NUMBERS)
            rng = random.Random(number)
            request = worker_pb2.GenerateRequest(
                request_id=f"lossy-{number}",
                attempt_id=f"lossy-{number}",
                model=MODEL,
                prompt_token_ids=[rng.randrange(300, 2000) for _ in range(200)],
                sampling=worker_pb2.SamplingParams(max_tokens=4, temperature=0),
            )
            async for _answer in self.worker.stub.Generate(request, timeout=20):
                pass

    async def converges(self, within_s: float = 3) -> None:
        async def both() -> tuple[tuple[int, int] | None, tuple[int, int]]:
            indexed = (await self.router.digests()).get("worker-lossy")
            return indexed, await self.worker.digest()

        await until(both, lambda d: d[0] == d[1], within_s=within_s, what="equal index")

    async def gap_noticed(self, before: router_pb2.GetIndexStatsResponse) -> None:
        await until(
            self.router.index, lambda i: i.gaps > before.gaps, within_s=2, what="noticed gap"
        )


@pytest.fixture
async def third(cluster: Cluster, router: RouterClient, lossy: EventProxy) -> AsyncIterator[Lossy]:
    async with WorkerClient(cluster.ready("worker-lossy").address) as worker:
        it = Lossy(worker, router, lossy)
        await it.work(2)
        await it.converges(within_s=10)
        yield it
        lossy.drop = lambda envelope: False


async def test_events_lost_in_the_middle(third: Lossy, repetition: int) -> None:
    before = await third.router.index()
    left = 100  # row 65: a hundred messages

    def drop(envelope: bytes) -> bool:
        nonlocal left
        if left and has_events(envelope):
            left -= 1
            return True
        return False

    third.proxy.drop = drop
    dropped = third.proxy.dropped
    await third.work(25)
    lost = third.proxy.dropped - dropped
    assert lost > 10
    left = 0
    await third.work(1)
    await third.converges()
    after = await third.router.index()
    assert after.gaps > before.gaps
    assert after.snapshots > before.snapshots


async def test_the_last_events_lost_show_by_heartbeats(third: Lossy, repetition: int) -> None:
    before = await third.router.index()
    third.proxy.drop = has_events
    await third.work(3)
    third.proxy.drop = lambda envelope: False
    await third.gap_noticed(before)  # nothing more is done: only heartbeats tell
    await third.converges()


async def test_single_events_lost_at_random(third: Lossy, repetition: int) -> None:
    rng = random.Random(repetition)
    third.proxy.drop = lambda envelope: rng.random() < 0.2
    dropped = third.proxy.dropped
    await third.work(20)
    assert third.proxy.dropped > dropped
    third.proxy.drop = lambda envelope: False
    await third.converges()


async def test_a_silent_stream_makes_a_suspect_and_a_heard_one_clears_it(
    third: Lossy, repetition: int
) -> None:
    third.proxy.drop = lambda envelope: True
    await until(
        third.router.workers,
        lambda w: w["worker-lossy"].state == router_pb2.WORKER_STATE_SUSPECT,
        within_s=2.5,
        what="suspect worker",
    )
    await third.work(2)
    third.proxy.drop = lambda envelope: False
    await until(
        third.router.workers,
        lambda w: w["worker-lossy"].state == router_pb2.WORKER_STATE_READY,
        within_s=2.5,
        what="worker that is ready again",
    )
    await third.converges()


async def test_66_an_adapter_shares_no_blocks_with_its_base(
    third: Lossy, client: httpx.AsyncClient
) -> None:
    """Also row I6 of the tiers: router, engine and tiers name a block by one function."""
    text = prose(16_000, 150)

    async def ask(model: str) -> tuple[str, int]:
        response = await client.post(CHAT, json=chat_body(model, text, max_tokens=12))
        assert response.status_code == 200, response.text
        answer = response.json()
        real = cached_tokens(answer["usage"])
        predicted = int(response.headers["x-forebay-predicted-cached-tokens"])
        assert abs(predicted - real) <= 32
        assert answer["model"] == model
        return answer["choices"][0]["message"]["content"], real

    plain, first = await ask(MODEL)
    twisted, second = await ask("twist")
    assert plain != twisted and first == second == 0
    assert (await ask(MODEL))[1] > 100
    again, cached = await ask("twist")
    assert again == twisted and cached > 100
    listed = (await client.get("/v1/models")).json()["data"]
    assert {m["id"] for m in listed} == {MODEL, "twist"}
