"""Foresight: our order of eviction. The block goes first whose slot is worth least.

Blocks form trees: a block is of no use without those before it. So only leaves go, and a prefix
outlives what follows it. Among leaves the one goes whose kind and age promise the fewest hits for
its slot's time, as `Reuse` has learned it. The kind is how often a block was found so far; one that
never was is told by what its prompt hung on when it came. That keeps the tails of prompts that come
but once from pushing out what returns (scan resistance), and with no evidence yet it is exactly
least recently used. What was evicted is remembered for a while, so that a block that comes again
is known to be one that does.

A use costs two moves in dictionaries, an eviction a look at some hundred queues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from services.common.arena import NO_KEY
from services.kvbm.core.reuse import Reuse

_FRESH, _BRANCH, _HOT_BRANCH = range(3)
"""Kinds of blocks that were never found: of a new prompt; after a block that was found before;
after one that was found often, such as a system prompt."""
_FOUND = 3
"""Kinds from here on: found once, twice, three times, more often."""
_KINDS = _FOUND + 4
_GHOSTS, _MOST_GHOSTS = 4, 1 << 18
"""Capacities of evicted blocks that are remembered; and most of them, at some 300 bytes each."""
_WATCHED = 1024
"""Keys watched for learning in each capacity of uses, about; one of four, where that is less."""


class _Queue(OrderedDict[bytes, "_Node"]):
    """Leaves of one kind and bin of age, oldest first."""

    def __init__(self, kind: int, bin: int) -> None:
        super().__init__()
        self.kind = kind
        self.bin = bin
        self.listed = False
        """Whether `victim` looks at it."""


class _Node:
    __slots__ = ("found", "here", "key", "kids", "kind", "parent", "queue", "time")

    def __init__(self, key: bytes, kind: int, time: int) -> None:
        self.key = key
        self.kind = kind
        self.time = time
        """Count of uses at its last use."""
        self.found = 0
        self.here = False
        """Whether it is in the tier; else it is remembered only."""
        self.kids = 0
        """Blocks in the tier that follow it."""
        self.parent: _Node | None = None
        self.queue: _Queue | None = None


class Foresight:
    """An Eviction (eviction.py has the contract)."""

    def __init__(self, capacity: int) -> None:
        capacity = max(1, capacity)
        self._reuse = Reuse(capacity, _KINDS)
        # A key is watched when its last byte has none of these bits.
        self._unwatched = (4 << min(max(0, (capacity // _WATCHED).bit_length() - 2), 6)) - 1
        self._nodes: dict[bytes, _Node] = {}
        self._ghosts = OrderedDict[bytes, _Node]()
        self._ghost_limit = min(_GHOSTS * capacity, _MOST_GHOSTS)
        self._size = 0
        self._now = 0
        # By kind and bin.
        self._queues = [
            [_Queue(kind, bin) for bin in range(self._reuse.bins + 1)] for kind in range(_KINDS)
        ]
        self._ranked: list[_Queue] = []
        """All queues, the next to be evicted from first."""
        self._listed: list[_Queue] = []
        """Those of them that aren't empty, and some that are."""
        self._period = max(16, capacity // 64)
        self._next = self._period
        self._rank()

    # News.

    def add(
        self, key: bytes, position: int, *, reused: bool = False, parent: bytes = NO_KEY
    ) -> None:
        """As Eviction's. A block that is remembered counts as found."""
        self._now += 1
        before = self._nodes.get(parent) if parent != NO_KEY else None
        node = self._nodes.get(key)
        if node is None:
            kind = _FRESH
            if before is not None:
                top = before.kind
                kind = top if top < _FOUND else _HOT_BRANCH if top == _KINDS - 1 else _BRANCH
            node = self._nodes[key] = _Node(key, kind, self._now)
            node.found = int(reused)
        else:
            node.found += 1
        if not node.here:
            self._ghosts.pop(key, None)
            node.here = True
            self._size += 1
            # A parent that is gone for good is not waited for.
            node.parent = before
            if before is not None:
                before.kids += 1
                self._leave(before)
        self._use(node)
        self._age()

    def touch(self, keys: Sequence[bytes]) -> None:
        """As Eviction's."""
        get = self._nodes.get
        for key in keys:
            node = get(key)
            if node is not None and node.here:
                self._now += 1
                node.found += 1
                self._use(node)
        self._age()

    def remove(self, key: bytes) -> None:
        """As Eviction's; the key is remembered."""
        node = self._nodes.get(key)
        if node is None or not node.here:
            return
        node.here = False
        self._size -= 1
        self._leave(node)
        before, node.parent = node.parent, None
        if before is not None:
            before.kids -= 1
            if not before.kids and before.here:
                queue = self._queues[before.kind][self._reuse.bin_of(self._now - before.time)]
                newest = queue[next(reversed(queue))].time if queue else 0
                self._join(before, queue)
                if before.time < newest:
                    queue.move_to_end(before.key, last=False)
        self._ghosts[key] = node
        while len(self._ghosts) > self._ghost_limit:
            old, _ = self._ghosts.popitem(last=False)
            del self._nodes[old]
            self._reuse.forget(old)

    def _use(self, node: _Node) -> None:
        node.time = self._now
        found = node.found
        if found:
            kind = node.kind = _FOUND - 1 + found if found < _KINDS - _FOUND else _KINDS - 1
        else:
            kind = node.kind
        if not node.kids:
            self._leave(node)
            self._join(node, self._queues[kind][0])
        if not node.key[-1] & self._unwatched:
            self._reuse.used(node.key, kind, self._now)

    def _join(self, node: _Node, queue: _Queue) -> None:
        queue[node.key] = node
        node.queue = queue
        if not queue.listed:
            self._listed = []

    def _leave(self, node: _Node) -> None:
        if node.queue is not None:
            del node.queue[node.key]
            node.queue = None

    # Order.

    def victim(self, spared: Callable[[bytes], bool]) -> bytes | None:
        """As Eviction's. An inner block goes only when all leaves are spared."""
        best: tuple[float, int, bytes] | None = None
        done: set[int] = set()
        for queue in self._listed or self._list():
            if not queue or queue.kind in done:
                continue
            node = next((node for node in queue.values() if not spared(node.key)), None)
            if node is None:
                continue
            done.add(queue.kind)
            value = self._reuse.value(queue.kind, queue.bin, self._now - node.time)
            # What came last is not judged yet: its prompt is still being stored.
            rank = (value + (queue.bin == 0), node.time, node.key)
            if best is None or rank < best:
                best = rank
            if len(done) == _KINDS:
                break
        if best is not None:
            return best[2]
        rest = [n for n in self._nodes.values() if n.here and not spared(n.key)]
        return min(rest, key=lambda n: n.time).key if rest else None

    def _list(self) -> list[_Queue]:
        for queue in self._ranked:
            queue.listed = bool(queue)
        self._listed = [queue for queue in self._ranked if queue.listed]
        return self._listed

    def next_victims(self, count: int) -> list[bytes]:
        """As Eviction's: leaves in order, each with those before it that it leaves without use."""
        chosen: list[bytes] = []
        left: dict[bytes, int] = {}
        for queue in self._ranked:
            for leaf in queue.values():
                node: _Node | None = leaf
                while node is not None and node.here and not left.get(node.key, node.kids):
                    if node is not leaf and node.kind != queue.kind:
                        break
                    if len(chosen) >= count:
                        return chosen
                    chosen.append(node.key)
                    left[node.key] = 1
                    node = node.parent
                    if node is not None:
                        left[node.key] = left.get(node.key, node.kids) - 1
        return chosen

    def worth(self, key: bytes) -> float:
        """As Eviction's: the chance learned for its kind and age."""
        node = self._nodes.get(key)
        if node is None:
            return self._reuse.chance[_FRESH][0]
        return self._reuse.chance[node.kind][self._reuse.bin_of(self._now - node.time)]

    def order(self) -> Iterator[bytes]:
        """As Eviction's: by last use."""
        here = [node for node in self._nodes.values() if node.here]
        here.sort(key=lambda node: node.time, reverse=True)
        return iter([node.key for node in here])

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: bytes) -> bool:
        node = self._nodes.get(key)
        return node is not None and node.here

    # Age.

    def _age(self) -> None:
        if self._now < self._next:
            return
        self._next = self._now + self._period
        for queues in self._queues:
            for bin in reversed(range(self._reuse.bins)):
                queue = queues[bin]
                if not queue:
                    continue
                due = self._now - self._reuse.bounds[bin]
                while queue and (node := next(iter(queue.values()))).time <= due:
                    self._leave(node)
                    self._join(node, queues[bin + 1])
        self._listed = []
        if self._reuse.advance(self._now):
            self._rank()

    def _rank(self) -> None:
        ranks = sorted(
            (value, -bin, kind)
            for kind, row in enumerate(self._reuse.index)
            for bin, value in enumerate(row)
        )
        self._ranked = [self._queues[kind][-bin] for _, bin, kind in ranks]
        self._listed = []

    def check_invariants(self) -> None:
        """Raises AssertionError when the structure is broken."""
        self._reuse.check_invariants()
        here = {key for key, node in self._nodes.items() if node.here}
        assert len(here) == self._size
        assert here | self._ghosts.keys() == self._nodes.keys() and not here & self._ghosts.keys()
        assert len(self._ghosts) <= self._ghost_limit
        for key, node in self._nodes.items():
            kids = sum(other.parent is node for other in self._nodes.values())
            assert node.kids == kids, "kids are counted wrong"
            assert (node.queue is not None) == (node.here and not node.kids), "not just leaves"
            assert node.queue is None or node.queue[key] is node
        assert not self._listed or all(
            queue.listed or not queue for bins in self._queues for queue in bins
        )
        queued = [key for bins in self._queues for queue in bins for key in queue]
        assert (
            len(queued)
            == len(set(queued))
            == sum(node.queue is not None for node in self._nodes.values())
        )
