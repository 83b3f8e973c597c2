"""Engines that hand KV to each other, for all tests here: starting them is what costs time."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import LOGS
from tests.e2e.conftest import settle
from tests.support.client import http_client
from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.pairs import Pairs

P, D0, D1 = "worker-0", "worker-1", "worker-2"
FLAGS: dict[str, object] = {
    "transfer": "nixl",
    "transfer_timeout_s": 1.5,
    "transfer_lease_s": 6,
    "kv_cache_gb": 0.0625,
}


@pytest.fixture(scope="package")
def engines(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, tiny_model_path: Path
) -> Iterator[Cluster]:
    """A worker that prefills, and one that decodes."""
    cluster = Cluster(tmp_path_factory.mktemp("disagg"), etcd, tiny_model_path)
    try:
        cluster.start_worker("worker-p", **FLAGS, role="prefill")
        cluster.start_worker("worker-d", **FLAGS, role="decode")
        cluster.keep("worker-p", "worker-d")
        for process in cluster.processes.values():
            process.wait_ready(180)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def pairs(engines: Cluster) -> AsyncIterator[Pairs]:
    """Both alive, at rest, with empty caches; at rest again when the test is over."""
    engines.heal()
    pairs = Pairs(engines)
    await pairs.at_rest("worker-p", "worker-d")
    await pairs.forget("worker-p", "worker-d")
    yield pairs
    engines.heal()
    await pairs.at_rest("worker-p", "worker-d")


@pytest.fixture(scope="package")
def apart(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, tiny_model_path: Path
) -> Iterator[Cluster]:
    """One worker that prefills, two that decode; the router always takes them apart."""
    cluster = Cluster(tmp_path_factory.mktemp("apart"), etcd, tiny_model_path)
    try:
        cluster.start_worker(P, **FLAGS, role="prefill")
        for name in (D0, D1):
            cluster.start_worker(name, **FLAGS, role="decode")
        cluster.start_router("router-0", disagg="always")
        cluster.start_gateway("gateway-0")
        cluster.keep("router-0", "gateway-0", P, D0, D1)
        for process in cluster.processes.values():
            process.wait_ready(180)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
async def cluster(apart: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    apart.heal()
    await settle(apart)
    request.node.stash[LOGS] = apart.logs_from_now()
    yield apart
    apart.heal()
    await settle(apart)
    await Pairs(apart).at_rest(P, D0, D1)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(cluster.url()) as client:
        yield client
