"""The `engine` worker model of the replay: the simulator's engine (services/worker/engines/sim).

Chunked prefill, continuous batching, preemption, in simulated time; host memory below it, if it
shall have any. Blocks are those of the trace, and full ones alone can be hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.common.events.model import (
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
    TierRate,
)
from services.common.ids import AttemptId, BlockKey
from services.router.replay.run import ReplayError
from services.router.replay.trace import BLOCK_TOKENS, TraceRequest
from services.worker.core.blocks import BlockMirror
from services.worker.engines.sim.core.lower import LowerTier
from services.worker.engines.sim.core.model import SimConfig, SimRequest, SimStep
from services.worker.engines.sim.core.simulator import Simulator
from services.worker.engines.sim.core.timing import TimingProfile

_COALESCE_S = 0.25
"""Steps that only decode are told together up to so long: as often as a worker's heartbeat."""


class HostMemory:
    """Host memory below one engine, and what its daemon would tell of it."""

    namespace = bytes(32)

    def __init__(self, tier: LowerTier) -> None:
        self.tier = tier
        self._blocks = BlockMirror()

    def take_news(self) -> Sequence[Event]:
        """What came and went since the last call."""
        events = self._blocks.apply(self.tier.take_news())
        return [replace(event, tier=Tier.G2, namespace=self.namespace) for event in events]

    def snapshot(self, publisher: str, sequence: int) -> Snapshot:
        """What was told, and what a load takes."""
        held = [key for part in self._blocks.blocks() for key in part.keys]
        rate = TierRate(Tier.G2, self.tier.latency_s, self.tier.block_s, self.namespace)
        blocks = (TierBlocks(Tier.G2, held, namespace=self.namespace),)
        return Snapshot(publisher, 1, sequence, blocks, rates=(rate,))


class EngineWorker:
    """One simulated engine, and what its worker would tell."""

    block_tokens = BLOCK_TOKENS
    first_gap = 1

    def __init__(
        self,
        profile: TimingProfile,
        capacity_blocks: int,
        speed: float = 1.0,
        host: LowerTier | None = None,
    ) -> None:
        config = SimConfig(profile, capacity_blocks, BLOCK_TOKENS, coalesce_s=_COALESCE_S)
        self._sim = Simulator(config, lower=host)
        self.tiers = None if host is None else HostMemory(host)
        self._sim.slow = 1 / speed
        self._blocks = BlockMirror()
        self._running: dict[AttemptId, tuple[RequestAdmitted, bool]] = {}
        self._cached: dict[AttemptId, int] = {}
        self._produced: dict[AttemptId, int] = {}
        self._computed = 0
        self.preempted = 0
        """Requests that lost their blocks and started again."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens computed so far, those of preempted requests each time."""
        return self._computed

    def submit(self, request: TraceRequest, attempt_id: AttemptId, now: float) -> Sequence[Event]:
        """Queues it. Raises ReplayError when it never fits."""
        full = request.input_tokens // BLOCK_TOKENS
        keys = [BlockKey(block) for block in request.blocks[:full]]
        output = max(1, request.output_tokens)
        try:
            self._sim.submit(SimRequest(attempt_id, request.input_tokens, output, keys), now)
        except ValueError as exc:
            raise ReplayError(f"request {request.number} fits no worker: {exc}") from exc
        admitted = RequestAdmitted(attempt_id, request.input_tokens, output, tuple(keys))
        self._running[attempt_id] = admitted, False
        return [admitted, self._report()]

    def next_time(self) -> float:
        """The end of the step that runs."""
        when = self._sim.next_time()
        return float("inf") if when is None else when

    def advance(self, now: float) -> Sequence[Event]:
        """Steps that end by `now`."""
        events: list[Event] = []
        for step in self._sim.advance(now):
            self._computed += step.prefill_tokens
            self.preempted += step.preempted
            events += self._blocks.apply(step.changes)
            events += self._outputs(step)
        if events:
            events.append(self._report())
        return events

    def snapshot(self, publisher: str, sequence: int, now: float) -> Snapshot:
        """Blocks and requests as they were told."""
        return Snapshot(
            publisher,
            1,
            sequence,
            blocks=self._blocks.blocks(),
            requests=tuple(RunningRequest(a, decoding) for a, decoding in self._running.values()),
            load=self._report(),
        )

    def _outputs(self, step: SimStep) -> list[Event]:
        events: list[Event] = []
        for output in step.outputs:
            attempt_id = AttemptId(output.id)
            if output.cached_tokens is not None:
                self._cached[attempt_id] = output.cached_tokens
                self._running[attempt_id] = self._running[attempt_id][0], True
                events.append(RequestFirstToken(attempt_id, output.cached_tokens))
            self._produced[attempt_id] = self._produced.get(attempt_id, 0) + output.tokens
            if output.end is not None:
                del self._running[attempt_id]
                cached = self._cached.pop(attempt_id, 0)
                events.append(RequestFinished(attempt_id, cached, self._produced.pop(attempt_id)))
        return events

    def _report(self) -> LoadReport:
        load = self._sim.load()
        return LoadReport(
            running_requests=load.running,
            waiting_requests=load.waiting,
            pending_prefill_tokens=load.pending_prefill_tokens,
            used_blocks=load.used_blocks,
            total_blocks=self._sim.config.capacity_blocks,
            steps=self._sim.steps,
        )
