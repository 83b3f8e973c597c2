"""What each worker need not compute of one prompt: its own blocks, then those of its node's tiers.

Made anew for each prompt; everything that workers share is looked up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.core.answers import Prefetch
from services.router.core.index import PrefixIndex
from services.router.core.load import LoadBook
from services.router.core.nodes import NodeTable
from services.router.core.onboard import OnboardModel
from services.router.core.peers import PeerHint, peer_hints
from services.router.core.tiers import LOCAL_TIERS, Overlap, Reach, TierSpace, TierWalk
from services.router.core.workers import WorkerInfo


@dataclass(slots=True)
class Usable:
    """What one worker can use of a prompt."""

    overlap: Overlap
    onboard_s: float
    """Seconds to bring up the blocks below G1."""
    mates: float
    """Requests in flight there that share the prompt."""
    below: int | None = None
    """Number of the first block that is not in G2 of its node."""
    recompute_block_s: float = 0.0
    """Seconds that the worker takes to compute a block."""


class Prompt:
    """One prompt's blocks, looked up wherever they may be."""

    def __init__(
        self,
        keys: Sequence[int],
        prompt_tokens: int,
        block_size: int,
        index: PrefixIndex,
        load: LoadBook,
        nodes: NodeTable,
        onboard: OnboardModel,
        now: float,
    ) -> None:
        self._keys = keys
        self._block_size = block_size or 1
        # The engine computes the last token of a prompt at least, and whole blocks only; unless the
        # last key is that of a block partly filled, as engines have it that reuse those.
        whole = len(keys) * self._block_size <= prompt_tokens
        full = max(0, prompt_tokens - 1) // self._block_size
        self._limit = min(len(keys), full if whole else full + 1)
        self._own = index.depths(keys, self._limit)
        self._mates = load.mates(keys, self._limit, self._own)
        self._walks: dict[int, TierWalk] = {}
        self._nodes = nodes
        self._reaches: dict[tuple[str, bytes], Reach | None] = {}
        self._onboard = onboard
        self._now = now
        self.fork: int | None = None
        """Key of the last block that any worker has, once somebody has looked."""

    def slots(self) -> set[int]:
        """Those that have blocks of the prompt in G1, or requests in flight that share it."""
        return self._own.keys() | self._mates.depth.keys()

    def own(self, slot: int) -> int:
        """Blocks that a slot has, or that requests ahead bring before this one's turn comes."""
        return max(self._own.get(slot, 0), self._mates.depth.get(slot, 0))

    def crowd(self, slot: int) -> float:
        """Requests in flight there that share the prompt (half of it counts half)."""
        return self._mates.crowd.get(slot, 0.0)

    def at(self, info: WorkerInfo, slot: int, prefill_rate: float) -> Usable:
        """What a worker's rank can use; `prefill_rate` in tokens a second."""
        crowd = self.crowd(slot)
        own = self.own(slot)
        reach = self._reach(info) if info.kvbm and own < self._limit else None
        if reach is None:
            return Usable(Overlap(own), 0.0, crowd)
        recompute_block_s = self._block_size / prefill_rate
        costs = self._onboard.costs(reach.rates, recompute_block_s)
        run = self._walk(reach.space).run(reach, own, costs.worth, fetch=costs.fetch)
        overlap = Overlap(own, run.g2, run.g3, run.g4, run.peer)
        return Usable(overlap, costs.seconds(overlap), crowd, run.below, recompute_block_s)

    def prefetch(self, info: WorkerInfo, usable: Usable) -> Prefetch | None:
        """What the worker's daemon may bring up while the request is on its way."""
        if usable.below is None:
            return None
        first, end = usable.below, usable.overlap.total
        peers: tuple[PeerHint, ...] = ()
        reach = self._reach(info) if usable.overlap.peer else None
        if reach is not None:
            nodes = self._nodes.fetchable(info.kvbm, info.namespace, self._now)
            masks = self._walk(reach.space).masks(first, end)
            # What the node has on its own disk it brings up from there.
            peers = peer_hints(masks, LOCAL_TIERS << reach.shift, nodes)
        keys = self._keys[first:end]
        return Prefetch(info.kvbm, info.namespace, keys, peers, usable.recompute_block_s)

    def _walk(self, space: TierSpace) -> TierWalk:
        walk = self._walks.get(id(space))
        if walk is None:
            walk = self._walks[id(space)] = TierWalk(self._keys, self._limit, space)
        return walk

    def _reach(self, info: WorkerInfo) -> Reach | None:
        where = info.kvbm, info.namespace
        if where not in self._reaches:
            self._reaches[where] = self._nodes.reach(info.kvbm, info.namespace, self._now)
        return self._reaches[where]
