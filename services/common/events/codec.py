"""Envelopes and snapshots between plain values and protobuf.

A receiver drops and counts what it doesn't know: kinds of events, and tiers (never read as G1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from forebay.common.v1 import common_pb2
from forebay.events.v1 import events_pb2 as pb
from forebay.kvbm.v1 import kvbm_pb2
from forebay.worker.v1 import worker_pb2
from google.protobuf.message import DecodeError

from services.common.events.model import (
    Batch,
    BlocksCleared,
    BlocksDigest,
    BlocksRemoved,
    BlocksStored,
    Event,
    LoadReport,
    RequestAdmitted,
    RequestFinished,
    RequestFirstToken,
    RunningRequest,
    Snapshot,
    Tier,
    TierBlocks,
    TierRate,
    TransferEnded,
)
from services.common.ids import AttemptId, BlockKey

_TO_PROTO: dict[Tier, common_pb2.Tier.ValueType] = {
    Tier.G1: common_pb2.TIER_G1,
    Tier.G2: common_pb2.TIER_G2,
    Tier.G3: common_pb2.TIER_G3,
    Tier.G4: common_pb2.TIER_G4,
    Tier.PEER: common_pb2.TIER_PEER,
}
_TIERS: dict[int, Tier] = {number: tier for tier, number in _TO_PROTO.items()}


def encode(batch: Batch) -> bytes:
    """One serialized Envelope."""
    return pb.Envelope(
        publisher=batch.publisher,
        incarnation=batch.incarnation,
        sequence=batch.sequence,
        time_unix_us=batch.time_unix_us,
        events=[_ENCODERS[type(e)](e) for e in batch.events],
    ).SerializeToString()


def decode(data: bytes) -> Batch:
    """The batch in a serialized Envelope. Raises ValueError when it is none."""
    try:
        envelope = pb.Envelope.FromString(data)
    except DecodeError as exc:
        raise ValueError(f"{len(data)} bytes that are no envelope") from exc
    events: list[Event] = []
    unknown = 0
    for message in envelope.events[:]:
        decoder = _DECODERS.get(message.WhichOneof("kind") or "")
        event = decoder(message) if decoder else None
        if event is None:
            unknown += 1
        else:
            events.append(event)
    return Batch(
        envelope.publisher,
        envelope.incarnation,
        envelope.sequence,
        envelope.time_unix_us,
        tuple(events),
        unknown,
    )


def snapshot_to_proto(snapshot: Snapshot) -> worker_pb2.SnapshotResponse:
    """The wire form."""
    return worker_pb2.SnapshotResponse(
        publisher=snapshot.publisher,
        incarnation=snapshot.incarnation,
        sequence=snapshot.sequence,
        time_unix_us=snapshot.time_unix_us,
        blocks=[
            worker_pb2.TierBlocks(dp_rank=b.dp_rank, tier=_TO_PROTO[b.tier], block_hashes=b.keys)
            for b in snapshot.blocks
        ],
        requests=[
            worker_pb2.RequestState(
                admitted=_admitted(r.admitted), decoding=r.decoding, dp_rank=r.admitted.dp_rank
            )
            for r in snapshot.requests
        ],
        load=None if snapshot.load is None else _load(snapshot.load),
    )


def snapshot_from_proto(m: worker_pb2.SnapshotResponse) -> Snapshot:
    """From the wire form. Blocks of unknown tiers are left out."""
    return Snapshot(
        publisher=m.publisher,
        incarnation=m.incarnation,
        sequence=m.sequence,
        time_unix_us=m.time_unix_us,
        blocks=tuple(
            TierBlocks(_TIERS[b.tier], _keys(b.block_hashes), b.dp_rank)
            for b in m.blocks
            if b.tier in _TIERS
        ),
        requests=tuple(
            RunningRequest(_admitted_back(r.admitted, r.dp_rank), r.decoding) for r in m.requests
        ),
        load=_load_back(m.load, 0) if m.HasField("load") else None,
        unknown_parts=sum(b.tier not in _TIERS for b in m.blocks),
    )


def tier_snapshot_to_proto(snapshot: Snapshot) -> kvbm_pb2.SnapshotResponse:
    """The wire form of a kvbm daemon's snapshot."""
    return kvbm_pb2.SnapshotResponse(
        publisher=snapshot.publisher,
        incarnation=snapshot.incarnation,
        sequence=snapshot.sequence,
        time_unix_us=snapshot.time_unix_us,
        blocks=[
            kvbm_pb2.TierBlocks(tier=_TO_PROTO[b.tier], block_hashes=b.keys, namespace=b.namespace)
            for b in snapshot.blocks
        ],
        rates=[kvbm_pb2.TierSpeed(namespace=r.namespace, rate=_rate(r)) for r in snapshot.rates],
    )


def tier_snapshot_from_proto(m: kvbm_pb2.SnapshotResponse) -> Snapshot:
    """From the wire form. Unknown tiers are left out and counted."""
    rates = [_rate_back(r.rate, r.namespace) for r in m.rates]
    return Snapshot(
        publisher=m.publisher,
        incarnation=m.incarnation,
        sequence=m.sequence,
        time_unix_us=m.time_unix_us,
        blocks=tuple(
            TierBlocks(_TIERS[b.tier], _keys(b.block_hashes), namespace=b.namespace)
            for b in m.blocks
            if b.tier in _TIERS
        ),
        rates=tuple(r for r in rates if r is not None),
        unknown_parts=sum(b.tier not in _TIERS for b in m.blocks) + rates.count(None),
    )


def _keys(numbers: Sequence[int]) -> tuple[BlockKey, ...]:
    # A slice of a repeated field is made in C, at half the cost of going through it.
    return cast("tuple[BlockKey, ...]", tuple(numbers[:]))


def _admitted(e: RequestAdmitted) -> pb.RequestAdmitted:
    return pb.RequestAdmitted(
        attempt_id=e.attempt_id,
        prompt_tokens=e.prompt_tokens,
        max_new_tokens=e.max_new_tokens,
        block_hashes=e.keys,
        transfer_tokens=e.transfer_tokens,
        prefill_only=e.prefill_only,
    )


def _admitted_back(m: pb.RequestAdmitted, dp_rank: int) -> RequestAdmitted:
    return RequestAdmitted(
        AttemptId(m.attempt_id),
        m.prompt_tokens,
        m.max_new_tokens,
        _keys(m.block_hashes),
        dp_rank,
        m.transfer_tokens,
        m.prefill_only,
    )


def _load(e: LoadReport) -> pb.LoadReport:
    return pb.LoadReport(
        running_requests=e.running_requests,
        waiting_requests=e.waiting_requests,
        pending_prefill_tokens=e.pending_prefill_tokens,
        used_blocks=e.used_blocks,
        total_blocks=e.total_blocks,
        steps=e.steps,
        held_transfers=e.held_transfers,
    )


def _load_back(m: pb.LoadReport, dp_rank: int) -> LoadReport:
    return LoadReport(
        running_requests=m.running_requests,
        waiting_requests=m.waiting_requests,
        pending_prefill_tokens=m.pending_prefill_tokens,
        used_blocks=m.used_blocks,
        total_blocks=m.total_blocks,
        steps=m.steps,
        dp_rank=dp_rank,
        held_transfers=m.held_transfers,
    )


def _rate(e: TierRate) -> pb.TierRate:
    return pb.TierRate(tier=_TO_PROTO[e.tier], latency_s=e.latency_s, block_s=e.block_s)


def _rate_back(m: pb.TierRate, namespace: bytes) -> TierRate | None:
    tier = _TIERS.get(m.tier)
    return None if tier is None else TierRate(tier, m.latency_s, m.block_s, namespace)


def _stored(e: BlocksStored) -> pb.Event:
    body = pb.BlocksStored(tier=_TO_PROTO[e.tier], block_hashes=e.keys)
    return pb.Event(dp_rank=e.dp_rank, blocks_stored=body, namespace=e.namespace)


def _removed(e: BlocksRemoved) -> pb.Event:
    body = pb.BlocksRemoved(tier=_TO_PROTO[e.tier], block_hashes=e.keys)
    return pb.Event(dp_rank=e.dp_rank, blocks_removed=body, namespace=e.namespace)


def _cleared(e: BlocksCleared) -> pb.Event:
    body = pb.BlocksCleared(tier=_TO_PROTO[e.tier])
    return pb.Event(dp_rank=e.dp_rank, blocks_cleared=body, namespace=e.namespace)


def _digest(e: BlocksDigest) -> pb.Event:
    body = pb.BlocksDigest(tier=_TO_PROTO[e.tier], blocks=e.blocks, xor=e.xor)
    return pb.Event(dp_rank=e.dp_rank, blocks_digest=body, namespace=e.namespace)


def _first_token(e: RequestFirstToken) -> pb.Event:
    body = pb.RequestFirstToken(
        attempt_id=e.attempt_id,
        cached_tokens=e.cached_tokens,
        transferred_tokens=e.transferred_tokens,
    )
    return pb.Event(dp_rank=e.dp_rank, request_first_token=body)


def _transfer_ended(e: TransferEnded) -> pb.Event:
    body = pb.TransferEnded(
        attempt_id=e.attempt_id,
        source=e.source,
        tokens=e.tokens,
        bytes=e.bytes,
        seconds=e.seconds,
    )
    return pb.Event(dp_rank=e.dp_rank, transfer_ended=body)


def _finished(e: RequestFinished) -> pb.Event:
    body = pb.RequestFinished(
        attempt_id=e.attempt_id,
        cached_tokens=e.cached_tokens,
        output_tokens=e.output_tokens,
        aborted=e.aborted,
    )
    return pb.Event(dp_rank=e.dp_rank, request_finished=body)


_ENCODERS: dict[type[Any], Callable[[Any], pb.Event]] = {
    BlocksStored: _stored,
    BlocksRemoved: _removed,
    BlocksCleared: _cleared,
    RequestAdmitted: lambda e: pb.Event(dp_rank=e.dp_rank, request_admitted=_admitted(e)),
    RequestFirstToken: _first_token,
    TransferEnded: _transfer_ended,
    RequestFinished: _finished,
    LoadReport: lambda e: pb.Event(dp_rank=e.dp_rank, load=_load(e)),
    BlocksDigest: _digest,
    TierRate: lambda e: pb.Event(tier_rate=_rate(e), namespace=e.namespace),
}


def _stored_back(m: pb.Event) -> Event | None:
    body = m.blocks_stored
    tier = _TIERS.get(body.tier)
    if tier is None:
        return None
    return BlocksStored(tier, _keys(body.block_hashes), m.dp_rank, m.namespace)


def _removed_back(m: pb.Event) -> Event | None:
    body = m.blocks_removed
    tier = _TIERS.get(body.tier)
    if tier is None:
        return None
    return BlocksRemoved(tier, _keys(body.block_hashes), m.dp_rank, m.namespace)


def _cleared_back(m: pb.Event) -> Event | None:
    tier = _TIERS.get(m.blocks_cleared.tier)
    return None if tier is None else BlocksCleared(tier, m.dp_rank, m.namespace)


def _digest_back(m: pb.Event) -> Event | None:
    body = m.blocks_digest
    tier = _TIERS.get(body.tier)
    if tier is None:
        return None
    return BlocksDigest(tier, body.blocks, body.xor, m.dp_rank, m.namespace)


def _first_token_back(m: pb.Event) -> Event:
    e = m.request_first_token
    return RequestFirstToken(
        AttemptId(e.attempt_id), e.cached_tokens, m.dp_rank, e.transferred_tokens
    )


def _transfer_ended_back(m: pb.Event) -> Event:
    e = m.transfer_ended
    return TransferEnded(AttemptId(e.attempt_id), e.source, e.tokens, e.bytes, e.seconds, m.dp_rank)


def _finished_back(m: pb.Event) -> Event:
    e = m.request_finished
    return RequestFinished(
        AttemptId(e.attempt_id), e.cached_tokens, e.output_tokens, e.aborted, m.dp_rank
    )


_DECODERS: dict[str, Callable[[pb.Event], Event | None]] = {
    "blocks_stored": _stored_back,
    "blocks_removed": _removed_back,
    "blocks_cleared": _cleared_back,
    "blocks_digest": _digest_back,
    "request_admitted": lambda m: _admitted_back(m.request_admitted, m.dp_rank),
    "request_first_token": _first_token_back,
    "transfer_ended": _transfer_ended_back,
    "request_finished": _finished_back,
    "load": lambda m: _load_back(m.load, m.dp_rank),
    "tier_rate": lambda m: _rate_back(m.tier_rate, m.namespace),
}
