"""A run of chain blocks as one immutable object.

    head        magic with version, namespace, what the blocks are; then each block's SlotHeader
    payloads    as in an arena: one block after the other, each from a page's start

Aligned: block number k * R is the first of its run, k * R + R - 1 the last, whose hash names the
object. Since a hash stands for all blocks before it, equal names mean equal blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from services.common.arena import HEADER_BYTES, PAGE, CorruptHeader, Geometry, SlotHeader

_MAGIC = b"FBRUN\0\0\1"
_HEAD = struct.Struct("<8s32sIIQQ")
"""Magic, namespace, blocks, ranks, payload bytes, stride."""


class OtherRuns(ValueError):
    """The object is sound, but holds runs of another length than ours."""


def head_bytes(blocks: int) -> int:
    """Bytes before the payloads: whole pages."""
    return -(-(_HEAD.size + blocks * HEADER_BYTES) // PAGE) * PAGE


def object_bytes(blocks: int, geometry: Geometry) -> int:
    """Bytes of an object."""
    return head_bytes(blocks) + blocks * geometry.stride


def pack_head(namespace: bytes, headers: Sequence[SlotHeader], geometry: Geometry) -> bytes:
    """The head of a run with these blocks."""
    head = _HEAD.pack(
        _MAGIC,
        namespace,
        len(headers),
        geometry.ranks,
        geometry.payload_bytes,
        geometry.stride,
    )
    head += b"".join(header.pack(namespace) for header in headers)
    return head.ljust(head_bytes(len(headers)), b"\0")


def unpack_head(
    raw: bytes | memoryview, namespace: bytes, blocks: int, geometry: Geometry
) -> list[SlotHeader | CorruptHeader]:
    """Each block's header, or what is wrong with it.

    Raises CorruptHeader when the object is none of ours, OtherRuns when its runs are of another
    length.
    """
    magic, space, count, ranks, payload_bytes, stride = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        raise CorruptHeader("the object is no run of this version")
    if space != namespace:
        raise CorruptHeader("the object is another namespace's")
    if (ranks, payload_bytes, stride) != (geometry.ranks, geometry.payload_bytes, geometry.stride):
        raise CorruptHeader("the object's blocks are of another shape")
    if count != blocks:
        raise OtherRuns(f"the object is a run of {count} blocks, not {blocks}")
    headers: list[SlotHeader | CorruptHeader] = []
    for at in range(_HEAD.size, _HEAD.size + blocks * HEADER_BYTES, HEADER_BYTES):
        try:
            headers.append(SlotHeader.unpack(raw[at : at + HEADER_BYTES], namespace))
        except CorruptHeader as exc:
            headers.append(exc)
    return headers
