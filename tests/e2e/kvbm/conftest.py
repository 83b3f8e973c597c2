"""Clusters of real engines over a real kvbm, one for each module that asks."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.conftest import LOGS
from tests.models import tiny_adapter
from tests.support.etcd import Etcd
from tests.support.kvcluster import KvCluster, open_kv_cluster


@pytest.fixture(scope="package")
def engines(
    tmp_path_factory: pytest.TempPathFactory, etcd: Etcd, tiny_model_path: Path
) -> Iterator[KvCluster]:
    """Two workers for all modules; each brings a daemon of its own (`replace_daemon`).

    One cluster at a time: another with the same etcd would take its processes' names. Both serve
    an adapter of the same name, with weights that differ.
    """
    folder = tmp_path_factory.mktemp("engines")
    adapters = [tiny_adapter(folder / f"adapter-{seed}", seed) for seed in (5, 6)]
    with (
        pytest.MonkeyPatch.context() as environment,
        open_kv_cluster(folder, etcd, tiny_model_path, workers=0) as kv,
    ):
        # oneDNN keeps kernels for up to 1,024 shapes of batches: an engine grows by some 200 MiB
        # while it meets them, with kvbm or without, and a leak of ours would hide behind that.
        environment.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
        for number, adapter in enumerate(adapters):
            # Answers of a machine under load may come late; here a look-up shall not fail for that.
            kv.start_worker(f"worker-{number}", adapters=f"ad={adapter}", kvbm_timeout_s=5)
        for number in range(2):
            kv.cluster[f"worker-{number}"].wait_ready(180)
        yield kv


@pytest.fixture(scope="module")
def module_kv(engines: KvCluster, tmp_path_factory: pytest.TempPathFactory) -> KvCluster:
    folder = tmp_path_factory.mktemp("kv")
    remote = f"file://{folder / 'remote'}"
    engines.replace_daemon(folder, remote_url=remote, remote_run_blocks=4)
    return engines


@pytest.fixture
async def kv(module_kv: KvCluster, request: pytest.FixtureRequest) -> AsyncIterator[KvCluster]:
    """The module's cluster, all alive, at rest, with empty caches."""
    kv = module_kv
    request.node.stash[LOGS] = kv.cluster.logs_from_now()
    for process in kv.cluster.processes.values():
        if not process.alive:
            process.start()
        else:
            process.thaw()
        process.wait_ready(120)
    await kv.attached()
    await kv.forget_g1("worker-0", "worker-1")
    await kv.clear()
    await kv.at_rest()
    yield kv
