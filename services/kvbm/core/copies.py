"""Copies: blocks under way between tiers. Each ends once.

A copy reads its source's slot and has a slot of its target, if that has slots. What it brings
counts only if its source is still that block when it ends, and nobody forgot the block meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable

from services.common.arena import SlotHeader, SlotState
from services.common.events.model import Tier
from services.kvbm.core.blocks import expired
from services.kvbm.core.model import DAEMON, BlockMeta, Copy, SlotRef, meta_of
from services.kvbm.core.slots import Use
from services.kvbm.core.stock import Stock


class _Flight:
    """One copy."""

    __slots__ = ("copy", "fencing", "void")

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.void = False
        """What it brings isn't wanted any more."""
        self.fencing = False
        """It has failed, and something may still read or write its slots."""


class Copies:
    """All copies of a namespace."""

    def __init__(self, stock: Stock, ranks: int) -> None:
        self._stock = stock
        self._ranks = ranks
        self._flights: dict[int, _Flight] = {}
        self._moving: dict[tuple[Tier, bytes], int] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._flights)

    def moving(self, key: bytes, target: Tier) -> bool:
        """Whether a block is on its way to a tier."""
        return (target, key) in self._moving

    def begin(self, key: bytes, source: Tier, target: Tier) -> Copy | None:
        """Starts to copy a block; None: it isn't there, is in the target, or there is no room."""
        block = self._stock.live(key)
        if block is None or source is target:
            return None
        if source is Tier.G4:
            if block.remote is None or target is not Tier.G2:
                return None
            return self.begin_fetch(block.remote)
        held = block.held(source)
        if held is None or target in block.tiers or (target, key) in self._moving:
            return None
        ref = held.ready.ref
        # Read first: making room in the target must not take the source.
        self._stock.read(source, ref.index)
        copy = self._start(held.meta, source, ref, target)
        if copy is None:
            self._stock.unread(source, ref.index)
        return copy

    def begin_fetch(self, meta: BlockMeta, source: Tier = Tier.G4) -> Copy | None:
        """Starts to bring a block from G4 or a peer, known here or not; None as of `begin`."""
        block = self._stock.live(meta.key)
        if (block is not None and block.g2 is not None) or (Tier.G2, meta.key) in self._moving:
            return None
        return self._start(meta, source, None, Tier.G2)

    def _start(
        self, meta: BlockMeta, source: Tier, source_slot: SlotRef | None, target: Tier
    ) -> Copy | None:
        stock = self._stock
        if not stock.charge(meta.tenant, target):
            return None
        target_slot = None
        if target is not Tier.G4:
            target_slot = stock.take(target, DAEMON)
            if target_slot is None:
                stock.refund(meta.tenant, target)
                return None
        self._last += 1
        copy = Copy(self._last, meta, source, source_slot, target, target_slot)
        self._flights[copy.id] = _Flight(copy)
        self._moving[target, meta.key] = copy.id
        return copy

    def end(self, copy: Copy, ok: bool, *, header: SlotHeader | None, terminal: bool) -> bool:
        """Books how a copy ended; whether the target has the block by it.

        `header`: the block's, as it came from G4. Not terminal: it failed, and both slots stay as
        they are, unused by others, until `fence_passed`.
        """
        flight = self._flights.get(copy.id)
        if flight is None or flight.fencing:
            return False
        copy = flight.copy
        del self._moving[copy.target, copy.meta.key]
        if not terminal:
            flight.fencing = True
            if copy.target_slot is not None:
                self._stock.slots[copy.target].quarantine(copy.target_slot.index)
            return False
        meta = self._brought(flight, header) if ok else None
        if meta is not None and meta.tenant != copy.meta.tenant:
            # Only now it is known whose it is.
            self._stock.refund(copy.meta.tenant, copy.target)
            if not self._stock.charge(meta.tenant, copy.target):
                self._finish(flight, charged=False)
                return False
        if meta is None:
            self._finish(flight)
            return False
        if copy.target_slot is not None:
            wanted = copy.target is Tier.G2
            self._stock.register(copy.target, copy.target_slot, meta, reused=wanted)
            if copy.source is Tier.G4:
                self._know_remote(meta)
            self._finish(flight, registered=True)
        else:
            self._finish(flight)  # `_know_remote` charges for itself
            self._know_remote(meta)
        return True

    def _brought(self, flight: _Flight, header: SlotHeader | None) -> BlockMeta | None:
        """What a copy that went well has brought; None: nothing that may be used."""
        stock, copy = self._stock, flight.copy
        if flight.void or not self._source_stands(copy):
            return None
        meta = copy.meta
        if header is not None:
            meta = meta_of(header)
            if (
                header.state is not SlotState.SEALED
                or meta.key != copy.meta.key
                or header.payload_bytes != stock.payload_bytes
            ):
                return None
        if len(meta.checksums) != self._ranks or expired(meta, stock.now_ms):
            return None
        block = stock.live(meta.key)
        if block is not None and copy.target in block.tiers:
            return None
        if block is None and copy.target is Tier.G4:
            return None
        return meta

    def _source_stands(self, copy: Copy) -> bool:
        if copy.source_slot is None:
            return True
        slots, index = self._stock.slots[copy.source], copy.source_slot.index
        return slots.current(copy.source_slot) and slots.uses[index] == Use.REGISTERED

    def _know_remote(self, meta: BlockMeta) -> None:
        block = self._stock.blocks.get(meta.key)
        if block is not None and block.local:
            self._stock.set_remote(block, meta)

    def fence_passed(self, copy: Copy) -> None:
        """What a failed copy may have left behind is terminal now; an unknown copy passes."""
        flight = self._flights.get(copy.id)
        if flight is not None and flight.fencing:
            self._finish(flight)

    def _finish(self, flight: _Flight, *, registered: bool = False, charged: bool = True) -> None:
        stock, copy = self._stock, flight.copy
        del self._flights[copy.id]
        if not registered:
            if charged:
                stock.refund(copy.meta.tenant, copy.target)
            if copy.target_slot is not None:
                stock.give_up(copy.target, copy.target_slot.index)
        if copy.source_slot is not None:
            stock.unread(copy.source, copy.source_slot.index)

    def void(self, unwanted: Callable[[Copy], bool]) -> None:
        """What these copies bring isn't wanted any more."""
        for flight in self._flights.values():
            if unwanted(flight.copy):
                flight.void = True

    def charges(self) -> dict[tuple[int, Tier], int]:
        """Bytes that are charged for copies under way, by tenant and tier."""
        charges: dict[tuple[int, Tier], int] = {}
        for flight in self._flights.values():
            of = flight.copy.meta.tenant, flight.copy.target
            charges[of] = charges.get(of, 0) + self._stock.payload_bytes
        return charges

    def readers(self) -> dict[tuple[Tier, int], int]:
        """Copies that read each slot."""
        readers: dict[tuple[Tier, int], int] = {}
        for flight in self._flights.values():
            if flight.copy.source_slot is not None:
                at = flight.copy.source, flight.copy.source_slot.index
                readers[at] = readers.get(at, 0) + 1
        return readers

    def check_invariants(self) -> None:
        """Raises AssertionError when a copy's slots aren't its own."""
        moving = {}
        for id, flight in self._flights.items():
            copy = flight.copy
            assert copy.id == id
            if not flight.fencing:
                moving[copy.target, copy.meta.key] = id
            if copy.target_slot is not None:
                slots, index = self._stock.slots[copy.target], copy.target_slot.index
                assert slots.current(copy.target_slot) and slots.owner(index) == DAEMON
                assert slots.uses[index] == (Use.QUARANTINED if flight.fencing else Use.FILLING)
            if copy.source_slot is not None:
                slots, index = self._stock.slots[copy.source], copy.source_slot.index
                assert slots.current(copy.source_slot)
                assert slots.uses[index] in (Use.REGISTERED, Use.LEAVING)
        assert moving == self._moving
        targets = [f.copy.target_slot for f in self._flights.values() if f.copy.target_slot]
        filling = sum(slots.owned_count(DAEMON) for slots in self._stock.slots.values())
        assert filling == len(targets), "the daemon fills a slot for no copy"
