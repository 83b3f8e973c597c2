"""Words of the daemon's core: slots, blocks, what a call decided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from services.common.arena import NO_KEY, SlotHeader, SlotState
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
    """What calls have decided since the shell last asked: the sum of it, one entry for each thing.

    Headers go first. Of G3 only FREE ones are told (what a store writes, the store knows): they
    are erasures, and whoever reuses such a slot writes after the erasure. A block that appeared and
    went, or went and came back, between two calls is in neither list.
    """

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


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader's hold on the leading blocks of what it wants that were in G2."""

    id: LeaseId
    ready: tuple[ReadyBlock, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A block under way from one tier to another; ends by `end_copy`, and only once."""

    id: int
    meta: BlockMeta
    source: Tier
    source_slot: SlotRef | None
    """None: G4 has no slots."""
    target: Tier
    target_slot: SlotRef | None


@dataclass(frozen=True, slots=True)
class Selection:
    """Which copies to forget; what is None selects all."""

    tenant: int | None = None
    prefix: bytes | None = None
    """This block and all that follow it, as far as this catalog knows how they hang together."""
    tiers: frozenset[Tier] | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """What was, or would be, forgotten."""

    blocks: Mapping[Tier, int]
    """Copies by tier."""
    leased: int = 0
    """Those of them whose slots come back when their last reader ends."""
    remote: tuple[bytes, ...] = ()
    """Blocks to erase from G4."""
    more: bool = False
    """Some are left: the limit of the call was reached."""


@dataclass(frozen=True, slots=True)
class Expired:
    """What has come to its time."""

    leases: int = 0
    blocks: int = 0
    """Copies in all tiers."""
    pins: int = 0
    more: bool = False
    """Some are left: the limit of one call was reached."""


@dataclass(frozen=True, slots=True)
class TierCounts:
    """Slots of a tier by their use. Of G4 only `blocks` is known."""

    blocks: int = 0
    free: int = 0
    filling: int = 0
    quarantined: int = 0
    leaving: int = 0
    """Slots of forgotten blocks that somebody still reads."""
    leased: int = 0
    """Slots (blocks or leaving) that leases or copies read."""

    @property
    def slots(self) -> int:
        """All slots."""
        return self.blocks + self.free + self.filling + self.quarantined + self.leaving


@dataclass(frozen=True, slots=True)
class Counts:
    """Figures of a catalog."""

    tiers: Mapping[Tier, TierCounts]
    leases: int
    pins: int
    granted: int
    """G2 slots that engines hold for filling."""
    copies: int
    """Copies under way, those that wait for a fence among them."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block, for people."""

    meta: BlockMeta
    """As in its best tier."""
    tiers: tuple[Tier, ...]
    hits: int
    """Times it was found."""
    used_ms: int
    """Unix time at which it was last found, or stored."""
    leases: int
    """Leases and copies that read it in G2."""
    pins: int


class PinLimit(Exception):
    """Pins would keep more of a tier than they may."""


def sealed_header(meta: BlockMeta, generation: int, payload_bytes: int) -> SlotHeader:
    """The header of a block in a slot."""
    return SlotHeader(
        SlotState.SEALED,
        generation,
        meta.key,
        meta.parent,
        meta.position,
        meta.tenant,
        0,
        meta.created_ms,
        meta.expires_ms,
        payload_bytes,
        tuple(meta.checksums),
    )


def meta_of(header: SlotHeader) -> BlockMeta:
    """What a sealed header says of its block."""
    return BlockMeta(
        header.key,
        header.parent,
        header.position,
        header.tenant,
        header.checksums,
        header.created_ms,
        header.expires_ms,
    )


def tenant_id(tenant: str) -> int:
    """A tenant's number in headers and books; 0 for no tenant."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "big") or 1
