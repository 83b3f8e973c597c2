"""The planner at work: once an interval it measures, decides for each group, and performs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.errors import ForebayError
from services.common.telemetry.logging import get_logger
from services.planner.adapters.metrics import PlannerMetrics
from services.planner.core.measures import GroupKey, GroupMeasures
from services.planner.core.policy import Decision, Move, Policy, Verdict
from services.planner.core.watch import Watch
from services.planner.ports import Clock, SetRole

log = get_logger(__name__)


class Candidate(Protocol):
    """Whether this planner is the active one; Election."""

    @property
    def active(self) -> bool:
        """Whether it believes so."""

    @property
    def left_s(self) -> float:
        """For how long it may, in seconds."""

    async def confirmed(self) -> bool:
        """Whether it is so, asked anew."""


class Planner:
    """Loop's thread only."""

    def __init__(
        self,
        watch: Watch,
        policy: Policy,
        candidate: Candidate,
        set_role: SetRole,
        metrics: PlannerMetrics,
        clock: Clock,
        *,
        models: Sequence[str] = (),
        dry_run: bool = False,
        set_role_timeout_s: float = 5.0,
        on_gone: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        """`models`: only these; empty: all. `on_gone` is told of workers that are forgotten."""
        self._watch = watch
        self._policy = policy
        self._candidate = candidate
        self._set_role = set_role
        self._metrics = metrics
        self._clock = clock
        self._models = frozenset(models)
        self._dry_run = dry_run
        self._timeout_s = set_role_timeout_s
        self._on_gone = on_gone
        self._was_active = False
        self._last: dict[GroupKey, Verdict] = {}

    async def round(self) -> None:
        """One interval: every group is measured and decided on; the active planner acts."""
        now = self._clock()
        for worker_id in self._watch.tick(now):
            log.info("worker gone", worker=worker_id)
            self._on_gone(worker_id)
        active = self._candidate.active
        if active and not self._was_active:
            self._policy.forget_streaks()
        self._was_active = active
        seen: list[tuple[GroupMeasures, Decision]] = []
        groups = [k for k in self._watch.groups() if not self._models or k.model in self._models]
        for key in groups:
            group = self._watch.measure(key, self._policy.targets, now)
            seen.append((group, self._policy.decide(group, now)))
        self._last = {k: v for k, v in self._last.items() if k in groups}
        self._metrics.groups(seen)
        if not active:
            return
        for group, decision in seen:
            outcome = decision.verdict.value
            if decision.move is not None:
                outcome = await self._perform(decision, decision.move)
            self._metrics.decided(group.key.model, outcome)
            self._log(decision, outcome)

    async def _perform(self, decision: Decision, move: Move) -> str:
        """Does what was decided; a word for what came of it."""
        worker = move.worker.info
        who = {"worker": worker.id, "before": worker.role, "after": move.to}
        if self._dry_run:
            return "dry_run"
        if not await self._candidate.confirmed():
            log.warning("not moved: another planner is active now, or etcd is away", **who)
            return "lost"
        try:
            # Nothing is done any more when another may be active already.
            timeout_s = min(self._timeout_s, self._candidate.left_s)
            before = await self._set_role(worker.address, move.to, timeout_s)
        except ForebayError as exc:
            self._policy.refused(worker.id, self._clock())
            log.warning("worker not moved", **who, why=exc.message, reason=exc.reason)
            return "failed"
        self._watch.moved(worker.id, worker.incarnation, move.to, self._clock())
        self._metrics.moved(decision.key.model, before, move.to)
        return "moved"

    def _log(self, decision: Decision, outcome: str) -> None:
        changed = self._last.get(decision.key) is not decision.verdict
        self._last[decision.key] = decision.verdict
        say = log.info if changed or decision.move is not None else log.debug
        say(
            "decision",
            model=decision.key.model,
            verdict=outcome,
            why=decision.reason,
            **{name: round(value, 4) for name, value in decision.figures.items()},
        )
