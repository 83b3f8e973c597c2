"""Leases: readers' holds on blocks in G2.

A lease keeps the bytes of its slots as they are, also when the blocks are forgotten meanwhile. It
ends by release, with its owner, or by time; a reader who is late finds another generation, which is
a miss.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from services.common.events.model import Tier
from services.kvbm.core.model import Lease, LeaseId, Owner, ReadyBlock
from services.kvbm.core.stock import Stock


class _Held:
    """One lease."""

    __slots__ = ("expires_ms", "keys", "owner", "ready", "tenant")

    def __init__(
        self, keys: Sequence[bytes], tenant: int, expires_ms: int, owner: Owner | None
    ) -> None:
        self.keys = keys
        self.tenant = tenant
        self.expires_ms = expires_ms
        self.owner = owner
        self.ready: list[ReadyBlock] = []


class Leases:
    """All leases of a namespace."""

    def __init__(self, stock: Stock, new_lease: Callable[[], LeaseId]) -> None:
        self._stock = stock
        self._new_lease = new_lease
        self._held: dict[LeaseId, _Held] = {}
        self._owned: dict[Owner, dict[LeaseId, None]] = {}
        self._expiries: list[tuple[int, LeaseId]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, id: LeaseId) -> bool:
        return id in self._held

    def take(
        self, keys: Sequence[bytes], tenant: int, expires_ms: int, owner: Owner | None
    ) -> Lease:
        """A lease on what of `keys` is in G2 now, from the first on without a hole."""
        id = self._new_lease()
        while id in self._held:
            id = self._new_lease()
        held = self._held[id] = _Held(keys, tenant, expires_ms, owner)
        if owner is not None:
            self._owned.setdefault(owner, {})[id] = None
        if len(self._expiries) > 1024 + 2 * len(self._held):
            self._expiries = [(h.expires_ms, id) for id, h in self._held.items() if h is not held]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (expires_ms, id))
        self._join(held)
        return Lease(id, tuple(held.ready))

    def ready(self, id: LeaseId) -> list[ReadyBlock]:
        """Its blocks in G2, those that have come since among them. Raises KeyError."""
        held = self._held[id]
        self._join(held)
        return list(held.ready)

    def _join(self, held: _Held) -> None:
        get, now_ms, ready = self._stock.blocks.get, self._stock.now_ms, held.ready
        readers = self._stock.slots[Tier.G2].readers
        keys = held.keys
        for number in range(len(ready), len(keys)):
            block = get(keys[number])
            if block is None or block.g2 is None:
                break
            if block.until <= now_ms and Tier.G2 not in block.tiers_at(now_ms):
                break
            here = block.g2.ready
            readers[here.ref.index] += 1
            ready.append(here)

    def release(self, id: LeaseId) -> bool:
        """Ends a lease; False: it had ended already."""
        held = self._held.pop(id, None)
        if held is None:
            return False
        if held.owner is not None:
            owned = self._owned[held.owner]
            del owned[id]
            if not owned:
                del self._owned[held.owner]
        for here in held.ready:
            self._stock.unread(Tier.G2, here.ref.index)
        return True

    def release_owner(self, owner: Owner) -> int:
        """Ends all leases of an owner; how many."""
        ids = list(self._owned.get(owner, ()))
        for id in ids:
            self.release(id)
        return len(ids)

    def expire(self, limit: int) -> int:
        """Ends up to `limit` leases whose time has come; how many."""
        ended = 0
        while self._expiries and self._expiries[0][0] <= self._stock.now_ms and ended < limit:
            expires_ms, id = heapq.heappop(self._expiries)
            held = self._held.get(id)
            if held is not None and held.expires_ms == expires_ms:
                ended += self.release(id)
        return ended

    def readers(self) -> dict[int, int]:
        """Leases on each G2 slot."""
        readers: dict[int, int] = {}
        for held in self._held.values():
            for here in held.ready:
                readers[here.ref.index] = readers.get(here.ref.index, 0) + 1
        return readers

    def check_invariants(self) -> None:
        """Raises AssertionError when a lease holds what isn't there, or can't end."""
        slots = self._stock.slots[Tier.G2]
        for id, held in self._held.items():
            assert (held.expires_ms, id) in self._expiries
            assert len(held.ready) <= len(held.keys)
            for key, here in zip(held.keys, held.ready, strict=False):
                assert here.key == key and slots.current(here.ref)
                lies = slots.held[here.ref.index]
                assert lies is not None and lies.ready is here
            assert held.owner is None or id in self._owned[held.owner]
        assert all(id in self._held for ids in self._owned.values() for id in ids)
        assert all(self._owned.values())
