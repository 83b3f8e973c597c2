"""The prefix index against a naive one, under anything that can happen to it."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.events.model import Tier
from services.router.core.index import Digest, Overlap, PrefixIndex

CHAINS = [[100 * c + i for i in range(8)] for c in range(3)]
ALL = [k for chain in CHAINS for k in chain]
TIERS = list(Tier)
some_keys = st.lists(st.sampled_from(ALL), max_size=12)


def naive_overlap(has: dict[Tier, set[int]], chain: list[int]) -> Overlap:
    counts = dict.fromkeys(TIERS, 0)
    rest = list(chain)
    while rest and rest[0] in has.get(Tier.G1, ()):
        counts[Tier.G1] += 1
        rest.pop(0)
    for key in rest:
        tier = next((t for t in TIERS[1:] if key in has.get(t, ())), None)
        if tier is None:
            break
        counts[tier] += 1
    return Overlap(*counts.values())


class IndexMachine(RuleBasedStateMachine):
    """PrefixIndex beside a dict of slot to tier to set of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[int, dict[Tier, set[int]]] = {}
        self.capacity: dict[int, int] = {}
        self.refused = 0
        self.next_slot = 0

    @rule(capacity=st.integers(0, 20))
    def add_holder(self, capacity: int) -> None:
        if len(self.model) < 4:
            self.index.add_holder(self.next_slot, capacity)
            self.model[self.next_slot] = {}
            self.capacity[self.next_slot] = capacity or 1 << 20
            self.next_slot += 1

    def slot(self, pick: int) -> int:
        return sorted(self.model)[pick % len(self.model)]

    def store_in_model(self, slot: int, tier: Tier, keys: list[int] | set[int]) -> None:
        mine = self.model[slot].setdefault(tier, set())
        for key in keys:
            if key in mine:
                continue
            if tier is Tier.G1 and len(mine) >= self.capacity[slot]:
                self.refused += 1
            else:
                mine.add(key)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3), tier=st.sampled_from(TIERS), keys=some_keys)
    def store(self, pick: int, tier: Tier, keys: list[int]) -> None:
        slot = self.slot(pick)
        self.index.store(slot, tier, keys)
        self.store_in_model(slot, tier, keys)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3), tier=st.sampled_from(TIERS), keys=some_keys)
    def remove(self, pick: int, tier: Tier, keys: list[int]) -> None:
        slot = self.slot(pick)
        self.index.remove(slot, tier, keys)
        self.model[slot].setdefault(tier, set()).difference_update(keys)

    @precondition(lambda self: self.model)
    @rule(pick=st.integers(0, 3), tier=st.sampled_from(TIERS))
    def clear(self, pick: int, tier: Tier) -> None:
        slot = self.slot(pick)
        self.index.clear(slot, tier)
        self.model[slot].pop(tier, None)

    @precondition(lambda self: self.model)
    @rule(
        pick=st.integers(0, 3), g1=st.sets(st.sampled_from(ALL)), g3=st.sets(st.sampled_from(ALL))
    )
    def replace(self, pick: int, g1: set[int], g3: set[int]) -> None:
        slot = self.slot(pick)
        room = self.capacity[slot]
        if len(g1) > room:
            g1 = set(sorted(g1)[:room])
        self.index.replace(slot, {Tier.G1: set(g1), Tier.G3: set(g3)})
        self.model[slot] = {Tier.G1: set(g1), Tier.G3: set(g3)}

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
    def overlaps_agree(self, chain: list[int], limit: int) -> None:
        want = {s: naive_overlap(has, chain[:limit]) for s, has in self.model.items()}
        got = self.index.overlaps(chain, limit)
        assert {s: o for s, o in got.items() if o.total} == {
            s: o for s, o in want.items() if o.total
        }

    @invariant()
    def agrees(self) -> None:
        self.index.check_invariants()
        assert self.index.refused == self.refused
        assert self.index.entries == sum(len(k) for m in self.model.values() for k in m.values())
        for slot, has in self.model.items():
            for tier in TIERS:
                xor = 0
                for key in has.get(tier, ()):
                    xor ^= key
                assert self.index.digest(slot, tier) == Digest(len(has.get(tier, ())), xor)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase


def test_a_run_goes_on_in_lower_tiers_and_ends_at_a_hole() -> None:
    index = PrefixIndex()
    index.add_holder(0, 100)
    index.store(0, Tier.G1, [1, 2, 6])
    index.store(0, Tier.G2, [1, 3, 6])
    index.store(0, Tier.G4, [3, 4])
    # 5 is a hole; 6 is there, but behind it.
    assert index.overlaps([1, 2, 3, 4, 5, 6], 6) == {0: Overlap(2, 1, 0, 1)}
    assert index.overlaps([1, 2, 3, 4, 5, 6], 3) == {0: Overlap(2, 1)}
    assert index.overlaps([9, 1], 2) == {}


def test_equal_sets_are_one_object_and_unused_ones_go() -> None:
    index = PrefixIndex()
    for slot in range(3):
        index.add_holder(slot, 10_000)
        index.store(slot, Tier.G1, range(1000))
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
    index.store(0, Tier.G1, [1, 2])
    index.store(1, Tier.G1, [1])
    index.remove_holder(0)
    assert index.overlaps([1, 2], 2) == {1: Overlap(1)}
    assert index.sweep(1)
    assert not index.sweep(1) or not index.sweep(1)
    assert index.blocks == 1
    with pytest.raises(KeyError):
        index.store(0, Tier.G1, [3])


def test_memory_is_bounded_by_what_holders_can_hold() -> None:
    index = PrefixIndex()
    index.add_holder(0, 100)
    rng = random.Random(1)
    for _ in range(50):
        index.store(0, Tier.G1, [rng.randrange(1 << 64) for _ in range(100)])
    assert index.entries == index.blocks == index.capacity_entries == 100
    assert index.refused == 4900
