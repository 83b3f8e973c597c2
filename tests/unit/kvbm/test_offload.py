"""The write budget, and which blocks go down."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.arena import NO_KEY
from services.common.events.model import Tier
from services.kvbm.core.eviction import new_eviction
from services.kvbm.core.model import BlockMeta
from services.kvbm.core.offload import OffloadPlan, WriteBudget

G2, G3 = Tier.G2, Tier.G3
BLOCK = 1000


def chain(prompt: int, length: int) -> list[bytes]:
    return [
        hashlib.blake2b(f"{prompt}/{i}".encode(), digest_size=32).digest() for i in range(length)
    ]


class Bed:
    """Two tiers and a plan, as the daemon couples them."""

    def __init__(self, capacity: int, budget: WriteBudget | None = None) -> None:
        self.sizes = {G2: capacity, G3: 4 * capacity}
        self.evictions = {tier: new_eviction(size) for tier, size in self.sizes.items()}
        self.budget = budget or WriteBudget(1e12)
        self.plan = OffloadPlan(self.evictions, self.budget, BLOCK)
        self.metas: dict[bytes, BlockMeta] = {}
        self.stored = self.written = 0

    def tiers_of(self, key: bytes) -> tuple[Tier, ...]:
        return tuple(tier for tier in (G2, G3) if key in self.evictions[tier])

    def meta(self, key: bytes) -> BlockMeta | None:
        return self.metas.get(key)

    def put(self, tier: Tier, key: bytes) -> None:
        eviction, meta = self.evictions[tier], self.metas[key]
        while key not in eviction and len(eviction) >= self.sizes[tier]:
            victim = eviction.victim(lambda _: False)
            assert victim is not None
            eviction.remove(victim)
        eviction.add(key, meta.position, parent=meta.parent)

    def ask(self, keys: list[bytes], now_s: float) -> None:
        for position, key in enumerate(keys):
            self.metas[key] = BlockMeta(key, keys[position - 1] if position else NO_KEY, position)
        found = 0
        while found < len(keys) and self.tiers_of(keys[found]):
            found += 1
        for tier in (G2, G3):
            self.evictions[tier].touch(keys[:found])
        for key in keys:
            if key not in self.evictions[G2]:
                self.stored += key not in self.evictions[G3]
                self.put(G2, key)
                self.plan.stored(key, now_s)

    def down(self, now_s: float, limit: int = 16) -> list[bytes]:
        keys = self.plan.choose(self, G2, G3, now_s, limit)
        assert len(keys) <= limit and len(set(keys)) == len(keys)
        for key in keys:
            assert self.tiers_of(key) == (G2,), "what is written is here, and not yet there"
            self.put(G3, key)
        self.written += len(keys)
        return keys

    def all_down(self, now_s: float) -> list[bytes]:
        keys: list[bytes] = []
        while some := self.down(now_s):
            keys += some
        return keys


def test_the_budget_fills_up_to_its_burst() -> None:
    budget = WriteBudget(100, burst_s=2)
    assert budget.take(200, 0)
    assert not budget.take(1, 0)
    assert budget.take(50, 0.5)
    assert budget.left(1000) == 200
    assert budget.left(900) == 200, "time never goes back"


def test_a_block_larger_than_the_burst_passes_when_the_budget_is_full() -> None:
    budget = WriteBudget(100, burst_s=1)
    assert budget.take(1000, 0)
    assert not budget.take(1000, 5)
    assert budget.take(1000, 11)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (1, 0), (-1, 1)])
def test_a_budget_needs_a_rate(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        WriteBudget(rate, burst)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 3)), max_size=50))
def test_no_more_is_written_than_rate_and_burst_allow(steps: list[tuple[int, float]]) -> None:
    budget, now, taken = WriteBudget(100, burst_s=2), 0.0, 0
    for bytes, pause in steps:
        now += pause
        if budget.take(bytes, now):
            taken += bytes
        assert taken <= 200 + 100 * now + 500  # one block may go beyond


def test_blocks_go_down_a_little_later_though_nothing_must_go() -> None:
    """D5: each once, whole chains from the head on; first a share, all of them on an idle disk."""
    bed = Bed(1000)
    prompts = [chain(prompt, 20) for prompt in range(10)]
    for prompt in prompts:
        bed.ask(prompt, 0)
    written = bed.all_down(1)
    assert 0.3 * 200 < len(written) < 0.5 * 200
    for now in range(3, 30):
        for prompt in prompts:
            there = [key in bed.evictions[G3] for key in prompt]
            assert there == sorted(there, reverse=True), "no block without those before it"
        bed.all_down(now)
    assert bed.written == 200, "all of them, and none twice"


def test_an_idle_disk_smaller_than_memory_is_not_written_over_and_over() -> None:
    bed = Bed(200)
    bed.sizes[G3] = 50
    for prompt in range(10):
        bed.ask(chain(prompt, 20), 0)
    for now in range(1, 100):
        bed.all_down(now)
    assert bed.written <= bed.stored


def test_an_idle_disk_stops_when_there_is_work_again() -> None:
    bed = Bed(2000)
    for prompt in range(50):
        bed.ask(chain(prompt, 20), 0)
    bed.all_down(1)
    assert len(bed.down(3)) == 16
    bed.ask(chain(99, 20), 3)
    assert len(bed.all_down(3.6)) < 40


def test_no_more_than_half_is_written_and_what_returns_is() -> None:
    bed, dice = Bed(300), random.Random(2)
    users = [chain(user, 20) for user in range(20)]
    for now in range(500):
        bed.ask(users[dice.randrange(20)] if now % 3 == 0 else chain(1000 + now, 20), now)
        bed.all_down(now)
    assert bed.written <= 0.5 * bed.stored
    there = sum(key in bed.evictions[G3] or key in bed.evictions[G2] for u in users for key in u)
    assert there > 0.85 * 400


def test_the_budget_holds_back_and_nothing_is_lost_by_it() -> None:
    bed = Bed(1000, WriteBudget(10 * BLOCK, burst_s=1))
    for prompt in range(10):
        bed.ask(chain(prompt, 20), 0)
    assert len(bed.all_down(1)) == 10
    assert bed.all_down(1) == []
    assert len(bed.all_down(1.5)) == 5
    for now in range(2, 40):
        assert len(bed.all_down(now)) <= 10
    assert bed.written == 200


def test_a_block_that_vanishes_meanwhile_is_passed_over() -> None:
    bed = Bed(1000)
    bed.ask(chain(1, 60), 0)
    first = bed.down(1, limit=4)
    assert len(first) == 4
    for key in list(bed.evictions[G2].order()):
        bed.evictions[G2].remove(key)
    assert bed.all_down(2) == []


def test_blocks_that_came_up_from_disk_earn_no_writes() -> None:
    bed = Bed(1000)
    bed.ask(chain(1, 40), 0)
    written = bed.all_down(1)
    assert 0 < len(written) < 40
    for _ in range(10):
        for key in written:
            bed.plan.stored(key, 1.5)  # as after a promotion
    assert bed.all_down(1.9) == []
    bed.ask(chain(2, 40), 1.9)
    assert bed.all_down(2.5)


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 12), st.booleans()), max_size=80),
)
@settings(max_examples=40, deadline=None)
def test_only_what_is_here_goes_down_and_only_once(steps: list[tuple[int, int, bool]]) -> None:
    bed = Bed(24)
    for now, (prompt, length, down) in enumerate(steps):
        bed.ask(chain(prompt, length), now)
        if down:
            bed.down(now, limit=4)
    assert bed.written <= bed.stored
