"""Prefill and decode apart under faults: no error to anybody, the right text, nothing held."""

import asyncio

import httpx
import pytest

from tests.e2e.disagg.conftest import D0, D1, P
from tests.support.apart import REQUESTS, ask, body, check, expected_of, forget, round_of, start
from tests.support.client import WorkerClient, metric
from tests.support.cluster import Cluster
from tests.support.pairs import Pairs
from tests.support.polling import PROGRESS_S, until


async def taken(cluster: Cluster) -> int:
    pairs = Pairs(cluster)
    return sum([await pairs.transfers(name, "taken") for name in (D0, D1)])


async def test_texts_are_those_of_one_worker(cluster: Cluster, client: httpx.AsyncClient) -> None:
    bodies = round_of(0)
    expected = await expected_of(client, bodies, D1)
    await forget(cluster, P, D0, D1)
    before = await taken(cluster)
    results = await asyncio.gather(*start(client, bodies))
    check(results, expected)
    assert {r.worker for r in results} <= {D0, D1}
    assert await taken(cluster) == before + REQUESTS
    for result in results:
        assert result.usage is not None
        # Nobody had anything of it: what travelled was computed.
        assert result.usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_kill_the_prefill_worker(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    """Before, during and after prefills and transfers, as it comes."""
    bodies = round_of(1 + repetition)
    expected = await expected_of(client, bodies, D1)
    await forget(cluster, P, D0, D1)
    before = await taken(cluster)
    tasks = start(client, bodies)
    await until(
        lambda: taken(cluster),
        lambda n: n > before,
        within_s=PROGRESS_S,
        what="a transfer",
        every_s=0.005,
    )
    cluster[P].kill()
    check(await asyncio.gather(*tasks), expected)
    # Dead, and perhaps not yet known to be.
    check(await asyncio.gather(*start(client, bodies)), expected)


async def test_kill_a_decode_worker(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    bodies = round_of(101 + repetition)
    expected = await expected_of(client, bodies, D1)
    await forget(cluster, P, D0, D1)
    before = await taken(cluster)
    tasks = start(client, bodies)
    await until(
        lambda: taken(cluster),
        lambda n: n > before,
        within_s=PROGRESS_S,
        what="a transfer",
        every_s=0.005,
    )
    cluster[D0].kill()
    check(await asyncio.gather(*tasks), expected)
    # What the dead one was to take is let go of, at the latest when its lease is over.
    await Pairs(cluster).at_rest(P, D1)


@pytest.mark.parametrize("victim", [P, D0])
async def test_a_worker_stops_and_goes_on(
    cluster: Cluster, client: httpx.AsyncClient, victim: str, repetition: int
) -> None:
    """Past every deadline: the read's, the lease's, the gateway's for silence."""
    bodies = round_of(201 + 10 * repetition + (victim == P))
    expected = await expected_of(client, bodies, D1)
    await forget(cluster, P, D0, D1)
    before = await taken(cluster)
    tasks = start(client, bodies)
    await until(
        lambda: taken(cluster),
        lambda n: n > before,
        within_s=PROGRESS_S,
        what="a transfer",
        every_s=0.005,
    )
    cluster[victim].freeze()
    try:
        check(await asyncio.gather(*tasks), expected)
    finally:
        cluster[victim].thaw()
    await Pairs(cluster).at_rest(P, D0, D1)
    again = round_of(291 + 10 * repetition + (victim == P))
    expected = await expected_of(client, again, D1)
    await forget(cluster, P, D0, D1)
    check(await asyncio.gather(*start(client, again)), expected)


async def test_clients_that_leave(
    cluster: Cluster, client: httpx.AsyncClient, repetition: int
) -> None:
    """While prefills wait, run, have ended, and while KV moves: both legs end, all is let go of."""
    tasks = start(client, round_of(401 + repetition))
    before = await taken(cluster)
    async with WorkerClient(cluster.ready(P).address) as prefill:
        await until(prefill.requests, within_s=10, what="a prefill", every_s=0.005)
        for task in tasks[: REQUESTS // 2]:
            task.cancel()
        await until(
            lambda: taken(cluster), lambda n: n > before, within_s=PROGRESS_S, what="a transfer"
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An engine's running step ends first; nobody waits for its end.
        await until(prefill.requests, lambda n: n == 0, within_s=2, what="an idle prefill worker")
    await Pairs(cluster).at_rest(P, D0, D1, within_s=5)
    gateway = cluster.ready("gateway-0").metrics_address
    assert await metric(gateway, "forebay_gateway_sequences") == 0


async def test_roles_change_under_load(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """Twenty times: nobody notices."""
    from forebay.common.v1 import common_pb2
    from forebay.worker.v1 import worker_pb2

    roles = [common_pb2.ROLE_PREFILL, common_pb2.ROLE_BOTH, common_pb2.ROLE_DECODE]
    done = asyncio.Event()
    served = 0

    async def load(lane: int) -> None:
        nonlocal served
        number = 0
        while not done.is_set():
            one = body(lane, 500 + number, stream=True) | {"max_tokens": 8}
            result = await ask(client, one)
            assert result.error is None and result.done
            assert result.finish_reasons() == ["length"]
            served += 1
            number += 1

    async with asyncio.TaskGroup() as tasks:
        for lane in range(4):
            tasks.create_task(load(lane))
        async with WorkerClient(cluster.ready(D1).address) as worker:
            for flip in range(20):
                seen = served
                await worker.stub.SetRole(
                    worker_pb2.SetRoleRequest(role=roles[flip % 3]), timeout=5
                )

                async def more(seen: int = seen) -> bool:
                    return served >= seen + 2

                await until(more, within_s=PROGRESS_S, what="requests served between two flips")
            await worker.stub.SetRole(
                worker_pb2.SetRoleRequest(role=common_pb2.ROLE_DECODE), timeout=5
            )
        done.set()
