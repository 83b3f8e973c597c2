"""What is worked out for all workers in one go is what each of them would say for itself."""

import math
import random

import numpy as np
import pytest
from hypothesis import settings

from services.common.events.model import (
    Batch,
    BlocksStored,
    RequestAdmitted,
    RequestFirstToken,
    Snapshot,
    Tier,
    TierRate,
)
from services.common.ids import AttemptId
from services.router.core import board
from services.router.core.choice import Choice
from services.router.core.cost import Candidate, CostModel
from services.router.core.drafts import Drafts
from services.router.core.nodes import NodeInfo
from tests.unit.router.test_node_placement import NodeRig
from tests.unit.router.test_placement import KEYS, CoreMachine, Rig

SPACES = (b"n" * 32, b"o" * 32)


class Cluster(Rig):
    """Workers above daemons or none, some of them slow, with loads and blocks by chance."""

    def __init__(self, seed: int) -> None:
        super().__init__(workers=0)
        self.dice = dice = random.Random(seed)
        nodes = [f"n{i}" for i in range(3)]
        for node in nodes:
            remote, transfer = dice.choice(("", "s3")), dice.choice(("", "nixl"))
            info = NodeInfo(node, 1, f"{node}:1", remote, transfer=transfer)
            self.core.nodes.record(info, self.now)
            self.core.nodes.reset(Snapshot(node, 1, 0), self.now)
            for sequence in range(1, dice.randrange(1, 8)):
                self.some_news(node, sequence)
        for i in range(12):
            kvbm = dice.choice(("", *nodes))
            self.join(f"w{i}", incarnation=i + 1, kvbm=kvbm, namespace=dice.choice(SPACES))
            if dice.random() < 0.3:
                self.say(f"w{i}", BlocksStored(Tier.G1, KEYS[: dice.randrange(1, 11)]))
            for n in range(dice.randrange(4)):
                attempt = AttemptId(f"a{i}-{n}")
                keys = KEYS[: dice.randrange(8)] if dice.random() < 0.3 else ()
                self.say(f"w{i}", RequestAdmitted(attempt, dice.randrange(1, 9000), 1, tuple(keys)))
                if dice.random() < 0.5:
                    self.say(f"w{i}", RequestFirstToken(attempt, 0))
        for page in self.core._books.pages.values():
            c = page.candidate
            c.token_s *= dice.choice((1.0, 1.0, 7.0))
            c.pair_s, c.request_s = dice.random() * 1e-7, dice.random() / 10
            c.sequence_s, c.kv_s = dice.random() / 1000, dice.random() * 1e-7
            c.churn = dice.uniform(-0.3, 0.3)
            self.core._books.load.changed.add(c.slot)

    def some_news(self, node: str, sequence: int) -> None:
        dice = self.dice
        tier = dice.choice((Tier.G2, Tier.G3, Tier.G4, Tier.PEER))
        if tier is Tier.PEER or dice.random() < 0.3:
            fast = dice.choice((0.0, 0.001, 0.03))
            event: TierRate | BlocksStored = TierRate(tier, dice.random() / 100, fast, SPACES[0])
        else:
            first = dice.choice((0, 0, 0, 3))
            keys = KEYS[first : dice.randrange(first + 1, 11)]
            event = BlocksStored(tier, tuple(keys), namespace=dice.choice(SPACES))
        self.core.nodes.apply(Batch(node, 1, sequence, 0, (event,)), self.now)


@pytest.mark.parametrize("many", [1, 1000], ids=["columns", "one by one"])
@pytest.mark.parametrize("seed", range(60))
def test_all_at_once_is_each_by_itself(
    seed: int, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "MANY", many)
    cluster = Cluster(seed)
    core, books, query = cluster.core, cluster.core._books, cluster.query()
    choice = core._choices.of(query, cluster.now)
    assert isinstance(choice, Choice)
    model = CostModel()
    drafts = Drafts(books, model)
    prompt = books.prompt(query.keys, query.prompt_tokens, query.block_size, cluster.now)
    drafts.begin(query, prompt, None, len(choice.pages))
    found = list(drafts.totals(choice, cluster.now))
    each = [model.total(drafts.of(page), cluster.now) for page in choice.pages]
    scores = [model.score(drafts.of(page), cluster.now).total_s for page in choice.pages]
    drafts.wipe()
    assert found == pytest.approx(each, rel=1e-9)
    assert found == pytest.approx(scores, rel=1e-9)
    core.check_invariants()


def test_the_cases_are_there() -> None:
    """The clusters above have hits in tiers and none, and workers that differ above one daemon."""
    hits: list[bool] = []
    for seed in range(60):
        rows = Cluster(seed)
        card = rows.core.explain(rows.query(), rows.now)
        hits += [bool(row.candidate.lower_tokens) for row in card.workers if row.candidate]  # type: ignore[union-attr]
    assert 0.2 < sum(hits) / len(hits) < 0.8


def test_rows_are_used_again_and_read_as_last_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MANY", 1)
    model, candidates = CostModel(), {slot: Candidate(slot) for slot in range(20)}
    mine = board.Board(model, candidates)
    for slot in candidates:
        mine.add(slot)
    for slot in range(0, 20, 2):
        del candidates[slot]
        mine.remove(slot)
    for slot in range(20, 45):
        candidates[slot] = Candidate(slot)
        mine.add(slot)
    sheet = mine.sheet(list(candidates), ())
    for token_s in (0.001, 0.002):
        for slot, c in candidates.items():
            c.token_s = slot * token_s
            c.prompt_tokens = 1000
            c.settle()
        mine.changed(candidates)
        each = [model.total(c, 0.0) for c in candidates.values()]
        assert list(sheet.totals(0.0, 1000)) == pytest.approx(each)
    mine.check_invariants()
    candidates[3].token_s = 9
    with pytest.raises(AssertionError):
        mine.check_invariants()


def test_the_cheapest_are_those_within_the_tolerance() -> None:
    costs = [3.0, 1.0, 2.0, 1.0 + 1e-7]
    for some in (costs, np.array(costs)):
        assert board.level(some, 1e-6) == [1, 3]
        assert board.level(some, 0.0) == [1]


class ColumnsMachine(CoreMachine):
    """Anything that can happen to a core that keeps few workers in columns as well."""

    def __init__(self) -> None:
        self.many, board.MANY = board.MANY, 1
        super().__init__()

    def teardown(self) -> None:
        board.MANY = self.many


ColumnsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestColumns = ColumnsMachine.TestCase


@pytest.mark.parametrize("many", [1, 1000], ids=["columns", "one by one"])
def test_what_has_changed_counts_in_the_next_decision(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load, churn and rates, each by itself, between decisions that read them."""
    monkeypatch.setattr(board, "MANY", many)
    rig = Rig(2)
    books = rig.core._books
    slots = {page.rank.holder.id: slot for slot, page in books.pages.items()}
    assert {rig.place(keys=()).holder.id for _ in range(12)} == {"w0", "w1"}
    rig.say("w0", RequestAdmitted(AttemptId("a"), 5000, 1, ()))
    assert rig.place(keys=()).holder.id == "w1"
    books.filled(slots["w0"], 5)
    rig.core.check_invariants()
    for number in range(20):
        began = rig.now + number
        done = books.rates.prefills_done(slots["w1"], 1, 1000, 5e5, began, began + 0.001)
        books.learn(done)
        rig.place(keys=())  # checks invariants


@pytest.mark.parametrize("many", [1, 1000], ids=["columns", "one by one"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_a_measurement_that_cannot_be_is_none(
    wrong: float, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "MANY", many)
    rig = NodeRig()
    for node in ("n0", "n1"):
        rig.tier(node, Tier.G2)
    placed = rig.place(excluded=frozenset({"w3"})).predicted_cached_tokens
    for number, rate in enumerate(
        (TierRate(Tier.G2, wrong, 0.001, SPACES[0]), TierRate(Tier.G2, 0.001, wrong, SPACES[0]))
    ):
        rig.core.nodes.apply(Batch("n0", 1, number + 2, 0, (rate,)), rig.now)
        for _ in range(4):
            assert rig.place(excluded=frozenset({"w3"})).predicted_cached_tokens == placed
