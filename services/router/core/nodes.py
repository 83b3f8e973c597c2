"""Node table: the kvbm daemons, whether they live, and what each holds below G1 by namespace.

A worker's record names its daemon, and its card the namespace: `reach` joins the two. A daemon that
is silent, refuses or leaves counts for nothing, and its blocks are kept; one that is gone or lives
anew has none. Its workers are never touched by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Snapshot,
    Tier,
    TierRate,
)
from services.common.ids import BlockKey
from services.router.core.answers import NodeSnapshot, Report, TierView
from services.router.core.doubts import Doubts
from services.router.core.lives import Life, Liveness, Status, Word
from services.router.core.tiers import ALL_TIERS, LOWER_TIERS, Holding, Reach, TierSpace

TierEvent = BlocksStored | BlocksRemoved | BlocksCleared | TierRate | BlocksDigest
_NAMESPACE_BYTES = 32
_TOLD = (*LOWER_TIERS, Tier.PEER)
_PEERS_S = 0.25
"""How long it is remembered which daemons are there to be fetched from."""
_MOST_NAMESPACES = 256
"""Namespaces of one daemon that are kept apart; more are refused."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What a daemon's record says."""

    id: str
    incarnation: int
    address: str
    remote: str = ""
    """Names its remote storage: daemons with the same one share G4. Empty: shared with nobody."""
    draining: bool = False
    transfer: str = ""
    """Daemons that name the same way fetch blocks from each other's memory. Empty: not it."""


@dataclass(slots=True, kw_only=True)
class _Node(Life):
    info: NodeInfo
    holdings: dict[bytes, Holding] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        return sum(len(holding.keys) for holding in self.holdings.values())


class NodeTable:
    """Daemons by id. Takes what their records and streams tell, as RouterCore does for workers.

    Each daemon may have `most_blocks` index entries, all namespaces and tiers together.
    """

    def __init__(self, liveness: Liveness, most_blocks: int) -> None:
        self._liveness = liveness
        self._most_blocks = most_blocks
        self._nodes: dict[str, _Node] = {}
        self._spaces: dict[bytes, TierSpace] = {}
        # By storage and namespace: bits of all daemons whose G4 is everybody's.
        self._remotes: dict[tuple[str, bytes], int] = {}
        # By way of transfer and namespace: the memory that is fetched from, until when it is that.
        self._peers: dict[tuple[str, bytes], tuple[float, dict[int, str], int]] = {}
        self._retired: list[tuple[bytes, Holding]] = []
        self._doubts = Doubts()
        self.refused_blocks = 0
        """Entries refused so far because their daemon had as many as it may."""
        self.events = 0
        """Events applied."""
        self.unknown_events = 0
        """Events and parts of snapshots dropped: of unknown kind or tier, or without namespace."""

    def __len__(self) -> int:
        return len(self._nodes)

    # What discovery tells.

    def record(self, info: NodeInfo, now: float) -> bool:
        """A daemon's record came or changed. False if it is of a life that is over."""
        node = self._nodes.get(info.id)
        if node is None:
            self._nodes[info.id] = _Node(
                info=info,
                incarnation=info.incarnation,
                heard_at=now,
                record_incarnation=info.incarnation,
            )
            return True
        word = node.recorded(info.incarnation)
        if word is Word.FORMER:
            return False
        moved = node.info.remote != info.remote
        node.info = info
        self._peers.clear()
        if word is Word.NEXT:
            node.begin(info.incarnation, now)
            self._forget_holdings(node, list(node.holdings))
        if moved:
            self._join_remotes()
        return True

    def record_vanished(self, node_id: str, incarnation: int) -> None:
        """A daemon's record went: a hint only."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.record_vanished(incarnation)

    # What its stream tells.

    def heard(self, node_id: str, incarnation: int, now: float) -> bool:
        """A daemon lives, its news is still being recovered. False if it is not known."""
        return self._hear(node_id, incarnation, now) is not None

    def reset(self, snapshot: Snapshot, now: float) -> bool:
        """A daemon holds exactly this. False if it is not known."""
        node = self._hear(snapshot.publisher, snapshot.incarnation, now)
        if node is None:
            return False
        node.answered(snapshot.sequence)
        self.unknown_events += snapshot.unknown_parts
        parts: dict[tuple[bytes, Tier], dict[BlockKey, None]] = {
            (namespace, tier): {} for namespace in node.holdings for tier in LOWER_TIERS
        }
        for part in snapshot.blocks:
            where = part.namespace, part.tier
            parts.setdefault(where, {}).update(dict.fromkeys(part.keys))
        # What went makes room for what came, and most is as it was.
        for (namespace, tier), keys in parts.items():
            if (holding := node.holdings.get(namespace)) is not None:
                holding.remove(tier, holding.keys_in(tier).difference(keys))
        for (namespace, tier), keys in parts.items():
            self._apply(node, BlocksStored(tier, tuple(keys), namespace=namespace))
        for rate in snapshot.rates:
            self._apply(node, rate)
        return True

    def resetting(self, snapshot: Snapshot, now: float, step: int = 1 << 62) -> Iterator[bool]:
        """`reset` in one step, which sets of keys make short; yields True, nothing if not known."""
        if self.reset(snapshot, now):
            yield True

    def apply(self, batch: Batch, now: float) -> tuple[Report, ...]:
        """News of a daemon, in order, without gaps. Requests never end here: returns ()."""
        node = self._hear(batch.publisher, batch.incarnation, now)
        if node is None:
            return ()
        node.sequence = batch.sequence
        self.unknown_events += batch.unknown_events
        for event in batch.events:
            if isinstance(event, TierEvent):
                self._apply(node, event)
            else:
                # A daemon runs no requests.
                self.unknown_events += 1
        return ()

    def refused(self, node_id: str, incarnation: int, now: float) -> bool:
        """A daemon refused a connection: of no use until heard again. True if that is news."""
        node = self._nodes.get(node_id)
        return node is not None and node.refuse(incarnation, now)

    def tick(self, now: float) -> list[str]:
        """Lets time pass: forgets daemons that are gone; returns their ids."""
        gone = [n for n in self._nodes.values() if n.gone(n.info.draining, self._liveness, now)]
        for node in gone:
            self._forget_holdings(node, list(node.holdings))
            del self._nodes[node.info.id]
            self._doubts.forget(node.info.id)
        return [node.info.id for node in gone]

    def sweep(self, limit: int) -> bool:
        """Frees up to `limit` entries of what was forgotten; True while some are left."""
        while self._retired and limit > 0:
            namespace, holding = self._retired[-1]
            limit -= 1 + holding.forget(limit)
            if not holding.keys:
                self._retired.pop()
                holding.space.give_back(holding.shift)
                if holding.space.unused:
                    self._spaces.pop(namespace, None)
        return bool(self._retired)

    def doubted(self, node_id: str) -> bool:
        """Whether a daemon's digest said that its blocks are not as known here; asking answers."""
        return self._doubts.take(node_id)

    @property
    def drifts(self) -> int:
        """Digests so far that differed."""
        return self._doubts.drifts

    # Questions.

    def reach(self, node_id: str, namespace: bytes, now: float) -> Reach | None:
        """A daemon's tiers as a worker of that namespace can use them now; None: not at all."""
        node = self._nodes.get(node_id)
        if node is None or self._status(node, now) is not Status.READY:
            return None
        remote = self._remotes.get((node.info.remote, namespace), 0)
        peers = self._fetched(node.info.transfer, namespace, now)[1] if node.info.transfer else 0
        holding = node.holdings.get(namespace)
        if holding is not None:
            peers &= ~(ALL_TIERS << holding.shift)
            return Reach(holding.space, holding.shift, remote, holding.rates, peers)
        if remote or peers:
            space = self._spaces[namespace]
            return Reach(space, space.beyond, remote, {}, peers)
        return None

    def fetchable(self, node_id: str, namespace: bytes, now: float) -> dict[int, str]:
        """Daemons that this one can fetch from, by the bit of their host memory."""
        node = self._nodes.get(node_id)
        if node is None or not node.info.transfer:
            return {}
        nodes, _ = self._fetched(node.info.transfer, namespace, now)
        return {bit: id for bit, id in nodes.items() if id != node_id}

    def _fetched(self, transfer: str, namespace: bytes, now: float) -> tuple[dict[int, str], int]:
        """Daemons that are there and fetched from this way, by bit, and all their bits."""
        way = transfer, namespace
        known = self._peers.get(way)
        if known is not None and now < known[0]:
            return known[1:]
        nodes = {
            holding.g2_flag: node.info.id
            for node in self._nodes.values()
            if node.info.transfer == transfer
            and (holding := node.holdings.get(namespace)) is not None
            and self._status(node, now) is Status.READY
        }
        self._peers[way] = now + _PEERS_S, nodes, sum(nodes)
        return nodes, sum(nodes)

    def address(self, node_id: str) -> str:
        """gRPC address of a daemon; empty if it is not known."""
        node = self._nodes.get(node_id)
        return "" if node is None else node.info.address

    def nodes(self, now: float) -> list[NodeSnapshot]:
        """All daemons, in order of id."""
        return [
            self._snapshot(n, now) for n in sorted(self._nodes.values(), key=lambda n: n.info.id)
        ]

    @property
    def entries(self) -> int:
        """Blocks times daemons that hold them in any tier."""
        return sum(node.entries for node in self._nodes.values())

    @property
    def capacity(self) -> int:
        """Most entries that the present daemons may have."""
        return self._most_blocks * len(self._nodes)

    def check_invariants(self) -> None:
        """Raises AssertionError when a bound is broken or a sum differs from what it sums up."""
        remotes: dict[tuple[str, bytes], int] = {}
        places: list[tuple[int, int]] = [(id(h.space), h.shift) for _, h in self._retired]
        for node_id, node in self._nodes.items():
            assert node.info.id == node_id
            assert node.incarnation not in node.old_lives
            assert node.entries <= self._most_blocks
            assert len(node.holdings) <= _MOST_NAMESPACES
            for namespace, holding in node.holdings.items():
                assert len(namespace) == _NAMESPACE_BYTES
                holding.check_invariants()
                assert holding.space is self._spaces[namespace]
                places.append((id(holding.space), holding.shift))
                if node.info.remote:
                    where = node.info.remote, namespace
                    remotes[where] = remotes.get(where, 0) | holding.g4_flag
        assert remotes == self._remotes
        assert len(places) == len(set(places)), "two share a place"
        for space in self._spaces.values():
            assert not space.unused
            space.check_invariants()
            mine = {shift for where, shift in places if where == id(space)}
            bits = sum(ALL_TIERS << shift for shift in mine)
            assert all(mask > 0 and not mask & ~bits for mask in space.masks.values())

    # Inside.

    def _status(self, node: _Node, now: float) -> Status:
        return node.status(node.info.draining, self._liveness, now)

    def _hear(self, node_id: str, incarnation: int, now: float) -> _Node | None:
        node = self._nodes.get(node_id)
        if node is None:
            return None
        match node.heard(incarnation, now):
            case Word.FORMER:
                return None
            case Word.NEXT:
                self._forget_holdings(node, list(node.holdings))
        return node

    def _apply(self, node: _Node, event: TierEvent) -> None:
        stored = event.tier is not Tier.PEER or isinstance(event, TierRate)
        holding = self._holding(node, event.namespace, event.tier) if stored else None
        if holding is None:
            self.unknown_events += 1
            return
        self.events += 1
        match event:
            case BlocksStored(tier=tier, keys=keys):
                room = self._most_blocks - node.entries
                self.refused_blocks += holding.store(tier, keys, room)
            case BlocksRemoved(tier=tier, keys=keys):
                holding.remove(tier, keys)
            case BlocksCleared(tier=tier):
                holding.clear(tier)
            case BlocksDigest(tier=tier, blocks=blocks, xor=xor):
                if node.entries >= self._most_blocks:
                    return  # some were refused: it can't be the same
                part = event.namespace, tier
                self._doubts.compare(node.info.id, part, holding.digest(tier), blocks, xor)
            case TierRate(tier=tier):
                holding.rates = {**holding.rates, tier: event}

    def _holding(self, node: _Node, namespace: bytes, tier: Tier) -> Holding | None:
        """Where an event belongs; None when that can't be said, or there are too many."""
        if tier not in _TOLD or len(namespace) != _NAMESPACE_BYTES:
            return None
        if namespace not in node.holdings:
            if len(node.holdings) >= _MOST_NAMESPACES:
                self._forget_holdings(node, [n for n, h in node.holdings.items() if not h.keys])
            if len(node.holdings) >= _MOST_NAMESPACES:
                return None
            space = self._spaces.setdefault(namespace, TierSpace())
            node.holdings[namespace] = Holding(space)
            self._join_remotes()
        return node.holdings[namespace]

    def _forget_holdings(self, node: _Node, namespaces: Iterable[bytes]) -> None:
        """Nobody finds them any more; `sweep` frees what they take."""
        for namespace in namespaces:
            self._retired.append((namespace, node.holdings.pop(namespace)))
        self._join_remotes()

    def _join_remotes(self) -> None:
        self._peers.clear()
        self._remotes.clear()
        for node in self._nodes.values():
            for namespace, holding in node.holdings.items():
                if node.info.remote:
                    where = node.info.remote, namespace
                    self._remotes[where] = self._remotes.get(where, 0) | holding.g4_flag

    def _snapshot(self, node: _Node, now: float) -> NodeSnapshot:
        return NodeSnapshot(
            id=node.info.id,
            incarnation=node.incarnation,
            address=node.info.address,
            status=self._status(node, now),
            tiers=tuple(
                TierView(namespace, tier, holding.digest(tier), holding.rates.get(tier))
                for namespace, holding in sorted(node.holdings.items())
                for tier in LOWER_TIERS
            ),
            entries=node.entries,
            sequence=node.sequence,
            silence_s=node.silence_s(now),
        )
