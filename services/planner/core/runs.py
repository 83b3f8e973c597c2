"""One worker's present life: its requests, its reports, and what it did in the window."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import inf

from services.common.events.model import LoadReport, RequestAdmitted
from services.common.ids import AttemptId
from services.planner.core.measures import WorkerInfo
from services.planner.core.steps import StepFit
from services.planner.core.windows import BusyTime, Window


@dataclass(slots=True)
class Running:
    """A request that a worker has."""

    admitted: RequestAdmitted
    at: float | None
    """When its admission was heard; None: from a snapshot only."""
    lead_s: float | None = None
    """On a decode leg: seconds from the prefill leg's admission to its own; None: not known, ..."""
    prefilled_s: float = 0.0
    """... and how many of them the prefill leg took."""
    first_at: float | None = None
    fresh: bool = True
    """Admitted after the last load report."""

    @property
    def to_compute(self) -> int:
        """Prompt tokens whose KV comes from nowhere else."""
        return max(0, self.admitted.prompt_tokens - self.admitted.transfer_tokens)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A load report, and when and beside how many decodes it was heard."""

    at: float
    report: LoadReport
    decoding: int


class WorkerRuns:
    """What one life of a worker does."""

    def __init__(self, window_s: float) -> None:
        self.requests: dict[AttemptId, Running] = {}
        self.computed = Window(window_s)
        """Prompt tokens that it computed, at the end of each prefill."""
        self.hits = Window(window_s)
        """Prompt tokens that its own cache saved."""
        self.step_s = Window(window_s)
        """Seconds in which steps ran that decoded, ..."""
        self.steps = Window(window_s)
        """... their number, ..."""
        self.tokens = Window(window_s)
        """... and the tokens that they produced."""
        self.prefilling = BusyTime(window_s)
        self._waiting: dict[AttemptId, Running] = {}
        self._marks: dict[int, _Mark] = {}
        self._pure = True
        self._computed_at = 0.0

    # What it tells.

    def admit(self, running: Running, now: float) -> None:
        """It took a request."""
        self.requests[running.admitted.attempt_id] = running
        self._waiting[running.admitted.attempt_id] = running
        self._note_queue(now)

    def first_token(self, running: Running, cached: int, transferred: int, now: float) -> int:
        """A prefill is over; returns the tokens that it computed."""
        self.decodes(running, now)
        computed = max(0, running.admitted.prompt_tokens - cached)
        if running.at is not None:
            self.computed.add(now, computed)
            self._computed_at = now
        self.hits.add(now, max(0, cached - transferred))
        if computed > 1:
            # A step that computes prompts tells nothing of how long decoding takes.
            self._pure = False
        return computed

    def decodes(self, running: Running, now: float) -> None:
        """A request's prefill is over."""
        running.first_at = now
        self._waiting.pop(running.admitted.attempt_id, None)
        self._note_queue(now)

    def finish(self, attempt_id: AttemptId, now: float) -> Running | None:
        """A request left it; None if it isn't known."""
        running = self.requests.pop(attempt_id, None)
        self._waiting.pop(attempt_id, None)
        self._note_queue(now)
        return running

    def report(self, report: LoadReport, fit: StepFit | None, now: float) -> None:
        """How busy it says it is; steps that only decoded go to `fit`."""
        mark = self._marks.get(report.dp_rank)
        pure = self._pure and not report.pending_prefill_tokens
        if mark is not None and mark.decoding and mark.report.running_requests and now > mark.at:
            steps = report.steps - mark.report.steps
            if steps > 0:
                self.step_s.add(now, now - mark.at, mark.at)
                self.steps.add(now, steps, mark.at)
                self.tokens.add(now, steps * mark.decoding, mark.at)
                if pure and not mark.report.pending_prefill_tokens and fit is not None:
                    fit.add(mark.decoding, (now - mark.at) / steps)
        self._pure = True
        decoding = sum(r.admitted.dp_rank == report.dp_rank for r in self.decoding())
        self._marks[report.dp_rank] = _Mark(now, report, decoding)
        for running in self.requests.values():
            running.fresh = False

    def interrupted(self) -> None:
        """What was heard last says nothing of the time until now (a gap in the stream)."""
        self._marks.clear()

    def prune(self, now: float) -> None:
        """Forgets what is older than the window."""
        for window in (self.computed, self.hits, self.step_s, self.steps, self.tokens):
            window.prune(now)

    # Questions.

    def waiting(self) -> Collection[Running]:
        """Requests without a first token."""
        return self._waiting.values()

    def decoding(self) -> Iterator[Running]:
        """Requests that produce tokens."""
        return (
            r
            for r in self.requests.values()
            if r.first_at is not None and not r.admitted.prefill_only
        )

    def queued_tokens(self, uncached: float) -> float:
        """Prompt tokens still to be computed, when `uncached` is the usual share of them."""
        queue = self.waiting()
        mine = sum(r.to_compute for r in queue) * uncached
        if not self._marks:
            return mine
        # Both are upper bounds: ours ignores progress inside a prompt, the engine's its cache.
        told = sum(m.report.pending_prefill_tokens for m in self._marks.values())
        return min(mine, told + sum(r.to_compute for r in queue if r.fresh) * uncached)

    def prefill_s(self, now: float) -> float:
        """Busy seconds in which `computed` was; a prompt that has not ended counts not yet."""
        return self.prefilling.seconds(now, self._computed_at)

    def batch_mean(self) -> float:
        """Decodes beside which a step ran, over the window; 0: none ran."""
        steps = self.steps.total()
        return self.tokens.total() / steps if steps else 0.0

    def kv_blocks(self) -> tuple[int, int]:
        """Blocks in use by requests, and in all, as it told last."""
        reports = [m.report for m in self._marks.values()]
        return sum(r.used_blocks for r in reports), sum(r.total_blocks for r in reports)

    def step_mean_s(self, since: float) -> float | None:
        """Mean seconds of its steps that decoded, from `since` on; None: too few of them."""
        steps = self.steps.total(since)
        return self.step_s.total(since) / steps if steps >= FEWEST_STEPS else None

    def _note_queue(self, now: float) -> None:
        self.prefilling.set(any(r.to_compute > 1 for r in self.waiting()), now)

    def check_invariants(self) -> None:
        """Raises AssertionError when figures contradict each other."""
        for window in (self.computed, self.hits, self.step_s, self.steps, self.tokens):
            window.check_invariants()
        assert len(self.step_s) == len(self.steps) == len(self.tokens)
        assert self._waiting == {a: r for a, r in self.requests.items() if r.first_at is None}
        for attempt_id, running in self.requests.items():
            assert running.admitted.attempt_id == attempt_id
            assert running.at is None or running.first_at is None or running.first_at >= running.at


FEWEST_STEPS = 4
"""Steps of which a mean is taken."""


@dataclass(slots=True)
class Worker:
    """A worker: what its record says, and its present life."""

    info: WorkerInfo
    runs: WorkerRuns
    incarnation: int
    heard_at: float = -inf
    recorded: bool = True
