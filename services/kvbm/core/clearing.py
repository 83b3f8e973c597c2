"""Clearing: forgetting blocks because people say so."""

from __future__ import annotations

import math

from services.common.events.model import Tier
from services.kvbm.core.blocks import Block
from services.kvbm.core.copies import Copies
from services.kvbm.core.model import Cleared, Copy, Selection
from services.kvbm.core.stock import Stock

_ALL = frozenset({Tier.G2, Tier.G3, Tier.G4})


def clear(
    stock: Stock, copies: Copies, select: Selection, *, dry_run: bool, limit: int | None
) -> Cleared:
    """Forgets copies that are selected, about `limit` of them, or only counts them all.

    From this call on nobody finds those, nor does anything that was under way at that time bring
    them back; readers finish unharmed. What is saved anew afterwards is a new block.
    """
    tiers = _ALL if select.tiers is None else select.tiers
    chosen = _chosen(stock, select)
    counts: dict[Tier, int] = {tier: 0 for tier in (Tier.G2, Tier.G3, Tier.G4) if tier in tiers}
    leased = 0
    remote: list[bytes] = []
    left = math.inf if limit is None or dry_run else limit
    for block in chosen:
        if left <= 0:
            break
        for tier, meta in list(block.metas()):
            if tier not in tiers or select.tenant not in (None, meta.tenant):
                continue
            counts[tier] += 1
            left -= 1
            held = block.held(tier)
            if held is None:
                remote.append(block.key)
                if not dry_run and block.remote is not None:
                    stock.set_remote(block, None)
                continue
            leased += stock.slots[tier].readers[held.ready.ref.index] > 0
            if not dry_run:
                stock.withdraw(block, tier)
    if not dry_run:
        keys = {block.key for block in chosen} if select.prefix is not None else None
        copies.void(lambda copy: _selects(select, tiers, keys, copy))
    return Cleared(counts, leased, tuple(remote), more=left <= 0)


def _chosen(stock: Stock, select: Selection) -> list[Block]:
    if select.prefix is not None:
        root = stock.blocks.get(select.prefix)
        # Followers first: a block that goes takes the names of missing ones before it along.
        return stock.blocks.followers(root)[::-1] if root is not None else []
    return list(stock.blocks)


def _selects(
    select: Selection, tiers: frozenset[Tier], keys: set[bytes] | None, copy: Copy
) -> bool:
    """Whether a copy under way carries something selected. What is fetched is not known yet."""
    if copy.source not in tiers and copy.target not in tiers:
        return False
    if copy.source in (Tier.G4, Tier.PEER):
        return True
    if select.tenant not in (None, copy.meta.tenant):
        return False
    return keys is None or copy.meta.key in keys
