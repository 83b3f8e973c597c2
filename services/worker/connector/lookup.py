"""A look-up's messages, and what they say in the connector's words."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.worker.connector.model import LeasedBlock, Slot
from services.worker.connector.terms import Lease, Terms

PROMOTE_S = 2.0
"""Longest wait for promotions."""


def lookup_request(
    namespace: bytes,
    keys: Sequence[bytes],
    *,
    skip: int,
    tenant: str = "",
    recompute_block_s: float = 0.0,
    wait_s: float = 0.0,
) -> pb.LookupRequest:
    """The question: what is there of `keys` after the engine's own `skip` blocks?"""
    return pb.LookupRequest(
        namespace=namespace,
        keys=keys,
        tenant=tenant,
        skip_blocks=skip,
        recompute_block_s=recompute_block_s,
        wait_s=wait_s,
        promote_ms=int(PROMOTE_S * 1000),
    )


def leased_blocks(blocks: Iterable[Any]) -> tuple[LeasedBlock, ...]:
    """Blocks of an answer."""
    return tuple(
        LeasedBlock(Slot(b.slot.index, b.slot.generation), tuple(b.checksums)) for b in blocks
    )


def terms_of(answer: pb.LookupResponse, asked: Terms, skip: int, looked_s: float) -> Terms:
    """The answer to a question that was put at `looked_s`."""
    lease = None
    if answer.lease:
        lease = Lease(
            id=answer.lease,
            first=answer.first_block,
            ready=leased_blocks(answer.ready),
            promoting=answer.promoting,
            until_s=looked_s + PROMOTE_S,
            expires_s=time.monotonic() + answer.expires_ms / 1000,
        )
    return Terms(
        assumed=skip,
        stored=answer.stored_blocks,
        looked_s=looked_s,
        recompute_block_s=asked.recompute_block_s,
        tenant=asked.tenant,
        lease=lease,
    )
