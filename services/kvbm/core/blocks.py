"""Blocks by key: where each lies, when it was used, and how blocks hang together in chains.

A block that is nowhere is kept, as a mere name, for as long as a block that follows it is here:
so a prefix can be selected across holes. Chains are known by parent and position; a link is made
only from a position to the one before it, so there are no cycles whatever an engine claims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.arena import NO_KEY
from services.common.events.model import Tier
from services.kvbm.core.model import BlockMeta, ReadyBlock

if TYPE_CHECKING:
    from services.kvbm.core.pins import Pin

NEVER = 1 << 63
"""Later than any time in milliseconds."""
SLOT_TIERS = (Tier.G2, Tier.G3)
"""Tiers whose blocks lie in slots."""
_TIERS = tuple(
    tuple(tier for bit, tier in enumerate((Tier.G2, Tier.G3, Tier.G4)) if mask >> bit & 1)
    for mask in range(8)
)


@dataclass(slots=True, eq=False)
class Held:
    """A copy of a block in a slot. Copies of one block may differ in bytes, so in checksums."""

    meta: BlockMeta
    ready: ReadyBlock


class Block:
    """A block, in whatever tiers it lies; in none: the name of a missing one."""

    __slots__ = (
        "after",
        "before",
        "first",
        "g2",
        "g3",
        "hits",
        "key",
        "parent",
        "pins",
        "position",
        "remote",
        "tiers",
        "until",
        "used_ms",
    )

    def __init__(self, key: bytes, position: int) -> None:
        self.key = key
        self.position = position
        self.parent: Block | None = None
        self.first: Block | None = None
        """A block that follows it; the others are its siblings."""
        self.before: Block | None = None
        self.after: Block | None = None
        self.g2: Held | None = None
        self.g3: Held | None = None
        self.remote: BlockMeta | None = None
        self.tiers: tuple[Tier, ...] = ()
        self.until = NEVER
        """When the first of its copies expires."""
        self.hits = 0
        self.used_ms = 0
        self.pins: tuple[Pin, ...] = ()

    @property
    def local(self) -> bool:
        """Whether it lies in a slot here."""
        return self.g2 is not None or self.g3 is not None

    def held(self, tier: Tier) -> Held | None:
        """Its copy in a tier with slots."""
        if tier is Tier.G2:
            return self.g2
        return self.g3 if tier is Tier.G3 else None

    def hold(self, tier: Tier, held: Held | None) -> None:
        """Puts or takes away its copy in a tier with slots."""
        if tier is Tier.G2:
            self.g2 = held
        else:
            self.g3 = held
        self._refresh()

    def set_remote(self, meta: BlockMeta | None) -> None:
        """Says whether G4 has it."""
        self.remote = meta
        self._refresh()

    def metas(self) -> Iterator[tuple[Tier, BlockMeta]]:
        """What it is in each of its tiers, best first."""
        for tier in SLOT_TIERS:
            if (held := self.held(tier)) is not None:
                yield tier, held.meta
        if self.remote is not None:
            yield Tier.G4, self.remote

    def tiers_at(self, now_ms: int) -> tuple[Tier, ...]:
        """Tiers in which it has not expired, best first."""
        if now_ms < self.until:
            return self.tiers
        return tuple(tier for tier, meta in self.metas() if not expired(meta, now_ms))

    def _refresh(self) -> None:
        g2, g3, remote = self.g2, self.g3, self.remote
        self.tiers = _TIERS[(g2 is not None) | (g3 is not None) << 1 | (remote is not None) << 2]
        until = NEVER
        if g2 is not None and g2.meta.expires_ms:
            until = g2.meta.expires_ms
        if g3 is not None and 0 < g3.meta.expires_ms < until:
            until = g3.meta.expires_ms
        if remote is not None and 0 < remote.expires_ms < until:
            until = remote.expires_ms
        self.until = until


def expired(meta: BlockMeta, now_ms: int) -> bool:
    """Whether it is void by now."""
    return 0 < meta.expires_ms <= now_ms


class Blocks:
    """All blocks of a namespace that are here, and the missing ones before them."""

    def __init__(self) -> None:
        self.most_missing = 1024
        """Missing blocks that are known at most; beyond that chains are cut, the oldest first."""
        self._missing: dict[bytes, None] = {}
        self._all: dict[bytes, Block] = {}
        self.get = self._all.get
        """The block of a key, be it a mere name; None: nothing is known of it."""

    def __iter__(self) -> Iterator[Block]:
        return iter(self._all.values())

    def put(self, tier: Tier, held: Held) -> Block:
        """A copy of a block appeared; its entry, made and linked to the one before if need be."""
        meta = held.meta
        block = self._all.get(meta.key)
        if block is None:
            block = self._all[meta.key] = Block(meta.key, meta.position)
        elif not block.tiers:
            del self._missing[meta.key]
        block.hold(tier, held)
        if block.parent is None and block.position == meta.position > 0 and meta.parent != NO_KEY:
            parent = self._all.get(meta.parent)
            if parent is None:
                parent = self._all[meta.parent] = Block(meta.parent, meta.position - 1)
                self._missing[meta.parent] = None
            if parent.position == block.position - 1:
                _link(parent, block)
                self._trim()
        return block

    def prune(self, block: Block) -> None:
        """A block is nowhere any more: it is forgotten, or known by name while others follow it."""
        self._missing[block.key] = None
        self._forget(block)
        self._trim()

    def _forget(self, block: Block | None) -> None:
        """Forgets a missing block that none follows, and those before it."""
        while block is not None and not block.tiers and block.first is None:
            parent = block.parent
            if parent is not None:
                _unlink(parent, block)
            del self._all[block.key], self._missing[block.key]
            block = parent

    def _trim(self) -> None:
        while len(self._missing) > self.most_missing:
            oldest = self._all[next(iter(self._missing))]
            while oldest.first is not None:
                _unlink(oldest, oldest.first)
            self._forget(oldest)

    @staticmethod
    def path(block: Block) -> list[Block]:
        """The block and all before it as far as known, last first; missing ones among them."""
        path = [block]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path

    @staticmethod
    def followers(block: Block) -> list[Block]:
        """The block and all that follow it in some chain; missing ones among them."""
        found = [block]
        for above in found:
            child = above.first
            while child is not None:
                found.append(child)
                child = child.after
        return found

    def check_invariants(self) -> None:
        """Raises AssertionError when entries, links or summaries don't fit."""
        children = 0
        for key, block in self._all.items():
            assert block.key == key
            assert block.local or not block.tiers, "a block without a local copy is known"
            assert block.tiers or block.first is not None, "a missing block leaks"
            assert block.tiers or not block.pins, "a missing block is pinned"
            assert block.tiers == tuple(tier for tier, _ in block.metas())
            assert block.until == min(
                (meta.expires_ms for _, meta in block.metas() if meta.expires_ms), default=NEVER
            )
            assert all(meta.key == key for _, meta in block.metas())
            child, before = block.first, None
            while child is not None:
                assert child.parent is block and child.before is before
                assert child.position == block.position + 1
                assert self._all.get(child.key) is child
                children += 1
                before, child = child, child.after
        assert set(self._missing) == {b.key for b in self if not b.tiers}
        assert len(self._missing) <= self.most_missing
        assert children == sum(block.parent is not None for block in self._all.values())


def _link(parent: Block, child: Block) -> None:
    child.parent, child.after = parent, parent.first
    if parent.first is not None:
        parent.first.before = child
    parent.first = child


def _unlink(parent: Block, child: Block) -> None:
    before, after = child.before, child.after
    if before is None:
        parent.first = after
    else:
        before.after = after
    if after is not None:
        after.before = before
    child.parent = child.before = child.after = None
