"""The prefix index against a naive one, under anything that can happen to it."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.core.index import Digest, PrefixIndex
from services.router.core.segments import LONGEST, Segment


def _branch(parent: list[int], at: int, name: int, length: int) -> list[int]:
    """A chain that leaves another one after `at` blocks."""
    return parent[:at] + [1000 * name + i for i in range(at, length)]


# A key stands for the chain before it: chains that share a key share all before it.
_TRUNK = _branch([], 0, 1, 90)
CHAINS = [
    _TRUNK,
    _branch(_TRUNK, 3, 2, 60),
    _branch(_TRUNK, 40, 3, 70),
    _branch([], 0, 4, 8),
]
ALL = sorted({k for chain in CHAINS for k in chain})


def _part(chain: list[int], start: int, length: int, backwards: bool) -> list[int]:
    part = chain[start : start + length]
    return part[::-1] if backwards else part


some_keys = st.one_of(
    st.lists(st.sampled_from(ALL), max_size=12),
    # As engines tell: runs of a chain, from its middle or its end, maybe several in one event.
    st.lists(
        st.builds(
            _part,
            st.sampled_from(CHAINS),
            st.sampled_from([0, 0, 1, 3, 20, 40]),
            st.integers(1, 90),
            st.booleans(),
        ),
        max_size=3,
    ).map(lambda parts: [key for part in parts for key in part]),
)


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

    @rule(capacity=st.sampled_from([0, 0, 20, 100]))
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
        new = sorted(keys)[: self.capacity[slot]]
        self.index.replace(slot, new)
        self.model[slot] = set(new)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3))
    def remove_holder(self, pick: int) -> None:
        slot = self.slot(pick)
        self.index.remove_holder(slot)
        del self.model[slot]

    @rule(limit=st.integers(1, 10))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule(chain=st.sampled_from(CHAINS), limit=st.sampled_from([0, 2, 9, 64, 80, 100]))
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
    assert len({id(s) for s in index._runs.cells.values()}) == -(-1000 // LONGEST)
    assert len(index._runs.sets.interned) <= 5
    for slot in range(3):
        index.remove_holder(slot)
    while index.sweep(100):
        pass
    assert (index.blocks, index.entries, len(index._runs.sets.interned)) == (0, 0, 0)


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


def _told(rng: random.Random) -> list[int]:
    """What an event may name: runs of chains, forwards or backwards, now and then shuffled."""
    keys: list[int] = []
    for _ in range(rng.choice([1, 1, 1, 2])):
        chain = rng.choice(CHAINS)
        start = rng.choice([0, 0, 0, 3, 40, rng.randrange(len(chain))])
        part = chain[start : start + rng.choice([1, 5, 16, 64, 90])]
        if rng.random() < 0.3:
            part.reverse()
        elif rng.random() < 0.1:
            rng.shuffle(part)
        keys += part
    return keys


@pytest.mark.parametrize("seed", range(12))
def test_long_histories(seed: int) -> None:
    """Few holders and long runs: most questions meet runs that some hold in part."""
    rng = random.Random(seed)
    index = PrefixIndex()
    model: dict[int, set[int]] = {slot: set() for slot in range(3)}
    for slot in model:
        index.add_holder(slot, 0)
    for step in range(250):
        slot, kind = rng.choice(list(model)), rng.random()
        if kind < 0.35:
            keys = _told(rng)
            index.store(slot, keys)
            model[slot].update(keys)
        elif kind < 0.55:
            keys = _told(rng)
            index.remove(slot, keys)
            model[slot].difference_update(keys)
        elif kind < 0.57:
            index.clear(slot)
            model[slot].clear()
        elif kind < 0.6:
            keys = list(dict.fromkeys(_told(rng)))
            for _ in index.replacing(slot, keys, 10):
                index.sweep(5)
            model[slot] = set(keys)
        else:
            chain = rng.choice(CHAINS)
            limit = rng.choice([len(chain), rng.randrange(len(chain))])
            want = {s: naive_depth(has, chain[:limit]) for s, has in model.items()}
            got = index.depths(chain, limit)
            assert {s: d for s, d in got.items() if d} == {s: d for s, d in want.items() if d}
        if step % 10 == 0:
            index.check_invariants()
    index.check_invariants()


def _runs(index: PrefixIndex) -> list[int]:
    return sorted(
        {id(c): len(c.keys) for c in index._runs.cells.values() if type(c) is Segment}.values()
    )


def test_runs_part_where_chains_part() -> None:
    index = PrefixIndex()
    for slot in range(2):
        index.add_holder(slot, 0)
    index.store(0, _TRUNK[:64])
    assert _runs(index) == [64]
    index.store(1, CHAINS[2])
    assert _runs(index) == [24, 30, 40]
    assert index.depths(_TRUNK, 90) == {0: 64, 1: 40}
    index.check_invariants()


def test_blocks_that_came_alone_are_put_together_by_a_question() -> None:
    index = PrefixIndex()
    for slot in range(2):
        index.add_holder(slot, 0)
        for key in _TRUNK:
            index.store(slot, [key])
    assert _runs(index) == []
    assert index.depths(_TRUNK, 90) == {0: 90, 1: 90}
    assert _runs(index) == [90]
    assert index.depths(_TRUNK, 90) == {0: 90, 1: 90}
    index.check_invariants()


def test_what_is_no_chain_is_taken_apart() -> None:
    index = PrefixIndex()
    index.add_holder(0, 0)
    jumbled = _TRUNK[::2] + _TRUNK[1::2]
    index.store(0, jumbled)
    for _ in range(30):
        assert index.depths(_TRUNK, 90) == {0: 90}
    assert _runs(index) == [90]
    index.check_invariants()


def test_an_emptied_holder_starts_anew_at_once() -> None:
    index = PrefixIndex()
    index.add_holder(0, 100)
    index.store(0, _TRUNK)
    index.clear(0)
    assert index.digest(0) == Digest(0, 0)
    assert index.depths(_TRUNK, 90) == {}
    assert index.entries == 0
    assert index.blocks == 90, "swept later"
    index.store(0, _TRUNK[:50])
    assert index.depths(_TRUNK, 90) == {0: 50}
    assert index.sweep(1)
    while index.sweep(10):
        index.check_invariants()
    assert index.depths(_TRUNK, 90) == {0: 50}
    assert index.blocks == 50


def test_a_snapshot_in_steps_ends_with_its_holder() -> None:
    index = PrefixIndex()
    index.add_holder(0, 0)
    index.store(0, _TRUNK)
    steps = index.replacing(0, CHAINS[3], 4)
    next(steps)
    index.remove_holder(0)
    assert list(steps) == []
    while index.sweep(10):
        pass
    assert index.blocks == 0
