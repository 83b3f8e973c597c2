"""Workers that serve some tenants only: a label of theirs says which."""

from __future__ import annotations

from collections.abc import Mapping

TENANTS_LABEL = "tenants"
"""Names with + between. A worker without it serves whoever has no workers of its own."""


def tenants_of(labels: Mapping[str, str]) -> frozenset[str]:
    """The tenants that a worker with these labels is reserved for; empty: it is for all."""
    names = (name.strip() for name in labels.get(TENANTS_LABEL, "").split("+"))
    return frozenset(name for name in names if name)
