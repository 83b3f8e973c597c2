"""Catalogs for tests: small ones, and what a shell would have written for them."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping

from services.common.arena import NO_KEY, SlotHeader, SlotState
from services.common.events.model import Tier
from services.kvbm.core.catalog import Catalog
from services.kvbm.core.eviction import Eviction, Lru
from services.kvbm.core.model import BlockMeta, Changes, CommitResult, LeaseId, Owner, SlotRef
from services.kvbm.core.quota import QuotaBook

PAYLOAD = 4096
ENGINE = Owner(7)


def key(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def chain(name: str, count: int, tenant: int = 0, expires_ms: int = 0) -> list[BlockMeta]:
    """Blocks that follow each other from a prompt's start on."""
    keys = [key((name, i)) for i in range(count)]
    return [
        BlockMeta(k, keys[i - 1] if i else NO_KEY, i, tenant, (), 1, expires_ms)
        for i, k in enumerate(keys)
    ]


def catalog(
    g2: int = 8,
    g3: int = 0,
    *,
    ranks: int = 1,
    limits: Mapping[tuple[int | None, Tier], int] | None = None,
    grant_limit: int = 8,
    grant_share: float = math.inf,
    pin_share: float = 0.5,
    quota: QuotaBook | None = None,
    policy: Callable[[int], Eviction] = Lru,
) -> Catalog:
    count = itertools.count(1)
    return Catalog(
        {Tier.G2: g2, Tier.G3: g3},
        ranks,
        PAYLOAD,
        {Tier.G2: policy(g2), Tier.G3: policy(g3)},
        quota or QuotaBook(limits or {}),
        grant_limit=grant_limit,
        grant_share=grant_share,
        new_lease=lambda: LeaseId(next(count)),
        pin_share=pin_share,
    )


def checksum(meta: BlockMeta, rank: int = 0) -> int:
    return meta.key[0] * 8 + rank


def save(
    cat: Catalog, metas: list[BlockMeta], now_ms: int = 10, owner: Owner = ENGINE
) -> list[SlotRef]:
    """Grants and commits (one rank); every block must be stored."""
    refs = []
    for meta in metas:
        (ref,) = cat.grant(owner, 1, now_ms)
        result = cat.commit(owner, ref, 0, meta, checksum(meta), now_ms)
        assert result is CommitResult.STORED, result
        refs.append(ref)
    return refs


def copy_down(cat: Catalog, metas: list[BlockMeta], now_ms: int = 20) -> None:
    for meta in metas:
        copy = cat.begin_copy(meta.key, Tier.G2, Tier.G3, now_ms)
        assert copy is not None
        assert cat.end_copy(copy, True, now_ms)


def keys(metas: list[BlockMeta]) -> list[bytes]:
    return [meta.key for meta in metas]


class Shell:
    """Headers as an arena and a disk would hold them, and tiers as a router would see them."""

    def __init__(self) -> None:
        self.headers: dict[tuple[Tier, int], SlotHeader] = {}
        self.told: dict[Tier, set[bytes]] = {tier: set() for tier in (Tier.G2, Tier.G3, Tier.G4)}

    def apply(self, changes: Changes) -> None:
        for write in changes.headers:
            assert write.tier is Tier.G2 or write.header.state is SlotState.FREE
            self.headers[write.tier, write.slot] = write.header
        for tier, block in changes.stored:
            assert block not in self.told[tier], "told twice"
            self.told[tier].add(block)
        for tier, block in changes.removed:
            assert block in self.told[tier], "removed what was not there"
            self.told[tier].remove(block)

    def header(self, tier: Tier, slot: int) -> SlotHeader:
        return self.headers.get((tier, slot), SlotHeader(SlotState.FREE, 0))
