"""The replay: lets simulated time pass between requests, workers, their streams, and routers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from services.common.events.model import (
    Batch,
    Event,
    RequestFinished,
    RequestFirstToken,
    Snapshot,
)
from services.common.ids import AttemptId
from services.router.core.answers import Query, Refusal
from services.router.core.nodes import NodeInfo
from services.router.core.placement import CoreConfig, RouterCore
from services.router.core.workers import WorkerInfo
from services.router.replay.links import HEARTBEAT_S, Link
from services.router.replay.model import WorkerModel
from services.router.replay.trace import TraceRequest

_MODEL = "replayed"
_SNAPSHOT_S = 0.005
"""How long a snapshot takes, beside the lag of the stream."""


class ReplayError(Exception):
    """The replay can't go on."""


@dataclass(frozen=True, slots=True)
class StreamFaults:
    """What befalls the workers' event streams."""

    lag_s: float = 0.0
    """How late a router hears what a worker tells."""
    drop: float = 0.0
    """Share of envelopes that never arrive, each router's for itself."""


@dataclass(slots=True)
class Served:
    """What became of one request. Times are seconds of the replay's clock."""

    request: TraceRequest
    arrival_s: float
    worker: int
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0


class Placer(Protocol):
    """Decides, and is told what workers tell."""

    decision_s: float
    """Time that decisions took, all together."""

    def place(self, request: TraceRequest, attempt_id: AttemptId, now: float) -> int:
        """Index of the worker that gets the request."""

    def tell(self, worker: int, events: Sequence[Event], now: float) -> None:
        """A worker's next envelope."""

    def next_time(self) -> float:
        """When it has something to do by itself; infinity if never."""

    def advance(self, now: float) -> None:
        """Does what is due."""


class CorePlacer:
    """`replicas` router cores, unchanged, each fed through its own links; requests pick one by lot.

    `clock` (seconds) times decisions: durations are summed in `decision_s`.
    """

    def __init__(
        self,
        models: Sequence[WorkerModel],
        config: CoreConfig,
        *,
        capacity_blocks: int,
        replicas: int = 1,
        faults: StreamFaults = StreamFaults(),
        seed: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._models = models
        self._faults = faults
        self._clock = clock
        self._dice = Random(seed)
        self._cores = [RouterCore(config, Random(seed + 1 + r)) for r in range(replicas)]
        self._names = [f"worker-{i:04d}" for i in range(len(models))]
        self._numbers = {name: i for i, name in enumerate(self._names)}
        # One stream for each worker, then one for each worker's tiers, if it has any.
        self._nodes = {
            i: n for n, i in enumerate((i for i, m in enumerate(models) if m.tiers), len(models))
        }
        self._names += [f"kvbm-{i:04d}" for i in self._nodes]
        self._links = [
            [
                Link(core if n < len(models) else core.nodes, name)
                for n, name in enumerate(self._names)
            ]
            for core in self._cores
        ]
        self._sequence = [0] * len(self._names)
        self._due: list[tuple[float, int, int, int, Batch | None, bool]] = []
        self._order = 0
        self._ticked = [0.0] * replicas
        self.decision_s = 0.0
        for core, links in zip(self._cores, self._links, strict=True):
            for i, model in enumerate(models):
                name, size = self._names[i], model.block_tokens
                info = WorkerInfo(name, 1, name, _MODEL, size, total_blocks=capacity_blocks)
                if model.tiers is not None:
                    node = self._names[self._nodes[i]]
                    core.nodes.record(NodeInfo(node, 1, node), 0.0)
                    info = replace(info, kvbm=node, namespace=model.tiers.namespace)
                core.record(info, 0.0)
            for n, name in enumerate(self._names):
                links[n].arrives(Batch(name, 1, 0, 0), 0.0)
                links[n].take(self._snapshot(n, 0.0), 0.0)
            core.synced()

    @property
    def cores(self) -> Sequence[RouterCore]:
        """The routers, to look into."""
        return self._cores

    def place(self, request: TraceRequest, attempt_id: AttemptId, now: float) -> int:
        """Asks one of the routers. Raises ReplayError if it refuses."""
        which = self._dice.randrange(len(self._cores)) if len(self._cores) > 1 else 0
        core = self._cores[which]
        for i, link in enumerate(self._links[which]):
            link.catch_up(now)
            self._fetch(which, i, now)
        if now - self._ticked[which] >= HEARTBEAT_S:
            self._ticked[which] = now
            core.tick(now)
        size = self._models[0].block_tokens
        query = Query(_MODEL, request.input_tokens, request.blocks, size)
        started = self._clock()
        placement = core.place(query, attempt_id, now)
        self.decision_s += self._clock() - started
        if isinstance(placement, Refusal):
            raise ReplayError(f"request {request.number} was refused: {placement.message}")
        return self._numbers[placement.holder.id]

    def tell(self, worker: int, events: Sequence[Event], now: float) -> None:
        """Sends an envelope to every router, and one of what changed below the worker."""
        self._send(worker, events, now)
        tiers = self._models[worker].tiers
        if tiers is not None and (news := tiers.take_news()):
            self._send(self._nodes[worker], news, now)

    def _send(self, stream: int, events: Sequence[Event], now: float) -> None:
        self._sequence[stream] += 1
        batch = Batch(
            self._names[stream], 1, self._sequence[stream], round(now * 1e6), tuple(events)
        )
        for which, links in enumerate(self._links):
            lost = self._faults.drop > 0 and self._dice.random() < self._faults.drop
            if self._faults.lag_s > 0:
                self._later(now + self._faults.lag_s, which, stream, batch, lost)
            else:
                self._deliver(links[stream], which, stream, batch, now, lost)

    def _snapshot(self, stream: int, now: float) -> Snapshot:
        name, sequence = self._names[stream], self._sequence[stream]
        if stream < len(self._models):
            return self._models[stream].snapshot(name, sequence, now)
        worker = next(i for i, n in self._nodes.items() if n == stream)
        tiers = self._models[worker].tiers
        assert tiers is not None
        return tiers.snapshot(name, sequence)

    def settle(self, now: float) -> None:
        """Lets heartbeats come and what they call for, until nothing is under way."""
        for which, links in enumerate(self._links):
            for i, link in enumerate(links):
                link.catch_up(now)
                self._fetch(which, i, now)
        while (when := self.next_time()) < float("inf"):
            self.advance(when)

    def next_time(self) -> float:
        """When the next envelope or snapshot arrives."""
        return self._due[0][0] if self._due else float("inf")

    def advance(self, now: float) -> None:
        """Delivers what has arrived."""
        while self._due and self._due[0][0] <= now:
            when, _, which, stream, batch, lost = heapq.heappop(self._due)
            link = self._links[which][stream]
            if batch is not None:
                self._deliver(link, which, stream, batch, when, lost)
                continue
            link.take(self._snapshot(stream, when), when)
            self._fetch(which, stream, when)

    def _deliver(
        self, link: Link, which: int, stream: int, batch: Batch, now: float, lost: bool
    ) -> None:
        if lost:
            link.lost(batch)
            return
        link.arrives(batch, now)
        self._fetch(which, stream, now)

    def _fetch(self, which: int, stream: int, now: float) -> None:
        link = self._links[which][stream]
        if link.wants_snapshot and not link.fetching:
            link.fetching = True
            self._later(now + _SNAPSHOT_S, which, stream, None, False)

    def _later(self, when: float, which: int, stream: int, batch: Batch | None, lost: bool) -> None:
        self._order += 1
        heapq.heappush(self._due, (when, self._order, which, stream, batch, lost))


@dataclass(slots=True)
class Replay:
    """One run: requests, workers, and who places."""

    requests: Sequence[TraceRequest]
    models: Sequence[WorkerModel]
    placer: Placer
    on_progress: Callable[[int], None] | None = None
    """Told now and then how many requests have been placed."""
    served: list[Served] = field(default_factory=list)

    def run(self) -> list[Served]:
        """Places all requests and lets all end; returns what became of each, by number."""
        served: dict[AttemptId, Served] = {}
        children: dict[int, list[TraceRequest]] = {}
        arrivals: list[tuple[float, int]] = []
        for request in self.requests:
            if request.parent is None:
                arrivals.append((request.arrival_s, request.number))
            else:
                children.setdefault(request.parent, []).append(request)
        heapq.heapify(arrivals)
        due = [(model.next_time(), i) for i, model in enumerate(self.models)]
        heapq.heapify(due)
        next_times = [when for when, _ in sorted(due, key=lambda d: d[1])]
        never = float("inf")

        def wake(worker: int) -> None:
            when = self.models[worker].next_time()
            if when != next_times[worker]:
                next_times[worker] = when
                if when < never:
                    heapq.heappush(due, (when, worker))

        def told(worker: int, events: Sequence[Event], now: float) -> None:
            for event in events:
                if isinstance(event, RequestFirstToken):
                    one = served[event.attempt_id]
                    one.first_token_s, one.cached_tokens = now, event.cached_tokens
                elif isinstance(event, RequestFinished):
                    one = served[event.attempt_id]
                    one.finished_s = now
                    for child in children.get(one.request.number, ()):
                        heapq.heappush(arrivals, (now + child.think_s, child.number))
            self.placer.tell(worker, events, now)

        while True:
            while due and due[0][0] != next_times[due[0][1]]:
                heapq.heappop(due)
            engine = due[0][0] if due else never
            router = self.placer.next_time()
            arrival = arrivals[0][0] if arrivals else never
            now = min(engine, router, arrival)
            if now == never:
                break
            # What ends at the moment of an arrival has ended before it.
            if engine == now:
                worker = heapq.heappop(due)[1]
                next_times[worker] = never
                if events := self.models[worker].advance(now):
                    told(worker, events, now)
                wake(worker)
            elif router == now:
                self.placer.advance(now)
            else:
                _, number = heapq.heappop(arrivals)
                request = self.requests[number]
                attempt = AttemptId(f"a{number}")
                worker = self.placer.place(request, attempt, now)
                served[attempt] = Served(request, now, worker)
                told(worker, self.models[worker].submit(request, attempt, now), now)
                wake(worker)
                if self.on_progress is not None and len(served) % 256 == 0:
                    self.on_progress(len(served))
        self.served = sorted(served.values(), key=lambda s: s.request.number)
        return self.served
