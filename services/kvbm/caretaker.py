"""What the daemon does by itself: blocks go down, the dead are buried, bytes are verified.

None of it stands in a request's way: each loop does a little, and gives way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial

from services.common.events.model import Tier
from services.common.loops import keep_going
from services.common.telemetry.logging import get_logger
from services.kvbm.core.model import BlockMeta, Owner, ReadyBlock, SlotRef, sealed_header
from services.kvbm.core.offload import WriteBudget
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.moves import BATCH_BLOCKS
from services.kvbm.node import Node
from services.kvbm.readers import Readers, verify
from services.kvbm.space import Space
from services.kvbm.tiers.port import DiskTier, Health, ObjectTier, Transfer

TICK_S = 0.25
OFFLOAD_S = 0.2
"""Pause between two looks at what may go down, when nothing new has come."""
PROBE_S = 2.0
"""Pause between two tries of a tier that does not store."""
REMOTE_MB_S = 100.0
"""Write budget of remote storage, in MiB a second on average."""
SCRUBBER = Owner((1 << 64) - 2)
"""Owner of the slots into which blocks on disk are read to be verified."""
log = get_logger(__name__)


class Caretaker:
    """The daemon's own work. Loop's thread only."""

    def __init__(self, node: Node, readers: Readers, metrics: KvbmMetrics) -> None:
        self._node = node
        self._readers = readers
        self._metrics = metrics
        self._remote_budget = WriteBudget(REMOTE_MB_S * 2**20)

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Starts all loops; cancelling them stops them."""
        node = self._node
        loops: dict[str, Callable[[], Awaitable[None]]] = {
            "tick": self._tick,
            "offload": self._down,
            "digests": self._tell_digests,
        }
        if node.settings.scrub_mb_s:
            loops["scrub"] = self._scrub
        for name, tier in (("disk probe", node.disk), ("remote probe", node.remote)):
            if tier is not None:
                loops[name] = partial(self._probe, tier)
        return [tasks.create_task(keep_going(run, name), name=name) for name, run in loops.items()]

    async def _tick(self) -> None:
        while True:
            self._node.bury_dead()
            self._readers.expire()
            if self._node.peers is not None:
                self._node.peers.tidy()
                self._node.peers.exports.expire()
            self._observe()
            await asyncio.sleep(TICK_S)

    async def _tell_digests(self) -> None:
        while True:
            await asyncio.sleep(self._node.settings.digest_interval_s)
            for space in self._node.spaces.values():
                space.tell_digests()

    def _observe(self) -> None:
        node, metrics = self._node, self._metrics
        totals = node.totals()
        for tier, (blocks, used, capacity, health) in totals.items():
            metrics.occupancy(tier, blocks, used, capacity, health.ok)
        counts = [s.catalog.counts() for s in node.spaces.values()]
        metrics.holdings(
            self._readers.leases,
            sum(c.pins for c in counts),
            sum(c.granted for c in counts),
            sum(t.quarantined for c in counts for t in c.tiers.values()),
            len(node.attached),
        )
        if node.peers is not None:
            fetches = [m.fetches for m in node.moves.values() if m.fetches is not None]
            window = node.peers.exports.window
            metrics.peer_holdings(
                sum(f.running for f in fetches),
                len(window),
                window.used,
                sum(f.quarantined for f in fetches),
                node.peers.agents,
                len(node.peers.book),
            )
        now = time.monotonic()
        metrics.budget(Tier.G3, node.disk_budget.left(now))
        metrics.budget(Tier.G4, self._remote_budget.left(now))
        for space in node.spaces.values():
            metrics.rates(space.gate.rates())
            space.tell_rates()

    # Down.

    async def _down(self) -> None:
        while True:
            moved = 0
            for space in list(self._node.spaces.values()):
                try:
                    await space.erase_dropped()
                    moved += await self._to_disk(space) + await self._to_remote(space)
                except Exception:  # one namespace's trouble must not keep others waiting
                    log.exception("offloading failed")
            if not moved:
                await asyncio.sleep(OFFLOAD_S)

    async def _to_disk(self, space: Space) -> int:
        disk = self._node.disk
        if space.disk is None or disk is None or not disk.health.ok:
            return 0
        now = time.monotonic()
        keys = space.plan.choose(space.catalog, Tier.G2, Tier.G3, now, BATCH_BLOCKS)
        if not keys:
            return 0
        if space.count(Tier.G3).free < len(keys):
            grown = await space.disk.grow()
            if grown:
                space.catalog.add_slots(Tier.G3, grown)
        return await self._node.moves[space.namespace].to_disk(keys)

    async def _to_remote(self, space: Space) -> int:
        """One run whose last block has gone down, if all of it is in host memory."""
        remote = self._node.remote
        if space.remote is None or remote is None or not remote.health.ok or not space.run_ends:
            return 0
        last = next(iter(space.run_ends))
        size = space.remote.run_blocks * space.geometry.payload_bytes
        if not self._remote_budget.take(size, time.monotonic()):
            return 0
        del space.run_ends[last]
        run = _run_before(space, last, space.remote.run_blocks)
        if run is None:
            return 0
        if any(Tier.G2 not in space.catalog.tiers_of(key) for key in run):
            await self._node.moves[space.namespace].promote(run)
        return await self._node.moves[space.namespace].to_remote(run)

    async def _probe(self, tier: DiskTier | ObjectTier) -> None:
        said = Health(True)
        away = False
        while True:
            # It may have failed since the last look and work again now: that is told as well.
            before = tier.health
            after = before if before.ok else await tier.probe()
            if tier is self._node.disk and after.ok:
                await self._look_at_disk()
            for health in (before, after):
                if health != said:
                    say = log.info if health.ok else log.warning
                    what = "tier works" if health.ok else "tier degraded"
                    say(what, place=tier.place, why=health.why)
                    said = health
            if tier is self._node.disk and after.ok and not before.ok:
                self._forgive(again=away)
            away = not after.ok
            await asyncio.sleep(PROBE_S)

    def _forgive(self, *, again: bool) -> None:
        """A disk that works again has no bad places: reads failed as all of it did.

        But when nobody saw it away as a whole (not `again`), a place that has failed twice is bad.
        """
        for space in self._node.spaces.values():
            if space.disk is None:
                continue
            if count := space.catalog.forgive(Tier.G3, again=again):
                space.apply()
                log.info("slots of the disk are used again", slots=count)

    async def _look_at_disk(self) -> None:
        """Opens the disk for who found no room on it before; forgets what was deleted there."""
        for space in list(self._node.spaces.values()):
            if space.disk is not None and (lost := space.disk.take_lost()):
                space.forget_slots(Tier.G3, lost, self._node.now_ms())
            if space.disk is None and (disk := await self._node.open_disk(space.arena)):
                await space.add_disk(disk, self._node.now_ms())

    # Verification.

    async def _scrub(self) -> None:
        """Goes round all blocks at a bounded rate."""
        rate = self._node.settings.scrub_mb_s * 2**20
        while True:
            for space in list(self._node.spaces.values()):
                for tier in (Tier.G2, Tier.G3):
                    for key in list(space.catalog.keys(tier)):
                        await asyncio.sleep(space.geometry.payload_bytes / rate)
                        with contextlib.suppress(OSError):
                            await self.check(space, tier, key)
            await asyncio.sleep(1.0)

    async def check(self, space: Space, tier: Tier, key: bytes) -> bool:
        """Verifies one block where it lies; False when it was bad, and is forgotten."""
        meta, ref = space.catalog.meta(key, tier), space.catalog.slot(tier, key)
        if meta is None or ref is None:
            return True
        if tier is Tier.G2:
            good = await verify(self._node, space, ReadyBlock(key, ref, meta.checksums))
        else:
            good = await self._check_disk(space, meta, ref)
        self._metrics.scrubbed(tier, 1)
        return good

    async def _check_disk(self, space: Space, meta: BlockMeta, ref: SlotRef) -> bool:
        """Reads a block on disk into a slot that nobody else uses; its verdict is the load's."""
        key, now = meta.key, self._node.now_ms
        slots = space.catalog.grant(SCRUBBER, 1, now())
        space.apply()
        if not slots:
            return True
        if space.disk is None or space.catalog.slot(Tier.G3, key) != ref:
            # To make room, even this block may have gone.
            space.catalog.give_back(SCRUBBER, slots[0], now())
            space.apply()
            return True
        header = sealed_header(meta, ref.generation, space.geometry.payload_bytes)
        result = await space.disk.load(
            [Transfer(slots[0].index, header, ref.index)], self._node.settings.disk_timeout_s
        )
        if result.fence is not None:
            await result.fence
        space.catalog.give_back(SCRUBBER, slots[0], now())
        error = result.errors[0]
        bad = error is not None and error.startswith("corrupt")
        if bad and space.catalog.slot(Tier.G3, key) == ref:
            log.error("a block on disk is corrupt", slot=ref.index, why=error)
            self._metrics.corrupt(Tier.G3)
            space.catalog.forget(Tier.G3, key, now())
        space.apply()
        return not bad


def _run_before(space: Space, last: bytes, size: int) -> list[bytes] | None:
    """The aligned run that ends with `last`, from its first block on, if all of it is here."""
    run = [last]
    while len(run) < size:
        meta = space.catalog.meta(run[-1])
        if meta is None or not any(meta.parent):
            return None
        run.append(meta.parent)
    run.reverse()
    return run if all(space.catalog.tiers_of(key) for key in run) else None
