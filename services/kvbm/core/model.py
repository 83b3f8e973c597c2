"""Words of the daemon's core: slots, blocks, what a call decided."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from services.common.arena import NO_KEY, SlotHeader
from services.common.events.model import Tier

Owner = NewType("Owner", int)
"""An attachment that may write into slots granted to it."""
DAEMON = Owner(0)
"""The daemon itself, as the owner of slots that it fills."""
LeaseId = NewType("LeaseId", int)


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A slot in one of its uses."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What a block is, wherever it lies."""

    key: bytes
    """Full hash, 32 bytes."""
    parent: bytes = NO_KEY
    """Hash of the block before it; zeros for a prompt's first."""
    position: int = 0
    """Number in its prompt."""
    tenant: int = 0
    """`tenant_id` of whom it is charged to; 0: nobody."""
    checksums: tuple[int, ...] = ()
    """XXH3-64 of each rank's shard."""
    created_ms: int = 0
    expires_ms: int = 0
    """Unix time after which it is void; 0: never."""


class CommitResult(StrEnum):
    """What became of one committed slot; meanings as in kvbm.proto."""

    STORED = "stored"
    PENDING = "pending"
    DUPLICATE = "duplicate"
    FENCED = "fenced"
    REFUSED = "refused"
    RETURNED = "returned"


class Adopted(StrEnum):
    """What became of one header found at start."""

    ADOPTED = "adopted"
    EMPTY = "empty"
    DUPLICATE = "duplicate"
    EXPIRED = "expired"
    INCOMPLETE = "incomplete"
    """It was being filled by somebody who is dead."""
    QUARANTINED = "quarantined"
    """It is being filled by somebody who is alive."""
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class HeaderWrite:
    """A slot header to write."""

    tier: Tier
    slot: int
    header: SlotHeader


@dataclass(slots=True)
class Changes:
    """What calls have decided since the shell last asked. Headers go first, in order."""

    headers: list[HeaderWrite] = field(default_factory=list)
    stored: list[tuple[Tier, bytes]] = field(default_factory=list)
    """Blocks that appeared in a tier; keys in full."""
    removed: list[tuple[Tier, bytes]] = field(default_factory=list)
    """Blocks whose last copy in a tier is gone."""


@dataclass(frozen=True, slots=True)
class ReadyBlock:
    """A block in G2 that can be copied now."""

    key: bytes
    ref: SlotRef
    checksums: Sequence[int]


def tenant_id(tenant: str) -> int:
    """A tenant's number in headers and books; 0 for no tenant."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "big") or 1
