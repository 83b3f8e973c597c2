"""Is what the router knows of a publisher what the publisher has? It tells digests; they compare.

A difference calls for a snapshot. One that stays after that (a publisher that lies, a bound that is
too small) must not call for one each time, so calls get rarer by halves.
"""

from __future__ import annotations

from collections.abc import Hashable

from services.router.core.index import Digest


class Doubts:
    """Publishers whose last digest differed, by the part of their blocks that it was of."""

    def __init__(self) -> None:
        self._differed: dict[str, dict[Hashable, int]] = {}
        """How often in a row."""
        self._called: set[str] = set()
        self.drifts = 0
        """Digests so far that differed."""

    def compare(self, publisher: str, part: Hashable, known: Digest, blocks: int, xor: int) -> None:
        """A publisher says that it has `blocks` with that xor of keys in a part (rank, tier)."""
        parts = self._differed.get(publisher, {})
        if known == Digest(blocks, xor):
            parts.pop(part, None)
            if not parts:
                self._differed.pop(publisher, None)
            return
        self.drifts += 1
        times = parts[part] = parts.get(part, 0) + 1
        self._differed[publisher] = parts
        if times & (times - 1) == 0:
            self._called.add(publisher)

    def take(self, publisher: str) -> bool:
        """Whether a snapshot is called for; says so once."""
        if publisher not in self._called:
            return False
        self._called.discard(publisher)
        return True

    def forget(self, publisher: str) -> None:
        """It is gone."""
        self._differed.pop(publisher, None)
        self._called.discard(publisher)
