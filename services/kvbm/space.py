"""One namespace: its catalog, its arena, its places on disk and in remote storage.

Performs what the catalog decides, in the same call, so that a snapshot taken between two calls is
exact at the last sequence.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

from services.common.arena import Arena, CorruptHeader, Geometry, SlotHeader
from services.common.blocks import block_key
from services.common.events.model import (
    BlocksCleared,
    BlocksDigest,
    Event,
    Tier,
    TierBlocks,
    TierRate,
)
from services.common.events.tiers import tier_events
from services.common.telemetry.logging import get_logger
from services.kvbm.core.catalog import Catalog, Copy
from services.kvbm.core.gate import Gate
from services.kvbm.core.model import Adopted, TierCounts, sealed_header
from services.kvbm.core.odds import Odds
from services.kvbm.core.offload import OffloadPlan
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.tiers.port import DiskSpace, ObjectSpace

_TOLD = (Tier.G2, Tier.G3, Tier.G4)
ADOPT_AT_ONCE = 2048
"""Headers read at start before others get their turn."""
log = get_logger(__name__)


class Space:
    """One namespace's blocks. Loop's thread only."""

    def __init__(
        self,
        arena: Arena,
        catalog: Catalog,
        gate: Gate,
        plan: OffloadPlan,
        disk: DiskSpace | None,
        remote: ObjectSpace | None,
        publish: Callable[[Sequence[Event]], int],
        metrics: KvbmMetrics,
    ) -> None:
        self.arena = arena
        self.catalog = catalog
        self.gate = gate
        self.plan = plan
        self.disk = disk
        self.remote = remote
        self.metrics = metrics
        self.odds = Odds()
        """Whether to ask remote storage for what nobody here has seen."""
        self.model = ""
        """Name of the model, for people."""
        self.run_ends: dict[bytes, None] = {}
        """Blocks whose run may be worth writing to remote storage, oldest first."""
        self.told_rates: dict[Tier, TierRate] = {}
        """Rates as routers last heard of them."""
        self._publish = publish
        self._told = {tier: (0, 0) for tier in _TOLD}
        """How many keys routers were told to be in each tier, and their xor."""
        self._short: dict[int, bytes] = {}
        self._erasures: set[int] = set()
        self._erasing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def namespace(self) -> bytes:
        """Its digest, 32 bytes."""
        return self.arena.namespace

    @property
    def geometry(self) -> Geometry:
        """How its blocks are made up."""
        return self.arena.geometry

    def count(self, tier: Tier) -> TierCounts:
        """Slots of a tier by their use."""
        return self.catalog.counts().tiers.get(tier, TierCounts())

    def long_key(self, short: int) -> bytes | None:
        """Full hash of a block that is stored here, by its low 64 bits."""
        return self._short.get(short)

    def long_keys(self, short: Sequence[int]) -> list[bytes]:
        """Full hashes of the leading blocks that are stored here, by their low 64 bits."""
        keys = []
        for number in short:
            key = self._short.get(number)
            if key is None:
                break
            keys.append(key)
        return keys

    def apply(self) -> None:
        """Performs what the catalog has decided: headers first, then the news."""
        changes = self.catalog.take_changes()
        for write in changes.headers:
            if write.tier is Tier.G2:
                self.arena.write_header(write.slot, write.header)
            else:
                self._erasures.add(write.slot)
        for tier, key in changes.removed:
            blocks, xor = self._told[tier]
            self._told[tier] = blocks - 1, xor ^ block_key(key)
            self.metrics.evicted(tier, 1)
            if not self.catalog.tiers_of(key):
                self._short.pop(block_key(key), None)
                self.run_ends.pop(key, None)
        for tier, key in changes.stored:
            blocks, xor = self._told[tier]
            self._told[tier] = blocks + 1, xor ^ block_key(key)
            self._short[block_key(key)] = key
            self._note_run_end(key, tier)
            if tier is Tier.G2:
                self.plan.stored(key, time.monotonic())
        self._publish(tier_events(self.namespace, changes.stored, changes.removed))

    def _note_run_end(self, key: bytes, tier: Tier) -> None:
        """A run goes to remote storage once its last block went down to disk, if there is one."""
        if self.remote is None or tier is not (Tier.G3 if self.disk else Tier.G2):
            return
        meta = self.catalog.meta(key)
        if (
            meta is not None
            and meta.position % self.remote.run_blocks == self.remote.run_blocks - 1
        ):
            self.run_ends[key] = None
            while len(self.run_ends) > 4096:
                self.run_ends.pop(next(iter(self.run_ends)))

    async def adopt(self, now_ms: int, alive: Callable[[int], bool]) -> Tally[Adopted]:
        """Reads all headers, in memory and on disk, and takes over what is whole."""
        counts: Tally[Adopted] = Tally()
        await self._adopt(Tier.G2, self.arena.headers(), now_ms, alive, counts)
        if self.disk is not None:
            await self._adopt(Tier.G3, self.disk.headers(), now_ms, alive, counts)
        return counts

    async def add_disk(self, disk: DiskSpace, now_ms: int) -> None:
        """Takes over a disk that could not be had at the start."""
        self.catalog.add_slots(Tier.G3, disk.slots)
        await self._adopt(Tier.G3, disk.headers(), now_ms, lambda owner: False, Tally())
        self.disk = disk

    async def _adopt(
        self,
        tier: Tier,
        headers: Iterable[SlotHeader | CorruptHeader],
        now_ms: int,
        alive: Callable[[int], bool],
        counts: Tally[Adopted],
    ) -> None:
        for slot, header in enumerate(headers):
            whole = None if isinstance(header, CorruptHeader) else header
            result = self.catalog.adopt(tier, slot, whole, now_ms, alive)
            counts[result] += 1
            if result is Adopted.CORRUPT:
                self.metrics.corrupt(tier)
            if slot % ADOPT_AT_ONCE == ADOPT_AT_ONCE - 1:
                await asyncio.sleep(0)
        self.apply()

    def forget_slots(self, tier: Tier, slots: Collection[int], now_ms: int) -> None:
        """What lay in these slots is lost."""
        for key in list(self.catalog.keys(tier)):
            ref = self.catalog.slot(tier, key)
            if ref is not None and ref.index in slots:
                self.catalog.forget(tier, key, now_ms)
        self.apply()

    def header_of(self, copy: Copy, tier: Tier) -> SlotHeader:
        """The header of a moving block as it is, or shall be, in one of the two tiers."""
        ref = copy.source_slot if tier is copy.source else copy.target_slot
        generation = ref.generation if ref is not None else 0
        return sealed_header(copy.meta, generation, self.geometry.payload_bytes)

    async def erase_dropped(self) -> None:
        """Makes sure that disk slots whose blocks were dropped hold nothing after a restart."""
        async with self._erasing:
            if self.disk is not None and self._erasures:
                slots, self._erasures = sorted(self._erasures), set()
                await self.disk.erase(slots)

    async def before_store(self, slots: Sequence[int]) -> None:
        """Disk slots are about to be written: no erasure of what was there may come after that."""
        self._erasures.difference_update(slots)
        async with self._erasing:
            pass  # one that had begun before

    def background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs something that outlives its caller, until `close`."""
        task = asyncio.create_task(self._guarded(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            await work
        except Exception:  # a task's boundary: what it worked on stays quarantined
            log.exception("a background operation failed", what=name)
            self.metrics.failed(Tier.G2, "internal")

    def tier_blocks(self) -> list[TierBlocks]:
        """All blocks that can be found, for a snapshot."""
        return [
            TierBlocks(
                tier, [block_key(k) for k in self.catalog.keys(tier)], namespace=self.namespace
            )
            for tier in _TOLD
        ]

    def tell_digests(self) -> None:
        """Tells what each tier holds, condensed, so that routers see whether they know it all."""
        self._publish(
            [
                BlocksDigest(tier, blocks, xor, namespace=self.namespace)
                for tier, (blocks, xor) in self._told.items()
            ]
        )

    def tell_rates(self) -> None:
        """Tells routers what the gate has learned, where it differs by more than a tenth."""
        for tier, rate in self.gate.rates().items():
            told = self.told_rates.get(tier)
            fresh = TierRate(tier, rate.latency_s, rate.block_s, self.namespace)
            if rate.samples and (told is None or _differ(told, fresh)):
                self.told_rates[tier] = fresh
                self._publish([fresh])

    def announce_end(self) -> None:
        """Tells that all its blocks are gone: the namespace makes room for another."""
        for tier in _TOLD:
            self._publish([BlocksCleared(tier, namespace=self.namespace)])

    async def close(self) -> None:
        """Waits for what moves, then lets go of disk and memory; everything stays for the next."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        for task in self._tasks:
            task.cancel()
        await self.erase_dropped()
        if self.disk is not None:
            await self.disk.close()
        if self.remote is not None:
            await self.remote.close()
        self.arena.close()


def _differ(a: TierRate, b: TierRate) -> bool:
    pairs = ((a.latency_s, b.latency_s), (a.block_s, b.block_s))
    return any(abs(x - y) > 0.1 * max(x, y) for x, y in pairs)
