"""Placement by what other nodes hold in memory: usable, priced, and hinted at."""

import random
from collections.abc import Sequence

import pytest

from services.common.events.model import Batch, BlocksStored, Snapshot, Tier, TierRate
from services.common.ids import BlockKey
from services.router.core.answers import Prefetch
from services.router.core.lives import Liveness
from services.router.core.nodes import NodeInfo
from services.router.core.onboard import OnboardDefaults, OnboardModel
from services.router.core.peers import MOST_HINTS, PeerHint, peer_hints
from services.router.core.walk import Run
from tests.unit.router.test_node_placement import BLOCK_S, SPACE, NodeRig
from tests.unit.router.test_placement import KEYS, SIZE


class PeerRig(NodeRig):
    """Workers w0 and w1 on node n0, w2 on n1, w3 on none; n0, n1 and n2 fetch from each other."""

    def __init__(self, transfer: str = "nixl") -> None:
        super().__init__()
        for node in ("n0", "n1", "n2"):
            self.core.nodes.record(NodeInfo(node, 1, f"{node}:1", transfer=transfer), self.now)
        self.core.nodes.reset(Snapshot("n2", 1, 0), self.now)

    def rate(self, node: str, latency_s: float, block_s: float) -> None:
        event = TierRate(Tier.PEER, latency_s, block_s, SPACE)
        self.core.nodes.apply(Batch(node, 1, 2, 0, (event,)), self.now)

    def peers(self, worker: str) -> int:
        c = self.rows()[worker].candidate
        assert c is not None
        return c.peer_tokens // SIZE

    def total(self, worker: str) -> int:
        c = self.rows()[worker].candidate
        assert c is not None
        return (c.g1_tokens + c.lower_tokens) // SIZE


def test_what_a_peer_holds_in_memory_is_usable_and_costs_its_way() -> None:
    rig = PeerRig()
    rig.tier("n1", Tier.G2, KEYS[:6])
    assert [rig.peers(w) for w in ("w0", "w1", "w2", "w3")] == [6, 6, 0, 0]
    row = rig.rows()["w0"]
    assert row.score is not None and row.candidate is not None
    assert row.score.onboard_s == pytest.approx(6 * BLOCK_S / 2)
    assert row.candidate.uncached_tokens == rig.query().prompt_tokens - 6 * SIZE


def test_only_memory_of_peers_of_the_same_way_counts() -> None:
    rig = PeerRig()
    rig.tier("n1", Tier.G3, KEYS)
    assert rig.peers("w0") == 0, "a peer's disk is not fetched from"
    rig.tier("n1", Tier.G2, KEYS, space=b"o" * 32)
    assert rig.peers("w0") == 0, "another namespace"
    rig.tier("n1", Tier.G2, KEYS)
    assert rig.peers("w0") > 0
    rig.core.nodes.record(NodeInfo("n1", 1, "n1:1", transfer="other"), rig.now)
    assert rig.peers("w0") == 0
    rig.core.nodes.record(NodeInfo("n1", 1, "n1:1"), rig.now)
    assert rig.peers("w0") == 0
    assert PeerRig("").peers("w0") == 0


def test_a_silent_peer_is_not_counted_on() -> None:
    rig = PeerRig()
    rig.tier("n1", Tier.G2, KEYS[:4])
    assert rig.peers("w0") == 4
    rig.now += Liveness().suspect_after_s + 0.5
    for worker in ("w0", "w1", "w2", "w3"):
        rig.core.heard(worker, int(worker[1]) + 1, rig.now)
    rig.core.nodes.heard("n0", 1, rig.now)
    assert rig.peers("w0") == 0
    rig.core.nodes.heard("n1", 1, rig.now)
    rig.now += 0.3
    assert rig.peers("w0") == 4


def test_own_tiers_and_peers_make_one_run_up_to_the_first_hole() -> None:
    rig = PeerRig()
    rig.say("w0", BlocksStored(Tier.G1, KEYS[:1]))
    rig.tier("n0", Tier.G2, KEYS[1:2])
    rig.tier("n1", Tier.G2, KEYS[2:4])
    rig.tier("n0", Tier.G3, KEYS[4:5])
    rig.tier("n2", Tier.G2, KEYS[5:6])
    rig.tier("n1", Tier.G2, KEYS[7:])
    assert (rig.peers("w0"), rig.total("w0")) == (3, 6)
    placed = rig.place(pinned="w0")
    hints = (PeerHint("n1", 0, 2), PeerHint("n2", 3, 1))
    assert placed.prefetch == Prefetch("n0", SPACE, list(KEYS[2:6]), hints, BLOCK_S)
    assert placed.predicted_cached_tokens == 6 * SIZE


def test_peers_slower_than_computing_are_no_hit() -> None:
    rig = PeerRig()
    rig.tier("n1", Tier.G2, KEYS[:6])
    rig.rate("n0", 0.01, BLOCK_S * 2)
    assert rig.peers("w0") == 0
    rig.rate("n0", 0.01, BLOCK_S / 4)
    assert rig.peers("w0") == 6
    row = rig.rows()["w0"]
    assert row.score is not None
    assert row.score.onboard_s == pytest.approx(0.01 + 6 * (BLOCK_S / 4 + BLOCK_S / 10))


def test_a_peers_rate_is_news_and_its_blocks_are_not() -> None:
    rig = PeerRig()
    before = rig.core.nodes.unknown_events
    rig.rate("n0", 0.01, 0.001)
    assert rig.core.nodes.unknown_events == before
    rig.tier("n0", Tier.PEER, KEYS)
    assert rig.core.nodes.unknown_events == before + 1
    rig.core.nodes.check_invariants()


def test_the_price_of_peers() -> None:
    model = OnboardModel(OnboardDefaults(peer_speedup=2.0))
    assert model.paces({}).load(Run(peer=4)) == pytest.approx((0.0, 2.0))
    assert model.paces({}).peer.beats(0.03)
    assert not OnboardModel(OnboardDefaults(peer_speedup=0.5)).paces({}).peer.beats(0.03)
    measured = {Tier.PEER: TierRate(Tier.PEER, 0.01, 0.05, SPACE)}
    assert not model.paces(measured).peer.beats(0.03)
    assert model.paces(measured).peer.beats(0.3)


def naive_hints(
    where: Sequence[set[str]], own: Sequence[bool], anyone: set[str]
) -> list[tuple[str, int, int]]:
    """All that hints may say: who has which blocks."""
    return [
        (node, at, 1)
        for at, nodes in enumerate(where)
        for node in sorted(nodes & anyone)
        if not own[at]
    ]


def test_hints_name_who_has_it_and_leave_out_nothing_that_somebody_has() -> None:
    rng = random.Random(3)
    bits = {"n0": 1 << 3, "n1": 1 << 6, "n2": 1 << 9}
    for _ in range(300):
        where = [{n for n in bits if rng.random() < 0.5} for _ in range(rng.randrange(14))]
        own = [rng.random() < 0.3 for _ in where]
        anyone = {n for n in bits if rng.random() < 0.8}
        masks = [
            sum(bits[n] for n in nodes) | (1 if mine else 0)
            for nodes, mine in zip(where, own, strict=True)
        ]
        hints = peer_hints(masks, 1, {bits[n]: n for n in anyone})
        true = {(node, at) for node, at, _ in naive_hints(where, own, anyone)}
        said = [(h.node, at) for h in hints for at in range(h.first, h.first + h.count)]
        assert set(said) <= true
        assert sorted(at for _, at in said) == sorted({at for _, at in true})


def test_hints_are_bounded() -> None:
    masks = [(1 << 3) if at % 2 else (1 << 6) for at in range(100)]
    assert len(peer_hints(masks, 1, {1 << 3: "n0", 1 << 6: "n1"})) == MOST_HINTS


def test_equal_keys_of_a_busy_prompt_are_named_in_their_order() -> None:
    """Numbers in hints count within the keys that the message has, not within the prompt."""
    rig = PeerRig()
    rig.tier("n0", Tier.G2, KEYS[:3])
    rig.tier("n1", Tier.G2, KEYS[:5])
    prefetch = rig.place(pinned="w0").prefetch
    assert prefetch is not None
    assert list(prefetch.keys) == [BlockKey(k) for k in KEYS[3:5]]
    assert prefetch.peers == (PeerHint("n1", 0, 2),)


def test_a_nodes_own_memory_is_no_peer_of_its_own() -> None:
    """Also where it is too slow to load from."""
    rig = PeerRig()
    rig.tier("n0", Tier.G2, KEYS[:6])
    slow = TierRate(Tier.G2, 0.0, BLOCK_S * 2, SPACE)
    rig.core.nodes.apply(Batch("n0", 1, 2, 0, (slow,)), rig.now)
    rig.rate("n0", 0.0, BLOCK_S / 100)
    assert rig.total("w0") == 0
