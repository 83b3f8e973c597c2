"""What a look-up found, as it travels with a request: from the worker's shell to the connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.worker.connector.model import LeasedBlock, Slot

FIELD = "forebay"
"""Name under `kv_transfer_params`."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that kvbm keeps for one request. Times are CLOCK_MONOTONIC of this machine."""

    id: int
    first: int
    """Number of the first leased block in the prompt."""
    ready: tuple[LeasedBlock, ...]
    """Blocks in G2, contiguous from `first` on."""
    promoting: int
    """Blocks after those that are on their way into G2."""
    until_s: float
    """When waiting for them ends."""
    expires_s: float


@dataclass(frozen=True, slots=True)
class Terms:
    """What is known of a request's blocks in the tiers, by asking kvbm or by passing it over."""

    assumed: int = 0
    """Leading blocks that the engine was believed to hold; they were not asked for."""
    stored: int = 0
    """Leading blocks that are in some tier: they need no new copy."""
    looked_s: float = 0.0
    """When kvbm was asked; 0: it was not."""
    recompute_block_s: float = 0.0
    tenant: str = ""
    lease: Lease | None = None


def to_params(terms: Terms) -> dict[str, Any]:
    """A form of plain values, for `kv_transfer_params`."""
    lease = terms.lease
    return {
        FIELD: {
            "assumed": terms.assumed,
            "stored": terms.stored,
            "looked_s": terms.looked_s,
            "recompute_block_s": terms.recompute_block_s,
            "tenant": terms.tenant,
            "lease": None
            if lease is None
            else {
                "id": lease.id,
                "first": lease.first,
                "ready": [
                    [b.slot.index, b.slot.generation, list(b.checksums)] for b in lease.ready
                ],
                "promoting": lease.promoting,
                "until_s": lease.until_s,
                "expires_s": lease.expires_s,
            },
        }
    }


def from_params(params: Mapping[str, Any] | None) -> Terms | None:
    """Back from plain values; None when the request has none. Raises KeyError and the like."""
    plain = (params or {}).get(FIELD)
    if plain is None:
        return None
    lease = plain["lease"]
    return Terms(
        assumed=plain["assumed"],
        stored=plain["stored"],
        looked_s=plain["looked_s"],
        recompute_block_s=plain["recompute_block_s"],
        tenant=plain["tenant"],
        lease=None
        if lease is None
        else Lease(
            id=lease["id"],
            first=lease["first"],
            ready=tuple(
                LeasedBlock(Slot(index, generation), tuple(checksums))
                for index, generation, checksums in lease["ready"]
            ),
            promoting=lease["promoting"],
            until_s=lease["until_s"],
            expires_s=lease["expires_s"],
        ),
    )
