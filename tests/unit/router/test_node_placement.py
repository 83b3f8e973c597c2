"""Placement by the tiers of the workers' nodes."""

import random
from collections.abc import Sequence
from dataclasses import replace

from services.common.events.model import (
    Batch,
    BlocksStored,
    RequestAdmitted,
    RequestFirstToken,
    Snapshot,
    Tier,
    TierBlocks,
    TierRate,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.answers import Prefetch, Scorecard, Scored
from services.router.core.nodes import NodeInfo
from tests.unit.router.test_placement import KEYS, SIZE, Rig

SPACE = b"n" * 32
OTHER = b"o" * 32
BLOCK_S = SIZE / 4000
"""What a worker takes to compute a block, until it was measured."""


class NodeRig(Rig):
    """Workers w0 and w1 on node n0, w2 on n1, w3 on none."""

    def __init__(self) -> None:
        super().__init__(workers=0)
        for node in ("n0", "n1"):
            self.core.nodes.record(NodeInfo(node, 1, f"{node}:1"), self.now)
            self.core.nodes.reset(Snapshot(node, 1, 0), self.now)
        for i, node in enumerate(("n0", "n0", "n1", "")):
            self.join(f"w{i}", incarnation=i + 1, kvbm=node, namespace=SPACE)

    def tier(
        self, node: str, tier: Tier, keys: Sequence[BlockKey] = KEYS, space: bytes = SPACE
    ) -> None:
        event = BlocksStored(tier, tuple(keys), namespace=space)
        self.core.nodes.apply(Batch(node, 1, 1, 0, (event,)), self.now)

    def rows(self, **changes: object) -> dict[str, Scored]:
        card = self.core.explain(self.query(**changes), self.now)  # type: ignore[arg-type]
        assert isinstance(card, Scorecard)
        return {row.holder.id: row for row in card.workers}


def usable(row: Scored) -> tuple[int, int, int, int]:
    c = row.candidate
    assert c is not None
    return c.g1_tokens // SIZE, c.g2_tokens // SIZE, c.g3_tokens // SIZE, c.g4_tokens // SIZE


def test_a_workers_own_run_goes_on_in_its_nodes_tiers() -> None:
    rig = NodeRig()
    rig.say("w0", BlocksStored(Tier.G1, KEYS[:3]))
    rig.say("w1", BlocksStored(Tier.G1, KEYS[:1]))
    rig.say("w3", BlocksStored(Tier.G1, KEYS[:2]))
    rig.tier("n0", Tier.G2, KEYS[2:6])
    rig.tier("n0", Tier.G3, KEYS[5:8])
    rig.tier("n0", Tier.G2, KEYS[9:])
    rig.tier("n1", Tier.G4, KEYS[:4])
    rows = rig.rows()
    assert usable(rows["w0"]) == (3, 3, 2, 0), "its run ends at the hole"
    assert usable(rows["w1"]) == (1, 0, 0, 0), "block 1 is in no tier of its node"
    assert usable(rows["w2"]) == (0, 0, 0, 4)
    assert usable(rows["w3"]) == (2, 0, 0, 0), "it has no daemon"
    score = rows["w0"].score
    assert score is not None and 0 < score.onboard_s < score.prefill_s


def test_predictions_include_tiers_but_never_the_last_token() -> None:
    rig = NodeRig()
    rig.tier("n1", Tier.G2)
    p = rig.place(tokens=12 * SIZE)
    assert (p.holder.id, p.predicted_cached_tokens) == ("w2", 11 * SIZE)


def test_a_node_with_the_prefix_in_g2_is_preferred_to_one_without() -> None:
    for node, want in (("n0", {"w0", "w1"}), ("n1", {"w2"})):
        rig = NodeRig()
        rig.tier(node, Tier.G2)
        assert {rig.place(excluded=frozenset({"w3"})).holder.id for _ in range(1)} <= want


def test_g1_beats_g2_beats_g3_beats_g4_beats_nothing() -> None:
    for better, worse in ((2, 3), (3, 4)):
        rig = NodeRig()
        rig.tier("n0", Tier(worse))
        rig.tier("n1", Tier(better))
        assert rig.place().holder.id == "w2"
    rig = NodeRig()
    rig.tier("n0", Tier.G4)
    assert rig.place().holder.id in ("w0", "w1")
    rig = NodeRig()
    rig.tier("n0", Tier.G2)
    rig.say("w3", BlocksStored(Tier.G1, KEYS))
    assert rig.place().holder.id == "w3"


def test_a_busy_worker_loses_despite_g2_when_computing_elsewhere_is_faster() -> None:
    rig = NodeRig()
    rig.tier("n1", Tier.G2)
    assert rig.rows()["w2"].chosen
    rig.say("w2", RequestAdmitted(AttemptId("big"), 8000, 1, ()))
    assert rig.place().holder.id != "w2"
    # Of the workers that share a node's tiers, the idle one.
    rig = NodeRig()
    rig.tier("n0", Tier.G2)
    rig.say("w0", RequestAdmitted(AttemptId("big"), 8000, 1, ()))
    assert rig.place().holder.id == "w1"


def test_another_namespaces_blocks_are_nobodys() -> None:
    """I5: the same prompt under new weights."""
    rig = NodeRig()
    rig.tier("n0", Tier.G2, space=OTHER)
    assert rig.place().predicted_cached_tokens == 0


def test_a_dead_daemon_takes_its_tiers_along_and_nothing_else() -> None:
    """Workers stay in choice; when it is back with a snapshot, its tiers count again."""
    rig = NodeRig()
    rig.tier("n0", Tier.G2)
    rig.say("w0", BlocksStored(Tier.G1, KEYS[:2]))
    rig.now += 1.5
    rig.beat()
    assert usable(rig.rows()["w0"]) == (2, 0, 0, 0)
    rig.core.nodes.heard("n0", 1, rig.now)
    assert usable(rig.rows()["w0"]) == (2, 10, 0, 0)
    rig.core.nodes.record_vanished("n0", 1)
    for _ in range(62):
        rig.now += 0.5
        rig.beat()
        rig.core.nodes.heard("n1", 1, rig.now)
        rig.core.tick(rig.now)
        rig.core.nodes.tick(rig.now)
    assert [n.id for n in rig.core.nodes.nodes(rig.now)] == ["n1"]
    assert set(rig.status()) == {"w0", "w1", "w2", "w3"}
    assert rig.place().predicted_cached_tokens == 2 * SIZE
    rig.core.nodes.record(NodeInfo("n0", 2, "n0:1"), rig.now)
    part = TierBlocks(Tier.G2, KEYS, namespace=SPACE)
    rig.core.nodes.reset(Snapshot("n0", 2, 5, (part,)), rig.now)
    assert usable(rig.rows()["w1"]) == (0, 12, 0, 0)
    while rig.core.sweep(5):
        pass
    rig.core.check_invariants()
    assert rig.core.index_stats().tier_entries == 12


def test_a_tier_that_was_measured_slower_than_computing_counts_for_nothing() -> None:
    """P1: predictions follow the daemon's gate."""
    rig = NodeRig()
    rig.tier("n0", Tier.G2, KEYS[:4])
    rig.tier("n0", Tier.G3, KEYS[4:])
    assert usable(rig.rows()["w0"]) == (0, 4, 8, 0)
    slow = TierRate(Tier.G3, 0.0, 1.0, SPACE)
    rig.core.nodes.apply(Batch("n0", 1, 2, 0, (slow,)), rig.now)
    assert usable(rig.rows()["w0"]) == (0, 4, 0, 0)


def test_loading_never_costs_more_than_computing() -> None:
    rig = NodeRig()
    rig.tier("n0", Tier.G2)
    late = TierRate(Tier.G2, 1000.0, 1e-6, SPACE)
    rig.core.nodes.apply(Batch("n0", 1, 2, 0, (late,)), rig.now)
    c, s = rig.rows()["w0"].candidate, rig.rows()["w0"].score
    assert c is not None and s is not None
    assert 0 < s.onboard_s <= c.lower_tokens / c.prefill_rate


def test_what_lies_below_g2_is_named_for_prefetching() -> None:
    rig = NodeRig()
    rig.say("w0", BlocksStored(Tier.G1, KEYS[:2]))
    rig.tier("n0", Tier.G2, KEYS[:5])
    first = rig.place(pinned="w0")
    assert first.prefetch is None
    rig.core.release(first.attempt_id)
    rig.tier("n0", Tier.G3, KEYS[5:7])
    rig.tier("n0", Tier.G2, KEYS[7:9])
    assert rig.place(pinned="w1").prefetch == Prefetch("n0", SPACE, list(KEYS[5:9]), (), BLOCK_S)
    assert rig.place(pinned="w1").prefetch is None, "the request before brings them"
    rig = NodeRig()
    rig.tier("n1", Tier.G4, KEYS)
    assert rig.place(pinned="w2").prefetch == Prefetch("n1", SPACE, list(KEYS), (), BLOCK_S)
    assert rig.place(pinned="w3").prefetch is None


def test_requests_that_load_teach_no_prefill_rate() -> None:
    rig = NodeRig()
    again = tuple(BlockKey(k + 100) for k in KEYS)
    rig.tier("n1", Tier.G2, (*KEYS[:6], *again[:6]))
    before = rig.core.workers(rig.now)[2].prefill_rate
    for name, keys in (("booked", KEYS), ("others", again)):
        attempt = AttemptId(name)
        if name == "booked":
            rig.core.place(replace(rig.query(keys), pinned="w2"), attempt, rig.now)
        rig.say("w2", RequestAdmitted(attempt, 385, 1, keys))
        rig.now += 5
        rig.core.nodes.heard("n1", 1, rig.now)
        rig.say("w2", RequestFirstToken(attempt, 6 * SIZE))
        assert rig.core.workers(rig.now)[2].prefill_rate == before


def test_tiers_are_for_daemons_to_tell() -> None:
    """E1: what a worker says of lower tiers is dropped and counted, never read as G1."""
    rig = NodeRig()
    before = rig.core.index_stats().unknown_events
    rig.say("w0", BlocksStored(Tier.G2, KEYS))
    rig.core.reset(Snapshot("w0", 1, 1, (TierBlocks(Tier.G3, KEYS),)), rig.now)
    assert rig.core.index_stats().unknown_events == before + 2
    assert usable(rig.rows()["w0"]) == (0, 0, 0, 0)


def test_decisions_agree_with_a_naive_reading_of_all_tiers() -> None:
    rng = random.Random(5)
    for _ in range(60):
        rig = NodeRig()
        own = {f"w{i}": {k for k in KEYS if rng.random() < 0.6} for i in range(4)}
        tiers = {
            (n, t): {k for k in KEYS if rng.random() < 0.5} for n in ("n0", "n1") for t in (2, 3, 4)
        }
        for id, keys in own.items():
            rig.say(id, BlocksStored(Tier.G1, tuple(keys)))
        for (node, t), keys in tiers.items():
            rig.tier(node, Tier(t), tuple(keys))
        rows = rig.rows()
        for id, node in zip(own, ("n0", "n0", "n1", ""), strict=True):
            counts, inside = [0, 0, 0, 0, 0], True
            for key in KEYS:
                inside = inside and key in own[id]
                tier = 1 if inside else 0
                if not inside:
                    here = [t for t in (2, 3, 4) if key in tiers.get((node, t), ())]
                    tier = min(here, default=0)
                if not tier:
                    break
                counts[tier] += 1
            assert usable(rows[id]) == tuple(counts[1:])
