"""Blocks between host memory and the tiers below: promotions, and writes downwards.

Each block that sets out ends once: there, failed, or with its slot quarantined until the operation
behind it is terminal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from services.common.arena import SlotHeader
from services.common.blocks import block_key
from services.common.events.model import Tier
from services.common.telemetry.logging import get_logger
from services.kvbm.core.catalog import Copy
from services.kvbm.core.model import BlockMeta, SlotRef
from services.kvbm.core.peers import PeerId
from services.kvbm.fetching import Fetches, wanted
from services.kvbm.metrics import KvbmMetrics
from services.kvbm.space import Space
from services.kvbm.tiers.port import Transfer, Transferred

BATCH_BLOCKS = 16
"""Blocks in one batch of I/O: large enough to keep a disk busy, small enough to fail alone."""
BATCHES_AT_ONCE = 2
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Promoted:
    """Blocks that a promotion has brought into host memory, by where they came from."""

    disk: int = 0
    remote: int = 0
    peers: int = 0


@dataclass(slots=True)
class _Underway:
    """What one promotion has set in motion, or waits for."""

    copies: list[Copy] = field(default_factory=list)
    fetches: list[Awaitable[int]] = field(default_factory=list)
    waits: list[asyncio.Future[None]] = field(default_factory=list)


class Moves:
    """All movements of one namespace. Loop's thread only."""

    def __init__(
        self,
        space: Space,
        metrics: KvbmMetrics,
        now_ms: Callable[[], int],
        now_s: Callable[[], float],
        *,
        disk_timeout_s: float,
        remote_timeout_s: float,
        fetches: Fetches | None = None,
    ) -> None:
        self.fetches = fetches
        """Blocks from peers; None: there are no peers."""
        self._space = space
        self._metrics = metrics
        self._now_ms = now_ms
        self._now_s = now_s
        self._disk_timeout_s = disk_timeout_s
        self._remote_timeout_s = remote_timeout_s
        self._flying: dict[bytes, asyncio.Future[None]] = {}
        self._lane = asyncio.Semaphore(BATCHES_AT_ONCE)

    # Up.

    async def promote(
        self,
        keys: Sequence[bytes],
        first: int = 0,
        arrived: Callable[[], None] = lambda: None,
        ask: Callable[[PeerId, int], int] | None = None,
    ) -> Promoted:
        """Brings blocks of a chain into host memory; how many came by this call.

        `keys` is the whole chain from its start; blocks before number `first` are not wanted.
        Stops at the first block that is nowhere. Returns when each block is there or has failed.
        `arrived` is called after each batch: in a full tier, a reader must hold what has come.
        `ask`: ask peers for blocks that nobody is known to have; it says how many to fetch of
        those that one turns out to hold.
        """
        under = _Underway()
        number = self._begin(keys, first, under, arrived)
        work: list[Awaitable[int]] = [
            self._flight(batch, self._from_disk(batch), arrived) for batch in _batches(under.copies)
        ]
        local, remote = asyncio.gather(*work), 0
        if number < len(keys) and ask is not None and self.fetches is not None:
            found = await self.fetches.ask(keys[number:])
            if found is not None:
                # By now others may have begun to fetch some of them.
                end = number + ask(*found)
                number = self._begin(keys[:end], number, under, arrived, disk=False)
        if number < len(keys):
            remote = await self._from_remote(keys, number, arrived)
        moved = Promoted(sum(await local), remote, sum(await asyncio.gather(*under.fetches)))
        if under.waits:
            await asyncio.wait(under.waits)
        return moved

    def _begin(
        self,
        keys: Sequence[bytes],
        number: int,
        under: _Underway,
        arrived: Callable[[], None],
        *,
        disk: bool = True,
    ) -> int:
        """Sets blocks under way, from number `number` on; the first that is nowhere to be had."""
        while number < len(keys):
            key = keys[number]
            if (flying := self._underway(key)) is not None:
                under.waits.append(flying)
                number += 1
                continue
            tiers = self._space.catalog.tiers_of(key)
            if Tier.G2 in tiers:
                number += 1
            elif Tier.G3 in tiers and disk:
                copy = self._space.catalog.begin_copy(key, Tier.G3, Tier.G2, self._now_ms())
                if copy is None:
                    break
                under.copies.append(copy)
                number += 1
            else:
                peer, count = self._at_peer(keys, number)
                if peer is None or self.fetches is None:
                    break
                blocks = wanted(keys[number : number + count])
                under.fetches.append(self.fetches.fetch(peer, blocks, arrived))
                number += count
        self._space.apply()
        return number

    def _underway(self, key: bytes) -> asyncio.Future[None] | None:
        """What a block that is on its way is waited for by."""
        flying = self._flying.get(key)
        if flying is None and self.fetches is not None:
            flying = self.fetches.coming(block_key(key))
        return flying

    def _at_peer(self, keys: Sequence[bytes], number: int) -> tuple[PeerId | None, int]:
        """The peer that is said to hold block `number`, and how many from there on it is for."""
        if self.fetches is None or (peer := self.fetches.holder(block_key(keys[number]))) is None:
            return None, 0
        count = 1
        for key in keys[number + 1 :]:
            tiers = self._space.catalog.tiers_of(key)
            if Tier.G2 in tiers or Tier.G3 in tiers or self._underway(key) is not None:
                break
            if self.fetches.holder(block_key(key)) != peer:
                break
            count += 1
        return peer, count

    async def _flight(
        self, copies: Sequence[Copy], work: Awaitable[int], arrived: Callable[[], None]
    ) -> int:
        """Runs `work`, and tells who waits for these blocks when it is over."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for copy in copies:
            self._flying[copy.meta.key] = done
        try:
            async with self._lane:
                moved = await work
            arrived()
            return moved
        finally:
            for copy in copies:
                if self._flying.get(copy.meta.key) is done:
                    del self._flying[copy.meta.key]
            done.set_result(None)

    async def _from_disk(self, copies: Sequence[Copy]) -> int:
        space = self._space
        assert space.disk is not None
        transfers = [
            Transfer(
                _slot(copy.target_slot),
                space.header_of(copy, Tier.G3),
                _slot(copy.source_slot),
            )
            for copy in copies
        ]
        result = await space.disk.load(transfers, self._disk_timeout_s)
        return self._ended(copies, result, Tier.G3, Tier.G2)

    async def _from_remote(
        self, keys: Sequence[bytes], first: int, arrived: Callable[[], None]
    ) -> int:
        """Fetches blocks from number `first` on, whole runs at a time, as far as they are there."""
        space = self._space
        if space.remote is None or first >= len(keys):
            return 0
        began = self._now_s()
        there = await space.remote.find(keys, self._remote_timeout_s)
        space.odds.heard(there > first, self._now_s() - began)
        size = space.remote.run_blocks
        work: list[Awaitable[int]] = []
        for start in range(first - first % size, there, size):
            copies: list[Copy] = []
            # A run is read from its start: blocks of it that are here already end its use.
            for position in range(start, min(start + size, there)):
                key = keys[position]
                meta = BlockMeta(key, keys[position - 1] if position else bytes(32), position)
                if position < first or key in self._flying:
                    continue
                copy = space.catalog.begin_fetch(meta, self._now_ms())
                if copy is not None:
                    copies.append(copy)
            if copies:
                work.append(self._flight(copies, self._run_from_remote(copies), arrived))
        space.apply()
        return sum(await asyncio.gather(*work)) if work else 0

    async def _run_from_remote(self, copies: Sequence[Copy]) -> int:
        space = self._space
        assert space.remote is not None
        transfers = [
            Transfer(_slot(copy.target_slot), space.header_of(copy, Tier.G2)) for copy in copies
        ]
        result = await space.remote.load(transfers, self._remote_timeout_s)
        return self._ended(copies, result, Tier.G4, Tier.G2)

    # Down.

    async def to_disk(self, keys: Sequence[bytes]) -> int:
        """Writes blocks from host memory to disk; how many arrived."""
        space = self._space
        if space.disk is None:
            return 0
        copies = []
        for key in keys:
            copy = space.catalog.begin_copy(key, Tier.G2, Tier.G3, self._now_ms())
            if copy is not None:
                copies.append(copy)
        space.apply()
        if not copies:
            return 0
        transfers = [
            Transfer(
                _slot(copy.source_slot),
                space.header_of(copy, Tier.G3),
                _slot(copy.target_slot),
            )
            for copy in copies
        ]
        await space.before_store([t.slot for t in transfers])
        result = await space.disk.store(transfers, self._disk_timeout_s)
        done = self._ended(copies, result, Tier.G2, Tier.G3)
        self._metrics.count("offload_blocks_h2d", done)
        return done

    async def to_remote(self, run: Sequence[bytes]) -> int:
        """Writes one aligned run, whole in host memory, to remote storage."""
        space = self._space
        if space.remote is None:
            return 0
        copies = []
        for key in run:
            copy = space.catalog.begin_copy(key, Tier.G2, Tier.G4, self._now_ms())
            if copy is not None:
                copies.append(copy)
        space.apply()
        if len(copies) < len(run):
            for copy in copies:
                space.catalog.end_copy(copy, False, self._now_ms())
            space.apply()
            return 0
        transfers = [
            Transfer(_slot(copy.source_slot), space.header_of(copy, Tier.G2)) for copy in copies
        ]
        result = await space.remote.store(transfers, self._remote_timeout_s)
        done = self._ended(copies, result, Tier.G2, Tier.G4)
        if result.errors.count(None) > done:
            # Forgotten while it was written: what is in the store now must not be found again.
            await space.remote.erase(run)
        self._metrics.count("offload_blocks_d2o", done)
        return done

    # Both.

    def _ended(
        self, copies: Sequence[Copy], result: Transferred, source: Tier, target: Tier
    ) -> int:
        """Books how a batch ended; how many blocks arrived."""
        space, lower = self._space, max(source, target)
        headers: Sequence[SlotHeader | None] = result.headers or [None] * len(copies)
        unfinished: list[Copy] = []
        done = 0
        for copy, error, header in zip(copies, result.errors, headers, strict=True):
            if error is None:
                done += space.catalog.end_copy(copy, True, self._now_ms(), header=header)
                continue
            terminal = result.fence is None
            space.catalog.end_copy(copy, False, self._now_ms(), terminal=terminal)
            if not terminal:
                unfinished.append(copy)
            self._metrics.failed(lower, error)
            if error.startswith("corrupt"):
                self._metrics.corrupt(source)
                log.warning("a stored block is corrupt", tier=source.name, why=error)
                if source is Tier.G3:
                    space.catalog.forget(Tier.G3, copy.meta.key, self._now_ms())
            elif error.startswith("EIO") and source is Tier.G3:
                # A bad sector: what lies there is lost, and nothing new should go there.
                space.catalog.forget(Tier.G3, copy.meta.key, self._now_ms(), quarantine=True)
            if source is Tier.G4:
                space.catalog.forget(Tier.G4, copy.meta.key, self._now_ms())
        space.apply()
        if done:
            self._metrics.moved(source, target, done * space.geometry.payload_bytes, result.seconds)
            if target is Tier.G2:
                space.gate.observe(source, done, result.seconds, self._now_s())
        elif target is Tier.G2 and result.errors:
            # A load that took its time and brought nothing is the dearest of all.
            space.gate.given_up(source, len(copies), result.seconds, self._now_s())
        if result.fence is not None:
            space.background(self._await_fence(result.fence, unfinished), "fence")
        return done

    async def _await_fence(self, fence: Awaitable[None], copies: Sequence[Copy]) -> None:
        await fence
        for copy in copies:
            self._space.catalog.fence_passed(copy, self._now_ms())
        self._space.apply()


def _slot(ref: SlotRef | None) -> int:
    assert ref is not None, "a copy between tiers with slots has both slots"
    return ref.index


def _batches(copies: Sequence[Copy]) -> list[Sequence[Copy]]:
    return [copies[i : i + BATCH_BLOCKS] for i in range(0, len(copies), BATCH_BLOCKS)]
