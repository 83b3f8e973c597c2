"""Session book: where each session's requests went last, and where one goes that is not known.

A session that is not remembered has a home all the same: the worker with the highest random weight
(D. Thaler, C. Ravishankar, IEEE/ACM ToN 6(1), 1998) of its name. Routers that don't know of each
other, or start anew, so send it to the same worker, without a word between them. Memory is for what
the hash can't know: that the session went elsewhere, or was there before a worker came.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

Place = tuple[str, int]
"""A worker's id, and a data-parallel rank of it."""


def session_key(session: str, model: str, tenant: str) -> bytes:
    """What stands for a session; the same name of another tenant or model is another session."""
    return blake2b(repr((tenant, model, session)).encode(), digest_size=16).digest()


def home_of(key: bytes, places: Iterable[Place]) -> int:
    """Number of the place where an unknown session belongs; some place at least."""
    weights = (
        blake2b(f"{id}/{rank}".encode(), digest_size=8, key=key).digest() for id, rank in places
    )
    return max(enumerate(weights), key=lambda one: one[1])[0]


class SessionBook:
    """The last place of each session, the latest `limit` of them, each for `ttl_s` seconds."""

    def __init__(self, limit: int, ttl_s: float) -> None:
        self._limit = limit
        self._ttl = ttl_s
        # In order of use, so the first ones expire first.
        self._places: OrderedDict[bytes, tuple[Place, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def place(self, key: bytes, now: float) -> Place | None:
        """Where a session was; None if that is not known (any more)."""
        known = self._places.get(key)
        return known[0] if known is not None and now < known[1] else None

    def went(self, key: bytes, place: Place, now: float) -> None:
        """A request of the session was placed."""
        self._places[key] = place, now + self._ttl
        self._places.move_to_end(key)
        self.expire(now)
        while len(self._places) > self._limit:
            self._places.popitem(last=False)

    def expire(self, now: float) -> None:
        """Drops sessions whose time is over."""
        while self._places:
            key = next(iter(self._places))
            if self._places[key][1] > now:
                return
            del self._places[key]

    def check_invariants(self) -> None:
        """Raises AssertionError when there are too many, or they are out of order."""
        assert len(self._places) <= self._limit
        ends = [end for _, end in self._places.values()]
        assert ends == sorted(ends)
