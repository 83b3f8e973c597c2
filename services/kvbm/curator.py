"""What people ask of the daemon: pins, clearing, lists, figures, reasons, a scrub now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass

from services.common.errors import InvalidRequest, NotFound, Overloaded
from services.common.events.model import Tier
from services.kvbm.caretaker import Caretaker
from services.kvbm.core.catalog import BlockView, Cleared, PinLimit, Selection
from services.kvbm.core.gate import Source, TierRate, TierVerdict
from services.kvbm.core.model import tenant_id
from services.kvbm.node import Node
from services.kvbm.readers import Ask, Plan, Readers
from services.kvbm.space import Space

CLEARED_AT_ONCE = 2048
"""Blocks forgotten before others get their turn."""
LISTED = 100
"""Blocks of a list when no number is given."""
_OWN = (Tier.G2, Tier.G3, Tier.G4)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why one block would be loaded, or not; words as in kvbm.proto."""

    position: int
    tiers: tuple[Tier, ...]
    load: bool
    reason: str
    view: BlockView | None
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Reasons for a whole prompt."""

    blocks: list[Verdict]
    plan: Plan
    rates: Mapping[Tier, TierRate]
    verdicts: Mapping[Source, TierVerdict]
    peers: Mapping[Source, TierRate]
    """Of each peer that blocks would come from; `Tier.PEER`: whoever has them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a scrub is."""

    scanned: int
    total: int
    corrupt: int
    done: bool


class Curator:
    """Answers people. Loop's thread only."""

    def __init__(self, node: Node, readers: Readers, caretaker: Caretaker) -> None:
        self._node = node
        self._readers = readers
        self._caretaker = caretaker

    def pin(self, namespace: bytes, key: bytes, owner: str, ttl_ms: int) -> int:
        """Keeps a prefix; how many blocks. Raises NotFound, Overloaded, InvalidRequest."""
        if not owner:
            raise InvalidRequest("a pin needs an owner", field="owner")
        if ttl_ms <= 0:
            raise InvalidRequest("a pin needs milliseconds above 0 to live", field="ttl_ms")
        space, now = self._node.space(namespace), self._node.now_ms()
        try:
            blocks = space.catalog.pin(key, owner, now + ttl_ms, now)
        except PinLimit as exc:
            raise Overloaded(str(exc), reason="PIN_LIMIT") from exc
        space.apply()
        if blocks is None:
            raise NotFound("this block is not stored here", reason="BLOCK_UNKNOWN")
        return blocks

    def unpin(self, namespace: bytes, key: bytes, owner: str) -> int:
        """Undoes pins of an owner; how many."""
        undone = 0
        for space in self._spaces(namespace):
            undone += space.catalog.unpin(key or None, owner)
            space.apply()
        return undone

    async def clear(
        self,
        namespace: bytes,
        tenant: str,
        prefix: bytes,
        tiers: Collection[Tier],
        *,
        everything: bool,
        dry_run: bool,
    ) -> tuple[dict[Tier, tuple[int, int]], int]:
        """Forgets blocks; by tier how many and their bytes, and how many go with a last lease."""
        if not (namespace or tenant or prefix or everything):
            raise InvalidRequest(
                "name a namespace, a tenant or a prefix, or set `everything`", field="namespace"
            )
        chosen = frozenset(tiers) if tiers else frozenset((Tier.G2, Tier.G3, Tier.G4))
        select = Selection(tenant_id(tenant) if tenant else None, prefix or None, chosen)
        cleared: dict[Tier, tuple[int, int]] = {}
        leased = 0
        for space in self._spaces(namespace):
            async for outcome in self._cleared(space, select, dry_run=dry_run):
                leased += outcome.leased
                for tier, blocks in ((t, n) for t, n in outcome.blocks.items() if n):
                    so_far, size = cleared.get(tier, (0, 0))
                    added = blocks * space.geometry.payload_bytes
                    cleared[tier] = (so_far + blocks, size + added)
        return cleared, leased

    async def _cleared(
        self, space: Space, select: Selection, *, dry_run: bool
    ) -> AsyncIterator[Cleared]:
        """Clears in steps, so that others are answered meanwhile."""
        if dry_run:
            yield space.catalog.clear(select, self._node.now_ms(), dry_run=True)
            return
        more = True
        while more:
            outcome = space.catalog.clear(select, self._node.now_ms(), limit=CLEARED_AT_ONCE)
            more = outcome.more
            space.apply()
            await space.erase_dropped()
            if space.remote is not None and outcome.remote:
                await space.remote.erase(outcome.remote)
            yield outcome
            await asyncio.sleep(0)

    def _spaces(self, namespace: bytes) -> list[Space]:
        if namespace:
            return [self._node.space(namespace)]
        return list(self._node.spaces.values())

    def blocks(self, namespace: bytes, tenant: str) -> Iterator[tuple[Space, BlockView]]:
        """Blocks that fit, most recently used first within a namespace."""
        wanted = tenant_id(tenant)
        for space in self._spaces(namespace):
            for view in space.catalog.blocks():
                if not tenant or view.meta.tenant == wanted:
                    yield space, view

    def explain(self, ask: Ask) -> Explanation:
        """Where each block of a prompt lies, and why it would be loaded or not."""
        plan = self._readers.plan(ask, dry_run=True)
        space = self._node.space(ask.namespace)
        verdicts = []
        hole = False
        for position, key in enumerate(ask.keys):
            tiers = space.catalog.tiers_of(key)
            number = position - ask.skip
            load = 0 <= number < plan.take and not hole
            source = plan.run[number] if 0 <= number < len(plan.run) else None
            peer = "" if source is None or isinstance(source, Tier) else source
            if number < 0:
                reason = "in-engine"
            elif hole:
                reason = "after-hole" if tiers else "missing"
            elif source is None and not tiers and not load:
                reason, hole = "missing", True
            elif load and (peer or source is Tier.PEER):
                reason = "fetch" if peer else "ask"
            elif load:
                reason = "ready" if Tier.G2 in tiers else "promote"
            else:
                reason = plan.reason
            view = space.catalog.view(key)
            verdicts.append(Verdict(position, tiers, load, reason, view, peer))
        peers = {s: space.gate.rate(s) for s in plan.verdicts if s not in _OWN}
        return Explanation(verdicts, plan, space.gate.rates(), plan.verdicts, peers)

    async def scrub(self, namespace: bytes, tiers: Collection[Tier]) -> AsyncIterator[Progress]:
        """Verifies blocks now."""
        chosen = [t for t in (Tier.G2, Tier.G3) if not tiers or t in tiers]
        work = [
            (space, tier, key)
            for space in self._spaces(namespace)
            for tier in chosen
            for key in space.catalog.keys(tier)
        ]
        corrupt = 0
        for number, (space, tier, key) in enumerate(work):
            if number % 64 == 0:
                yield Progress(number, len(work), corrupt, False)
            corrupt += not await self._caretaker.check(space, tier, key)
        yield Progress(len(work), len(work), corrupt, True)
