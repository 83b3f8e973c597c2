"""Orders of eviction: one suite for ours and those we compare with, and what only ours promises."""

import hashlib
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.common.arena import NO_KEY
from services.kvbm.core.eviction import Eviction, new_eviction
from services.kvbm.core.foresight import Foresight
from services.kvbm.core.reuse import Reuse

KINDS = ["default", "lru", "arc", "s3fifo"]


def key(*path: int) -> bytes:
    return hashlib.blake2b(repr(path).encode(), digest_size=32).digest()


def chain(prompt: int, length: int, shared: int = 0) -> list[bytes]:
    """A prompt's keys; the first `shared` are those of every prompt."""
    return [key(-1 if i < shared else prompt, i) for i in range(length)]


def nobody(_: bytes) -> bool:
    return False


def ask(policy: Eviction, capacity: int, keys: Sequence[bytes]) -> int:
    """A request as the daemon serves it: found, touched, the rest computed and stored."""
    found, own = 0, set(keys)
    while found < len(keys) and keys[found] in policy:
        found += 1
    policy.touch(keys[:found])
    for position in range(found, len(keys)):
        while keys[position] not in policy and len(policy) >= capacity:
            gone = policy.victim(own.__contains__)
            assert gone is not None
            policy.remove(gone)
        parent = keys[position - 1] if position else NO_KEY
        policy.add(keys[position], position, parent=parent)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_holds_what_was_added_and_nothing_else(kind: str) -> None:
    policy = new_eviction(8, kind)
    keys = chain(1, 4)
    ask(policy, 8, keys)
    assert len(policy) == 4
    assert sorted(policy.order()) == sorted(keys)
    policy.add(keys[0], 0)
    assert len(policy) == 4, "a key that is there is touched, not added twice"
    policy.touch([key(9), *keys])
    policy.remove(key(9))
    assert len(policy) == 4
    for k in keys:
        policy.remove(k)
    assert len(policy) == 0
    assert policy.victim(nobody) is None
    assert policy.next_victims(5) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_victim_is_never_spared_and_stays_until_it_is_removed(kind: str) -> None:
    policy = new_eviction(8, kind)
    keys = chain(1, 8)
    ask(policy, 8, keys)
    assert policy.victim(lambda _: True) is None
    for spare in keys:
        assert policy.victim(lambda k, s=spare: k != s) == spare  # type: ignore[misc]
    assert len(policy) == 8


def test_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="clock"):
        new_eviction(8, "clock")


class Machine(RuleBasedStateMachine):
    """Against a plain set: keys are neither lost nor invented, no victim is spared or gone."""

    kind = "default"
    capacity = 6

    def __init__(self) -> None:
        super().__init__()
        self.policy = new_eviction(self.capacity, self.kind)
        self.here: set[bytes] = set()
        self.spared: set[bytes] = set()

    @rule(prompt=st.integers(0, 3), position=st.integers(0, 4), reused=st.booleans())
    def add(self, prompt: int, position: int, reused: bool) -> None:
        added, shared = key(prompt if position > 1 else 0, position), position > 2
        while added not in self.here and len(self.here) >= self.capacity:
            gone = self.policy.victim(nobody)
            assert gone in self.here
            self.policy.remove(gone)
            self.here.discard(gone)
        parent = key(prompt if shared else 0, position - 1) if position else NO_KEY
        self.policy.add(added, position, reused=reused, parent=parent)
        self.here.add(added)

    @rule(prompt=st.integers(0, 3), length=st.integers(0, 5))
    def touch(self, prompt: int, length: int) -> None:
        self.policy.touch([key(prompt if i > 1 else 0, i) for i in range(length)])

    @rule(prompt=st.integers(0, 3), position=st.integers(0, 4))
    def remove(self, prompt: int, position: int) -> None:
        gone = key(prompt if position > 1 else 0, position)
        self.policy.remove(gone)
        self.here.discard(gone)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def victim(self, data: st.DataObject) -> None:
        spared = data.draw(st.sets(st.sampled_from(sorted(self.here))))
        victim = self.policy.victim(spared.__contains__)
        if victim is None:
            assert spared == self.here
        else:
            assert victim in self.here - spared

    @invariant()
    def agrees(self) -> None:
        assert len(self.policy) == len(self.here)
        assert all(k in self.policy for k in self.here)
        assert sorted(self.policy.order()) == sorted(self.here)
        ahead = self.policy.next_victims(4)
        assert len(ahead) == len(set(ahead)) <= 4
        assert set(ahead) <= self.here
        assert all(0 <= self.policy.worth(k) <= 1 for k in [*self.here, key(99)])
        if isinstance(self.policy, Foresight):
            self.policy.check_invariants()


class LruMachine(Machine):
    kind = "lru"


class ArcMachine(Machine):
    kind = "arc"


class S3FifoMachine(Machine):
    kind = "s3fifo"


TestDefault = Machine.TestCase
TestLru = LruMachine.TestCase
TestArc = ArcMachine.TestCase
TestS3Fifo = S3FifoMachine.TestCase
for case in (TestDefault, TestLru, TestArc, TestS3Fifo):
    case.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), max_size=120))
@settings(max_examples=60, deadline=None)
def test_a_prefix_outlives_what_follows_it(requests: list[tuple[int, int]]) -> None:
    policy = Foresight(16)
    parents: dict[bytes, bytes] = {}
    for prompt, length in requests:
        keys = chain(prompt, length, shared=2)
        parents.update(zip(keys[1:], keys, strict=False))
        ask(policy, 16, keys)
        assert len(policy) <= 16
        for k in policy.order():
            assert k not in parents or parents[k] in policy, "a block after a hole"
        policy.check_invariants()


@given(st.lists(st.integers(0, 12), max_size=60))
@settings(max_examples=60, deadline=None)
def test_without_evidence_it_is_least_recently_used(prompts: list[int]) -> None:
    """The prompt asked for longest ago goes first, and its tail before its head."""
    ours, lru = Foresight(1000), new_eviction(1000, "lru")
    for prompt in prompts:
        keys = chain(prompt, 1 + prompt * 5 % 9)
        found = ask(ours, 1000, keys)
        lru.touch(keys[:found])
        for position in reversed(range(found, len(keys))):
            lru.add(keys[position], position)
        lru.touch(keys[:found])
    while (gone := ours.victim(nobody)) is not None:
        assert gone == lru.victim(nobody)
        ours.remove(gone)
        lru.remove(gone)
    assert len(lru) == 0


def test_a_scan_does_not_push_out_what_returns() -> None:
    """Eight users return now and then, between long prompts that come but once."""
    hits = {}
    for kind in KINDS:
        policy, dice, hits[kind] = new_eviction(200, kind), random.Random(5), 0
        for number in range(800):
            hits[kind] += ask(policy, 200, chain(number % 8, 10))
            ask(policy, 200, chain(1000 + number, dice.randint(20, 60)))
    assert hits["lru"] == 0
    assert hits["default"] > 0.8 * 800 * 10
    assert hits["default"] > 0.98 * max(hits.values())


def test_a_block_that_comes_again_is_known_though_it_was_evicted() -> None:
    policy = Foresight(4)
    ask(policy, 4, chain(1, 4))
    ask(policy, 4, chain(2, 4))
    assert not any(k in policy for k in chain(1, 4))
    ask(policy, 4, chain(1, 1))
    assert policy.worth(chain(1, 1)[0]) >= policy.worth(chain(2, 1)[0])
    policy.check_invariants()


def test_what_is_remembered_is_bounded() -> None:
    policy = Foresight(4)
    for prompt in range(100):
        ask(policy, 4, chain(prompt, 3))
    policy.check_invariants()
    assert len(policy) == 4


def test_an_inner_block_goes_when_all_leaves_are_spared() -> None:
    policy = Foresight(8)
    keys = chain(1, 3)
    ask(policy, 8, keys)
    assert policy.victim(lambda k: k == keys[2]) in keys[:2]


def test_next_victims_are_those_that_go() -> None:
    policy = Foresight(64)
    for prompt in range(8):
        ask(policy, 64, chain(prompt, 8))
    ahead = policy.next_victims(16)
    assert len(ahead) == 16
    gone = []
    for _ in range(16):
        victim = policy.victim(nobody)
        assert victim is not None
        gone.append(victim)
        policy.remove(victim)
    assert ahead == gone


def test_chances_are_learned_by_kind_and_age() -> None:
    """Blocks of kind 1 return after 300 uses, those of kind 0 never."""
    reuse = Reuse(100, 2)
    for now in range(6_000):
        reuse.used(("once", now), 0, now)
        reuse.used(("back", now % 300), 1, now)
        reuse.advance(now)
        if now % 2000 == 0:
            reuse.check_invariants()
    young, due, over = reuse.bin_of(10), reuse.bin_of(290), reuse.bin_of(900)
    assert reuse.chance[1][young] > 0.9
    assert reuse.chance[0][young] < 0.2
    assert reuse.index[1][young] > 5 * reuse.index[0][young]
    assert reuse.index[1][due] > reuse.index[1][young], "the nearer its return, the dearer"
    assert reuse.chance[0][over] < reuse.chance[1][young]
    assert reuse.value(0, reuse.bins, 1e9) == 0
