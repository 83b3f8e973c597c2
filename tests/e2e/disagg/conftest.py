"""Engines that hand KV to each other, for all tests here: starting them is what costs time."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.etcd import Etcd
from tests.support.pairs import Pairs

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
