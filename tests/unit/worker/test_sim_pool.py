"""The simulated engine's block pool, beside a model that is as plain as it can be."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from services.common.ids import BlockKey
from services.worker.engines.sim.core.pool import BlockPool


def named(pool: BlockPool, keys: list[int]) -> list[int]:
    blocks = pool.take(len(keys), [])
    for block, key in zip(blocks, keys, strict=True):
        pool.name(block, BlockKey(key))
    return blocks


def test_a_prefix_is_found_up_to_its_first_hole() -> None:
    pool = BlockPool(8)
    blocks = named(pool, [1, 2, 3, 4])
    pool.release(blocks)
    assert pool.match([1, 2, 9, 3]) == blocks[:2]
    assert pool.match([2, 3]) == blocks[1:3]
    assert pool.match([9, 1]) == []


def test_empty_and_unused_blocks_go_first_then_tails_of_the_longest_unused() -> None:
    pool = BlockPool(6)
    old, young = named(pool, [1, 2]), named(pool, [3, 4])
    blank = pool.take(1, [])
    pool.release(old)
    pool.release(young)
    pool.release(blank)
    dropped: list[BlockKey] = []
    assert pool.take(2, dropped) == [blank[0], 5]
    assert dropped == []
    assert pool.take(3, dropped) == [old[1], old[0], young[1]]
    assert dropped == [2, 1, 4]
    assert set(pool.held()) == {3}


def test_a_hit_is_young_again_and_safe_while_it_is_used() -> None:
    pool = BlockPool(4)
    first, second = named(pool, [1, 2]), named(pool, [3, 4])
    pool.release(first)
    pool.release(second)
    hits = pool.match([1, 2])
    assert pool.idle_among(hits) == 2
    pool.share(hits)
    assert pool.idle_among(hits) == 0
    dropped: list[BlockKey] = []
    pool.take(pool.free, dropped)
    assert dropped == [4, 3]
    pool.release(hits)
    assert pool.match([1, 2]) == first


def test_a_second_copy_keeps_the_key_when_the_first_is_lost() -> None:
    pool = BlockPool(2)
    first, second = named(pool, [7]), named(pool, [7])
    pool.release(first)
    dropped: list[BlockKey] = []
    (taken,) = pool.take(1, dropped)
    assert (taken, dropped) == (first[0], [7])
    assert pool.match([7]) == second


def test_the_oldest_copy_is_hit_next_and_the_tail_of_what_is_empty_taken_first() -> None:
    pool = BlockPool(5)
    copies = [named(pool, [7])[0] for _ in range(3)]
    blank = pool.take(2, [])
    pool.release(blank)
    assert pool.take(2, []) == blank[::-1]
    pool.release(copies[:1])
    pool.take(1, [])
    assert pool.match([7]) == copies[1:2]


def test_clear_needs_all_blocks_free() -> None:
    pool = BlockPool(4)
    blocks = named(pool, [1])
    assert not pool.clear()
    assert set(pool.held()) == {1}
    pool.release(blocks)
    assert pool.clear()
    assert (list(pool.held()), pool.free) == ([], 4)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0)


class Pools(RuleBasedStateMachine):
    """Random users of one pool; what is held follows from names and drops alone."""

    owned = Bundle("owned")
    CAPACITY = 6

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.CAPACITY)
        self.copies: dict[int, int] = {}
        self.users: dict[int, int] = {}

    @rule(target=owned, count=st.integers(1, 3), keys=st.lists(st.integers(0, 5), max_size=3))
    def take(self, count: int, keys: list[int]) -> list[int]:
        dropped: list[BlockKey] = []
        blocks = self.pool.take(min(count, self.pool.free), dropped)
        for key in dropped:
            self.copies[key] -= 1
        assert all(not self.users.get(block) for block in blocks)
        for block in blocks:
            self.users[block] = 1
        for block, key in zip(blocks, keys, strict=False):
            self.pool.name(block, BlockKey(key))
            self.copies[key] = self.copies.get(key, 0) + 1
        return blocks

    @rule(target=owned, keys=st.lists(st.integers(0, 5), max_size=3))
    def hit(self, keys: list[int]) -> list[int]:
        known = next((i for i, k in enumerate(keys) if not self.copies.get(k)), len(keys))
        blocks = self.pool.match([BlockKey(k) for k in keys])
        assert len(blocks) == known
        blocks = list(dict.fromkeys(blocks))
        self.pool.share(blocks)
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
        return blocks

    @rule(blocks=consumes(owned))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(blocks)
        for block in blocks:
            self.users[block] -= 1

    @rule()
    def clear(self) -> None:
        used = any(self.users.values())
        assert self.pool.clear() is not used
        if not used:
            self.copies.clear()

    @invariant()
    def sound(self) -> None:
        self.pool.check_invariants()
        assert set(self.pool.held()) == {k for k, n in self.copies.items() if n}
        assert self.pool.used == sum(1 for n in self.users.values() if n)


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
