"""Requests over simulated time, whole or in legs: who is held up, and that nothing is left over."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from services.common.events.model import (
    Batch,
    BlocksStored,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TransferEnded,
)
from services.common.ids import AttemptId, BlockKey
from services.router.core.answers import Placement, Query
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo, WorkerRole

RATE = 1150.0
"""Prompt tokens a second; a prompt holds up every decode beside it for its whole prefill."""
DECODES = 4
"""They run on at each worker that doesn't begin as one for prefill."""
LONG, SHORT = 3000, 150
TRANSFER_S = 0.08


@dataclass
class Engine:
    decodes: int
    sequence: int = 0
    busy_until: float = 0.0
    stalled_s: float = 0.0


class Flow:
    """Every third prompt is long."""

    def __init__(self, roles: Sequence[WorkerRole], seed: int, failing: bool = False) -> None:
        self.rng = random.Random(seed)
        self.core = RouterCore(CoreConfig(), random.Random(seed))
        self.core.synced()
        self.failing = failing
        self.engines: dict[str, Engine] = {}
        self.due: list[tuple[float, int, Callable[[float], None]]] = []
        self.ttft_s: list[float] = []
        """Of the long ones."""
        self.apart = 0
        self.order = 0
        for i, role in enumerate(roles):
            id = f"w{i}"
            self.engines[id] = Engine(0 if role is WorkerRole.PREFILL else DECODES)
            info = WorkerInfo(id, 1, id, "m", 32, 4000, role=role, transfer="nixl")
            self.core.record(info, 0.0)
            running = tuple(
                RunningRequest(RequestAdmitted(AttemptId(f"{id}.{k}"), 100, 9999), True)
                for k in range(self.engines[id].decodes)
            )
            self.core.reset(Snapshot(id, 1, 0, (), running), 0.0)

    def run(self, requests: int, gap_s: float) -> None:
        now = 0.0
        for number in range(requests):
            now += self.rng.expovariate(1 / gap_s)
            self.later(now, lambda t, n=number: self.arrive(t, n))  # type: ignore[misc]
        while self.due:
            now, _, happens = heapq.heappop(self.due)
            for id in self.engines:
                self.core.heard(id, 1, now)
            self.core.tick(now)
            happens(now)
            self.core.check_invariants()

    def later(self, when: float, what: Callable[[float], None]) -> None:
        self.order += 1
        heapq.heappush(self.due, (when, self.order, what))

    def say(self, id: str, now: float, *events: Event) -> None:
        self.engines[id].sequence += 1
        self.core.apply(Batch(id, 1, self.engines[id].sequence, 0, events), now)

    def arrive(self, now: float, number: int) -> None:
        tokens = SHORT if number % 3 else LONG
        keys = tuple(BlockKey(1000 * number + k) for k in range(tokens // 32))
        p = self.core.place(Query("m", tokens, keys, 32), AttemptId(f"a{number}"), now)
        assert isinstance(p, Placement)
        leg = RequestAdmitted(p.attempt_id, tokens, 50, keys)
        if p.prefill is None:
            self.prefill(p.holder.id, leg, now, lambda t: self.decode(p, tokens, 0, now, t))
            return
        self.apart += 1
        first = RequestAdmitted(p.prefill.attempt_id, tokens, 1, keys, prefill_only=True)
        self.prefill(p.prefill.holder.id, first, now, lambda t: self.hand_over(p, first, now, t))

    def prefill(
        self, id: str, event: RequestAdmitted, now: float, then: Callable[[float], None]
    ) -> None:
        engine, seconds = self.engines[id], event.prompt_tokens / RATE
        self.say(id, now, event)
        engine.busy_until = max(now, engine.busy_until) + seconds
        engine.stalled_s += seconds * engine.decodes

        def done(t: float) -> None:
            self.say(id, t, BlocksStored(Tier.G1, event.keys))
            then(t)

        self.later(engine.busy_until, done)

    def hand_over(self, p: Placement, first: RequestAdmitted, asked: float, now: float) -> None:
        assert p.prefill is not None
        source, id, tokens = p.prefill.holder.id, p.holder.id, first.prompt_tokens
        ended = RequestFinished(first.attempt_id, 0, 1)
        self.say(source, now, RequestFirstToken(first.attempt_id, 0), ended)
        leg = RequestAdmitted(p.attempt_id, tokens, 50, first.keys, transfer_tokens=tokens)
        if self.failing:
            self.prefill(id, leg, now, lambda t: self.decode(p, tokens, 0, asked, t))
            self.say(id, now, TransferEnded(p.attempt_id, source, 0, 0, 2.0))
            return
        self.say(id, now, leg)

        def came(t: float) -> None:
            end = TransferEnded(p.attempt_id, source, tokens, 1, TRANSFER_S)
            self.say(id, t, end, BlocksStored(Tier.G1, first.keys))
            self.decode(p, tokens, tokens - 1, asked, t)

        self.later(now + TRANSFER_S, came)

    def decode(self, p: Placement, tokens: int, handed: int, asked: float, now: float) -> None:
        self.say(p.holder.id, now, RequestFirstToken(p.attempt_id, handed, 0, handed))
        if tokens == LONG:
            self.ttft_s.append(now - asked)
        end = RequestFinished(p.attempt_id, handed, 50)
        self.later(now + 2, lambda t: self.say(p.holder.id, t, end))

    def stalled_s(self) -> float:
        return sum(engine.stalled_s for engine in self.engines.values())

    def check_nothing_is_left(self) -> None:
        assert self.core.bookings == self.core.expired_bookings == 0
        for view in self.core.workers(1e9):
            assert view.load.active == self.engines[view.info.id].decodes
            assert view.load.queued_tokens == 0


BOTH, PREFILL, DECODE = WorkerRole.BOTH, WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.mark.parametrize("seed", [1, 2])
def test_long_prompts_hold_up_nobody_where_others_prefill_them(seed: int) -> None:
    together, parted = Flow([BOTH] * 4, seed), Flow([PREFILL, PREFILL, DECODE, DECODE], seed)
    for flow in (together, parted):
        flow.run(90, gap_s=0.8)
        flow.check_nothing_is_left()
    assert (together.apart, parted.apart) == (0, 30)
    assert parted.stalled_s() < together.stalled_s() / 8
    middle = sorted(parted.ttft_s)[15], sorted(together.ttft_s)[15]
    assert middle[0] < 1.1 * middle[1], "at the price of a transfer"
    rates = [w.prefill_rate for w in parted.core.workers(0.0)]
    assert rates == pytest.approx([RATE] * 4, rel=0.05), "legs spoil no rates"


def test_where_transfers_fail_nearly_all_stay_whole() -> None:
    flow = Flow([PREFILL, DECODE], 1, failing=True)
    flow.run(90, gap_s=1.6)
    flow.check_nothing_is_left()
    assert 1 <= flow.apart < 15, "now and then it is tried again"
    assert len(flow.ttft_s) == 30
