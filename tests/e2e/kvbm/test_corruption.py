"""Bytes are damaged behind the running engines' backs, and no answer changes.

Blocks lie in memory, on disk or in a shared folder, and in no engine's own cache. Then something
damages many of them at once, of all kinds, and every prompt is asked again: each damage is met by a
load, found, counted, and computed anew.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.common.arena import Geometry
from tests.support.corrupt import KINDS, Corrupter, Damage
from tests.support.kvcluster import BLOCK, G2, G3, G4, Answer, KvCluster, prompt
from tests.support.kvdamage import (
    DiskRecords,
    arena_records,
    earlier_record,
    keys_of,
    object_damages,
    object_is_sound,
    objects,
)
from tests.support.polling import until

pytestmark = pytest.mark.chaos

BOTH = ("worker-0", "worker-1")
BLOCKS = 16
RUN = 4
PROMPTS = [prompt(7000 + seed, BLOCKS) for seed in range(32)]
KEYS = keys_of(PROMPTS, BLOCK)
INJECTED: Counter[str] = Counter()
"""Damages done by this module."""


@pytest.fixture(scope="module")
def module_kv(engines: KvCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvCluster]:
    folder = tmp_path_factory.mktemp("corruption")
    engines.replace_daemon(
        folder,
        cpu_cache_gb=0.25,
        arena_share=0.5,
        remote_url=f"file://{folder / 'remote'}",
        remote_run_blocks=RUN,
        # What it would find first, no load could meet.
        scrub_mb_s=0,
    )
    yield engines


@pytest.fixture(scope="module")
def reference() -> dict[int, tuple[int, ...]]:
    """Tokens of fresh computations, filled by the first test that needs them."""
    return {}


def texts(answers: Sequence[Answer]) -> dict[int, tuple[int, ...]]:
    assert not any(a.error for a in answers), answers
    return {n: a.tokens for n, a in enumerate(answers)}


async def stored(kv: KvCluster, reference: dict[int, tuple[int, ...]], tier: int) -> None:
    """Brings all prompts' blocks into a tier, and out of the engines."""
    answers = await kv.ask_all(BOTH, PROMPTS)
    if not reference:
        assert all(a.cached == 0 for a in answers), "caches were not empty"
        reference.update(texts(answers))
        assert len(set(reference.values())) == len(PROMPTS), "outputs must depend on prompts"
    assert texts(answers) == reference
    await kv.until_saved(BOTH, PROMPTS)
    await kv.until_in(tier, PROMPTS, 60)
    await kv.forget_g1(*BOTH)


async def unharmed(kv: KvCluster, reference: dict[int, tuple[int, ...]]) -> None:
    """Asks all prompts again: the tokens are those of a fresh computation."""
    answers = await kv.ask_all(BOTH, PROMPTS)
    assert texts(answers) == reference
    assert sum(a.cached for a in answers) > 0, "nothing was loaded at all"
    await kv.forget_g1(*BOTH)


async def rise(kv: KvCluster, before: dict[str, float], name: str, by: int) -> None:
    """Waits until a counter has risen by just so much."""

    async def risen() -> float:
        return await kv.counter(name) - before.get(name, 0.0)

    await until(risen, lambda n: n >= by, within_s=10, what=f"{by} more {name}", every_s=0.1)
    assert await risen() == by, f"{name} counts more than was damaged"


@pytest.fixture(autouse=True)
def fresh_daemon_afterwards(module_kv: KvCluster) -> Iterator[None]:
    """Slots in which bytes went bad stay out of use until the daemon's next life."""
    yield
    module_kv.restart("kvbm-0")


@pytest.mark.parametrize("life", [1, 2])
async def test_memory(kv: KvCluster, reference: dict[int, tuple[int, ...]], life: int) -> None:
    """C1, C4, C14: bits, headers, swapped blocks, stale generations, other namespaces."""
    for turn in range(2):
        rng = random.Random(100 * life + turn)
        await stored(kv, reference, G2)
        before = dict((await kv.stats()).counters)
        with arena_records(kv.arenas[0]) as records:
            sealed = records.sealed()
            slots = [sealed[key] for key in KEYS]
            good = [records.read(slot) for slot in slots]
            corrupter = Corrupter(
                rng.randrange(1 << 30),
                good,
                [earlier_record(record, records.namespace, rng) for record in good],
                records.namespace,
                lambda n, header, payload, slots=slots, records=records: records.write(
                    slots[n], header, payload
                ),
                (*KINDS, Damage.GENERATION),
            )
            bad = corrupter.hit(96)
        INJECTED.update({f"g2 {kind}": n for kind, n in corrupter.counts.items()})
        await unharmed(kv, reference)
        await rise(kv, before, "failures_g2", len(bad))
        await rise(kv, before, "corrupt_blocks_g2", len(bad))
    # What went to disk between the damage and its discovery is as bad there, and found there.
    await kv.scrub()
    scanned, corrupt = await kv.scrub()
    assert scanned > 0 and corrupt == 0


async def test_bytes_that_are_no_numbers(
    kv: KvCluster, reference: dict[int, tuple[int, ...]]
) -> None:
    """C1: they are found, and nothing of them stays in the engine for whoever gets the block next.

    Attention multiplies what lies beyond a sequence's end by 0, and 0 times NaN is NaN.
    """
    await stored(kv, reference, G2)
    before = dict((await kv.stats()).counters)
    half = KEYS[: len(KEYS) // 2]
    with arena_records(kv.arenas[0]) as records:
        sealed = records.sealed()
        for slot in (sealed[key] for key in half):
            payload = records.arena.payload(slot)
            payload[:] = b"\xff" * len(payload)
            payload.release()
    INJECTED["g2 nan"] += len(half)
    # Round and round: blocks that held them come to be the half-filled ends of other prompts.
    for _ in range(3):
        await unharmed(kv, reference)
    await rise(kv, before, "corrupt_blocks_g2", len(half))


async def test_disk(kv: KvCluster, reference: dict[int, tuple[int, ...]]) -> None:
    """C4, C5: header and payload bytes, swapped slots, what was there before, zeros."""
    rng = random.Random(3)
    await only_on_disk(kv, reference)
    before = dict((await kv.stats()).counters)
    records = await disk_records(kv)
    sealed = records.sealed()
    slots = [sealed[key] for key in KEYS]
    good = [records.read(slot) for slot in slots]
    corrupter = Corrupter(
        rng.randrange(1 << 30),
        good,
        [earlier_record(record, records.namespace, rng) for record in good],
        records.namespace,
        lambda n, header, payload: records.write(slots[n], header, payload),
    )
    bad = corrupter.hit(161)
    INJECTED.update({f"g3 {kind}": n for kind, n in corrupter.counts.items()})
    await unharmed(kv, reference)
    await rise(kv, before, "corrupt_blocks_g3", len(bad))
    assert await kv.counter("corrupt_blocks_g2") == 0
    assert (await kv.scrub())[1] == 0


async def only_on_disk(kv: KvCluster, reference: dict[int, tuple[int, ...]]) -> None:
    """Brings all prompts' blocks to the disk, and nowhere else above it."""
    await stored(kv, reference, G3)
    # A run on its way to the shared folder would bring its blocks up again.
    await kv.until_in(G4, PROMPTS, 60)
    await kv.clear(G2)


async def test_a_file_on_disk_ends_too_early(
    kv: KvCluster, reference: dict[int, tuple[int, ...]]
) -> None:
    await only_on_disk(kv, reference)
    before = dict((await kv.stats()).counters)
    records = await disk_records(kv)
    sealed = records.sealed()
    slots = sorted(sealed[key] for key in KEYS)
    cut = slots[len(slots) * 3 // 4]
    records.cut(cut)
    INJECTED["g3 file cut"] += 1
    await unharmed(kv, reference)
    await rise(kv, before, "corrupt_blocks_g3", sum(slot >= cut for slot in slots))
    # What is written from now on is whole again.
    await kv.clear()
    await stored(kv, reference, G3)
    assert (await kv.scrub())[1] == 0


async def test_objects(kv: KvCluster, reference: dict[int, tuple[int, ...]]) -> None:
    """C4, C15: objects in a shared folder; a bad one is removed, and a sound one written anew."""
    rng = random.Random(4)
    await stored(kv, reference, G4)
    await kv.clear(G2, G3)
    before = dict((await kv.stats()).counters)
    geometry = await geometry_of(kv)
    folder = Path(str(kv.flags["remote_url"]).removeprefix("file://"))
    found = objects(folder, kv.namespace)
    ends = [key for n, key in enumerate(KEYS) if n % RUN == RUN - 1]
    paths = [found[key] for key in ends]
    assert len(paths) == len(KEYS) // RUN
    assert all(object_is_sound(p, kv.namespace, RUN, geometry) for p in paths)
    ways = object_damages(RUN, geometry, rng)
    rng.shuffle(paths)
    harmed: list[Path] = []
    for number, (path, way) in enumerate(zip(paths[:60], [*ways] * 10, strict=True)):
        replace_object(path, ways[way](path.read_bytes()))
        INJECTED[f"g4 {way}"] += 1
        harmed.append(path)
        if number % 10 == 9:
            one, other = paths[60 + number // 10 * 2 : 62 + number // 10 * 2]
            a, b = one.read_bytes(), other.read_bytes()
            replace_object(one, b)
            replace_object(other, a)
            INJECTED["g4 swapped"] += 1
            harmed += [one, other]
    assert not any(object_is_sound(p, kv.namespace, RUN, geometry) for p in harmed)
    await unharmed(kv, reference)

    async def failures() -> float:
        return await kv.counter("failures_g4") - before.get("failures_g4", 0.0)

    await until(failures, lambda n: n >= len(harmed), within_s=10, what="each object found bad")
    assert await kv.counter("corrupt_blocks_g4") > 0

    async def unsound() -> int:
        return sum(
            p.exists() and not object_is_sound(p, kv.namespace, RUN, geometry) for p in paths
        )

    await until(unsound, lambda n: n == 0, within_s=20, what="bad objects removed", every_s=0.5)


def replace_object(path: Path, raw: bytes) -> None:
    """Whoever has the object open keeps the old bytes, as in a store of objects."""
    scratch = path.with_name(f".{path.name}.damaged")
    scratch.write_bytes(raw)
    scratch.rename(path)


async def test_at_least_500_damages_went_through_the_engines() -> None:
    if len({name.split()[0] for name in INJECTED}) < 3:
        pytest.skip("not all of the module's tests were run")
    print(dict(INJECTED))
    assert INJECTED.total() >= 500


async def test_new_weights_of_an_adapter_are_no_hit(kv: KvCluster) -> None:
    """I3: both workers serve the adapter `ad`, of the same base, with weights that differ."""
    tokens = PROMPTS[0]
    mine = await kv.ask("worker-0", tokens, adapter="ad")
    base = await kv.ask("worker-0", tokens)
    assert base.cached == 0 and base.tokens != mine.tokens
    await kv.until_in(G2, [tokens], 20)
    theirs = await kv.ask("worker-1", tokens, adapter="ad")
    assert theirs.cached == 0, "served with the keys and values of other weights"
    assert theirs.tokens not in (mine.tokens, base.tokens)
    await kv.forget_g1(*BOTH)
    for worker, answer in (("worker-0", mine), ("worker-1", theirs)):
        again = await kv.ask(worker, tokens, adapter="ad")
        assert again.tokens == answer.tokens
        assert again.cached == BLOCKS * BLOCK, "its own blocks must be there"
    assert (await kv.ask("worker-1", tokens)).cached == BLOCKS * BLOCK


async def test_new_weights_under_the_same_name_are_no_hit(
    kv: KvCluster, tiny_model_path: Path, tmp_path: Path
) -> None:
    """I5: a worker of the same model name whose weights are others, at the same daemon."""
    tokens = PROMPTS[2]
    old = await kv.ask("worker-0", tokens)
    await kv.until_in(G2, [tokens], 20)
    model = other_weights(tiny_model_path, tmp_path / "model")
    kv.start_worker("worker-2", model=model)
    try:
        kv.cluster["worker-2"].wait_ready()
        await kv.attached()
        new = await kv.ask("worker-2", tokens)
        assert new.cached == 0, "served with the keys and values of other weights"
        assert new.tokens != old.tokens
        assert len(kv.arenas) == 2

        async def own() -> float:
            await kv.forget_g1("worker-2")
            return (await kv.ask("worker-2", tokens)).cached

        await until(own, lambda n: n == BLOCKS * BLOCK, within_s=20, what="its own blocks")
        await kv.forget_g1("worker-2")
        assert (await kv.ask("worker-2", tokens)).tokens == new.tokens
    finally:
        kv.cluster.forget("worker-2")
    await kv.forget_g1("worker-0")
    again = await kv.ask("worker-0", tokens)
    assert again.tokens == old.tokens and again.cached == BLOCKS * BLOCK


def other_weights(model: Path, folder: Path) -> Path:
    """The model with other keys and values."""
    folder.mkdir()
    for path in model.iterdir():
        if path.suffix == ".safetensors":
            rng = np.random.default_rng(9)
            tensors = {
                name: rng.permutation(tensor) if ".k_proj." in name else tensor
                for name, tensor in load_file(path).items()
            }
            save_file(tensors, folder / path.name, metadata={"format": "pt"})
        else:
            os.link(path, folder / path.name)
    return folder


async def geometry_of(kv: KvCluster) -> Geometry:
    """How blocks of the workers are made up."""
    with arena_records(kv.arenas[0]) as records:
        return records.arena.geometry


async def disk_records(kv: KvCluster) -> DiskRecords:
    return DiskRecords(kv.disk_dir, kv.namespace, await geometry_of(kv))
