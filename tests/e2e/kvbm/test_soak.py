"""Mixed load for FOREBAY_SOAK_S seconds, a third of it abandoned, on tiers that are all too small.

Three minutes unless told otherwise; `make soak` takes an hour.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.support.kvcluster import BLOCK, KvCluster, prompt
from tests.support.kvdamage import arena_records
from tests.support.kvload import load, references
from tests.support.kvrest import GRANT_BLOCKS, anonymous_bytes, nothing_is_left

SOAK_S = float(os.environ.get("FOREBAY_SOAK_S", "180"))
WARM_UP_S = min(60.0, SOAK_S / 3)
BOTH = ("worker-0", "worker-1")
MIB = 1 << 20
GROWTH_BYTES = {"kvbm-0": 16 * MIB, "worker-0": 24 * MIB, "worker-1": 24 * MIB}
"""What a process may grow by after the warm-up, however long the soak is."""
pytestmark = pytest.mark.timeout(SOAK_S + 300)


def prompts() -> list[tuple[int, ...]]:
    """Prompts of 1 to 24 blocks; some begin like others and go on differently."""
    rng = random.Random(11)
    found: list[tuple[int, ...]] = []
    for number in range(80):
        tokens = prompt(9000 + number, rng.randint(1, 24), rng.randint(1, BLOCK - 1))
        if number % 3 == 2:
            before = found[rng.randrange(len(found))]
            tokens = (before[: rng.randint(1, len(before))] + tokens[: 8 * BLOCK])[: 60 * BLOCK]
        found.append(tokens)
    return found


@pytest.fixture(scope="module")
def module_kv(engines: KvCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvCluster]:
    folder = tmp_path_factory.mktemp("soak")
    engines.replace_daemon(
        folder,
        cpu_cache_gb=1 / 24,
        disk_cache_gb=1 / 12,
        remote_url=f"file://{folder / 'remote'}",
        remote_run_blocks=4,
        remote_ttl_s=60,
        ttl_s=45,
        lease_s=20,
    )
    yield engines


async def test_soak(kv: KvCluster) -> None:
    """C3, L1, L2, K2: no wrong token, no error, nothing held at the end, no growth."""
    chosen = prompts()
    expected = await references(kv, "worker-0", chosen, salted=True)
    warm: dict[str, int] = {}
    granted: list[int] = []
    started = time.monotonic()
    async with load(kv, BOTH, chosen, expected, seed=1, abort_share=0.3) as running:
        while (left := started + SOAK_S - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 5.0))
            granted += [sum(n.granted for n in (await kv.stats()).namespaces)]
            if not warm and time.monotonic() - started >= WARM_UP_S:
                warm = memory(kv)
            assert not running.failed and not running.wrong, (running.failed, running.wrong)
    await nothing_is_left(kv)
    with arena_records(kv.arenas[0]) as records:
        assert records.bad() == []
    stats = await kv.stats()
    counts = dict(stats.counters)
    total = running.answered.total()
    print(
        f"{total} answers, {running.aborted} abandoned, cached "
        f"{running.cached / running.prompt_tokens:.2f} of tokens, granted {granted[-10:]}\n{counts}"
    )
    assert running.failed == [] and running.wrong == []
    assert min(running.answered[w] for w in BOTH) > SOAK_S / 10
    assert 0.15 < running.aborted / (total + running.aborted) < 0.45
    # The tiers were in use, and too small.
    assert counts["onboard_blocks_h2d"] > 0 and counts["onboard_blocks_d2d"] > 0
    assert counts["removed_blocks_g2"] > 0 and counts["removed_blocks_g3"] > 0
    assert counts.get("corrupt_blocks", 0) == 0
    assert max(granted) <= len(BOTH) * GRANT_BLOCKS + 1
    grown = {name: bytes - warm[name] for name, bytes in memory(kv).items()}
    print({name: f"{bytes / MIB:+.1f} MiB" for name, bytes in grown.items()})
    for name, bytes in grown.items():
        assert bytes <= GROWTH_BYTES[name], f"{name} grew by {bytes / MIB:.0f} MiB"


def memory(kv: KvCluster) -> dict[str, int]:
    """Memory of daemon and workers by name."""
    return {name: anonymous_bytes(kv.cluster[name].pid) for name in GROWTH_BYTES}
