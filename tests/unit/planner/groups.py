"""Groups of workers as a policy sees them, built from a few figures."""

from __future__ import annotations

from services.common.cards import Role
from services.planner.core.measures import (
    DecodeLoad,
    GroupKey,
    GroupMeasures,
    PrefillLoad,
    WorkerInfo,
    WorkerView,
)
from services.planner.core.steps import StepTime

KEY = GroupKey("m", b"n", "nixl")
RATE = 10_000.0
STEP = StepTime(0.01, 0.0002)


def worker(
    name: str, role: Role, *, movable: bool = True, tokens: int = 0, hits: float = 0
) -> WorkerView:
    info = WorkerInfo(name, 1, f"{name}:1", KEY, role)
    return WorkerView(info, movable, active_tokens=tokens, hit_tokens=hits)


def workers(prefill: int, decode: int, both: int = 0) -> tuple[WorkerView, ...]:
    return (
        *(worker(f"p{i}", Role.PREFILL) for i in range(prefill)),
        *(worker(f"d{i}", Role.DECODE) for i in range(decode)),
        *(worker(f"b{i}", Role.BOTH) for i in range(both)),
    )


def group(
    views: tuple[WorkerView, ...],
    *,
    demand: float = 0.0,
    pending: float = 0.0,
    batch: int = 0,
    spread: float = 1.0,
    changed_at: float | None = None,
) -> GroupMeasures:
    """Prompts of 2,000 tokens; a step of 10 ms and 0.2 ms for each sequence."""
    return GroupMeasures(
        KEY,
        views,
        prefill=PrefillLoad(RATE, demand, pending, 2_000.0, 4_000.0, 0.3),
        decode=DecodeLoad(STEP, batch, 0.0, spread),
        changed_at=changed_at,
    )
