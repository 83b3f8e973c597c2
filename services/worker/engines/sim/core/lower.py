"""A tier below the simulated engine's own blocks (G2: host memory), for replays.

Full blocks are copied into it when the step that computed them ends, as a kvbm daemon's connector
does. A request that finds more of its prompt there than in the engine waits for a load, if that is
quicker than computing; loads of one engine come one after the other, and hold no blocks meanwhile.
Engines of one node may share a tier. What it evicts is what was longest unused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import KeysView, Sequence

from services.common.ids import BlockKey
from services.worker.core.blocks import BlockChange, CopiesAdded, CopiesDropped


class LowerTier:
    """Room for `capacity_blocks`. A load takes `latency_s` and `block_s` for each block."""

    def __init__(self, capacity_blocks: int, *, latency_s: float, block_s: float) -> None:
        if capacity_blocks < 1 or latency_s < 0 or block_s < 0:
            raise ValueError("a tier has at least one block, and times from 0 on")
        self.capacity_blocks = capacity_blocks
        self.latency_s = latency_s
        self.block_s = block_s
        self._held: OrderedDict[BlockKey, None] = OrderedDict()
        self._news: list[BlockChange] = []

    def __len__(self) -> int:
        return len(self._held)

    def keys(self) -> KeysView[BlockKey]:
        """All that it holds, what was longest unused first."""
        return self._held.keys()

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` it holds, from the first on without a hole."""
        held = self._held
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def load_s(self, blocks: int) -> float:
        """Time of a load."""
        return self.latency_s + blocks * self.block_s

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These are used: a chain's tail leaves before its root."""
        for key in reversed(keys):
            if key in self._held:
                self._held.move_to_end(key)

    def save(self, keys: Sequence[BlockKey]) -> None:
        """Holds these blocks from now on."""
        new = tuple(key for key in dict.fromkeys(keys) if key not in self._held)
        for key in new:
            self._held[key] = None
        self.touch(keys)
        dropped: list[BlockKey] = []
        while len(self._held) > self.capacity_blocks:
            dropped.append(self._held.popitem(last=False)[0])
        if new:
            self._news.append(CopiesAdded(new))
        if dropped:
            self._news.append(CopiesDropped(tuple(dropped)))

    def take_news(self) -> list[BlockChange]:
        """What changed since the last call, in order."""
        news, self._news = self._news, []
        return news
