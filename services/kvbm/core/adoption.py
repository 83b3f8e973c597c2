"""Adoption: taking over what an earlier life left in slots. Headers are all there is to go by."""

from __future__ import annotations

from collections.abc import Callable

from services.common.arena import NO_KEY, SlotHeader, SlotState
from services.common.events.model import Tier
from services.kvbm.core.model import Adopted, Owner, SlotRef, meta_of
from services.kvbm.core.stock import Stock


def adopt(
    stock: Stock,
    ranks: int,
    tier: Tier,
    slot: int,
    header: SlotHeader | None,
    alive: Callable[[int], bool],
) -> Adopted:
    """Books one slot by its header. See Catalog.adopt."""
    slots = stock.slots[tier]
    verdict = _judge(stock, ranks, tier, header, alive)
    if header is None:
        # Its generation is lost: one that no count of uses has reached.
        slots.restore(slot, stock.now_ms)
    elif verdict is Adopted.ADOPTED:
        stock.restore(tier, SlotRef(slot, header.generation), meta_of(header))
    elif verdict is Adopted.QUARANTINED:
        slots.restore(slot, header.generation, owner=Owner(header.owner))
    else:
        slots.restore(slot, header.generation)
    if verdict not in (Adopted.ADOPTED, Adopted.QUARANTINED, Adopted.EMPTY):
        slots.changed[slot] = None
    return verdict


def _judge(
    stock: Stock, ranks: int, tier: Tier, header: SlotHeader | None, alive: Callable[[int], bool]
) -> Adopted:
    if header is None:
        return Adopted.CORRUPT
    if header.state is SlotState.FREE:
        return Adopted.EMPTY
    if header.state is SlotState.FILLING:
        # Nobody but engines outlives a daemon, and they write into host memory alone.
        filling = tier is Tier.G2 and header.owner != 0 and alive(header.owner)
        return Adopted.QUARANTINED if filling else Adopted.INCOMPLETE
    if (
        header.key == NO_KEY
        or len(header.checksums) != ranks
        or header.payload_bytes != stock.payload_bytes
    ):
        return Adopted.CORRUPT
    if 0 < header.expires_ms <= stock.now_ms:
        return Adopted.EXPIRED
    block = stock.blocks.get(header.key)
    if block is not None and block.held(tier) is not None:
        return Adopted.DUPLICATE
    return Adopted.ADOPTED
