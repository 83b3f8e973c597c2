"""Tiers of daemons against naive dicts, under anything that can happen to them."""

import random
from functools import reduce
from operator import xor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    RequestFinished,
    Snapshot,
    Tier,
    TierBlocks,
    TierRate,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.index import Digest
from services.router.core.lives import Liveness, Status
from services.router.core.nodes import NodeInfo, NodeTable
from services.router.core.tiers import ALL_TIERS, LOWER_TIERS, Reach, tier_set
from services.router.core.walk import Run, TierWalk

A, B = b"a" * 32, b"b" * 32
CHAINS = [[BlockKey(1000 * c + i) for i in range(80)] for c in range(2)]
"""Longer than a chunk of a walk."""
MOST = 150
spans = st.tuples(st.sampled_from(CHAINS), st.integers(0, 79), st.integers(1, 80)).map(
    lambda s: tuple(s[0][s[1] : s[1] + s[2]])
)
scattered = st.sets(st.sampled_from(CHAINS[0] + CHAINS[1]), max_size=9).map(tuple)
some_keys = spans | scattered


def naive_run(
    has: dict[Tier, set[BlockKey]], remote: set[BlockKey], chain: list[BlockKey], start: int,
    worth: set[Tier],
) -> Run:  # fmt: skip
    run, counts = Run(), dict.fromkeys(LOWER_TIERS, 0)
    for i in range(start, len(chain)):
        key = chain[i]
        where = {t for t in LOWER_TIERS if key in has.get(t, ())} | (
            {Tier.G4} if key in remote else set()
        )
        if not where & worth:
            break
        tier = min(where & worth)
        counts[tier] += 1
        if tier is not Tier.G2 and run.below is None:
            run.below = i
    return Run(*counts.values(), run.below)


class NodeMachine(RuleBasedStateMachine):
    """NodeTable beside dicts of node to namespace to tier to keys, of which it knows as much."""

    ids = st.sampled_from(["n0", "n1", "n2"])
    spaces = st.sampled_from([A, B])
    tiers = st.sampled_from(LOWER_TIERS)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = NodeTable(Liveness(), MOST)
        self.model: dict[str, dict[bytes, dict[Tier, set[BlockKey]]]] = {}
        self.lives: dict[str, int] = {}
        self.records: dict[str, int] = {}
        self.remotes: dict[str, str] = {}
        self.count = 0
        self.refused = 0

    def known(self, id: str) -> bool:
        return id in self.lives

    @rule(id=ids, news=st.booleans(), remote=st.sampled_from(["", "s3"]))
    def record(self, id: str, news: bool, remote: str) -> None:
        if news or not self.known(id):
            self.count += 1
            self.lives[id] = self.count
            self.model[id] = {}
        self.remotes[id] = remote
        self.records[id] = self.lives[id]
        assert self.table.record(NodeInfo(id, self.lives[id], f"{id}:1", remote), self.now)
        if not self.model[id]:
            assert self.table.reset(Snapshot(id, self.lives[id], 1), self.now)

    @rule(id=ids)
    def new_life_heard(self, id: str) -> None:
        self.count += 1
        if self.table.heard(id, self.count, self.now):
            self.lives[id], self.model[id] = self.count, {}
            assert self.table.reset(Snapshot(id, self.count, 1), self.now)
        else:
            assert not self.known(id)

    def say(self, id: str, *events: object) -> bool:
        if not self.known(id):
            self.table.apply(Batch(id, 1, 1, 0, events), self.now)  # type: ignore[arg-type]
            return False
        self.table.apply(Batch(id, self.lives[id], 1, 0, events), self.now)  # type: ignore[arg-type]
        return True

    def used(self, id: str) -> int:
        return sum(len(set().union(*tiers.values())) for tiers in self.model[id].values())

    def store_in_model(self, id: str, space: bytes, tier: Tier, keys: tuple[BlockKey, ...]) -> None:
        tiers = self.model[id].setdefault(space, {t: set() for t in LOWER_TIERS})
        room = MOST - self.used(id)
        for key in keys:
            new = not any(key in held for held in tiers.values())
            if new and not room:
                self.refused += 1
                continue
            room -= new
            tiers[tier].add(key)

    @rule(id=ids, space=spaces, tier=tiers, keys=some_keys)
    def store(self, id: str, space: bytes, tier: Tier, keys: tuple[BlockKey, ...]) -> None:
        if self.say(id, BlocksStored(tier, keys, namespace=space)):
            self.store_in_model(id, space, tier, keys)

    @rule(id=ids, space=spaces, tier=tiers, keys=some_keys)
    def remove(self, id: str, space: bytes, tier: Tier, keys: tuple[BlockKey, ...]) -> None:
        if self.say(id, BlocksRemoved(tier, keys, namespace=space)):
            self.model[id].setdefault(space, {t: set() for t in LOWER_TIERS})[tier] -= set(keys)

    @rule(id=ids, space=spaces, tier=tiers)
    def clear(self, id: str, space: bytes, tier: Tier) -> None:
        if self.say(id, BlocksCleared(tier, namespace=space)):
            self.model[id].setdefault(space, {t: set() for t in LOWER_TIERS})[tier].clear()

    @rule(id=ids, g2=spans, g3=some_keys, space=spaces)
    def snapshot(
        self, id: str, g2: tuple[BlockKey, ...], g3: tuple[BlockKey, ...], space: bytes
    ) -> None:
        if not self.known(id):
            return
        parts = (TierBlocks(Tier.G2, g2, namespace=space), TierBlocks(Tier.G3, g3, namespace=space))
        assert self.table.reset(Snapshot(id, self.lives[id], 9, parts), self.now)
        empty = {n: {t: set[BlockKey]() for t in LOWER_TIERS} for n in {space, *self.model[id]}}
        self.model[id] = empty
        self.model[id][space] |= {Tier.G2: set(g2), Tier.G3: set(g3)}

    @rule(id=ids)
    def goes(self, id: str) -> None:
        if self.known(id):
            self.table.record_vanished(id, self.records[id])
            for other in self.lives:
                if other != id:
                    self.table.heard(other, self.lives[other], self.now + 100)
            self.now += 100
            assert self.table.tick(self.now) == [id]
            del self.lives[id], self.model[id], self.remotes[id]

    @rule(limit=st.integers(1, 100))
    def sweep(self, limit: int) -> None:
        self.table.sweep(limit)

    @rule(
        id=ids,
        space=spaces,
        chain=st.sampled_from(CHAINS),
        starts=st.lists(st.integers(0, 80), min_size=1, max_size=3),
        limit=st.integers(0, 80),
        worth=st.sets(tiers),
    )
    def runs_agree(
        self,
        id: str,
        space: bytes,
        chain: list[BlockKey],
        starts: list[int],
        limit: int,
        worth: set[Tier],
    ) -> None:
        if not self.known(id):
            assert self.table.reach(id, space, self.now) is None
            return
        has = self.model[id].get(space, {})
        remote = set[BlockKey]()
        for other, spaces in self.model.items():
            if self.remotes[id] and self.remotes[other] == self.remotes[id]:
                remote |= spaces.get(space, {}).get(Tier.G4, set())
        reach = self.table.reach(id, space, self.now)
        if reach is None:
            assert not remote and not any(has.values())
            return
        walk = TierWalk(chain, limit, reach.space)
        for start in starts:
            want = naive_run(has, remote, chain[:limit], start, worth)
            assert walk.run(reach, start, tier_set(worth)) == want

    @invariant()
    def agrees(self) -> None:
        self.table.check_invariants()
        assert self.table.refused_blocks == self.refused
        assert {n.id: n.incarnation for n in self.table.nodes(self.now)} == self.lives
        for node in self.table.nodes(self.now):
            assert node.entries == self.used(node.id) <= MOST
            for view in node.tiers:
                keys = self.model[node.id][view.namespace][view.tier]
                assert view.digest == Digest(len(keys), reduce(xor, keys, 0))


NodeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestNodes = NodeMachine.TestCase


def table(*records: NodeInfo, most: int = 1 << 20) -> NodeTable:
    nodes = NodeTable(Liveness(), most)
    for info in records or (NodeInfo("n0", 1, "n0:1"),):
        nodes.record(info, 0.0)
        nodes.reset(Snapshot(info.id, info.incarnation, 0), 0.0)
    return nodes


def reach(nodes: NodeTable, id: str = "n0", space: bytes = A, now: float = 0.0) -> Reach:
    found = nodes.reach(id, space, now)
    assert found is not None
    return found


KEYS = tuple(CHAINS[0][:6])


def run(nodes: NodeTable, start: int = 0, id: str = "n0", space: bytes = A, worth: int = 7) -> Run:
    found = reach(nodes, id, space)
    return TierWalk(KEYS, len(KEYS), found.space).run(found, start, worth)


def store(nodes: NodeTable, tier: Tier, keys: tuple[BlockKey, ...], id: str = "n0") -> None:
    nodes.apply(Batch(id, 1, 1, 0, (BlocksStored(tier, keys, namespace=A),)), 0.0)


def test_a_run_takes_each_block_from_its_best_tier_and_ends_at_a_hole() -> None:
    nodes = table()
    store(nodes, Tier.G2, KEYS[:2])
    store(nodes, Tier.G3, KEYS[1:3])
    store(nodes, Tier.G4, KEYS[3:4])
    store(nodes, Tier.G2, KEYS[5:])
    assert run(nodes) == Run(2, 1, 1, below=2)
    assert run(nodes, start=3) == Run(0, 0, 1, below=3)
    assert run(nodes, start=4) == Run(), "the block itself is missing"
    assert run(nodes, start=5) == Run(1)
    assert run(nodes, worth=tier_set([Tier.G2])) == Run(2), "what is not worth it is a hole"


def test_events_that_do_not_explain_themselves_are_dropped_and_counted() -> None:
    """E1, E2: G1 is no daemon's, a namespace must be named, a daemon runs no requests."""
    nodes = table()
    events = (
        BlocksStored(Tier.G1, KEYS, namespace=A),
        BlocksStored(Tier.G2, KEYS),
        BlocksStored(Tier.G2, KEYS, namespace=b"short"),
        TierRate(Tier.G2, 0.0, 1.0),
        RequestFinished(AttemptId("a"), 0, 1),
    )
    nodes.apply(Batch("n0", 1, 1, 0, events, unknown_events=2), 0.0)
    assert (nodes.unknown_events, nodes.events, nodes.entries) == (7, 0, 0)
    nodes.reset(Snapshot("n0", 1, 1, (TierBlocks(Tier.G2, KEYS),), unknown_parts=3), 0.0)
    assert (nodes.unknown_events, nodes.entries) == (11, 0)


def test_namespaces_of_a_daemon_never_mix() -> None:
    """I5: new weights under the same name find nothing of the old ones, on the same daemon."""
    nodes = table()
    store(nodes, Tier.G2, KEYS)
    nodes.apply(Batch("n0", 1, 2, 0, (BlocksStored(Tier.G2, KEYS[:1], namespace=B),)), 0.0)
    assert (run(nodes).g2, run(nodes, space=B).g2) == (6, 1)
    nodes.apply(Batch("n0", 1, 3, 0, (BlocksRemoved(Tier.G2, KEYS, namespace=B),)), 0.0)
    assert (run(nodes).g2, run(nodes, space=B).g2) == (6, 0)
    assert nodes.reach("n0", b"c" * 32, 0.0) is None


def test_a_tiers_last_copy_takes_only_that_tier() -> None:
    """E4: a removal from one tier leaves the block in the others."""
    nodes = table()
    store(nodes, Tier.G2, KEYS)
    store(nodes, Tier.G3, KEYS)
    nodes.apply(Batch("n0", 1, 2, 0, (BlocksRemoved(Tier.G2, KEYS[:4], namespace=A),)), 0.0)
    assert run(nodes) == Run(2, 4, below=0)
    assert nodes.entries == 6


def test_g4_is_shared_by_daemons_of_one_storage_alone() -> None:
    nodes = table(
        NodeInfo("n0", 1, "x", remote="s3"),
        NodeInfo("n1", 1, "x", remote="s3"),
        NodeInfo("n2", 1, "x", remote="other"),
        NodeInfo("n3", 1, "x"),
    )
    store(nodes, Tier.G4, KEYS, id="n1")
    store(nodes, Tier.G2, KEYS[:2], id="n0")
    store(nodes, Tier.G2, KEYS, id="n1")
    assert run(nodes, id="n0") == Run(2, 0, 4, below=2), "its G2 is its own"
    assert run(nodes, id="n1") == Run(6)
    assert nodes.reach("n2", A, 0.0) is None and nodes.reach("n3", A, 0.0) is None
    nodes.record_vanished("n1", 1)
    for id in ("n0", "n2", "n3"):
        nodes.heard(id, 1, 50.0)
    assert nodes.tick(50.0) == ["n1"]
    found = reach(nodes, now=50.0)
    assert TierWalk(KEYS, 6, found.space).run(found, 0) == Run(2)


def test_who_is_silent_refuses_or_leaves_counts_for_nothing_and_keeps_its_blocks() -> None:
    nodes = table()
    store(nodes, Tier.G2, KEYS)
    assert nodes.reach("n0", A, 1.1) is None
    assert nodes.nodes(1.1)[0].status is Status.SUSPECT
    nodes.heard("n0", 1, 1.2)
    assert run(nodes).g2 == 6
    assert nodes.refused("n0", 1, 1.3) and nodes.reach("n0", A, 1.3) is None
    nodes.heard("n0", 1, 2.0)
    assert nodes.reach("n0", A, 2.0) is not None
    nodes.record(NodeInfo("n0", 1, "n0:1", draining=True), 2.0)
    assert nodes.reach("n0", A, 2.0) is None
    nodes.record(NodeInfo("n0", 1, "n0:1"), 2.0)
    assert nodes.reach("n0", A, 2.0) is not None
    # A new life has nothing until it says so; late words of the old one change nothing.
    nodes.heard("n0", 2, 2.0)
    assert nodes.reach("n0", A, 2.0) is None and nodes.entries == 0
    assert nodes.apply(Batch("n0", 1, 9, 0, (BlocksStored(Tier.G2, KEYS, 0, A),)), 2.0) == ()
    assert not nodes.record(NodeInfo("n0", 1, "n0:1"), 2.0)
    assert nodes.entries == 0
    nodes.check_invariants()


def test_memory_is_bounded_and_comes_back() -> None:
    nodes = table(most=100)
    rng = random.Random(1)
    for i in range(30):
        keys = tuple(BlockKey(rng.getrandbits(64)) for _ in range(100))
        space = bytes([i]) * 32
        nodes.apply(Batch("n0", 1, 1, 0, (BlocksStored(Tier.G2, keys, 0, space),)), 0.0)
    assert (nodes.entries, nodes.capacity, nodes.refused_blocks) == (100, 100, 2900)
    for i in range(400):
        space = i.to_bytes(32)
        nodes.apply(Batch("n0", 1, 1, 0, (BlocksStored(Tier.G2, (), 0, space),)), 0.0)
    nodes.check_invariants()
    assert len(nodes.nodes(0.0)[0].tiers) <= 256 * 3
    # Life after life: places are used again, and nothing is left in the end.
    for life in range(2, 40):
        nodes.heard("n0", life, 0.0)
        nodes.apply(Batch("n0", life, 1, 0, (BlocksStored(Tier.G3, KEYS, 0, A),)), 0.0)
        while nodes.sweep(7):
            pass
    assert nodes._spaces[A].beyond <= 6
    nodes.heard("n0", 99, 0.0)
    while nodes.sweep(7):
        pass
    assert not nodes._spaces and not nodes._remotes
    nodes.check_invariants()


def test_large_snapshots_take_the_fast_way_and_agree() -> None:
    nodes = table(NodeInfo("n0", 1, "x"), NodeInfo("n1", 1, "x"))
    keys = [BlockKey(i * 7919 + 1) for i in range(6000)]
    for id, mine in (("n0", keys[:5000]), ("n1", keys[1000:])):
        parts = (
            TierBlocks(Tier.G3, tuple(mine), namespace=A),
            TierBlocks(Tier.G2, tuple(mine[::2]), namespace=A),
        )
        for _ in range(2):
            nodes.reset(Snapshot(id, 1, 1, parts), 0.0)
            nodes.check_invariants()
    found = reach(nodes)
    walk = TierWalk(keys, len(keys), found.space)
    assert walk.run(found, 0, ALL_TIERS) == Run(2500, 2500, below=1)
    other = reach(nodes, "n1")
    assert walk.run(other, 0) == Run() and walk.run(other, 1000).g2 == 2500


@pytest.mark.parametrize("seed", range(8))
def test_what_is_remembered_of_long_prompts_holds_until_a_block_changes(seed: int) -> None:
    """Long chains that part somewhere, in whole stretches, with few changes between questions."""
    dice = random.Random(seed)
    nodes = table(NodeInfo("n0", 1, "x", remote="s3"), NodeInfo("n1", 1, "x", remote="s3"))
    trunk = [BlockKey(dice.getrandbits(63)) for _ in range(400)]
    ends = [[BlockKey(dice.getrandbits(63)) for _ in range(200)] for _ in range(3)]
    chains = [trunk, *(trunk[:at] + end for at, end in zip((64, 130, 256), ends, strict=True))]
    has: dict[str, dict[Tier, set[BlockKey]]] = {
        id: {tier: set() for tier in LOWER_TIERS} for id in ("n0", "n1")
    }
    kept, lives = 0, {"n0": 1, "n1": 1}
    for _ in range(120):
        id, tier, chain = dice.choice(("n0", "n1")), dice.choice(LOWER_TIERS), dice.choice(chains)
        held = has[id][tier]
        first = dice.choice((0, 0, 64, dice.randrange(len(chain))))
        some = tuple(chain[first : first + dice.choice((1, 64, 300))])
        life = lives[id]
        match dice.randrange(7):
            case 0 | 1 | 2:
                nodes.apply(Batch(id, life, 1, 0, (BlocksStored(tier, some, namespace=A),)), 0.0)
                held |= set(some)
            case 3:
                nodes.apply(Batch(id, life, 1, 0, (BlocksRemoved(tier, some, namespace=A),)), 0.0)
                held -= set(some)
            case 4 if dice.random() < 0.2:
                parts = [TierBlocks(t, tuple(keys), namespace=A) for t, keys in has[id].items()]
                has[id][Tier.G3] = set(trunk)
                parts[1] = TierBlocks(Tier.G3, tuple(trunk), namespace=A)
                nodes.reset(Snapshot(id, life, 1, tuple(parts)), 0.0)
            case 5 if dice.random() < 0.2:
                lives[id] += 1
                nodes.heard(id, lives[id], 0.0)
                nodes.reset(Snapshot(id, lives[id], 1), 0.0)
                has[id] = {tier: set() for tier in LOWER_TIERS}
            case _:
                nodes.sweep(dice.randrange(200))
        remote = has["n0"][Tier.G4] | has["n1"][Tier.G4]
        for asked in (chains, chains[::-1]):
            for chain in asked:
                limit = dice.choice((len(chain), dice.randrange(len(chain) + 1)))
                space = nodes._spaces.get(A)
                if space is None:
                    continue
                walk, start = TierWalk(chain, limit, space), dice.choice((0, 0, 70))
                for who in ("n0", "n1"):
                    reach = nodes.reach(who, A, 0.0)
                    want = naive_run(has[who], remote, chain[:limit], start, set(LOWER_TIERS))
                    assert reach is not None or want == Run()
                    if reach is not None:
                        assert walk.run(reach, start) == want
                masks = [space.masks.get(key, 0) for key in chain[3:limit]]
                assert walk.masks(3, max(3, limit)) == masks
        nodes.check_invariants()
        kept += len(nodes._spaces[A].stretches) if A in nodes._spaces else 0
    assert kept > 120, "hardly anything is ever remembered"
