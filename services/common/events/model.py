"""What workers and kvbm daemons tell routers, as plain values.

Meanings and units as in events.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from services.common.ids import AttemptId, BlockKey


class Tier(IntEnum):
    """Where a KV block lies; the numbers are those of common.proto."""

    G1 = 1
    G2 = 2
    G3 = 3
    G4 = 4
    PEER = 5
    """Host memory of other nodes: in rates only."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks became usable in a tier, in chain order."""

    tier: Tier
    keys: Sequence[BlockKey]
    dp_rank: int = 0
    namespace: bytes = b""
    """Of the blocks, 32 bytes; empty from workers."""


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The last copies of blocks in a tier are gone."""

    tier: Tier
    keys: Sequence[BlockKey]
    dp_rank: int = 0
    namespace: bytes = b""
    """Of the blocks, 32 bytes; empty from workers."""


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """A tier is empty now."""

    tier: Tier
    dp_rank: int = 0
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestAdmitted:
    """The engine took a request; `keys` are its prompt's full blocks."""

    attempt_id: AttemptId
    prompt_tokens: int
    max_new_tokens: int
    keys: Sequence[BlockKey] = ()
    dp_rank: int = 0
    transfer_tokens: int = 0
    """Prompt tokens whose KV is to come from a prefill worker."""
    prefill_only: bool = False
    """It ends with its first token; its KV stays for a decode worker."""


@dataclass(frozen=True, slots=True)
class RequestFirstToken:
    """A request's prefill is over."""

    attempt_id: AttemptId
    cached_tokens: int
    dp_rank: int = 0
    transferred_tokens: int = 0
    """Of the cached ones, those whose KV came from a prefill worker."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """KV came from another worker (`source`); 0 tokens: it did not, and they are computed."""

    attempt_id: AttemptId
    source: str
    tokens: int
    bytes: int
    seconds: float
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request left the engine; exactly one for each admitted."""

    attempt_id: AttemptId
    cached_tokens: int
    output_tokens: int
    aborted: bool = False
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How busy an engine is."""

    running_requests: int = 0
    waiting_requests: int = 0
    pending_prefill_tokens: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    dp_rank: int = 0
    held_transfers: int = 0
    """Prefilled requests whose KV waits to be taken."""


@dataclass(frozen=True, slots=True)
class TierRate:
    """How fast blocks come up: from G2 into the engine, from G3 and G4 into G2. Seconds."""

    tier: Tier
    latency_s: float
    """Before the first block arrives."""
    block_s: float
    """A block; 0: not known."""
    namespace: bytes = b""
    dp_rank: int = 0
    """Always 0: daemons have no ranks."""


@dataclass(frozen=True, slots=True)
class BlocksDigest:
    """What the publisher holds at this point of its stream: a count, and the xor of the keys."""

    tier: Tier
    blocks: int
    xor: int
    dp_rank: int = 0
    namespace: bytes = b""
    """As in BlocksStored."""


Event = (
    BlocksStored
    | BlocksRemoved
    | BlocksCleared
    | RequestAdmitted
    | RequestFirstToken
    | TransferEnded
    | RequestFinished
    | LoadReport
    | TierRate
    | BlocksDigest
)


@dataclass(frozen=True, slots=True)
class Batch:
    """One envelope: `sequence` as in events.proto; no events means a heartbeat."""

    publisher: str
    incarnation: int
    sequence: int
    time_unix_us: int
    events: tuple[Event, ...] = ()
    unknown_events: int = 0
    """Events that were dropped because their kind or tier is not known to this version."""

    @property
    def is_heartbeat(self) -> bool:
        """Whether it only tells the last number, and takes none itself."""
        return not self.events and not self.unknown_events


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request in a snapshot."""

    admitted: RequestAdmitted
    decoding: bool


@dataclass(frozen=True, slots=True)
class TierBlocks:
    """All blocks of one tier, rank and namespace in a snapshot, in no particular order."""

    tier: Tier
    keys: Sequence[BlockKey]
    dp_rank: int = 0
    namespace: bytes = b""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A publisher's state at one sequence of its stream."""

    publisher: str
    incarnation: int
    sequence: int
    blocks: tuple[TierBlocks, ...] = ()
    requests: tuple[RunningRequest, ...] = ()
    load: LoadReport | None = None
    rates: tuple[TierRate, ...] = ()
    """Of a kvbm daemon's tiers."""
    time_unix_us: int = 0
    """When it was taken, by the clock that stamps batches; 0: not told."""
    unknown_parts: int = 0
    """Parts that were dropped because their tier is not known to this version."""
