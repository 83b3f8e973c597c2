"""The header of a slot: 256 bytes that say what block lies behind them, and prove it.

Equal in memory, on disk and in objects.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import xxhash

MAX_RANKS = 8
HEADER_BYTES = 256
NO_KEY = bytes(32)
_BODY = struct.Struct("<4xQ32s32sIIQQQQQQ8Q")
_STATE = struct.Struct("<I")
_CHECK = struct.Struct("<Q")
_CHECK_AT = _BODY.size
_PADDING = bytes(HEADER_BYTES - _CHECK_AT - _CHECK.size)
_HOLDS = struct.Struct("<IQ32s36xI32xQ")
"""What `is_block` looks at: state, generation, key, number of checksums, payload bytes."""


class CorruptHeader(ValueError):
    """A header is not what a writer of ours left there: torn, damaged or another namespace's."""


def checksum(*parts: memoryview | bytes) -> int:
    """XXH3-64 over the parts, one after the other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


class SlotState(IntEnum):
    """State of a slot as its header tells it."""

    FREE = 0
    FILLING = 1
    SEALED = 2


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot holds. Equal in memory, on disk and in objects."""

    state: SlotState
    generation: int
    """Grows with every use of the slot; a lease of another generation is void."""
    key: bytes = NO_KEY
    """Full block hash, 32 bytes; zeros when the slot holds none."""
    parent: bytes = NO_KEY
    """Hash of the block before it; zeros for a prompt's first."""
    position: int = 0
    """Number of the block in its prompt."""
    tenant: int = 0
    """`tenant_id` of whom its bytes are charged to; 0: nobody."""
    owner: int = 0
    """While FILLING: attachment that may write the payload; 0: the daemon."""
    created_ms: int = 0
    """Unix time of the seal."""
    expires_ms: int = 0
    """Unix time after which it is void; 0: never."""
    payload_bytes: int = 0
    checksums: tuple[int, ...] = ()
    """XXH3-64 of each rank's shard."""

    def pack(self, namespace: bytes) -> bytes:
        """The header's 256 bytes, bound to the namespace."""
        sums = self.checksums + (0,) * (MAX_RANKS - len(self.checksums))
        body = _BODY.pack(
            self.generation,
            self.key,
            self.parent,
            self.position,
            len(self.checksums),
            self.tenant,
            self.owner,
            self.created_ms,
            self.expires_ms,
            self.payload_bytes,
            0,
            *sums,
        )
        raw = _STATE.pack(self.state) + body[4:]
        # The state is part of the check: no flipped bit, nor half a write, makes a slot SEALED.
        return (raw + _CHECK.pack(checksum(namespace, raw))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, raw: bytes | memoryview, namespace: bytes) -> Self:
        """Reads a header. Raises CorruptHeader when anything about it is doubtful."""
        raw = bytes(raw)
        if len(raw) != HEADER_BYTES:
            raise CorruptHeader(f"{len(raw)} bytes instead of {HEADER_BYTES}")
        if not any(raw):
            return cls(SlotState.FREE, 0)
        if not _is_sound(raw, namespace):
            raise CorruptHeader("the header's checksum does not fit")
        (state,) = _STATE.unpack_from(raw)
        generation, key, parent, position, ranks, *rest = _BODY.unpack_from(raw)
        tenant, owner, created_ms, expires_ms, payload_bytes, _, *sums = rest
        if state not in (0, 1, 2) or ranks > MAX_RANKS:
            raise CorruptHeader("the header's values make no sense")
        return cls(
            SlotState(state),
            generation,
            key,
            parent,
            position,
            tenant,
            owner,
            created_ms,
            expires_ms,
            payload_bytes,
            tuple(sums[:ranks]),
        )


def is_block(
    raw: bytes, namespace: bytes, generation: int, key: bytes, ranks: int, payload_bytes: int
) -> bool:
    """Whether a header says SEALED of just this block, whole.

    The same as looking at an unpacked one, and several times as fast: readers ask it of each block.
    """
    found = _HOLDS.unpack_from(raw)
    wanted = (SlotState.SEALED, generation, key, ranks, payload_bytes)
    return found == wanted and _is_sound(raw, namespace)


def _is_sound(raw: bytes, namespace: bytes) -> bool:
    (check,) = _CHECK.unpack_from(raw, _CHECK_AT)
    return bool(
        check == xxhash.xxh3_64_intdigest(namespace + raw[:_CHECK_AT]) and raw.endswith(_PADDING)
    )
