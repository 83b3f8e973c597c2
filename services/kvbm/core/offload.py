"""Offload plan: which blocks go down a tier now, by eviction order, worth and budget.

Whatever is evicted without a copy below is lost, but most blocks are never asked for again, and
every write wears the disk and takes from its reads. So a share of what is stored is written: what
is near eviction, in whole chains with the head first, and only if its worth, as eviction has
learned it, isn't far below what is usual. While nothing new is stored the disk is idle, and the
rest follows; with that, too, no more is written than if each new block were.

On traces (benchmarks/kvbm/traces.py) half of the writes keep 0.95 to 0.98 of all hits where the
disk itself has to choose, and 0.85 to 0.89 where it could hold nearly everything: whether a new
prompt will return isn't known when it leaves memory for the first time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Protocol

from services.common.events.model import Tier
from services.kvbm.core.eviction import Eviction
from services.kvbm.core.model import BlockMeta

SHARE = 0.45
"""Blocks written for each new one that is stored. Under the half that is the goal, since a block
that was not written may have to be stored twice."""
_BURST_BLOCKS = 512
"""Most blocks that can be saved up to be written at once."""
_AHEAD_BLOCKS = 256
"""Blocks looked at, those that are evicted next."""
_LOOK_S = 0.5
"""Seconds between looks when little is stored."""
_IDLE_S = 2.0
"""Seconds without a new block after which the disk counts as idle."""
_IDLE_BLOCKS = 512
"""Blocks chosen at once for an idle disk."""
_FAR_BLOCKS = 8192
"""Blocks looked at for them; behind these, what is near eviction is down already."""
_POOR = 0.6
"""A chain is passed over when its worth is below this part of the average."""
_PASSED = 4096
"""Chains passed over that are remembered, so that one dice is cast for each."""
_LONGEST = 4096


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

    def meta(self, key: bytes) -> BlockMeta | None:
        """What a block is; None when it is nowhere."""
        ...


class OffloadPlan:
    """Chooses what goes down from G2. One for each namespace; the budget is shared by all."""

    def __init__(
        self,
        evictions: Mapping[Tier, Eviction],
        budget: WriteBudget,
        block_bytes: int,
        *,
        share: float = SHARE,
    ) -> None:
        self._evictions = evictions
        self._budget = budget
        self._block_bytes = block_bytes
        self._share = share
        self._credit = 0.0
        """Blocks that may be written."""
        self._usual: float | None = None
        """Average worth of chains looked at."""
        self._owed = 0
        """Blocks that write-through would have written beyond ours: an idle disk gets no more."""
        self._chosen: deque[bytes] = deque()
        self._spare: deque[bytes] = deque()
        """Chosen for an idle disk."""
        self._passed = OrderedDict[bytes, float]()
        """Chains passed over, by their last block, with their worth then."""
        self._stored = 0
        """Blocks stored since the last look."""
        self._looked_s = float("-inf")
        self._stored_s = float("-inf")

    def stored(self, key: bytes, now_s: float) -> None:
        """A block appeared in G2. Unless it came from below, write-through would write it now."""
        if key not in self._evictions[Tier.G3]:
            self._credit = min(self._credit + self._share, float(_BURST_BLOCKS))
            self._stored += 1
            self._owed += 1
            self._stored_s = now_s

    def choose(
        self, catalog: Places, source: Tier, target: Tier, now_s: float, limit: int
    ) -> list[bytes]:
        """Up to `limit` keys in `source` to write to `target` now; the budget is taken for them.

        Empty when nothing should be, or the budget is spent.
        """
        idle = now_s - self._stored_s >= _IDLE_S
        if not idle:
            self._spare.clear()
        if not self._chosen and (
            self._stored * 8 >= _AHEAD_BLOCKS or now_s - self._looked_s >= _LOOK_S
        ):
            self._look(catalog, source, target)
            self._stored, self._looked_s = 0, now_s
        if idle and self._owed > 0 and not self._chosen and not self._spare:
            self._look_further(catalog, source, target)
        keys: list[bytes] = []
        while (queue := self._chosen or self._spare) and len(keys) < limit:
            tiers = catalog.tiers_of(queue[0])
            if source not in tiers or target in tiers:
                queue.popleft()
            elif self._budget.take(self._block_bytes, now_s):
                keys.append(queue.popleft())
                self._owed -= 1
            else:
                break
        return keys

    def _look(self, catalog: Places, source: Tier, target: Tier) -> None:
        eviction, seen = self._evictions[source], set[bytes]()
        for last in eviction.next_victims(_AHEAD_BLOCKS):
            if last in seen:
                continue
            chain = self._chain(catalog, last, source, target, seen)
            if not chain:
                continue
            worth = sum(eviction.worth(key) for key in chain) / len(chain)
            usual = self._usual = worth if self._usual is None else self._usual
            self._usual += 0.02 * (worth - usual)
            if worth < _POOR * usual or worth <= self._passed.get(last, 0.0):
                continue
            # A chain whose head alone can be paid for is written as far as that goes.
            length = min(len(chain), int(self._credit))
            if length < min(len(chain), 8):
                self._passed[last] = worth * 1.2
                while len(self._passed) > _PASSED:
                    self._passed.popitem(last=False)
                continue
            self._credit -= length
            self._chosen.extend(chain[:length])

    def _look_further(self, catalog: Places, source: Tier, target: Tier) -> None:
        eviction, seen = self._evictions[source], set[bytes]()
        room = min(_IDLE_BLOCKS, self._owed)
        for last in eviction.next_victims(_FAR_BLOCKS):
            if last not in seen and (chain := self._chain(catalog, last, source, target, seen)):
                self._spare.extend(chain[: room - len(self._spare)])
                if len(self._spare) >= room:
                    return
        if not self._spare:
            self._owed = 0

    def _chain(
        self, catalog: Places, last: bytes, source: Tier, target: Tier, seen: set[bytes]
    ) -> list[bytes]:
        """The blocks up to `last` that `target` lacks, the first of them first."""
        chain: list[bytes] = []
        key = last
        while key not in seen and len(chain) < _LONGEST:
            tiers = catalog.tiers_of(key)
            if source not in tiers or target in tiers:
                break
            seen.add(key)
            chain.append(key)
            meta = catalog.meta(key)
            if meta is None:
                break
            key = meta.parent
        chain.reverse()
        return chain
