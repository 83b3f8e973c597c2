"""Pins: prefixes that people want kept, and which copies are kept for them.

A pin holds blocks, not slots. In each tier a limited number of pinned blocks is kept from eviction:
a pin that can't be honoured is refused, and copies of pinned blocks that come later are kept as far
as there is room. Pins end by time, by their owner, or with their last block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.common.events.model import Tier
from services.kvbm.core.blocks import SLOT_TIERS, Block
from services.kvbm.core.model import PinLimit


class Pin:
    """One owner's wish to keep one prefix."""

    __slots__ = ("blocks", "expires_ms", "key", "owner")

    def __init__(self, key: bytes, owner: str) -> None:
        self.key = key
        self.owner = owner
        self.expires_ms = 0
        self.blocks: dict[bytes, Block] = {}


class Pins:
    """All pins of a namespace."""

    def __init__(self, share: float, slots: Mapping[Tier, int]) -> None:
        self.kept: dict[Tier, set[bytes]] = {tier: set() for tier in SLOT_TIERS}
        """Blocks whose copy in the tier is not evicted."""
        self._share = share
        self._limits = {tier: int(slots.get(tier, 0) * share) for tier in SLOT_TIERS}
        self._pins: dict[tuple[bytes, str], Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def resize(self, tier: Tier, slots: int) -> None:
        """The tier has that many slots now."""
        self._limits[tier] = int(slots * self._share)

    # What people want.

    def pin(self, key: bytes, path: Sequence[Block], owner: str, expires_ms: int) -> int:
        """Keeps the blocks of a prefix, all of which are here; how many. Raises PinLimit.

        An owner's second pin of the same prefix takes the place of the first.
        """
        need = dict.fromkeys(SLOT_TIERS, 0)
        for block in path:
            best = block.tiers[0]
            need[best] += block.key not in self.kept[best]
        for tier, count in need.items():
            if count and len(self.kept[tier]) + count > self._limits[tier]:
                raise PinLimit(
                    f"pins would keep {len(self.kept[tier]) + count} blocks of {tier.name}; "
                    f"at most {self._limits[tier]} may be kept"
                )
        pin = self._pins.setdefault((key, owner), Pin(key, owner))
        pin.expires_ms = expires_ms
        for block in path:
            if block.key not in pin.blocks:
                pin.blocks[block.key] = block
                block.pins += (pin,)
            # The best copies first: they were counted.
            self.kept[block.tiers[0]].add(block.key)
        for block in path:
            self._keep_what_fits(block)
        return len(path)

    def unpin(self, key: bytes | None, owner: str) -> int:
        """Ends the owner's pin of a prefix, or all of its pins; how many."""
        if key is not None:
            pins = [pin] if (pin := self._pins.get((key, owner))) is not None else []
        else:
            pins = [pin for pin in self._pins.values() if pin.owner == owner]
        for pin in pins:
            self._end(pin)
        return len(pins)

    def expire(self, now_ms: int) -> int:
        """Ends the pins whose time has come; how many."""
        pins = [pin for pin in self._pins.values() if pin.expires_ms <= now_ms]
        for pin in pins:
            self._end(pin)
        return len(pins)

    def _end(self, pin: Pin) -> None:
        del self._pins[pin.key, pin.owner]
        for block in pin.blocks.values():
            block.pins = tuple(other for other in block.pins if other is not pin)
            if not block.pins:
                for kept in self.kept.values():
                    kept.discard(block.key)

    # What happens to blocks.

    def appeared(self, block: Block) -> None:
        """The block has a new copy."""
        if block.pins:
            self._keep_what_fits(block)

    def vanished(self, block: Block, tier: Tier) -> None:
        """The block has lost its copy in a tier."""
        if block.pins:
            self.kept[tier].discard(block.key)
            self._keep_what_fits(block)

    def forgotten(self, block: Block) -> None:
        """The block is nowhere any more."""
        for pin in block.pins:
            del pin.blocks[block.key]
            if not pin.blocks:
                del self._pins[pin.key, pin.owner]
        block.pins = ()

    def _keep_what_fits(self, block: Block) -> None:
        for tier in SLOT_TIERS:
            if block.held(tier) is not None and len(self.kept[tier]) < self._limits[tier]:
                self.kept[tier].add(block.key)

    def check_invariants(self, blocks: Mapping[bytes, Block]) -> None:
        """Raises AssertionError when a pin or a kept copy points to nothing."""
        for (key, owner), pin in self._pins.items():
            assert (pin.key, pin.owner) == (key, owner)
            assert pin.blocks, "a pin of nothing"
            for block in pin.blocks.values():
                assert blocks.get(block.key) is block and block.local and pin in block.pins
        for block in blocks.values():
            assert all(self._pins.get((pin.key, pin.owner)) is pin for pin in block.pins)
            assert all(block.key in pin.blocks for pin in block.pins)
        for tier, kept in self.kept.items():
            assert len(kept) <= max(self._limits[tier], 0)
            for key in kept:
                assert blocks[key].pins and blocks[key].held(tier) is not None
