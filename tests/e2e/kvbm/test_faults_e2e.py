"""Disks, folders, object stores and quotas that fail under real engines: requests succeed.

The tier concerned degrades, says so, and comes back by itself. Each test brings a daemon of its own
to the same engines.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LOGS
from tests.support.client import metric
from tests.support.faultfs import can_mount, fault_fs
from tests.support.kvcluster import BLOCK, G2, G3, G4, KvCluster, prompt
from tests.support.kvload import Tokens, load, references
from tests.support.kvrest import nothing_is_left
from tests.support.polling import PROGRESS_S, until
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Link, shared_server

pytestmark = pytest.mark.chaos

BOTH = ("worker-0", "worker-1")
BLOCKS = 8
# More than an engine's own cache holds, and than memory and disk of most of these daemons.
PROMPTS = [prompt(3000 + seed, BLOCKS) for seed in range(96)]
TIERS = {G2: "G2", G3: "G3", G4: "G4"}
MIB = 1 << 20
Start = Callable[..., Awaitable[KvCluster]]


@pytest.fixture(scope="module")
def known() -> list[Tokens]:
    """Tokens of fresh computations, filled by the first test."""
    return []


@pytest.fixture
async def start(
    engines: KvCluster, known: list[Tokens], tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Start]:
    """Starts a daemon with flags and waits for the engines; their caches are empty then."""
    kv = engines
    request.node.stash[LOGS] = kv.cluster.logs_from_now()

    async def begin(*, attached: bool = True, **flags: object) -> KvCluster:
        kv.replace_daemon(tmp_path / "kvbm", **{"cpu_cache_gb": 1 / 24, **flags})
        if attached:
            await kv.attached()
        await kv.forget_g1(*BOTH)
        if not known:
            known.extend(await references(kv, "worker-0", PROMPTS))
            await kv.forget_g1(*BOTH)
            await kv.clear()
        return kv

    (tmp_path / "kvbm").mkdir()
    yield begin
    if kv.cluster["kvbm-0"].alive:
        kv.cluster["kvbm-0"].terminate()
        kv.cluster["kvbm-0"].wait_ended(20)
        assert kv.cluster["kvbm-0"].exit_code == 0, "it must be able to stop"


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A real file system of that size."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def enlarge(folder: Path, size: str) -> None:
    """Gives a mounted tmpfs another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


@contextlib.asynccontextmanager
async def requests(kv: KvCluster, known: Sequence[Tokens]) -> AsyncIterator[Any]:
    """Load while the context lasts: no request may fail or say anything else than it should."""
    async with load(kv, BOTH, PROMPTS, known, seed=2, at_once=4) as running:
        await running.goes_on(*BOTH, answers=2)
        yield running
        await running.goes_on(*BOTH, answers=2)
    assert running.failed == [] and running.wrong == []


async def state(kv: KvCluster, tier: int) -> str:
    """What Stats says of a tier."""
    return next((t.state for t in (await kv.stats()).tiers if t.tier == tier), "none")


async def filled(kv: KvCluster, tier: int, blocks: int = 32) -> None:
    """Waits until a tier holds something."""

    async def held() -> int:
        return next(t.blocks for t in (await kv.stats()).tiers if t.tier == tier)

    await until(held, lambda n: n >= blocks, within_s=PROGRESS_S, what=f"blocks in {TIERS[tier]}")


async def healthy(kv: KvCluster, tier: int, wanted: bool, within_s: float = 20) -> None:
    """Waits until a tier works, or does not, by Stats and by its metric."""
    await until(
        lambda: state(kv, tier),
        lambda s: (s == "ok") is wanted,
        within_s=within_s,
        what=f"{TIERS[tier]} {'ok' if wanted else 'degraded'}",
        every_s=0.1,
    )
    address = kv.cluster.ready("kvbm-0").metrics_address
    await until(
        lambda: metric(address, "forebay_kvbm_tier_healthy", tier=TIERS[tier]),
        lambda n: bool(n) is wanted,
        within_s=5,
        what="the metric",
    )


async def loads_from(kv: KvCluster, tier: int, known: Sequence[Tokens], within_s: float) -> None:
    """The tier works: what is stored there now comes back, and the answer is right."""
    tokens = PROMPTS[-1]

    async def stored() -> bool:
        # Whatever an earlier try left in upper tiers is of no use for the next one.
        await kv.forget_g1(*BOTH)
        answer = await kv.ask("worker-0", tokens)
        assert answer.tokens == known[-1]
        with contextlib.suppress(AssertionError):
            await kv.until_in(tier, [tokens], 5)
            return True
        await kv.forget_g1(*BOTH)
        await kv.clear()
        return False

    await until(stored, within_s=within_s, what=f"blocks in {TIERS[tier]}")
    await kv.forget_g1(*BOTH)
    if tier != G2:
        await kv.clear(*(t for t in (G2, G3) if t < tier))
    answer = await kv.ask("worker-1", tokens)
    assert answer.tokens == known[-1] and answer.cached == BLOCKS * BLOCK


async def test_the_disk_is_full(start: Start, known: list[Tokens], tmp_path: Path) -> None:
    """D1: no room at the start, then a little, then enough."""
    with tmpfs(tmp_path / "small", "48m") as folder:
        ballast = folder / "ballast"
        ballast.write_bytes(bytes(47 * MIB))
        kv = await start(disk_cache_dir=folder / "kv", disk_free_gb=1 / 1024)
        async with requests(kv, known):
            await filled(kv, G2)
        blocks = {t.tier: t.blocks for t in (await kv.stats()).tiers}
        assert blocks[G3] == 0 and blocks[G2] > 0
        await healthy(kv, G3, False)
        async with requests(kv, known):
            ballast.unlink()
            await healthy(kv, G3, True)
        await loads_from(kv, G3, known, 30)
        # Full again, now of our own blocks: the oldest go.
        ballast.write_bytes(bytes(shutil.disk_usage(folder).free))
        async with requests(kv, known):
            pass
        await nothing_is_left(kv)


async def test_the_disk_folder_is_deleted(start: Start, known: list[Tokens]) -> None:
    kv = await start()
    async with requests(kv, known):
        await filled(kv, G3)
        shutil.rmtree(kv.disk_dir)
    await loads_from(kv, G3, known, 40)
    await healthy(kv, G3, True)
    await nothing_is_left(kv)


@pytest.mark.parametrize("what", ["read", "write", "all"])
async def test_the_disk_stands_still(
    start: Start, known: list[Tokens], tmp_path: Path, what: str
) -> None:
    """C14, H1: I/O hangs for longer than its deadline; nobody waits for it that long."""
    if not can_mount():
        pytest.skip("mounting is not permitted here")
    async with fault_fs(tmp_path) as fs:
        kv = await start(disk_cache_dir=fs.folder, disk_cache_gb=1 / 24, disk_timeout_s=1)
        async with requests(kv, known):
            await filled(kv, G3)
            await fs.tell(f"hang {what}")
            await kv.clear(G2)
            await healthy(kv, G3, False)
            await fs.tell("go")
            await healthy(kv, G3, True)
        await kv.at_rest()
        await loads_from(kv, G3, known, 30)
        await nothing_is_left(kv)
        kv.cluster["kvbm-0"].terminate()
        kv.cluster["kvbm-0"].wait_ended(20)


async def test_reads_and_writes_of_the_disk_fail(
    start: Start, known: list[Tokens], tmp_path: Path
) -> None:
    """C1: EIO of every read and write."""
    if not can_mount():
        pytest.skip("mounting is not permitted here")
    async with fault_fs(tmp_path) as fs:
        kv = await start(disk_cache_dir=fs.folder, disk_cache_gb=1 / 24)
        async with requests(kv, known):
            await filled(kv, G3)
            await fs.tell("eio all")
            await kv.clear(G2)
            await healthy(kv, G3, False)
            await fs.tell("go")
            await healthy(kv, G3, True)
        await loads_from(kv, G3, known, 30)
        await nothing_is_left(kv)
        kv.cluster["kvbm-0"].terminate()
        kv.cluster["kvbm-0"].wait_ended(20)


def s3_flags(endpoint: str, name: str, **more: object) -> dict[str, object]:
    return {
        "disk_cache_gb": 0,
        "remote_url": f"s3://{BUCKET}/{name}",
        "remote_endpoint": endpoint,
        "remote_access_key": ACCESS_KEY,
        "remote_secret_key": SECRET_KEY,
        "remote_run_blocks": 4,
        "remote_timeout_s": 2,
        **more,
    }


async def test_the_object_store_fails(start: Start, known: list[Tokens]) -> None:
    """H5: down, silent, slow; requests never wait for it longer than a promotion may."""
    with Link(shared_server().port) as link:
        kv = await start(**s3_flags(f"http://127.0.0.1:{link.port}", "fails"))
        await loads_from(kv, G4, known, 30)
        async with requests(kv, known):
            link.cut()
            await healthy(kv, G4, False, 30)
            link.flow()
            await healthy(kv, G4, True, 30)
        async with requests(kv, known):
            link.stall()
            await healthy(kv, G4, False, 30)
            link.flow()
            await healthy(kv, G4, True, 30)
        async with requests(kv, known):
            link.slow(20_000)
            await healthy(kv, G4, False, 30)
            link.slow(0)
            await healthy(kv, G4, True, 30)
        await kv.clear()
        await loads_from(kv, G4, known, 30)


async def test_the_object_store_refuses_us(start: Start, known: list[Tokens]) -> None:
    kv = await start(**s3_flags(shared_server().endpoint, "refuses", remote_secret_key="wrong"))
    await healthy(kv, G4, False)
    assert "access key or secret key is wrong" in await state(kv, G4)
    async with requests(kv, known):
        pass
    await filled(kv, G2)


async def test_a_quota_is_reached(start: Start, known: list[Tokens]) -> None:
    """The tenant's own oldest blocks make room, and no request notices."""
    size = 12 * BLOCKS * 128 * 1024
    quotas = json.dumps({"*": {"g2": size / 2**30, "g3": 0}, "none": {"g2": 0, "g3": 0}})
    kv = await start(quotas=quotas)
    for tenant in ("some", "none"):
        answers = await kv.ask_all(BOTH, PROMPTS, tenant=tenant)
        assert [a.tokens for a in answers] == known and not any(a.error for a in answers)
        await kv.forget_g1(*BOTH)
    use = {
        (t.tenant, c.tier): c.bytes for t in (await kv.stats()).tenants for c in t.tiers if c.bytes
    }
    assert set(use) <= {("some", G2)} and 0 < use["some", G2] <= size
    last = await kv.ask("worker-0", PROMPTS[-1], tenant="some")
    assert last.tokens == known[-1]


async def test_memory_is_too_small_at_the_start(
    start: Start, known: list[Tokens], tmp_path: Path
) -> None:
    """The worker serves without tiers and says why; with more room it finds them by itself."""
    with tmpfs(tmp_path / "tiny", "4m") as folder:
        kv = await start(attached=False, cpu_cache_dir=folder / "arenas")
        async with requests(kv, known):
            for worker in BOTH:

                async def told(worker: str = worker) -> bool:
                    lines = kv.cluster[worker].log_text().splitlines()
                    return any("kvbm is away" in line and "MiB" in line for line in lines)

                await until(told, within_s=20, what="a log that says what lacks", every_s=0.1)
        assert sum(len(n.workers) for n in (await kv.stats()).namespaces) == 0
        enlarge(folder, "128m")
        await kv.attached()
        await loads_from(kv, G2, known, 20)
        kv.cluster["kvbm-0"].terminate()
        kv.cluster["kvbm-0"].wait_ended(20)
