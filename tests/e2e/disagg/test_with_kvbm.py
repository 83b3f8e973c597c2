"""KV from engine to engine beside a node's tiers: one connector loads, both are right."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.e2e.disagg.conftest import FLAGS
from tests.support.etcd import Etcd
from tests.support.kvcluster import KvCluster, open_kv_cluster
from tests.support.pairs import BLOCK, Pairs, prompt

P, D = "worker-0", "worker-1"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, tiny_model_path: Path
) -> Iterator[KvCluster]:
    """Two workers that hand KV to each other, over one kvbm."""
    folder = tmp_path_factory.mktemp("tiers")
    with open_kv_cluster(folder, etcd, tiny_model_path, workers=0) as kv:
        for name in (P, D):
            kv.start_worker(name, **FLAGS, kvbm_timeout_s=5)
        for name in (P, D):
            kv.cluster[name].wait_ready(180)
        yield kv


@pytest.fixture
async def kv(cluster: KvCluster) -> AsyncIterator[KvCluster]:
    await cluster.attached()
    await cluster.forget_g1(P, D)
    await cluster.clear()
    await cluster.at_rest()
    yield cluster
    await Pairs(cluster.cluster).at_rest(P, D)


async def test_every_remainder_of_a_block_gives_the_same_tokens(kv: KvCluster) -> None:
    pairs = Pairs(kv.cluster)
    prompts = [prompt(n, 3 * BLOCK + n) for n in range(BLOCK)]
    whole = [await pairs.ask(D, tokens) for tokens in prompts]
    await kv.forget_g1(P, D)
    await kv.clear()
    lanes = asyncio.Semaphore(8)

    async def one(tokens: tuple[int, ...]) -> tuple[int, ...]:
        async with lanes:
            _, second = await pairs.apart(P, D, tokens)
        assert second.error == ""
        assert second.transferred == len(tokens) - 1
        return second.tokens

    assert await asyncio.gather(*(one(tokens) for tokens in prompts)) == [t.tokens for t in whole]


async def test_the_prefill_side_loads_from_its_tiers(kv: KvCluster) -> None:
    pairs = Pairs(kv.cluster)
    tokens = prompt(50, 12 * BLOCK + 4)
    whole = await pairs.ask(P, tokens)
    await kv.at_rest()
    await kv.forget_g1(P)
    first, second = await pairs.apart(P, D, tokens)
    assert first.cached == 12 * BLOCK
    assert second.transferred == len(tokens) - 1
    assert second.tokens == whole.tokens


async def test_what_came_by_a_transfer_is_kept_below(kv: KvCluster) -> None:
    pairs = Pairs(kv.cluster)
    tokens = prompt(60, 8 * BLOCK + 1)
    _, second = await pairs.apart(P, D, tokens, max_tokens=2 * BLOCK)
    await kv.at_rest()
    await kv.forget_g1(P, D)
    # Prompt and answer: the answer's blocks only the decode side could keep.
    longer = tokens + second.tokens
    again = await pairs.ask(D, longer)
    assert again.cached >= 9 * BLOCK
    await kv.forget_g1(P, D)
    await kv.clear()
    assert (await pairs.ask(P, longer)).tokens == again.tokens
