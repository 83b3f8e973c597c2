"""Well-known orders of eviction, to compare ours with; no daemon uses them.

Both keep single blocks and know no chains. They forget a key that is removed but was not their own
victim, as they would have to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from services.common.arena import NO_KEY

Keys = OrderedDict[bytes, int]


def _first(queue: Keys, spared: Callable[[bytes], bool]) -> bytes | None:
    return next((key for key in queue if not spared(key)), None)


class _Rival:
    """What both have in common: two queues of blocks, `a` and `b`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self._a: Keys = OrderedDict()
        self._b: Keys = OrderedDict()

    def _hit(self, key: bytes) -> None:
        raise NotImplementedError

    def touch(self, keys: Sequence[bytes]) -> None:
        """As Eviction's: as if each block had been asked for, the tail first."""
        for key in reversed(keys):
            if key in self:
                self._hit(key)

    def next_victims(self, count: int) -> list[bytes]:
        """As Eviction's, roughly."""
        return [key for key, _ in zip(chain(self._a, self._b), range(count), strict=False)]

    def worth(self, key: bytes) -> float:
        """As Eviction's: no estimate beyond the queue it is in."""
        return float(key in self._b)

    def order(self) -> Iterator[bytes]:
        """As Eviction's."""
        return chain(reversed(self._b), reversed(self._a))

    def __len__(self) -> int:
        return len(self._a) + len(self._b)

    def __contains__(self, key: bytes) -> bool:
        return key in self._a or key in self._b


class Arc(_Rival):
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003); `a` is T1, `b` is T2."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghost_a: Keys = OrderedDict()
        self._ghost_b: Keys = OrderedDict()
        self._target = 0.0
        self._victim: bytes | None = None

    def add(
        self, key: bytes, position: int, *, reused: bool = False, parent: bytes = NO_KEY
    ) -> None:
        """As Eviction's."""
        if key in self:
            self._hit(key)
        elif key in self._ghost_a:
            step = max(1.0, len(self._ghost_b) / len(self._ghost_a))
            self._target = min(float(self.capacity), self._target + step)
            del self._ghost_a[key]
            self._b[key] = 0
        elif key in self._ghost_b:
            step = max(1.0, len(self._ghost_a) / len(self._ghost_b))
            self._target = max(0.0, self._target - step)
            del self._ghost_b[key]
            self._b[key] = 0
        else:
            self._a[key] = 0
            while self._ghost_a and len(self._a) + len(self._ghost_a) > self.capacity:
                self._ghost_a.popitem(last=False)
        while self._ghost_b and (
            len(self) + len(self._ghost_a) + len(self._ghost_b) > 2 * self.capacity
        ):
            self._ghost_b.popitem(last=False)

    def _hit(self, key: bytes) -> None:
        self._a.pop(key, None)
        self._b[key] = 0
        self._b.move_to_end(key)

    def victim(self, spared: Callable[[bytes], bool]) -> bytes | None:
        """As Eviction's."""
        queues = (self._a, self._b)
        if not self._a or len(self._a) <= self._target:
            queues = (self._b, self._a)
        key = _first(queues[0], spared)
        self._victim = key if key is not None else _first(queues[1], spared)
        return self._victim

    def remove(self, key: bytes) -> None:
        """As Eviction's."""
        for queue, ghosts in ((self._a, self._ghost_a), (self._b, self._ghost_b)):
            if key in queue:
                del queue[key]
                if key == self._victim:
                    ghosts[key] = 0


class S3Fifo(_Rival):
    """S3-FIFO (Yang et al., SOSP 2023); `a` is the small queue, a tenth, `b` the main one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghosts: Keys = OrderedDict()
        self._small = max(1, self.capacity // 10)
        self._victim: bytes | None = None

    def add(
        self, key: bytes, position: int, *, reused: bool = False, parent: bytes = NO_KEY
    ) -> None:
        """As Eviction's."""
        if key in self:
            self._hit(key)
        elif self._ghosts.pop(key, None) is not None:
            self._b[key] = 0
        else:
            self._a[key] = 0

    def _hit(self, key: bytes) -> None:
        queue = self._a if key in self._a else self._b
        queue[key] = min(3, queue[key] + 1)

    def victim(self, spared: Callable[[bytes], bool]) -> bytes | None:
        """As Eviction's."""
        self._victim = None
        if len(self._a) >= self._small or not self._b:
            for key in list(self._a):
                if self._a[key] > 1:
                    del self._a[key]
                    self._b[key] = 0
                elif not spared(key):
                    self._victim = key
                    return key
        for _ in range(4):
            for key in list(self._b):
                if spared(key):
                    continue
                if not self._b[key]:
                    self._victim = key
                    return key
                self._b[key] -= 1
                self._b.move_to_end(key)
        self._victim = _first(self._a, spared)
        return self._victim

    def remove(self, key: bytes) -> None:
        """As Eviction's."""
        if self._a.pop(key, None) is not None and key == self._victim:
            self._ghosts[key] = 0
            while len(self._ghosts) > self.capacity - self._small:
                self._ghosts.popitem(last=False)
        self._b.pop(key, None)
