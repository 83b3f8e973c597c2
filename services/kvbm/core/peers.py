"""Peers: which other daemons there are, which of them to use now, and which are said to hold what.

All of it hints: a record may be stale, a peer may have evicted, a router may err. Pure; knows no
network. Times are seconds of a steady clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

PeerId = NewType("PeerId", str)
"""Id of another node's daemon."""

MOST_ASKED = 4
"""Peers that are asked about one prompt."""
_HINT_S = 30.0
"""How long a router's word about a block is kept."""
_MOST_HINTS = 65_536
_ABSENT_S = 2.0
"""How long nobody is asked again about a block that nobody had."""
_MOST_ABSENT = 4096
_AVOID_S, _LONGEST_AVOID_S = 0.5, 30.0
"""After a failure a peer is not used for so long; it doubles with each further one, up to:"""


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What a daemon's record says."""

    id: PeerId
    incarnation: int
    address: str


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive blocks of a chain that one peer is said to hold."""

    peer: PeerId
    first: int
    """Number in the chain."""
    count: int

    @property
    def end(self) -> int:
        """Number of the block after its last."""
        return self.first + self.count


@dataclass(slots=True)
class _Standing:
    info: PeerInfo
    vanished: bool = False
    failures: int = 0
    """In a row."""
    until_s: float = float("-inf")
    why: str = ""


class PeerBook:
    """All peers of a daemon, and what was heard of them."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._peers: dict[PeerId, _Standing] = {}
        self._hints: OrderedDict[int, tuple[PeerId, float]] = OrderedDict()
        self._absent: OrderedDict[int, float] = OrderedDict()
        self._turn = 0

    def __len__(self) -> int:
        return len(self._peers)

    # What discovery tells.

    def record(self, info: PeerInfo) -> bool:
        """A daemon's record came or changed; whether it lives anew or elsewhere than known."""
        if info.id == self._own_id:
            return False
        known = self._peers.get(info.id)
        if known is not None and known.info == info:
            known.vanished = False
            return False
        self._peers[info.id] = _Standing(info)
        self._forget_hints(info.id)
        return known is not None

    def record_vanished(self, id: PeerId, incarnation: int) -> None:
        """A record went: a hint. The peer is forgotten once it fails as well."""
        known = self._peers.get(id)
        if known is not None and known.info.incarnation == incarnation:
            known.vanished = True

    # How they do.

    def failed(self, id: PeerId, why: str, now_s: float) -> bool:
        """A peer did not do what was asked: it is avoided for a while. Whether it is forgotten."""
        known = self._peers.get(id)
        if known is None:
            return True
        if known.vanished:
            del self._peers[id]
            self._forget_hints(id)
            return True
        pause_s = min(_AVOID_S * 2**known.failures, _LONGEST_AVOID_S)
        known.failures, known.until_s, known.why = known.failures + 1, now_s + pause_s, why
        return False

    def worked(self, id: PeerId) -> None:
        """A peer answered as it should."""
        known = self._peers.get(id)
        if known is not None:
            known.failures, known.until_s, known.why = 0, float("-inf"), ""

    def usable(self, id: PeerId, now_s: float) -> bool:
        """Whether it is known, and not avoided."""
        known = self._peers.get(id)
        return known is not None and known.until_s <= now_s

    def info(self, id: PeerId) -> PeerInfo | None:
        """Its record."""
        known = self._peers.get(id)
        return known.info if known is not None else None

    def standings(self, now_s: float) -> list[tuple[PeerInfo, str]]:
        """All peers, and why each is avoided now (empty: it isn't)."""
        return [(p.info, p.why if p.until_s > now_s else "") for p in self._peers.values()]

    def any_usable(self, now_s: float) -> bool:
        """Whether there is anybody to ask."""
        return any(peer.until_s <= now_s for peer in self._peers.values())

    def to_ask(self, now_s: float) -> list[PeerId]:
        """Whom to ask about a prompt: a bounded number of those usable, all in turn."""
        usable = sorted(id for id, p in self._peers.items() if p.until_s <= now_s)
        if len(usable) <= MOST_ASKED:
            return usable
        self._turn = (self._turn + MOST_ASKED) % len(usable)
        return [usable[(self._turn + n) % len(usable)] for n in range(MOST_ASKED)]

    # Who is said to hold what, by the low 64 bits of a block's hash.

    def hint(self, peer: PeerId, keys: Sequence[int], now_s: float) -> None:
        """A peer is said to hold these."""
        if peer not in self._peers:
            return
        for key in keys[:_MOST_HINTS]:
            self._hints[key] = peer, now_s + _HINT_S
            self._hints.move_to_end(key)
        while len(self._hints) > _MOST_HINTS:
            self._hints.popitem(last=False)

    def unhint(self, peer: PeerId, key: int) -> None:
        """That peer turned out not to have it."""
        hint = self._hints.get(key)
        if hint is not None and hint[0] == peer:
            del self._hints[key]

    def holder(self, key: int, now_s: float) -> PeerId | None:
        """Who is said to hold a block, and usable now."""
        hint = self._hints.get(key)
        if hint is None:
            return None
        peer, until_s = hint
        if until_s <= now_s:
            del self._hints[key]
            return None
        return peer if self.usable(peer, now_s) else None

    def absent(self, key: int, now_s: float) -> None:
        """Nobody who was asked has this block."""
        self._absent[key] = now_s + _ABSENT_S
        self._absent.move_to_end(key)
        while len(self._absent) > _MOST_ABSENT:
            self._absent.popitem(last=False)

    def is_absent(self, key: int, now_s: float) -> bool:
        """Whether nobody had it a moment ago."""
        return self._absent.get(key, float("-inf")) > now_s

    def _forget_hints(self, peer: PeerId) -> None:
        for key in [key for key, (of, _) in self._hints.items() if of == peer]:
            del self._hints[key]

    def check_invariants(self) -> None:
        """Raises AssertionError when a bound is broken."""
        assert PeerId(self._own_id) not in self._peers
        assert len(self._hints) <= _MOST_HINTS and len(self._absent) <= _MOST_ABSENT
        assert all(peer in self._peers for peer, _ in self._hints.values())
