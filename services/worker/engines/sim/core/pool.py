"""The simulated engine's KV blocks: a pool with prefix caching that evicts as vLLM's does.

A block in use is referenced by requests; one that nobody uses keeps its content until it is taken
for something else. Taken first are blocks that no prefix can hit, last freed first, then those that
were never used, then cached ones, longest unused first. Of a request that ends, the tail becomes
older than its root. Two requests that compute one prefix at the same time make two copies; a hit
takes the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from services.common.ids import BlockKey


class BlockPool:
    """`capacity` blocks, numbered from 0. What is not known to be used costs no memory."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool needs at least one block, not {capacity}")
        self.capacity = capacity
        self._users: list[int] = []
        """Requests that use a block, by its number; blocks beyond the end were never used."""
        self._keys: list[BlockKey | None] = []
        self._blank: list[int] = []
        """Free blocks that hold nothing; the last one is taken next."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that nobody uses, longest unused first."""
        self._first: dict[BlockKey, int] = {}
        """The copy of a cached block that hits take."""
        self._more: dict[BlockKey, list[int]] = {}
        """Its other copies, oldest first."""

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._blank) + self.capacity - len(self._users) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that requests use."""
        return self.capacity - self.free

    def held(self) -> Iterable[BlockKey]:
        """Keys that a prefix can hit, each once."""
        return self._first.keys()

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """The cached blocks of `keys`, from the first on without a hole. Takes none."""
        found: list[int] = []
        first = self._first
        for key in keys:
            block = first.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these cached blocks nobody uses: taking them makes as many less free."""
        users = self._users
        return sum(1 for block in blocks if not users[block])

    def share(self, blocks: Sequence[int]) -> None:
        """A request uses these cached blocks too."""
        users, idle = self._users, self._idle
        for block in blocks:
            if not users[block]:
                del idle[block]
            users[block] += 1

    def take(self, count: int, dropped: list[BlockKey]) -> list[int]:
        """`count` blocks for one request, at most `free`; keys of lost copies go to `dropped`."""
        taken: list[int] = []
        blank, users, keys = self._blank, self._users, self._keys
        for _ in range(count):
            if blank:
                block = blank.pop()
                users[block] = 1
            elif len(users) < self.capacity:
                block = len(users)
                users.append(1)
                keys.append(None)
            else:
                block, _nothing = self._idle.popitem(last=False)
                dropped.append(self._forget(block))
                users[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, key: BlockKey) -> None:
        """A block in use is full now: prefixes can hit it from here on."""
        self._keys[block] = key
        if key in self._first:
            self._more.setdefault(key, []).append(block)
        else:
            self._first[key] = block

    def release(self, blocks: Sequence[int]) -> None:
        """A request uses its blocks, given from the root on, no longer."""
        blank: list[int] = []
        users, keys, idle = self._users, self._keys, self._idle
        for block in reversed(blocks):
            users[block] -= 1
            if users[block]:
                continue
            if keys[block] is None:
                blank.append(block)
            else:
                idle[block] = None
        self._blank.extend(reversed(blank))

    def clear(self) -> bool:
        """Forgets everything cached; False, and nothing done, while requests use blocks."""
        if self.used:
            return False
        self._users.clear()
        self._keys.clear()
        self._blank.clear()
        self._idle.clear()
        self._first.clear()
        self._more.clear()
        return True

    def _forget(self, block: int) -> BlockKey:
        key = self._keys[block]
        assert key is not None, "an idle block without a key"
        self._keys[block] = None
        more = self._more.get(key)
        if more is None:
            del self._first[key]
            return key
        if self._first[key] == block:
            self._first[key] = more.pop(0)
        else:
            more.remove(block)
        if not more:
            del self._more[key]
        return key

    def check_invariants(self) -> None:
        """Raises AssertionError when the pool contradicts itself."""
        known = len(self._users)
        assert known == len(self._keys) <= self.capacity
        assert all(users >= 0 for users in self._users)
        unused = {block for block in range(known) if not self._users[block]}
        assert unused == {*self._blank, *self._idle}, "a free block is lost, or a used one is free"
        assert len(self._blank) + len(self._idle) == len(unused), "a block is free twice"
        assert all(self._keys[block] is None for block in self._blank)
        copies: dict[BlockKey, set[int]] = {}
        for block, key in enumerate(self._keys):
            if key is not None:
                copies.setdefault(key, set()).add(block)
        listed = {key: {first, *self._more.get(key, ())} for key, first in self._first.items()}
        assert copies == listed, "the table of keys and the blocks disagree"
        assert self._more.keys() <= self._first.keys() and all(self._more.values())
