"""The prefix index against a naive one, under anything that can happen to it."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.core.index import Digest, PrefixIndex

CHAINS = [[100 * c + i for i in range(8)] for c in range(3)]
ALL = [k for chain in CHAINS for k in chain]
some_keys = st.lists(st.sampled_from(ALL), max_size=12)


def naive_depth(has: set[int], chain: list[int]) -> int:
    return next((i for i, key in enumerate(chain) if key not in has), len(chain))


class IndexMachine(RuleBasedStateMachine):
    """PrefixIndex beside a dict of slot to set of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, set[int]] = {}
        self.capacity: dict[int, int] = {}
        self.refused = 0
        self.next_slot = 0

    @rule(capacity=st.integers(0, 20))
    def add_holder(self, capacity: int) -> None:
        if len(self.model) < 4:
            self.index.add_holder(self.next_slot, capacity)
            self.model[self.next_slot] = set()
            self.capacity[self.next_slot] = capacity or 1 << 20
            self.next_slot += 1

    def slot(self, pick: int) -> int:
        return sorted(self.model)[pick % len(self.model)]

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3), keys=some_keys)
    def store(self, pick: int, keys: list[int]) -> None:
        slot = self.slot(pick)
        self.index.store(slot, keys)
        mine = self.model[slot]
        for key in keys:
            if key in mine:
                continue
            if len(mine) >= self.capacity[slot]:
                self.refused += 1
            else:
                mine.add(key)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3), keys=some_keys)
    def remove(self, pick: int, keys: list[int]) -> None:
        slot = self.slot(pick)
        self.index.remove(slot, keys)
        self.model[slot].difference_update(keys)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3))
    def clear(self, pick: int) -> None:
        slot = self.slot(pick)
        self.index.clear(slot)
        self.model[slot].clear()

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3), keys=st.sets(st.sampled_from(ALL)))
    def replace(self, pick: int, keys: set[int]) -> None:
        slot = self.slot(pick)
        keys = set(sorted(keys)[: self.capacity[slot]])
        self.index.replace(slot, keys)
        self.model[slot] = set(keys)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3))
    def remove_holder(self, pick: int) -> None:
        slot = self.slot(pick)
        self.index.remove_holder(slot)
        del self.model[slot]

    @rule(limit=st.integers(1, 10))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule(chain=st.sampled_from(CHAINS), limit=st.integers(0, 10))
    def depths_agree(self, chain: list[int], limit: int) -> None:
        want = {s: naive_depth(has, chain[:limit]) for s, has in self.model.items()}
        got = self.index.depths(chain, limit)
        assert {s: d for s, d in got.items() if d} == {s: d for s, d in want.items() if d}

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        assert self.index.refused == self.refused
        assert self.index.entries == sum(map(len, self.model.values()))
        for slot, has in self.model.items():
            xor = 0
            for key in has:
                xor ^= key
            assert self.index.digest(slot) == Digest(len(has), xor)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def test_equal_sets_are_one_object_and_unused_ones_go() -> None:
    index = PrefixIndex()
    for slot in range(3):
        index.add_holder(slot, 10_000)
        index.store(slot, range(1000))
    assert len({id(s) for s in index._sets.values()}) == 1
    assert len(index._interned) <= 3
    for slot in range(3):
        index.remove_holder(slot)
    while index.sweep(100):
        pass
    assert (index.blocks, index.entries, len(index._interned)) == (0, 0, 0)


def test_a_removed_holder_is_never_seen_again() -> None:
    index = PrefixIndex()
    index.add_holder(0, 10)
    index.add_holder(1, 10)
    index.store(0, [1, 2])
    index.store(1, [1])
    index.remove_holder(0)
    assert index.depths([1, 2], 2) == {1: 1}
    assert index.sweep(1)
    assert not index.sweep(1) or not index.sweep(1)
    assert index.blocks == 1
    with pytest.raises(KeyError):
        index.store(0, [3])


def test_memory_is_bounded_by_what_holders_can_hold() -> None:
    index = PrefixIndex()
    index.add_holder(0, 100)
    rng = random.Random(1)
    for _ in range(50):
        index.store(0, [rng.randrange(1 << 64) for _ in range(100)])
    assert index.entries == index.blocks == index.capacity_entries == 100
    assert index.refused == 4900
