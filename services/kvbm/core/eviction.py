"""Eviction: in which order the blocks of one tier go.

It knows keys and how they hang together, not slots, leases or quotas. Keys are added when a block
appears in the tier and removed when it goes, whatever the reason.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from services.common.arena import NO_KEY


class Eviction(Protocol):
    """The order in which the blocks of one tier go."""

    def add(
        self, key: bytes, position: int, *, reused: bool = False, parent: bytes = NO_KEY
    ) -> None:
        """A block appeared. `position`: its number in its prompt; `parent`: the block before it.

        `reused`: somebody asked for it, as when it is promoted from a lower tier. A key that is
        there already is taken as touched.
        """
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """A chain was found, given in order: its head shall outlive its tail. Unknown keys pass."""
        ...

    def remove(self, key: bytes) -> None:
        """A block is gone; an unknown one passes."""
        ...

    def victim(self, spared: Callable[[bytes], bool]) -> bytes | None:
        """The next to go that is not spared; it stays until `remove`. None: all are spared."""
        ...

    def next_victims(self, count: int) -> list[bytes]:
        """About the next `count` to go if nothing else happens, first to go first."""
        ...

    def worth(self, key: bytes) -> float:
        """How likely it is to be asked for again, 0 to 1; also of keys that are not here."""
        ...

    def order(self) -> Iterator[bytes]:
        """All keys, last to go first."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: bytes) -> bool: ...


class Lru:
    """Least recently used goes first."""

    def __init__(self, capacity: int) -> None:
        self._keys = OrderedDict[bytes, int]()
        """Key -> times found."""

    def add(
        self, key: bytes, position: int, *, reused: bool = False, parent: bytes = NO_KEY
    ) -> None:
        """As Eviction's."""
        self._keys[key] = self._keys.pop(key, 0) + reused

    def touch(self, keys: Sequence[bytes]) -> None:
        """As Eviction's."""
        for key in reversed(keys):
            if key in self._keys:
                self._keys[key] += 1
                self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """As Eviction's."""
        self._keys.pop(key, None)

    def victim(self, spared: Callable[[bytes], bool]) -> bytes | None:
        """As Eviction's."""
        return next((key for key in self._keys if not spared(key)), None)

    def next_victims(self, count: int) -> list[bytes]:
        """As Eviction's."""
        return [key for key, _ in zip(self._keys, range(count), strict=False)]

    def worth(self, key: bytes) -> float:
        """As Eviction's: found once means found again."""
        return min(1.0, self._keys.get(key, 0))

    def order(self) -> Iterator[bytes]:
        """As Eviction's."""
        return reversed(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys


def new_eviction(capacity: int, kind: str = "default") -> Eviction:
    """A policy for a tier of `capacity` blocks: ours, or "lru", "arc", "s3fifo" to compare with.

    Raises ValueError for another kind.
    """
    from services.kvbm.core import foresight, rivals  # they know this module's contract

    kinds: dict[str, Callable[[int], Eviction]] = {
        "default": foresight.Foresight,
        "lru": Lru,
        "arc": rivals.Arc,
        "s3fifo": rivals.S3Fifo,
    }
    if kind not in kinds:
        raise ValueError(f"eviction must be one of {', '.join(kinds)}, not {kind!r}")
    return kinds[kind](capacity)
