"""The stock: blocks in slots, tier by tier, and what follows from their coming and going.

Keeps slots, block entries, eviction order, quotas, pins and the list of changes in step. Who asks
for it (engines, readers, copies, people) is not known here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from services.common.arena import SlotHeader, SlotState
from services.common.events.model import Tier
from services.kvbm.core.blocks import SLOT_TIERS, Block, Blocks, Held, expired
from services.kvbm.core.eviction import Eviction
from services.kvbm.core.model import (
    BlockMeta,
    Changes,
    HeaderWrite,
    Owner,
    ReadyBlock,
    SlotRef,
    sealed_header,
)
from services.kvbm.core.pins import Pins
from services.kvbm.core.quota import QuotaBook
from services.kvbm.core.slots import Slots, Use

_LONG_PAST_MS = 1
"""Expiry of a block that is void though its header must still be readable."""
_SPARE_NAMES = 1024
"""Missing blocks that may be known beyond one for each slot."""
_SIBLINGS = 8
"""Followers of one block that are tried on the way to the end of a chain."""


class Stock:
    """What lies in the tiers of one namespace. Not thread-safe; each call leaves it consistent."""

    def __init__(
        self,
        slots: Mapping[Tier, int],
        payload_bytes: int,
        evictions: Mapping[Tier, Eviction],
        quota: QuotaBook,
        pins: Pins,
    ) -> None:
        self.slots = {tier: Slots(tier, slots.get(tier, 0)) for tier in SLOT_TIERS}
        self.blocks = Blocks()
        self._limit_missing()
        self.pins = pins
        self.evictions = evictions
        self.quota = quota
        self.payload_bytes = payload_bytes
        self.now_ms = 0
        """The time, as was said last."""
        self.remote_blocks = 0
        """Blocks that are in G4, too."""
        self._spared = {tier: self._spares(tier) for tier in SLOT_TIERS}
        self._limited: dict[tuple[int, Tier], OrderedDict[bytes, int]] = {}
        """Blocks of each tenant with a quota, those used longest ago first as far as was looked,
        with the time of use that was seen then."""
        self._expiries: list[tuple[int, Tier, int, int]] = []
        """Heap of (time, tier, slot, generation); those of blocks that went earlier among them."""
        self._events: dict[Tier, dict[bytes, bool]] = {tier: {} for tier in (*SLOT_TIERS, Tier.G4)}

    def add_slots(self, tier: Tier, count: int) -> None:
        """A tier has grown."""
        self.slots[tier].add(count)
        self.pins.resize(tier, len(self.slots[tier]))
        self._limit_missing()

    def _limit_missing(self) -> None:
        self.blocks.most_missing = _SPARE_NAMES + sum(len(slots) for slots in self.slots.values())

    # Blocks.

    def live(self, key: bytes) -> Block | None:
        """The block if it is anywhere; its expired copies go now."""
        block = self.blocks.get(key)
        if block is None or self.now_ms < block.until:
            return block if block is not None and block.tiers else None
        if block.remote is not None and expired(block.remote, self.now_ms):
            self.set_remote(block, None)
        for tier in SLOT_TIERS:
            held = block.held(tier)
            if held is not None and expired(held.meta, self.now_ms):
                self.withdraw(block, tier)
        return block if block.tiers else None

    def register(self, tier: Tier, ref: SlotRef, meta: BlockMeta, *, reused: bool = False) -> None:
        """A filled slot becomes a block's copy. Its bytes are charged already.

        `reused`: somebody has asked for the block.
        """
        held = Held(meta, ReadyBlock(meta.key, ref, meta.checksums))
        self.slots[tier].register(ref.index, held)
        self._enter(tier, held, self.now_ms, reused)

    def restore(self, tier: Tier, ref: SlotRef, meta: BlockMeta) -> None:
        """A block was found in a slot at start. It is charged whatever the quota says."""
        held = Held(meta, ReadyBlock(meta.key, ref, meta.checksums))
        self.slots[tier].restore(ref.index, ref.generation, held=held)
        self.quota.charge(meta.tenant, tier, self.payload_bytes, force=True)
        self._enter(tier, held, meta.created_ms, False)

    def _enter(self, tier: Tier, held: Held, used_ms: int, reused: bool) -> None:
        meta = held.meta
        block = self.blocks.put(tier, held)
        if used_ms > block.used_ms:
            block.used_ms = used_ms
        self.evictions[tier].add(
            meta.key, meta.position, reused=reused or block.hits > 0, parent=meta.parent
        )
        if self.quota.limit(meta.tenant, tier) is not None:
            own = self._limited.get((meta.tenant, tier))
            if own is None:
                own = self._limited[meta.tenant, tier] = OrderedDict()
            own[meta.key] = block.used_ms
        if meta.expires_ms:
            self._expect(meta.expires_ms, tier, held.ready.ref)
        if block.pins:
            self.pins.appeared(block)
        self._tell(tier, meta.key, there=True)

    def withdraw(self, block: Block, tier: Tier, *, bad: bool = False) -> None:
        """Nobody finds this copy again; its slot comes back when its last reader ends.

        `bad`: its slot stays out of use. A block without local copies is forgotten.
        """
        held = block.held(tier)
        assert held is not None
        slots, index = self.slots[tier], held.ready.ref.index
        self.evictions[tier].remove(block.key)
        own = self._limited.get((held.meta.tenant, tier))
        if own is not None:
            del own[block.key]
            if not own:
                del self._limited[held.meta.tenant, tier]
        block.hold(tier, None)
        if block.pins:
            self.pins.vanished(block, tier)
        self._tell(tier, block.key, there=False)
        if slots.readers[index]:
            slots.leave(index, bad=bad)
        else:
            self._vacate(tier, index, held, bad)
        if not block.local:
            if block.remote is not None:
                self.set_remote(block, None)
            self.pins.forgotten(block)
            block.hits = block.used_ms = 0
            self.blocks.prune(block)

    def set_remote(self, block: Block, meta: BlockMeta | None) -> None:
        """G4 has, or hasn't, a block that is here. Its bytes there are charged while it is."""
        if block.remote is not None:
            self.quota.refund(block.remote.tenant, Tier.G4, self.payload_bytes)
        if meta is not None:
            self.quota.charge(meta.tenant, Tier.G4, self.payload_bytes, force=True)
        if (meta is None) != (block.remote is None):
            self._tell(Tier.G4, block.key, there=meta is not None)
            self.remote_blocks += 1 if meta is not None else -1
        block.set_remote(meta)

    # Readers.

    def read(self, tier: Tier, index: int) -> None:
        """One reader more: the slot keeps its bytes."""
        self.slots[tier].readers[index] += 1

    def unread(self, tier: Tier, index: int) -> None:
        """One reader less; the last one lets a withdrawn block's slot go."""
        slots = self.slots[tier]
        slots.readers[index] -= 1
        if not slots.readers[index] and slots.uses[index] == Use.LEAVING:
            held = slots.held[index]
            assert held is not None
            self._vacate(tier, index, held, slots.bad(index))

    # Slots.

    def take(self, tier: Tier, owner: Owner) -> SlotRef | None:
        """An empty slot to fill, after evicting if need be; None: all are in use."""
        slots = self.slots[tier]
        if not slots.any_free and not self._make_room(tier):
            return None
        return slots.take(owner)

    def give_up(self, tier: Tier, index: int) -> None:
        """A slot that was being filled, or was quarantined, is empty again."""
        self.slots[tier].free(index)

    def _vacate(self, tier: Tier, index: int, held: Held, bad: bool) -> None:
        self.quota.refund(held.meta.tenant, tier, self.payload_bytes)
        if bad:
            self.slots[tier].quarantine(index)
        else:
            self.slots[tier].free(index)

    # Room.

    def charge(self, tenant: int, tier: Tier) -> bool:
        """Books a block's bytes; the tenant's oldest blocks go first if they must. False: no."""
        while not self.quota.room(tenant, tier, self.payload_bytes):
            block = self._oldest(tenant, tier) if tier is not Tier.G4 else None
            if block is None:
                return False
            self.withdraw(block, tier)
        self.quota.charge(tenant, tier, self.payload_bytes)
        return True

    def refund(self, tenant: int, tier: Tier) -> None:
        """Takes back what was charged for a block that did not come."""
        self.quota.refund(tenant, tier, self.payload_bytes)

    def _make_room(self, tier: Tier) -> bool:
        slots = self.slots[tier]
        while (due := self._due()) is not None:
            self.withdraw(*due)
            if slots.any_free:
                return True
        key = self.evictions[tier].victim(self._spared[tier])
        if key is None:
            return False
        block = self.blocks.get(key)
        assert block is not None and not self._spared[tier](key), "the policy chose a spared block"
        self.withdraw(block, tier)
        return True

    def _spares(self, tier: Tier) -> Callable[[bytes], bool]:
        slots, kept, get = self.slots[tier], self.pins.kept[tier], self.blocks.get

        def spared(key: bytes) -> bool:
            block = get(key)
            held = block.held(tier) if block is not None else None
            return held is None or slots.readers[held.ready.ref.index] > 0 or key in kept

        return spared

    def _oldest(self, tenant: int, tier: Tier) -> Block | None:
        """The tenant's block to go first: the end of the chain that was used longest ago."""
        own = self._limited.get((tenant, tier))
        for _ in range(2 * len(own) if own else 0):
            assert own is not None
            key, used_ms = next(iter(own.items()))
            block = self.blocks.get(key)
            assert block is not None
            if block.used_ms == used_ms and self._may_go(block, tenant, tier):
                return self._end_of_chain(block, tenant, tier)
            own[key] = block.used_ms
            own.move_to_end(key)
        return None

    def _may_go(self, block: Block, tenant: int, tier: Tier) -> bool:
        held = block.held(tier)
        return held is not None and held.meta.tenant == tenant and not self._spared[tier](block.key)

    def _end_of_chain(self, block: Block, tenant: int, tier: Tier) -> Block:
        while True:
            child, tries = block.first, _SIBLINGS
            while child is not None and tries and not self._may_go(child, tenant, tier):
                child, tries = child.after, tries - 1
            if child is None or not tries:
                return block
            block = child

    # Time.

    def expire(self, limit: int) -> int:
        """Withdraws up to `limit` copies whose time has come; how many."""
        count = 0
        while count < limit and (due := self._due()) is not None:
            self.withdraw(*due)
            count += 1
        return count

    def _due(self) -> tuple[Block, Tier] | None:
        """A copy that has expired."""
        heap = self._expiries
        while heap and heap[0][0] <= self.now_ms:
            entry = heapq.heappop(heap)
            if self._waits(entry):
                held = self.slots[entry[1]].held[entry[2]]
                block = self.blocks.get(held.meta.key) if held is not None else None
                assert block is not None
                return block, entry[1]
        return None

    def _waits(self, entry: tuple[int, Tier, int, int]) -> bool:
        _, tier, index, generation = entry
        slots = self.slots[tier]
        return slots.generations[index] == generation and slots.uses[index] == Use.REGISTERED

    def _expect(self, expires_ms: int, tier: Tier, ref: SlotRef) -> None:
        heap = self._expiries
        if len(heap) > 1024 + 2 * sum(len(slots) for slots in self.slots.values()):
            heap[:] = [entry for entry in heap if self._waits(entry)]
            heapq.heapify(heap)
        heapq.heappush(heap, (expires_ms, tier, ref.index, ref.generation))

    # News.

    def _tell(self, tier: Tier, key: bytes, *, there: bool) -> None:
        events = self._events[tier]
        if events.pop(key, there) is there:
            events[key] = there

    def take_changes(self) -> Changes:
        """All headers and news since the last call."""
        changes = Changes()
        for tier, slots in self.slots.items():
            for index in slots.changed:
                header = self._header(slots, index)
                if tier is Tier.G2 or header.state is SlotState.FREE:
                    changes.headers.append(HeaderWrite(tier, index, header))
            slots.changed.clear()
        for tier, events in self._events.items():
            for key, there in events.items():
                (changes.stored if there else changes.removed).append((tier, key))
            events.clear()
        return changes

    def _header(self, slots: Slots, index: int) -> SlotHeader:
        """What the header of a slot has to say, by what the slot is used for."""
        generation, held = slots.generations[index], slots.held[index]
        if held is not None:
            header = sealed_header(held.meta, generation, self.payload_bytes)
            if slots.uses[index] == Use.LEAVING:
                # Readers find it as it was; a daemon that starts meanwhile finds it expired.
                header = replace(header, expires_ms=_LONG_PAST_MS)
            return header
        owner = slots.owner(index)
        if owner is None:
            return SlotHeader(SlotState.FREE, generation)
        return SlotHeader(SlotState.FILLING, generation, owner=owner)

    def charges(self) -> dict[tuple[int, Tier], int]:
        """Bytes by tenant and tier of blocks that are here; copies under way are not counted."""
        charges: dict[tuple[int, Tier], int] = {}
        for tier, slots in self.slots.items():
            for held in slots.held:
                if held is not None:
                    of = held.meta.tenant, tier
                    charges[of] = charges.get(of, 0) + self.payload_bytes
        for block in self.blocks:
            if block.remote is not None:
                of = block.remote.tenant, Tier.G4
                charges[of] = charges.get(of, 0) + self.payload_bytes
        return charges

    def check_invariants(self) -> None:
        """Raises AssertionError when its parts disagree."""
        self.blocks.check_invariants()
        self.pins.check_invariants({block.key: block for block in self.blocks})
        for tier, slots in self.slots.items():
            slots.check_invariants()
            here = {held.meta.key: held for held in slots.blocks()}
            assert len(here) == slots.counts().blocks, "a key has two slots"
            known = {b.key: held for b in self.blocks if (held := b.held(tier)) is not None}
            assert here == known
            for key, held in here.items():
                ref = held.ready.ref
                assert slots.current(ref) and slots.held[ref.index] is held
                assert held.ready.key == held.meta.key == key
                assert held.ready.checksums == held.meta.checksums
                assert key in self.evictions[tier]
            assert len(self.evictions[tier]) == len(here)
            own = {
                key: tenant
                for (tenant, t), keys in self._limited.items()
                if t is tier
                for key in keys
            }
            limited = {key: held.meta.tenant for key, held in here.items()}
            for key, tenant in list(limited.items()):
                if self.quota.limit(tenant, tier) is None:
                    del limited[key]
            assert own == limited
        assert self.remote_blocks == sum(block.remote is not None for block in self.blocks)
        assert all(self._limited.values())
        waiting = {entry for entry in self._expiries if self._waits(entry)}
        for tier, slots in self.slots.items():
            for held in slots.blocks():
                if held.meta.expires_ms:
                    ref = held.ready.ref
                    assert (held.meta.expires_ms, tier, ref.index, ref.generation) in waiting
