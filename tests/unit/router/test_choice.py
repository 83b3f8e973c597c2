"""Who may be chosen is remembered between decisions; it must be what a fresh look would give."""

import random
from dataclasses import replace

import pytest

from services.common.events.model import Batch, Snapshot
from services.common.ids import AttemptId
from services.router.core.answers import Placement, Query, Refusal
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo, WorkerRole

SIZE = 16


class Days:
    """Workers to whom everything happens."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = RouterCore(CoreConfig(), random.Random(seed))
        self.core.synced()
        self.now = 0.0
        self.lives = dict.fromkeys(["w0", "w1", "w2", "w3"], 1)
        self.records: dict[str, WorkerInfo] = {}

    def info(self, id: str) -> WorkerInfo:
        adapters = {"lora": "/l"} if self.rng.random() < 0.5 else {}
        longest = self.rng.choice([0, 100, 4000])
        role = self.rng.choice(list(WorkerRole))
        return WorkerInfo(
            id,
            self.lives[id],
            f"{id}:1",
            "m",
            SIZE,
            100,
            longest,
            adapters=adapters,
            role=role,
            transfer=self.rng.choice(["", "nixl"]),
        )

    def happen(self) -> None:
        id = self.rng.choice(list(self.lives))
        kind = self.rng.randrange(9)
        if kind == 0:
            self.records[id] = self.info(id)
            self.core.record(self.records[id], self.now)
        elif kind == 1 and id in self.records:
            draining, role = self.rng.random() < 0.5, self.rng.choice(list(WorkerRole))
            self.records[id] = replace(self.records[id], draining=draining, role=role)
            self.core.record(self.records[id], self.now)
        elif kind == 2:
            self.core.record_vanished(id, self.lives[id])
        elif kind == 3:
            self.core.refused(id, self.lives[id], self.now)
        elif kind == 4 and self.rng.random() < 0.4:
            self.lives[id] += 1
        elif kind == 5:
            self.core.reset(Snapshot(id, self.lives[id], 1), self.now)
        elif kind == 6:
            self.now += self.rng.choice([0.1, 0.3, 0.6, 1.1])
            self.core.tick(self.now)
        else:
            for one in self.lives:
                if self.rng.random() < 0.7:
                    self.core.apply(Batch(one, self.lives[one], 1, 0), self.now)

    def check(self) -> None:
        query = Query(
            self.rng.choice(["m", "m", "lora"]),
            self.rng.choice([10, 200]),
            (),
            SIZE,
            excluded=frozenset(self.rng.sample(sorted(self.lives), self.rng.choice([0, 0, 1]))),
            pinned=self.rng.choice(["", "", "", "w1"]),
        )
        classes = self.core._choices.classes(query, self.now)
        fresh = next((some for some in classes if some), [])
        choice = self.core._choices.of(query, self.now)
        if isinstance(choice, Refusal):
            assert not fresh
            return
        assert [page.worker for page in choice.pages] == fresh
        free = self.core._choices.classes(replace(query, pinned=""), self.now)[1]
        pool = self.core._choices.pool(query, choice, self.now)
        if pool is not None:
            assert [page.worker for page in pool.pages] == [w for w in free if w.info.transfer]
        else:
            roles = {worker.info.role for worker in self.core._books.table}
            assert WorkerRole.PREFILL not in roles or fresh[0].info.role is WorkerRole.PREFILL
        placed = self.core.place(query, AttemptId("a"), self.now)
        assert isinstance(placed, Placement)
        assert placed.holder.id in {worker.info.id for worker in fresh}
        self.core.release(AttemptId("a"))
        self.core.check_invariants()


@pytest.mark.parametrize("seed", range(8))
def test_what_is_remembered_is_what_a_fresh_look_gives(seed: int) -> None:
    days = Days(seed)
    for _ in range(300):
        days.happen()
        days.check()
