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
from services.router.core.onboard import OnboardModel, Paces
from services.router.core.peers import PeerHint, peer_hints
from services.router.core.tiers import LOCAL_TIERS, Overlap, Reach, TierSpace
from services.router.core.walk import Run, TierWalk
from services.router.core.workers import WorkerInfo


@dataclass(slots=True)
class Usable:
    """What one worker can use of a prompt."""

    overlap: Overlap
    onboard_s: float
    """Seconds to bring up the blocks below G1."""
    below: int | None = None
    """Number of the first block that is not in G2 of its node."""
    recompute_block_s: float = 0.0
    """Seconds that the worker takes to compute a block."""


@dataclass(slots=True)
class Beneath:
    """What a daemon brings to a worker that has nothing of a prompt."""

    tokens: int
    load_s: float
    """Seconds to bring them up,"""
    load_tokens: float
    """and tokens that the worker could compute meanwhile, as far as that is not measured."""


MIXED = Beneath(0, 0.0, 0.0)
"""Says that those above a daemon differ: a tier is of use to some and too slow for others."""


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
        self.depths = depths = index.depths(keys, self._limit)
        """Blocks that slots have, or that requests ahead bring before this one's turn comes."""
        mates = load.mates(keys, self._limit, depths)
        self._crowd = mates.crowd
        for slot, depth in mates.depth.items():
            if depth > depths.get(slot, 0):
                depths[slot] = depth
        self._walks: dict[int, TierWalk] = {}
        self._nodes = nodes
        self._reaches: dict[tuple[str, bytes], Reach | None] = {}
        self._onboard = onboard
        self._worthy: dict[tuple[Paces, float], tuple[int, bool]] = {}
        self._now = now
        self.fork: int | None = None
        """Key of the last block that any worker has, once somebody has looked."""

    def crowd(self, slot: int) -> float:
        """Requests in flight there that share the prompt (half of it counts half)."""
        return self._crowd.get(slot, 0.0)

    def at(self, info: WorkerInfo, slot: int, token_s: float) -> Usable:
        """What a worker's rank can use that computes a token in `token_s`."""
        own = self.depths.get(slot, 0)
        reach = self._reach(info.kvbm, info.namespace) if info.kvbm and own < self._limit else None
        if reach is None:
            return Usable(Overlap(own), 0.0)
        recompute_block_s = self._block_size * token_s
        paces = self._onboard.paces(reach.rates)
        run = self._run(reach, own, paces, recompute_block_s)
        seconds, blocks = paces.load(run)
        return Usable(
            Overlap(own, run.g2, run.g3, run.g4, run.peer),
            seconds + blocks * recompute_block_s,
            run.below,
            recompute_block_s,
        )

    def beneath(
        self, kvbm: str, namespace: bytes, fastest_s: float, slowest_s: float
    ) -> Beneath | None:
        """What a daemon brings to those above it that have nothing of their own: None is nothing,
        MIXED not the same to all. The fastest and the slowest compute a token in so many seconds.
        """
        reach = self._reach(kvbm, namespace)
        if reach is None or not self._walk(reach.space).finds(reach):
            return None
        paces = self._onboard.paces(reach.rates)
        run = self._run(reach, 0, paces, self._block_size * fastest_s)
        if fastest_s < slowest_s:
            other = self._run(reach, 0, paces, self._block_size * slowest_s)
            if other != run:
                return MIXED
        if not run.total:
            return None
        seconds, blocks = paces.load(run)
        return Beneath(run.total * self._block_size, seconds, blocks * self._block_size)

    def prefetch(self, info: WorkerInfo, usable: Usable) -> Prefetch | None:
        """What the worker's daemon may bring up while the request is on its way."""
        if usable.below is None:
            return None
        first, end = usable.below, usable.overlap.total
        peers: tuple[PeerHint, ...] = ()
        reach = self._reach(info.kvbm, info.namespace) if usable.overlap.peer else None
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

    def _run(self, reach: Reach, own: int, paces: Paces, recompute_block_s: float) -> Run:
        # Most daemons are alike, and so are those above them.
        who = paces, recompute_block_s
        worthy = self._worthy.get(who)
        if worthy is None:
            worthy = paces.worth(recompute_block_s), paces.peer.beats(recompute_block_s)
            self._worthy[who] = worthy
        worth, fetch = worthy
        return self._walk(reach.space).run(reach, own, worth, fetch=fetch)

    def _reach(self, kvbm: str, namespace: bytes) -> Reach | None:
        where = kvbm, namespace
        if where not in self._reaches:
            self._reaches[where] = self._nodes.reach(kvbm, namespace, self._now)
        return self._reaches[where]
