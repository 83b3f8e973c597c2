"""The catalog: all blocks of one namespace. Who holds what in G2, G3 and G4, who writes, who reads.

Pure and synchronous. Each call decides; the shell performs what was decided (`take_changes`) before
the next one. The parts: stock.py (blocks in slots), grants.py (engines that write), leases.py
(engines that read), copies.py (between tiers), pins.py, adoption.py and clearing.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from services.common.arena import SlotHeader
from services.common.events.model import Tier
from services.kvbm.core.adoption import adopt
from services.kvbm.core.blocks import SLOT_TIERS, Block
from services.kvbm.core.clearing import clear
from services.kvbm.core.copies import Copies
from services.kvbm.core.eviction import Eviction
from services.kvbm.core.grants import Grants
from services.kvbm.core.leases import Leases
from services.kvbm.core.model import (
    Adopted,
    BlockMeta,
    BlockView,
    Changes,
    Cleared,
    CommitResult,
    Copy,
    Counts,
    Expired,
    Lease,
    LeaseId,
    Owner,
    PinLimit,
    ReadyBlock,
    Selection,
    SlotRef,
    TierCounts,
)
from services.kvbm.core.pins import Pins
from services.kvbm.core.quota import QuotaBook
from services.kvbm.core.slots import Use
from services.kvbm.core.stock import Stock

__all__ = [
    "BlockView",
    "Catalog",
    "Cleared",
    "Copy",
    "Counts",
    "Expired",
    "Lease",
    "PinLimit",
    "Selection",
    "TierCounts",
]

EXPIRE_AT_ONCE = 2048
"""Leases, and copies, that one call of `expire` ends at most."""


class Catalog:
    """All blocks of one namespace. Loop's thread only; each call leaves it consistent.

    `slots`: of G2, and of G3 if there is any. `payload_bytes`: of a block, all ranks together.
    `evictions`: one for each tier with slots. `quota` may be shared with other namespaces.
    `grant_limit`: most slots one owner may hold for filling; `grant_share`: how much of the tier an
    owner's part of that may be, with all owners given alike. `pin_share`: most of a tier that pins
    may keep. Times are Unix milliseconds; a clock that was set back does no harm.
    """

    def __init__(
        self,
        slots: Mapping[Tier, int],
        ranks: int,
        payload_bytes: int,
        evictions: Mapping[Tier, Eviction],
        quota: QuotaBook,
        *,
        grant_limit: int,
        grant_share: float = math.inf,
        new_lease: Callable[[], LeaseId],
        pin_share: float = 0.5,
    ) -> None:
        self.evictions = evictions
        self._ranks = ranks
        self._quota = quota
        self._pins = Pins(pin_share, slots)
        self._stock = Stock(slots, payload_bytes, evictions, quota, self._pins)
        self._grants = Grants(self._stock, ranks, grant_limit, grant_share)
        self._leases = Leases(self._stock, new_lease)
        self._copies = Copies(self._stock, ranks)

    def add_slots(self, tier: Tier, count: int) -> None:
        """A tier has grown by `count` empty slots, numbered on from its last."""
        self._stock.add_slots(tier, count)

    # Start.

    def adopt(
        self,
        tier: Tier,
        slot: int,
        header: SlotHeader | None,
        now_ms: int,
        alive: Callable[[int], bool],
    ) -> Adopted:
        """Takes over what an earlier life left in a slot; `header` None: it is corrupt.

        All of a tier's slots are adopted before any of them is taken; after that it raises
        IllegalStep. What a live owner is filling stays out of use until `release_owner`. Quotas are
        charged beyond their limits.
        """
        self._stock.now_ms = now_ms
        return adopt(self._stock, self._ranks, tier, slot, header, alive)

    # Engines that write.

    def grant(self, owner: Owner, count: int, now_ms: int) -> list[SlotRef]:
        """Empty slots of G2 to fill, up to `count` and the owner's limit; evicts if need be."""
        self._stock.now_ms = now_ms
        return self._grants.grant(owner, count)

    def commit(
        self,
        owner: Owner,
        ref: SlotRef,
        rank: int,
        block: BlockMeta,
        checksum: int,
        now_ms: int,
    ) -> CommitResult:
        """A rank has filled its shard of a granted slot. Idempotent for the same commit.

        `block.checksums` is ignored. With several ranks any owner may commit its rank's shard.
        """
        self._stock.now_ms = now_ms
        return self._grants.commit(owner, ref, rank, block, checksum)

    def give_back(self, owner: Owner, ref: SlotRef, now_ms: int) -> CommitResult:
        """Returns a granted slot unused: RETURNED, or FENCED when it wasn't the owner's."""
        self._stock.now_ms = now_ms
        return self._grants.give_back(owner, ref)

    def release_owner(self, owner: Owner, now_ms: int) -> int:
        """All the owner's writes have ended: its slots come back (how many) and its leases end."""
        self._stock.now_ms = now_ms
        self._leases.release_owner(owner)
        return self._grants.release_owner(owner)

    def granted(self, owner: Owner) -> int:
        """Slots that the owner may write into."""
        return self._grants.granted(owner)

    # Engines that read.

    def tiers_of(self, key: bytes) -> tuple[Tier, ...]:
        """Where the block can be found, best first; () nowhere."""
        block = self._stock.blocks.get(key)
        return block.tiers_at(self._stock.now_ms) if block is not None else ()

    def run(self, keys: Sequence[bytes]) -> list[tuple[Tier, ...]]:
        """Where the leading blocks can be found, up to the first that is nowhere."""
        get, now_ms = self._stock.blocks.get, self._stock.now_ms
        found = []
        for key in keys:
            block = get(key)
            if block is None:
                break
            tiers = block.tiers if now_ms < block.until else block.tiers_at(now_ms)
            if not tiers:
                break
            found.append(tiers)
        return found

    def touch(self, keys: Sequence[bytes], now_ms: int) -> None:
        """A look-up has found a chain, given in order; unknown keys pass."""
        self._stock.now_ms = now_ms
        get = self._stock.blocks.get
        g2: list[bytes] = []
        g3: list[bytes] = []
        for key in keys:
            block = get(key)
            if block is None or not block.tiers:
                continue
            block.hits += 1
            block.used_ms = now_ms
            if block.g2 is not None:
                g2.append(key)
            if block.g3 is not None:
                g3.append(key)
        if g2:
            self.evictions[Tier.G2].touch(g2)
        if g3:
            self.evictions[Tier.G3].touch(g3)

    def lease(
        self,
        keys: Sequence[bytes],
        tenant: int,
        expires_ms: int,
        now_ms: int,
        *,
        owner: Owner | None = None,
    ) -> Lease:
        """Holds what of `keys` is in G2 now, from the first on without a hole.

        The others may join later (`lease_ready`). With an owner it ends with that owner at the
        latest.
        """
        self._stock.now_ms = now_ms
        return self._leases.take(keys, tenant, expires_ms, owner)

    def lease_ready(self, lease: LeaseId) -> list[ReadyBlock]:
        """A lease's leading blocks in G2, held from now on. Raises KeyError for one that ended."""
        return self._leases.ready(lease)

    def has_lease(self, lease: LeaseId) -> bool:
        """Whether it hasn't ended."""
        return lease in self._leases

    def release(self, lease: LeaseId, now_ms: int) -> bool:
        """Ends a lease; False: it had ended."""
        self._stock.now_ms = now_ms
        return self._leases.release(lease)

    def expire(self, now_ms: int) -> Expired:
        """Ends leases, copies and pins whose time has come; a bounded number of them at once."""
        self._stock.now_ms = now_ms
        leases = self._leases.expire(EXPIRE_AT_ONCE)
        blocks = self._stock.expire(EXPIRE_AT_ONCE)
        more = EXPIRE_AT_ONCE in (leases, blocks)
        return Expired(leases, blocks, self._pins.expire(self._stock.now_ms), more)

    # Between tiers.

    def begin_copy(self, key: bytes, source: Tier, target: Tier, now_ms: int) -> Copy | None:
        """Starts to copy a block. None: gone, there already, being copied, over quota, no room."""
        self._stock.now_ms = now_ms
        return self._copies.begin(key, source, target)

    def begin_fetch(self, meta: BlockMeta, now_ms: int, *, source: Tier = Tier.G4) -> Copy | None:
        """Starts to bring a block from G4, or a peer, into G2.

        Of `meta` only key and place need be known.
        """
        self._stock.now_ms = now_ms
        return self._copies.begin_fetch(meta, source)

    def moving(self, key: bytes, target: Tier) -> bool:
        """Whether a block is on its way to a tier."""
        return self._copies.moving(key, target)

    def end_copy(
        self,
        copy: Copy,
        ok: bool,
        now_ms: int,
        *,
        header: SlotHeader | None = None,
        terminal: bool = True,
    ) -> bool:
        """Books how a copy ended; whether the target has the block by it.

        False also when it went well but the block was forgotten meanwhile or came another way; an
        object just stored is to be erased then. `header`: what a fetch has brought; required of one
        that went well unless its checksums were known. Not terminal (only when it failed): slots
        stay out of use until `fence_passed`.
        """
        self._stock.now_ms = now_ms
        return self._copies.end(copy, ok, header=header, terminal=terminal)

    def fence_passed(self, copy: Copy, now_ms: int) -> None:
        """Nothing reads or writes a failed copy's slots any more."""
        self._stock.now_ms = now_ms
        self._copies.fence_passed(copy)

    def forget(self, tier: Tier, key: bytes, now_ms: int, *, quarantine: bool = False) -> bool:
        """A tier's copy is bad: nobody finds it again. False: it isn't there.

        Its slot is used again when nobody reads it, or not before `forgive`, as told. Of G4: as
        `set_remote`.
        """
        self._stock.now_ms = now_ms
        block = self._stock.blocks.get(key)
        if block is None or tier not in block.tiers:
            return False
        if tier is Tier.G4:
            self._stock.set_remote(block, None)
        else:
            self._stock.withdraw(block, tier, bad=quarantine)
        return True

    def forgive(self, tier: Tier, *, again: bool = True) -> int:
        """Slots in which bytes went bad are used again; how many are free for it at once.

        Not `again`: those that were forgiven before stay out of use.
        """
        return len(self._stock.slots[tier].forgive(again=again))

    def lost(self, tier: Tier, slot: SlotRef) -> None:
        """What lay in a slot, in that generation, is lost; a slot that was reused since passes."""
        slots = self._stock.slots[tier]
        held = slots.held[slot.index] if slots.current(slot) else None
        if held is not None and slots.uses[slot.index] == Use.REGISTERED:
            self.forget(tier, held.meta.key, self._stock.now_ms)

    def set_remote(self, keys: Sequence[bytes], there: bool) -> None:
        """G4 has, or hasn't, these blocks; those that are not here pass."""
        for key in keys:
            block = self._stock.blocks.get(key)
            if block is None or not block.local or there is (block.remote is not None):
                continue
            self._stock.set_remote(block, next(block.metas())[1] if there else None)

    # Rules.

    def pin(self, key: bytes, owner: str, expires_ms: int, now_ms: int) -> int | None:
        """Keeps a block and all before it, as far as they are here, from eviction; how many.

        None: nothing of it is here. Raises PinLimit. Blocks that people clear, that expire or that
        are lost go nevertheless.
        """
        self._stock.now_ms = now_ms
        block = self._stock.blocks.get(key)
        path = self._stock.blocks.path(block) if block is not None else []
        here = [b for b in path if self._stock.live(b.key) is not None]
        return self._pins.pin(key, here, owner, expires_ms) if here else None

    def unpin(self, key: bytes | None, owner: str) -> int:
        """Ends an owner's pin of a prefix, or (None) all of its pins; how many."""
        return self._pins.unpin(key, owner)

    def clear(
        self,
        select: Selection,
        now_ms: int,
        *,
        dry_run: bool = False,
        limit: int | None = None,
    ) -> Cleared:
        """Forgets what is selected, or only counts it. See clearing.py.

        With a limit about so many copies go by one call, and `more` tells to call again: so a
        large tier is cleared without keeping everybody else waiting.
        """
        self._stock.now_ms = now_ms
        return clear(self._stock, self._copies, select, dry_run=dry_run, limit=limit)

    # Questions.

    def counts(self) -> Counts:
        """Figures."""
        stock = self._stock
        tiers = {tier: slots.counts() for tier, slots in stock.slots.items()}
        tiers[Tier.G4] = TierCounts(blocks=stock.remote_blocks)
        return Counts(
            tiers,
            len(self._leases),
            len(self._pins),
            self._grants.total(),
            len(self._copies),
        )

    def blocks(self) -> Iterator[BlockView]:
        """All blocks that can be found, most recently used first."""
        here = [block for block in self._stock.blocks if block.tiers]
        here.sort(key=_used, reverse=True)
        return (self._view(block) for block in here if block.tiers)

    def view(self, key: bytes) -> BlockView | None:
        """One block; None: it is nowhere."""
        block = self._stock.blocks.get(key)
        return self._view(block) if block is not None and block.tiers else None

    def _view(self, block: Block) -> BlockView:
        held = block.g2
        readers = self._stock.slots[Tier.G2].readers[held.ready.ref.index] if held else 0
        _, meta = next(block.metas())
        return BlockView(meta, block.tiers, block.hits, block.used_ms, readers, len(block.pins))

    def keys(self, tier: Tier) -> Iterable[bytes]:
        """All blocks that can be found in a tier. Valid until the next call that changes any."""
        if tier in SLOT_TIERS:
            return (held.meta.key for held in self._stock.slots[tier].blocks())
        return (block.key for block in self._stock.blocks if block.remote is not None)

    def meta(self, key: bytes, tier: Tier | None = None) -> BlockMeta | None:
        """What a block is in a tier, or in its best; checksums may differ between tiers."""
        block = self._stock.blocks.get(key)
        if block is None:
            return None
        return next((meta for t, meta in block.metas() if tier in (None, t)), None)

    def slot(self, tier: Tier, key: bytes) -> SlotRef | None:
        """Where in a tier with slots a block lies."""
        block = self._stock.blocks.get(key)
        held = block.held(tier) if block is not None else None
        return held.ready.ref if held is not None else None

    def take_changes(self) -> Changes:
        """What calls have decided since this was called last."""
        return self._stock.take_changes()

    def charges(self) -> dict[tuple[int, Tier], int]:
        """Bytes that this namespace charges to each tenant in each tier."""
        charges = self._stock.charges()
        for of, count in self._copies.charges().items():
            charges[of] = charges.get(of, 0) + count
        return charges

    def check_invariants(self) -> None:
        """Raises AssertionError when anything in it disagrees with anything else."""
        for part in (self._stock, self._grants, self._leases, self._copies):
            part.check_invariants()
        readers = self._copies.readers()
        for index, count in self._leases.readers().items():
            readers[Tier.G2, index] = readers.get((Tier.G2, index), 0) + count
        for tier, slots in self._stock.slots.items():
            for index, count in enumerate(slots.readers):
                assert count == readers.get((tier, index), 0), "a reader leaks"
        use = self._quota.use()
        for of, count in self.charges().items():
            assert use.get(of, 0) >= count, "charges disagree with use"


def _used(block: Block) -> int:
    return block.used_ms
