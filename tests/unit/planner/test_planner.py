"""The planner at work: it acts when it is the active one, once for each decision."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from services.common.cards import Role
from services.common.errors import FailedPrecondition, ForebayError
from services.common.events.model import Batch, RequestAdmitted, RequestFirstToken
from services.common.ids import AttemptId
from services.planner.adapters.metrics import PlannerMetrics
from services.planner.core.measures import GroupKey, WorkerInfo
from services.planner.core.policy import Policy, PolicyConfig
from services.planner.core.targets import Targets
from services.planner.core.watch import Watch, WatchConfig
from services.planner.planner import Planner

KEY = GroupKey("m", b"n", "nixl")


class Stage:
    """A planner over one prefill worker that is drowned in prompts, and two idle decode workers."""

    def __init__(self, **options: object) -> None:
        self.now = 0.0
        self.active = True
        self.confirms = True
        self.left_s = 5.0
        self.calls: list[tuple[str, Role, float]] = []
        self.error: ForebayError | None = None
        self.watch = Watch(WatchConfig())
        self.policy = Policy(PolicyConfig(hold=1, gap_s=0), Targets(1.0, 0.05))
        self.registry = CollectorRegistry()
        metrics = PlannerMetrics(self.registry)
        self.planner = Planner(
            self.watch, self.policy, self, self.set_role, metrics, lambda: self.now, **options
        )
        for name, role in (("p", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)):
            self.watch.record(WorkerInfo(name, 1, f"{name}:1", KEY, role), 0.0)
            self.watch.heard(name, 1, 0.0)
        self.tell(RequestAdmitted(AttemptId("a"), 10_000, 1, prefill_only=True))
        self.now = 1.0
        self.tell(RequestFirstToken(AttemptId("a"), 0))
        for i in range(10):
            self.tell(RequestAdmitted(AttemptId(f"b{i}"), 10_000, 1, prefill_only=True))

    def tell(self, event: RequestAdmitted | RequestFirstToken) -> None:
        self.watch.apply(Batch("p", 1, 1, 0, (event,)), self.now)

    async def confirmed(self) -> bool:
        return self.confirms

    async def set_role(self, address: str, role: Role, timeout_s: float) -> Role:
        self.calls.append((address, role, timeout_s))
        if self.error is not None:
            raise self.error
        return Role.DECODE

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"forebay_planner_{name}", labels)


async def test_the_active_one_moves_a_worker_and_tells() -> None:
    stage = Stage()
    await stage.planner.round()
    assert stage.calls == [("d0:1", Role.PREFILL, 5.0)]
    assert stage.value("moves_total", model="m", **{"from": "decode", "to": "prefill"}) == 1
    assert stage.value("decisions_total", model="m", verdict="moved") == 1
    assert stage.value("workers", model="m", role="decode") == 2
    # It counts as moved before its record says so, and the last decode worker stays.
    await stage.planner.round()
    assert len(stage.calls) == 1
    assert stage.value("workers", model="m", role="prefill") == 2
    assert stage.value("decisions_total", model="m", verdict="helpless") == 1
    assert stage.value("predicted_seconds", model="m", of="prefill") == pytest.approx(5.0)


async def test_one_that_stands_by_measures_and_decides_nothing() -> None:
    stage = Stage()
    stage.active = False
    await stage.planner.round()
    assert not stage.calls
    assert stage.value("pressure", model="m", side="prefill") == 100.0
    assert stage.value("decisions_total", model="m", verdict="moved") is None


async def test_one_that_lost_its_claim_meanwhile_does_not_act() -> None:
    stage = Stage()
    stage.confirms = False
    await stage.planner.round()
    assert not stage.calls
    assert stage.value("decisions_total", model="m", verdict="lost") == 1


async def test_a_call_ends_with_the_claim() -> None:
    stage = Stage(set_role_timeout_s=5.0)
    stage.left_s = 0.5
    await stage.planner.round()
    assert stage.calls == [("d0:1", Role.PREFILL, 0.5)]


async def test_a_dry_run_moves_nobody() -> None:
    stage = Stage(dry_run=True)
    for _ in range(5):
        await stage.planner.round()
    assert not stage.calls
    assert stage.value("decisions_total", model="m", verdict="dry_run") == 5
    assert stage.value("moves_total", model="m", **{"from": "decode", "to": "prefill"}) is None


async def test_who_refuses_is_left_alone_and_the_next_one_asked() -> None:
    stage = Stage()
    stage.error = FailedPrecondition("it can't", reason="NO_TRANSFER")
    for _ in range(3):
        await stage.planner.round()
    assert [call[0] for call in stage.calls] == ["d0:1", "d1:1"]
    assert stage.value("decisions_total", model="m", verdict="failed") == 2
    assert stage.value("decisions_total", model="m", verdict="unable") == 1


async def test_other_models_are_left_alone() -> None:
    stage = Stage(models=("another",))
    await stage.planner.round()
    assert not stage.calls
    assert stage.value("workers", model="m", role="decode") is None


async def test_pressure_seen_while_standing_by_does_not_count() -> None:
    stage = Stage()
    stage.policy = stage.planner._policy = Policy(PolicyConfig(hold=2, gap_s=0), Targets(1.0, 0.05))
    stage.active = False
    await stage.planner.round()
    stage.active = True
    await stage.planner.round()
    assert not stage.calls
    await stage.planner.round()
    assert len(stage.calls) == 1


async def test_forgotten_workers_are_told_of() -> None:
    gone: list[str] = []
    stage = Stage(on_gone=gone.append)
    stage.watch.record_vanished("d1", 1)
    stage.now = 1000.0
    await stage.planner.round()
    assert gone == ["d1"]
