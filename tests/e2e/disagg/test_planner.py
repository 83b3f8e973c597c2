"""A planner over real engines: the load swings, roles follow, and no request fails."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import httpx
import pytest
from forebay.common.v1 import common_pb2
from forebay.worker.v1 import worker_pb2

from tests.e2e.disagg.conftest import D0, D1, P
from tests.support.apart import ask
from tests.support.client import RouterClient, WorkerClient, chat_body, metric
from tests.support.cluster import MODEL, SEQUENCES, Cluster
from tests.support.polling import PROGRESS_S, until
from tests.support.words import prose

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
Body = Callable[[int], dict[str, Any]]


def long_prompt(number: int) -> dict[str, Any]:
    """All prefill: a prompt that nobody has, and a word or two."""
    return chat_body(MODEL, prose(900_000 + number, 1500), max_tokens=4)


def long_answer(number: int) -> dict[str, Any]:
    """Nearly all decode."""
    return chat_body(MODEL, prose(950_000 + number, 20), max_tokens=400)


@contextlib.asynccontextmanager
async def load(
    client: httpx.AsyncClient, body: Body, lanes: int, numbers: Iterator[int]
) -> AsyncIterator[None]:
    """That many requests at any time; each one must be answered in full."""
    done = asyncio.Event()

    async def lane() -> None:
        while not done.is_set():
            result = await ask(client, body(next(numbers)))
            assert result.error is None and result.done
            assert result.finish_reasons() == ["length"]

    async with asyncio.TaskGroup() as tasks:
        for _ in range(lanes):
            tasks.create_task(lane())
        yield
        done.set()


@pytest.fixture
async def roles_as_started(cluster: Cluster) -> AsyncIterator[None]:
    yield
    for name, role in ((P, PREFILL), (D0, DECODE), (D1, DECODE)):
        async with WorkerClient(cluster.ready(name).address) as worker:
            await worker.stub.SetRole(worker_pb2.SetRoleRequest(role=role), timeout=5)


@pytest.mark.usefixtures("roles_as_started")
async def test_roles_follow_the_load(cluster: Cluster, client: httpx.AsyncClient) -> None:
    """More prompts than one worker computes, then more answers than one batch takes; and back."""
    planner = cluster.start("services.planner", "planner-0", ttft_s=0.5, itl_ms=1000, gap_s=2)
    ready = await planner.until_ready()
    numbers = count()
    async with RouterClient(cluster.ready("router-0").address) as router:

        async def prefillers() -> int:
            return sum(w.role == PREFILL for w in (await router.workers()).values())

        assert await prefillers() == 1
        for body, lanes, wanted in (
            (long_prompt, 12, 2),
            (long_answer, SEQUENCES + 12, 1),
            (long_prompt, 12, 2),
        ):
            async with load(client, body, lanes, numbers):
                await until(
                    prefillers,
                    lambda n, wanted=wanted: n == wanted,
                    within_s=PROGRESS_S,
                    what=f"{wanted} workers that prefill",
                    every_s=0.2,
                )
    address = ready.metrics_address
    moves = [
        await metric(address, "forebay_planner_moves_total", to=role)
        for role in ("prefill", "decode")
    ]
    assert sum(moves) >= 3
