"""A cluster of modelled workers under one load: with a fixed split of roles, or with the planner.

The planner's core runs unchanged: it is fed the workers' events, asked at each interval, and its
moves take effect at once. A request whose group has a prefill worker runs in two legs, else whole
at a worker that does both; each leg goes where its tokens would be computed first (prefill) or
fewest decode (decode). Deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from benchmarks.planner.model import Hardware, Job, Life, Worker
from services.common.cards import Role
from services.common.events.model import Batch, Event
from services.common.ids import AttemptId
from services.planner.core.measures import GroupKey, WorkerInfo
from services.planner.core.policy import Decision, Policy, PolicyConfig, Verdict
from services.planner.core.targets import Targets
from services.planner.core.watch import Watch, WatchConfig
from services.router.replay.trace import TraceRequest

KEY = GroupKey("m", b"n" * 32, "nixl")
REPORT_S = 0.1
"""Least time between two load reports of a worker; a real one keeps the same."""


@dataclass(frozen=True, slots=True)
class Planning:
    """How the planner is set."""

    targets: Targets
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    interval_s: float = 1.0


@dataclass(slots=True)
class Outcome:
    """What came of a run."""

    lives: list[Life]
    moves: int = 0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    """All but steady ones, with their times."""
    prefillers: list[tuple[float, int]] = field(default_factory=list)
    """Size of the prefill pool, from each time on."""


class Cluster:
    """Workers in simulated time. `planning` None: roles stay as they are."""

    def __init__(
        self, roles: Sequence[Role], hardware: Hardware, planning: Planning | None = None
    ) -> None:
        self.workers = [Worker(hardware, role) for role in roles]
        self.planning = planning
        self.outcome = Outcome([])
        self._hardware = hardware
        self._due: list[tuple[float, int]] = []
        self._next = [inf] * len(self.workers)
        self._told = [-inf] * len(self.workers)
        self._sequence = [0] * len(self.workers)
        if planning is not None:
            self.watch = Watch(planning.watch)
            self.policy = Policy(planning.policy, planning.targets)
            for i, role in enumerate(roles):
                self.watch.record(_info(i, role), 0.0)
                self.watch.heard(f"w{i}", i + 1, 0.0)

    def run(self, requests: Sequence[TraceRequest]) -> Outcome:
        """Serves all of them and returns what became of each."""
        arrivals = deque_of(requests)
        tick = inf if self.planning is None else self.planning.interval_s
        self._note_pools(0.0)
        left = len(requests)
        while left:
            while self._due and self._due[0][0] != self._next[self._due[0][1]]:
                heapq.heappop(self._due)
            engine = self._due[0][0] if self._due else inf
            arrival = arrivals[-1].arrival_s if arrivals else inf
            now = min(engine, arrival, tick)
            if engine == now:
                _, i = heapq.heappop(self._due)
                left -= self._advance(i, now)
            elif arrival == now:
                self._arrive(arrivals.pop(), now)
            else:
                self._plan(now)
                assert self.planning is not None
                tick = now + self.planning.interval_s
        return self.outcome

    # Requests.

    def _arrive(self, request: TraceRequest, now: float) -> None:
        life = Life(request, now)
        self.outcome.lives.append(life)
        pool = [i for i, w in enumerate(self.workers) if w.role is Role.PREFILL]
        split = bool(pool)
        attempt = AttemptId(f"a{request.number}{'p' if split else ''}")
        job = Job(attempt, life, prefill_only=split, transfer=False)
        self._submit(self._soonest(pool or list(range(len(self.workers))), request), job, now)

    def _soonest(self, pool: Sequence[int], request: TraceRequest) -> int:
        def tokens(i: int) -> float:
            worker = self.workers[i]
            # A running decode counts as so many tokens that it slows a prefill by.
            crowd = 16 * len(worker.batch)
            return worker.pending_tokens + request.input_tokens - worker.hits(request) + crowd

        return min(pool, key=lambda i: (tokens(i), i))

    def _hand_on(self, leg: Job, now: float) -> None:
        request, h = leg.life.request, self._hardware
        pool = [i for i, w in enumerate(self.workers) if w.role is not Role.PREFILL]
        target = min(pool, key=lambda i: (self.workers[i].promised, i))
        job = Job(AttemptId(f"a{request.number}d"), leg.life, prefill_only=False, transfer=True)
        job.ready_s = now + h.transfer_s + request.input_tokens / h.transfer_tokens_s
        self._submit(target, job, now)

    def _submit(self, i: int, job: Job, now: float) -> None:
        self._tell(i, self.workers[i].submit(job, now), now)
        self._wake(i)

    def _advance(self, i: int, now: float) -> int:
        worker = self.workers[i]
        self._next[i] = inf
        events = worker.advance(now)
        self._tell(i, events, now)
        legs, worker.prefilled = worker.prefilled, []
        for leg in legs:
            self._hand_on(leg, now)
        self._wake(i)
        ended = sum(type(e).__name__ == "RequestFinished" for e in events)
        return ended - len(legs)

    def _wake(self, i: int) -> None:
        when = self.workers[i].next_time()
        if when != self._next[i]:
            self._next[i] = when
            if when < inf:
                heapq.heappush(self._due, (when, i))

    # The planner.

    def _tell(self, i: int, events: list[Event], now: float) -> None:
        if self.planning is None:
            return
        if now - self._told[i] >= REPORT_S:
            events.append(self.workers[i].report(now))
            self._told[i] = now
        if events:
            self._sequence[i] += 1
            batch = Batch(f"w{i}", i + 1, self._sequence[i], 0, tuple(events))
            self.watch.apply(batch, now)

    def _plan(self, now: float) -> None:
        assert self.planning is not None
        for i in range(len(self.workers)):
            self._tell(i, [], now)
            self.watch.heard(f"w{i}", i + 1, now)
        self.watch.tick(now)
        group = self.watch.measure(KEY, self.planning.targets, now)
        decision = self.policy.decide(group, now)
        if decision.verdict is not Verdict.STEADY:
            self.outcome.decisions.append((now, decision))
        if decision.move is not None:
            info = decision.move.worker.info
            self.workers[info.incarnation - 1].role = decision.move.to
            self.watch.moved(info.id, info.incarnation, decision.move.to, now)
            self.outcome.moves += 1
            self._note_pools(now)

    def _note_pools(self, now: float) -> None:
        size = sum(w.role is Role.PREFILL for w in self.workers)
        self.outcome.prefillers.append((now, size))


def deque_of(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """By arrival, the first one last."""
    return sorted(requests, key=lambda r: (-r.arrival_s, -r.number))


def split(workers: int, prefill: int) -> list[Role]:
    """So many workers, `prefill` of them for prompts; 0: all do both."""
    if not prefill:
        return [Role.BOTH] * workers
    return [Role.PREFILL] * prefill + [Role.DECODE] * (workers - prefill)


def _info(i: int, role: Role) -> WorkerInfo:
    return WorkerInfo(f"w{i}", i + 1, f"w{i}:1", KEY, role)
