"""Health in the form that operators of Dynamo know, and plain liveness and readiness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance as this gateway sees it. `component` is worker or router."""

    component: str
    id: str
    address: str
    connected: bool
    model: str = ""
    incarnation: int = 0
    draining: bool = False
    in_flight: int = 0


def health(
    instances: Iterable[InstanceView], endpoints: Iterable[str]
) -> tuple[int, dict[str, Any]]:
    """Status and body of /health: healthy while some worker can be reached."""
    rows = []
    healthy = False
    for i in instances:
        healthy |= i.component == "worker" and i.connected and not i.draining
        row: dict[str, Any] = {
            "component": i.component,
            "id": i.id,
            "endpoint": i.address,
            "connected": i.connected,
        }
        if i.component == "worker":
            row |= {
                "model": i.model,
                "incarnation": f"{i.incarnation:016x}",
                "draining": i.draining,
                "in_flight": i.in_flight,
            }
        rows.append(row)
    body = {
        "status": "healthy" if healthy else "unhealthy",
        "endpoints": sorted(endpoints),
        "instances": rows,
    }
    return (200 if healthy else 503), body
