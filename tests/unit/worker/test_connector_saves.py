"""Which blocks are saved: each once, heads first, never more than may be kept, never waiting."""

from __future__ import annotations

import hashlib
import time
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.connector.instructions import Fill, Instructions
from services.worker.connector.model import LeasedBlock, Loaded, LoadOrder, Saved, SaveOrder, Slot
from services.worker.connector.plan import Plan
from services.worker.connector.saves import KnownKeys, Pick, SavePlan, ahead_blocks
from services.worker.connector.slots import SlotPool
from services.worker.connector.terms import Lease, Terms


def keys(count: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(count)]


class Grants:
    """Slots without a daemon."""

    def __init__(self, count: int = 1000) -> None:
        self.owner = 5
        self.slots = deque(Slot(i, 1) for i in range(count))

    def take(self) -> Slot | None:
        return self.slots.popleft() if self.slots else None


def make(count: int = 1000, pin_limit: int = 64) -> tuple[SavePlan, Grants]:
    grants = Grants(count)
    return SavePlan(grants, pin_limit), grants


def step(
    plan: SavePlan, id: str, chain: list[bytes], complete: int, held: int = 1000
) -> list[Pick]:
    if not plan.due(id, complete):
        return []
    return plan.pick(id, chain, lambda position: position < held)


def test_a_block_is_saved_with_the_step_that_completes_it() -> None:
    """C10: key, parent and position belong together."""
    plan, _ = make()
    chain = keys(5)
    plan.arrive("r", Terms(tenant="acme"))
    assert [p.position for p in step(plan, "r", chain, 2)] == [0, 1]
    picks = step(plan, "r", chain, 3)
    assert picks == [Pick(2, chain[2], chain[1], Slot(2, 1), "acme")]
    order = plan.begin(picks, [77])
    assert order == SaveOrder(1, (77,), (2,))
    out = Instructions()
    assert plan.saved(1, Saved((123,)), out) == 1
    assert out.fills == [Fill(5, Slot(2, 1), chain[2], chain[1], 2, "acme", 123)]


def test_a_large_step_is_saved_whole() -> None:
    """A prefill worker's answer is one token: no step follows that could save the rest."""
    ahead = ahead_blocks(step_tokens=8192, block_size=16)
    assert ahead == 1024
    plan, _ = make(2000, pin_limit=ahead)
    chain = keys(512)
    plan.arrive("r", Terms())
    assert [p.position for p in step(plan, "r", chain, 512)] == list(range(512))
    assert plan.leave("r") == 0


@pytest.mark.parametrize(
    ("step_tokens", "block_size", "blocks"),
    [(256, 32, 64), (2048, 16, 256), (2050, 16, 258), (131_072, 16, 1024)],
)
def test_two_steps_may_be_on_their_way(step_tokens: int, block_size: int, blocks: int) -> None:
    assert ahead_blocks(step_tokens, block_size) == blocks


def test_what_is_stored_is_not_saved_again() -> None:
    plan, _ = make()
    chain = keys(6)
    plan.arrive("r", Terms(stored=4))
    assert [p.position for p in step(plan, "r", chain, 6)] == [4, 5]
    plan.committed({chain[4]: True, chain[5]: False}, 1.0)
    plan.arrive("other", Terms())
    plan.has(chain[:4], 1.0)
    assert [p.position for p in step(plan, "other", chain, 6)] == [5]


def test_a_look_up_is_believed_more_than_what_was_known_before_it() -> None:
    """Blocks that lower tiers have dropped since are saved again when they are computed again."""
    plan, _ = make()
    chain = keys(3)
    plan.has(chain, 1.0)
    plan.arrive("r", Terms(stored=1, looked_s=2.0))
    assert [p.position for p in step(plan, "r", chain, 3)] == [1, 2]


def test_what_does_not_come_up_from_a_lower_tier_is_saved_when_it_is_computed() -> None:
    """It was stored when the look-up was made, and may be no longer: bytes on disk go bad."""
    chain = keys(6)
    slots = tuple(LeasedBlock(Slot(100 + i, 7), (i,)) for i in range(3))
    lease = Lease(9, 0, slots[:1], 4, until_s=2.0, expires_s=60.0)
    told = Plan(Grants(), pin_limit=64)
    told.arrive("r", Terms(stored=5, lease=lease))
    assert told.due("r", 5) is False
    told.promoted("r", 9, slots, 0)
    assert told.due("r", 5)
    assert [p.position for p in told.pick("r", chain, lambda position: True)] == [3, 4]
    silent = Plan(Grants(), pin_limit=64)
    silent.arrive("r", Terms(stored=5, lease=lease))
    assert silent.match("r", chain, 5, 0, 2.0) == 1
    silent.allocated("r", chain, range(6), 1)
    assert silent.due("r", 5)
    assert [p.position for p in silent.pick("r", chain, lambda position: True)] == [1, 2, 3, 4]


def test_two_requests_save_a_common_block_once() -> None:
    plan, _ = make()
    chain = keys(3)
    for id in ("a", "b"):
        plan.arrive(id, Terms())
    assert len(step(plan, "a", chain, 3)) == 3
    assert step(plan, "b", chain, 3) == []


def test_without_slots_blocks_are_passed_over_and_tried_later() -> None:
    """K2, K5: a full tier is no store now, and no error."""
    plan, grants = make(count=2)
    chain = keys(4)
    plan.arrive("r", Terms())
    assert [p.position for p in step(plan, "r", chain, 4)] == [0, 1]
    assert step(plan, "r", chain, 4) == []
    grants.slots.append(Slot(9, 1))
    assert [p.position for p in step(plan, "r", chain, 4)] == [2]
    assert plan.leave("r") == 1


def test_saves_keep_a_bounded_part_of_the_cache() -> None:
    """K3"""
    plan, _ = make(pin_limit=5)
    chain = keys(9)
    plan.arrive("r", Terms())
    picks = step(plan, "r", chain, 9)
    assert len(picks) == plan.pinned == 5
    plan.begin(picks, range(5))
    assert step(plan, "r", chain, 9) == []
    plan.saved(1, Saved((1, 2, 3, None, 5)), Instructions())
    assert plan.pinned == 0
    assert [p.position for p in step(plan, "r", chain, 9)] == [5, 6, 7, 8]


def test_a_block_that_the_engine_does_not_hold_is_not_saved() -> None:
    """A hash without the block, or a block under another hash: nothing of it goes out."""
    plan, grants = make()
    plan.arrive("r", Terms())
    assert [p.position for p in step(plan, "r", keys(4), 4, held=2)] == [0, 1]
    assert len(grants.slots) == 998


def test_a_copy_that_failed_gives_its_slot_back() -> None:
    plan, _ = make()
    chain = keys(2)
    plan.arrive("r", Terms())
    plan.begin(step(plan, "r", chain, 2), [1, 2])
    out = Instructions()
    plan.saved(1, Saved((None, 8)), out)
    assert [f.key for f in out.fills] == [b"", chain[1]]
    plan.arrive("again", Terms())
    assert [p.position for p in step(plan, "again", chain, 1)] == [0]


def test_blocks_after_a_bad_one_are_saved_once_they_are_computed() -> None:
    """C1: what was computed anew replaces what was bad."""
    plan = Plan(Grants(), pin_limit=64)
    chain = keys(6)
    plan.arrive("r", Terms(stored=6))
    assert not plan.due("r", 6)
    order = LoadOrder("r", tuple(range(6)), ())
    plan.loaded(order, Loaded(0, (0,)), 1.0)
    plan.check_invariants()
    assert plan.due("r", 6)
    assert [p.position for p in plan.pick("r", chain, lambda p: True)] == list(range(6))
    assert plan.counts["failed_blocks"] == 6
    assert plan.counts["bad_blocks"] == 1


def test_known_keys_are_bounded() -> None:
    known = KnownKeys(limit=3)
    for i, key in enumerate(keys(5)):
        known.add(key, float(i))
    assert len(known) == 3
    assert not known.since(keys(5)[0], 0.0)
    assert known.since(keys(5)[4], 4.0)
    assert not known.since(keys(5)[4], 4.5)


def test_slots_are_quiet_only_when_no_copy_runs() -> None:
    """An owner id is given up when nobody writes into its slots any more, and not before."""
    pool = SlotPool()
    pool.open(1)
    pool.add(1, [Slot(0, 1), Slot(1, 1)])
    pool.add(2, [Slot(7, 1)])
    assert pool.take() == Slot(0, 1)
    pool.close()
    assert pool.take() is None
    assert not pool.quiet
    pool.done(1)
    assert pool.quiet
    pool.open(2)
    assert pool.take() is None, "slots of the former owner"


def test_a_step_of_32_requests_costs_little() -> None:
    """H5: the scheduler's thread has 100 us a step for us; here with room for a busy machine."""
    plan = Plan(Grants(), pin_limit=64)
    chains = [keys(300, seed) for seed in range(32)]
    for n in range(32):
        plan.arrive(f"r{n}", Terms(stored=300))

    def one() -> float:
        began = time.perf_counter()
        for n, chain in enumerate(chains):
            plan.due(f"r{n}", min(len(chain), 299))
        plan.take_instructions()
        return time.perf_counter() - began

    assert min(one() for _ in range(20)) < 100e-6


class Machine(RuleBasedStateMachine):
    """Random steps: no slot is lost, no key is saved twice at once, bounds hold."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = 12
        self.plan, self.grants = make(self.slots, pin_limit=6)
        self.chains = [keys(10, seed) for seed in (0, 0, 1)]
        self.complete: dict[str, int] = {}
        self.running: dict[int, list[Pick]] = {}
        self.out = Instructions()
        self.back = 0

    @rule(which=st.integers(0, 2), stored=st.integers(0, 3))
    def arrive(self, which: int, stored: int) -> None:
        if str(which) not in self.complete:
            self.plan.arrive(str(which), Terms(stored=stored))
            self.complete[str(which)] = 0

    @precondition(lambda self: self.complete)
    @rule(data=st.data(), more=st.integers(0, 4))
    def step(self, data: st.DataObject, more: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.complete)))
        self.complete[id] = min(10, self.complete[id] + more)
        picks = step(self.plan, id, self.chains[int(id)], self.complete[id])
        busy = {p.key for job in self.running.values() for p in job}
        assert not busy & {p.key for p in picks}
        assert [p.position for p in picks] == sorted(p.position for p in picks)
        assert all(p.position < self.complete[id] for p in picks)
        if picks:
            order = self.plan.begin(picks, range(len(picks)))
            self.running[order.job] = picks

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def save_ends(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(sorted(self.running)))
        picks = self.running.pop(job)
        sums = data.draw(st.lists(st.none() | st.just(1), min_size=len(picks), max_size=len(picks)))
        assert self.plan.saved(job, Saved(tuple(sums)), self.out) == len(picks)

    @rule(stored=st.booleans())
    def kvbm_answers(self, stored: bool) -> None:
        fills, self.out.fills = self.out.fills, []
        self.plan.committed({f.key: stored for f in fills if f.key}, 1.0)
        self.grants.slots.extend(f.slot for f in fills)

    @precondition(lambda self: self.complete)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.complete)))
        del self.complete[id]
        assert self.plan.leave(id) >= 0

    @invariant()
    def no_slot_is_lost(self) -> None:
        self.plan.check_invariants()
        used = sum(len(p) for p in self.running.values()) + len(self.out.fills)
        assert used + len(self.grants.slots) == self.slots


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
