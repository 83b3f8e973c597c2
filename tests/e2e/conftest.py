"""One cluster for all end-to-end tests: real etcd, router, gateway and two engines.

A test may kill and stop what it likes: afterwards everything is put back, and every test, whatever
it did, must leave a cluster that serves the next request and has nothing running.
"""

import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from forebay.router.v1 import router_pb2

from tests.conftest import LOGS
from tests.support.client import RouterClient, WorkerClient, chat_body, http_client, metric
from tests.support.cluster import MODEL, Cluster, open_cluster
from tests.support.etcd import Etcd
from tests.support.otlp import Collector, open_collector
from tests.support.polling import until

HERE = Path(__file__).parent
REPEATS = int(os.environ.get("FOREBAY_CHAOS_REPEATS", "3"))
WORKERS = ("worker-0", "worker-1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)
            if item.get_closest_marker("timeout") is None:  # the soak has a longer one
                item.add_marker(pytest.mark.timeout(600))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Chaos tests take `repetition` and run FOREBAY_CHAOS_REPEATS times."""
    if "repetition" in metafunc.fixturenames:
        metafunc.parametrize("repetition", range(REPEATS))
    if "every_third_repetition" in metafunc.fixturenames:  # a restart of an engine costs 10 s
        metafunc.parametrize("every_third_repetition", range(max(1, REPEATS // 3)))


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with open_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with Etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture(scope="session")
def session_cluster(
    tmp_path_factory: pytest.TempPathFactory,
    etcd: Etcd,
    collector: Collector,
    tiny_model_path: Path,
) -> Iterator[Cluster]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    with open_cluster(
        tmp_path_factory.mktemp("cluster"),
        etcd,
        tiny_model_path,
        workers=len(WORKERS),
        otlp_endpoint=collector.endpoint,
    ) as cluster:
        yield cluster


@pytest.fixture
async def cluster(
    session_cluster: Cluster, request: pytest.FixtureRequest
) -> AsyncIterator[Cluster]:
    """The shared cluster, settled before the test and mended and checked after it."""
    cluster = session_cluster
    await settle(cluster)
    request.node.stash[LOGS] = cluster.logs_from_now()
    yield cluster
    cluster.heal()
    try:
        await settle(cluster)
    except BaseException:
        # This test is to blame for what still runs; the next one starts without it.
        cluster["gateway-0"].kill()
        cluster.heal()
        raise


async def settle(cluster: Cluster) -> None:
    """Waits until router and gateway see all workers, nothing runs, and a request is served."""
    async with RouterClient(cluster.ready("router-0").address) as router:
        await until(
            lambda: _ready(router),
            lambda ready: ready == set(cluster.workers),
            within_s=15,
            what="router that sees all workers ready",
        )
    for name in cluster.workers:
        async with WorkerClient(cluster.ready(name).address) as worker:
            await until(worker.requests, lambda n: n == 0, within_s=5, what=f"idle {name}")
    address = cluster.ready("gateway-0").metrics_address
    await until(
        lambda: metric(address, "forebay_gateway_router_connected"), within_s=10, what="router"
    )
    await until(
        lambda: metric(address, "forebay_gateway_workers_connected"),
        lambda n: n == len(cluster.workers),
        within_s=10,
        what="sessions with all workers",
    )
    async with http_client(cluster.url()) as client:
        body = chat_body(MODEL, "still there?", max_tokens=1)
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text


async def _ready(router: RouterClient) -> set[str]:
    ready = router_pb2.WORKER_STATE_READY
    return {id for id, w in (await router.workers()).items() if w.state == ready}


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP client of the gateway."""
    async with http_client(cluster.url()) as client:
        yield client


@pytest.fixture
async def router(cluster: Cluster) -> AsyncIterator[RouterClient]:
    async with RouterClient(cluster.ready("router-0").address) as router:
        yield router


@pytest.fixture
async def workers(cluster: Cluster) -> AsyncIterator[dict[str, WorkerClient]]:
    """gRPC clients of the workers by id."""
    clients = {name: WorkerClient(cluster.ready(name).address) for name in WORKERS}
    yield clients
    for client in clients.values():
        await client.__aexit__()
