"""Offload plan: which blocks go down a tier now, by worth and within a write budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from services.common.events.model import Tier
from services.kvbm.core.eviction import Eviction


class WriteBudget:
    """A token bucket of bytes; time is an argument."""

    def __init__(self, bytes_per_s: float, burst_s: float = 10.0) -> None:
        if bytes_per_s <= 0 or burst_s <= 0:
            raise ValueError("a write budget needs a rate and a burst above 0")
        self.bytes_per_s = bytes_per_s
        self.burst_bytes = bytes_per_s * burst_s
        self._left = self.burst_bytes
        self._at_s: float | None = None

    def left(self, now_s: float) -> float:
        """Bytes that may be written now."""
        if self._at_s is not None and now_s > self._at_s:
            self._left = min(self.burst_bytes, self._left + (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s if self._at_s is None else max(now_s, self._at_s)
        return self._left

    def take(self, bytes: int, now_s: float) -> bool:
        """Takes so many bytes, or none and False. More than a burst passes when it is full."""
        left = self.left(now_s)
        if left < min(bytes, self.burst_bytes):
            return False
        self._left = left - bytes
        return True


class Places(Protocol):
    """What the plan asks of the catalog."""

    def tiers_of(self, key: bytes) -> tuple[Tier, ...]:
        """Tiers that hold a block."""
        ...


class OffloadPlan:
    """Chooses what goes down. One for each namespace; the budget is shared by all."""

    def __init__(
        self, evictions: Mapping[Tier, Eviction], budget: WriteBudget, block_bytes: int
    ) -> None:
        self._evictions = evictions
        self._budget = budget
        self._block_bytes = block_bytes

    def stored(self, key: bytes, now_s: float) -> None:
        """A new block appeared in G2: what write-through would write."""

    def choose(
        self, catalog: Places, source: Tier, target: Tier, now_s: float, limit: int
    ) -> list[bytes]:
        """Up to `limit` keys in `source` to write to `target` now; the budget is taken for them."""
        chosen: list[bytes] = []
        for key in self._evictions[source].next_victims(8 * limit):
            if len(chosen) >= limit:
                break
            if target not in catalog.tiers_of(key):
                if not self._budget.take(self._block_bytes, now_s):
                    break
                chosen.append(key)
        return chosen
