"""Workers, a network that loses, repeats and reorders, and routers that know the truth at last.

Each router is a core behind a Join for each worker, as in the service; each worker keeps the truth.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.events.join import (
    Apply,
    FollowStats,
    Heard,
    Instruction,
    Join,
    Reset,
    TakeSnapshot,
)
from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Event,
    RequestAdmitted,
    RequestFinished,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.answers import Placement, Query
from services.router.core.index import Digest
from services.router.core.lives import Status
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo

SIZE = 16
TTL = 10.0
CHAINS = [
    [BlockKey(1000 * c + i) if i >= shared else BlockKey(i) for i in range(40)]
    for c, shared in ((1, 0), (2, 12), (3, 30))
]


@dataclass
class Truth:
    """A worker: what it holds and runs, and its stream."""

    id: str
    incarnation: int = 1
    sequence: int = 0
    blocks: dict[BlockKey, None] = field(default_factory=dict)
    running: dict[AttemptId, RequestAdmitted] = field(default_factory=dict)

    def say(self, *events: Event) -> Batch:
        self.sequence += bool(events)
        return Batch(self.id, self.incarnation, self.sequence, 0, events)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            self.id,
            self.incarnation,
            self.sequence,
            (TierBlocks(Tier.G1, tuple(self.blocks)),),
            tuple(RunningRequest(r, False) for r in self.running.values()),
        )

    def digest(self) -> Digest:
        xor = 0
        for key in self.blocks:
            xor ^= key
        return Digest(len(self.blocks), xor)

    def depth(self, chain: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(chain) if key not in self.blocks), len(chain))


class Router:
    """A core and its joins."""

    def __init__(self, seed: int) -> None:
        self.core = RouterCore(CoreConfig(booking_ttl_s=TTL), random.Random(seed))
        self.core.synced()
        self.stats = FollowStats()
        self.joins: dict[str, Join] = {}
        self.asked: set[str] = set()

    def take(self, worker: str, instructions: list[Instruction], now: float) -> None:
        for instruction in instructions:
            match instruction:
                case TakeSnapshot():
                    self.asked.add(worker)
                case Apply(batch=batch):
                    self.core.apply(batch, now)
                case Reset(snapshot=snapshot):
                    for _ in self.core.resetting(snapshot, now, 7):
                        pass
                case Heard(incarnation=incarnation):
                    self.core.heard(worker, incarnation, now)
        if self.core.doubted(worker):
            self.take(worker, self.joins[worker].on_doubt(), now)


class World(RuleBasedStateMachine):
    """Two workers, two routers."""

    workers = st.integers(0, 1)
    routers = st.integers(0, 1)
    chains = st.sampled_from(CHAINS)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.truths = [Truth("w0"), Truth("w1")]
        self.links: dict[tuple[int, int], deque[Batch]] = {
            (w, r): deque() for w in range(2) for r in range(2)
        }
        self.two = [Router(1), Router(2)]
        self.attempts = 0
        self.booked: dict[tuple[int, AttemptId], float] = {}
        for router in self.two:
            for truth in self.truths:
                router.joins[truth.id] = Join(router.stats, max_buffered=8)
                router.core.record(self.info(truth), self.now)

    def info(self, truth: Truth) -> WorkerInfo:
        return WorkerInfo(truth.id, truth.incarnation, "a:1", "m", SIZE, 1000, 0)

    def send(self, worker: int, batch: Batch) -> None:
        for router in range(2):
            self.links[worker, router].append(batch)

    # What workers do.

    @rule(worker=workers, chain=chains, start=st.integers(0, 30), count=st.integers(1, 40))
    def store(self, worker: int, chain: list[BlockKey], start: int, count: int) -> None:
        keys = tuple(chain[start : start + count])
        self.truths[worker].blocks.update(dict.fromkeys(keys))
        self.send(worker, self.truths[worker].say(BlocksStored(Tier.G1, keys)))

    @rule(worker=workers, chain=chains, keep=st.integers(0, 30), holes=st.booleans())
    def evict(self, worker: int, chain: list[BlockKey], keep: int, holes: bool) -> None:
        truth = self.truths[worker]
        gone = tuple(
            k for k in reversed(chain[keep : keep + 9 if holes else 40]) if k in truth.blocks
        )
        for key in gone:
            del truth.blocks[key]
        self.send(worker, truth.say(BlocksRemoved(Tier.G1, gone)))

    @rule(worker=workers)
    def clear(self, worker: int) -> None:
        self.truths[worker].blocks.clear()
        self.send(worker, self.truths[worker].say(BlocksCleared(Tier.G1)))

    @rule(worker=workers)
    def restart(self, worker: int) -> None:
        old = self.truths[worker]
        truth = self.truths[worker] = Truth(old.id, old.incarnation + 1)
        self.send(worker, truth.say())

    @rule(worker=workers)
    def beat(self, worker: int) -> None:
        self.send(worker, self.truths[worker].say())

    @rule(worker=workers, key=st.sampled_from(CHAINS[2]))
    def lie(self, worker: int, key: BlockKey) -> None:
        """A change that gets no number at all."""
        self.truths[worker].blocks[key] = None

    @rule(worker=workers)
    def finish(self, worker: int) -> None:
        truth = self.truths[worker]
        if truth.running:
            attempt = next(iter(truth.running))
            del truth.running[attempt]
            self.send(worker, truth.say(RequestFinished(attempt, 0, 1)))

    # What the network does.

    @rule(worker=workers, router=routers, count=st.integers(1, 9))
    def deliver(self, worker: int, router: int, count: int) -> None:
        link = self.links[worker, router]
        for _ in range(min(count, len(link))):
            self.hand(router, link.popleft())

    @rule(worker=workers, router=routers)
    def lose(self, worker: int, router: int) -> None:
        if self.links[worker, router]:
            self.links[worker, router].popleft()

    @rule(worker=workers, router=routers)
    def repeat(self, worker: int, router: int) -> None:
        if self.links[worker, router]:
            self.links[worker, router].append(self.links[worker, router][0])

    @rule(worker=workers, router=routers)
    def reorder(self, worker: int, router: int) -> None:
        self.links[worker, router].rotate(1)

    @rule(worker=workers, router=routers, fails=st.booleans())
    def answer(self, worker: int, router: int, fails: bool) -> None:
        self.snapshot(worker, router, fails)

    def hand(self, router: int, batch: Batch) -> None:
        one = self.two[router]
        one.take(batch.publisher, one.joins[batch.publisher].on_batch(batch), self.now)

    def snapshot(self, worker: int, router: int, fails: bool = False) -> None:
        one, truth = self.two[router], self.truths[worker]
        if truth.id in one.asked:
            one.asked.discard(truth.id)
            join = one.joins[truth.id]
            answer = join.on_snapshot_failed() if fails else join.on_snapshot(truth.snapshot())
            one.take(truth.id, answer, self.now)

    # What routers do.

    @rule(router=routers, chain=chains, length=st.integers(1, 40), arrives=st.booleans())
    def place(self, router: int, chain: list[BlockKey], length: int, arrives: bool) -> None:
        self.attempts += 1
        attempt = AttemptId(f"a{self.attempts}")
        keys = chain[:length]
        query = Query("m", length * SIZE + 1, keys, SIZE)
        placed = self.two[router].core.place(query, attempt, self.now)
        assert isinstance(placed, Placement)
        self.booked[router, attempt] = self.now
        if arrives:
            worker = int(placed.holder.id[1:])
            event = RequestAdmitted(attempt, length * SIZE + 1, 8, tuple(keys))
            self.truths[worker].running[attempt] = event
            self.send(worker, self.truths[worker].say(event))

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for router in self.two:
            router.core.tick(self.now)
            while router.core.sweep(3):
                pass

    @invariant()
    def bookings_expire_and_nothing_is_negative(self) -> None:
        for number, router in enumerate(self.two):
            router.core.check_invariants()
            young = [
                attempt
                for (of, attempt), at in self.booked.items()
                if of == number and at + TTL > self.now
            ]
            assert router.core.bookings <= len(young)

    def teardown(self) -> None:
        """The network heals: soon all routers know what is true."""
        self.now += 1
        for worker, truth in enumerate(self.truths):
            for router in range(2):
                link = self.links[worker, router]
                while link:
                    self.hand(router, link.popleft())
            # A life whose words were overtaken by those of an earlier one is believed again.
            self.now += 2
            # Digests call for a snapshot less and less often; a healed stream needs two.
            for _ in range(4):
                digest = truth.digest()
                told = truth.say(BlocksDigest(Tier.G1, digest.blocks, digest.xor))
                for router in range(2):
                    self.hand(router, told)
                    self.hand(router, truth.say())
                    while truth.id in self.two[router].asked:
                        self.snapshot(worker, router)
        for router in self.two:
            stats = {h.id: d for h, _, d in router.core.index_stats().digests}
            assert stats == {t.id: t.digest() for t in self.truths}
            for chain in CHAINS:
                query = Query("m", len(chain) * SIZE + 1, chain, SIZE)
                card = router.core.explain(query, self.now)
                mates = {t.id for t in self.truths if t.running}
                for row in getattr(card, "workers", ()):
                    truth = self.truths[int(row.holder.id[1:])]
                    if row.candidate and truth.id not in mates and not router.core.bookings:
                        assert row.candidate.g1_tokens == truth.depth(chain) * SIZE


World.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase


def test_late_words_of_a_life_never_heard_do_not_hide_the_living_one() -> None:
    router = Router(1)
    first, second, third = (Truth("w0", incarnation) for incarnation in (1, 2, 3))
    join = router.joins["w0"] = Join(router.stats)
    router.core.record(World.info(None, first), 0.0)  # type: ignore[arg-type]
    for truth in (first, third, second, third):
        router.take("w0", join.on_batch(truth.say()), 0.5)
    assert router.core.workers(0.5)[0].holder.incarnation == 2
    router.take("w0", join.on_batch(third.say()), 1.4)
    assert router.core.workers(1.4)[0].holder.incarnation == 2
    router.take("w0", join.on_batch(third.say()), 1.6)
    router.take("w0", join.on_snapshot(third.snapshot()), 1.6)
    assert router.core.workers(1.6)[0].holder.incarnation == 3
    # And a former one that was heard stays former.
    router.take("w0", join.on_batch(first.say()), 1.7)
    assert router.core.workers(1.7)[0].holder.incarnation == 3


def test_a_busy_worker_whose_snapshot_is_ahead_of_its_stream_stays_in_choice() -> None:
    router, truth = Router(1), Truth("w0")
    router.core.record(World.info(None, truth), 0.0)  # type: ignore[arg-type]
    join = router.joins["w0"] = Join(router.stats)
    now, since_asked = 0.0, 0
    for number in range(80):
        now += 0.25
        event = BlocksStored(Tier.G1, (BlockKey(number),))
        truth.blocks[BlockKey(number)] = None
        for batch in (truth.say(event), truth.say()):
            sent = replace(batch, time_unix_us=round(now * 1e6))
            router.take("w0", join.on_batch(sent), now)
        since_asked += 1
        if router.asked and since_asked >= 4:
            since_asked = 0
            router.asked.clear()
            snapshot = replace(truth.snapshot(), sequence=1000, time_unix_us=round(now * 1e6))
            router.take("w0", join.on_snapshot(snapshot), now)
        (worker,) = router.core.workers(now + 0.25)
        assert worker.status in (Status.READY, Status.JOINING)
        # What its snapshots tell is known, a little late.
        assert number - worker.indexed_blocks < 8
    assert router.stats.lies > 10


def test_a_digest_that_differs_calls_for_a_snapshot_ever_less_often() -> None:
    router, truth = Router(1), Truth("w0")
    router.joins["w0"] = Join(router.stats)
    router.core.record(World.info(None, truth), 0.0)  # type: ignore[arg-type]
    router.take("w0", router.joins["w0"].on_batch(truth.say()), 0.0)
    router.take("w0", router.joins["w0"].on_snapshot(truth.snapshot()), 0.0)
    router.asked.clear()
    calls = []
    for number in range(1, 9):
        told = truth.say(BlocksDigest(Tier.G1, 5, 5))
        router.take("w0", router.joins["w0"].on_batch(told), 0.0)
        if router.asked:
            calls.append(number)
            router.asked.clear()
            router.take("w0", router.joins["w0"].on_snapshot(truth.snapshot()), 0.0)
    assert calls == [1, 2, 4, 8]
    assert router.core.index_stats().drifts == 8
    right = truth.say(BlocksDigest(Tier.G1, 0, 0))
    router.take("w0", router.joins["w0"].on_batch(right), 0.0)
    router.take("w0", router.joins["w0"].on_batch(truth.say(BlocksDigest(Tier.G1, 1, 1))), 0.0)
    assert router.asked == {"w0"}
