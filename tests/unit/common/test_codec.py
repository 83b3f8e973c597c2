"""Envelopes and snapshots on the wire: a golden file, round trips, and what is not known."""

import json
from pathlib import Path
from typing import Any

import pytest
from forebay.events.v1 import events_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from services.common.blocks import block_key
from services.common.events.codec import (
    decode,
    encode,
    snapshot_from_proto,
    snapshot_to_proto,
    tier_snapshot_from_proto,
    tier_snapshot_to_proto,
)
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
from services.common.events.tiers import tier_events
from services.common.ids import AttemptId, BlockKey

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden" / "envelope.json").read_text()
)
ATTEMPT = AttemptId("att-1#1")
KEYS = (BlockKey(1), BlockKey(2**64 - 1))
BATCH = Batch(
    publisher="w1",
    incarnation=2**64 - 2,
    sequence=7,
    time_unix_us=1_700_000_000_000_001,
    events=(
        BlocksStored(Tier.G1, KEYS, 1),
        BlocksRemoved(Tier.G2, KEYS[:1], 2),
        BlocksCleared(Tier.G3, 3),
        RequestAdmitted(ATTEMPT, 100, 16, KEYS, 4),
        RequestFirstToken(ATTEMPT, 96, 5),
        RequestFinished(ATTEMPT, 96, 16, True, 6),
        LoadReport(1, 2, 3, 4, 5, 6, 7),
    ),
)


def test_golden_envelope() -> None:
    assert encode(BATCH).hex() == GOLDEN["hex"]
    assert decode(bytes.fromhex(GOLDEN["hex"])) == BATCH


def test_heartbeat_has_no_events() -> None:
    beat = Batch("w1", 1, 7, 5)
    assert decode(encode(beat)) == beat
    assert decode(encode(beat)).is_heartbeat and not BATCH.is_heartbeat


numbers = st.integers(0, 2**32 - 1)
keys = st.lists(st.integers(0, 2**64 - 1).map(BlockKey), max_size=4).map(tuple)
tiers = st.sampled_from(Tier)
spaces = st.sampled_from([b"", b"n" * 32])
attempts = st.text(max_size=5).map(AttemptId)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(BlocksStored, tiers, keys, numbers, spaces),
    st.builds(BlocksRemoved, tiers, keys, numbers, spaces),
    st.builds(BlocksCleared, tiers, numbers, spaces),
    st.builds(TierRate, tiers, st.floats(0, 1), st.floats(0, 1), spaces),
    st.builds(BlocksDigest, tiers, numbers, st.integers(0, 2**64 - 1), numbers, spaces),
    st.builds(RequestAdmitted, attempts, numbers, numbers, keys, numbers, numbers, st.booleans()),
    st.builds(RequestFirstToken, attempts, numbers, numbers, numbers),
    st.builds(
        TransferEnded, attempts, st.text(max_size=3), numbers, numbers, st.floats(0, 1), numbers
    ),
    st.builds(RequestFinished, attempts, numbers, numbers, st.booleans(), numbers),
    st.builds(LoadReport, *[numbers] * 8),
)


@given(st.lists(events, max_size=5).map(tuple), st.integers(0, 2**64 - 1))
def test_batches_round_trip(some: tuple[Event, ...], incarnation: int) -> None:
    batch = Batch("w", incarnation, 3, -4, some)
    assert decode(encode(batch)) == batch


def test_unknown_tiers_and_kinds_are_dropped_and_counted() -> None:
    envelope = pb.Envelope(
        publisher="w",
        incarnation=1,
        sequence=2,
        events=[
            pb.Event(),
            pb.Event(blocks_stored=pb.BlocksStored(block_hashes=[1])),
            pb.Event(blocks_removed=pb.BlocksRemoved(tier=9, block_hashes=[1])),  # type: ignore[arg-type]
            pb.Event(blocks_cleared=pb.BlocksCleared(tier=9)),  # type: ignore[arg-type]
            pb.Event(tier_rate=pb.TierRate(tier=9, block_s=1)),  # type: ignore[arg-type]
            pb.Event(blocks_stored=pb.BlocksStored(tier=1, block_hashes=[5])),  # type: ignore[arg-type]
        ],
    )
    batch = decode(envelope.SerializeToString())
    assert batch.events == (BlocksStored(Tier.G1, (BlockKey(5),)),)
    assert batch.unknown_events == 5


def test_a_batch_of_unknown_events_is_no_heartbeat() -> None:
    envelope = pb.Envelope(publisher="w", incarnation=1, sequence=2, events=[pb.Event()])
    assert not decode(envelope.SerializeToString()).is_heartbeat


@pytest.mark.parametrize("data", [b"\xff", b"hello", b"\x0a\x05ab"])
def test_what_is_no_envelope_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="no envelope"):
        decode(data)


def test_snapshot_round_trip() -> None:
    admitted = RequestAdmitted(ATTEMPT, 100, 16, KEYS, 2)
    snapshot = Snapshot(
        publisher="w",
        incarnation=2**64 - 1,
        sequence=2**40,
        time_unix_us=1_700_000_000_000_001,
        blocks=(TierBlocks(Tier.G1, KEYS, 1), TierBlocks(Tier.G4, (), 0)),
        requests=(RunningRequest(admitted, True), RunningRequest(admitted, False)),
        load=LoadReport(1, 2, 3, 4, 5, 6),
    )
    assert snapshot_from_proto(snapshot_to_proto(snapshot)) == snapshot
    bare = Snapshot("w", 1, 0)
    assert snapshot_from_proto(snapshot_to_proto(bare)) == bare


def test_unknown_tiers_of_a_snapshot_are_left_out() -> None:
    message = snapshot_to_proto(Snapshot("w", 1, 0, (TierBlocks(Tier.G1, KEYS),)))
    message.blocks[0].tier = 9  # type: ignore[assignment]
    assert snapshot_from_proto(message).blocks == ()
    assert snapshot_from_proto(message).unknown_parts == 1


SPACE = b"n" * 32


def test_a_daemons_snapshot_round_trip() -> None:
    snapshot = Snapshot(
        publisher="node-1",
        incarnation=2**64 - 1,
        sequence=2**40,
        time_unix_us=1_700_000_000_000_001,
        blocks=(
            TierBlocks(Tier.G2, KEYS, namespace=SPACE),
            TierBlocks(Tier.G3, KEYS[:1], namespace=b"m" * 32),
        ),
        rates=(TierRate(Tier.G3, 0.001, 0.5, SPACE),),
    )
    assert tier_snapshot_from_proto(tier_snapshot_to_proto(snapshot)) == snapshot


def test_unknown_tiers_of_a_daemons_snapshot_are_left_out_and_counted() -> None:
    """E1: never read as another tier."""
    message = tier_snapshot_to_proto(
        Snapshot(
            "n",
            1,
            0,
            (TierBlocks(Tier.G2, KEYS, namespace=SPACE), TierBlocks(Tier.G3, KEYS)),
            rates=(TierRate(Tier.G2, 0.0, 1.0, SPACE),),
        )
    )
    message.blocks[0].tier = 9  # type: ignore[assignment]
    message.rates[0].rate.tier = 9  # type: ignore[assignment]
    back = tier_snapshot_from_proto(message)
    assert [part.tier for part in back.blocks] == [Tier.G3]
    assert (back.rates, back.unknown_parts) == ((), 2)


def test_changes_of_a_daemons_tiers_explain_themselves() -> None:
    """E2: each event names its tier and the namespace of its blocks, by their index keys."""
    a, b, c = (bytes([i]) * 32 for i in (1, 2, 3))
    events = tier_events(SPACE, [(Tier.G2, a), (Tier.G3, b), (Tier.G2, c)], [(Tier.G2, b)])
    assert decode(encode(Batch("n", 1, 1, 0, tuple(events)))).events == (
        BlocksRemoved(Tier.G2, (block_key(b),), namespace=SPACE),
        BlocksStored(Tier.G2, (block_key(a), block_key(c)), namespace=SPACE),
        BlocksStored(Tier.G3, (block_key(b),), namespace=SPACE),
    )
    assert tier_events(SPACE) == []
    with pytest.raises(ValueError, match="32 bytes"):
        tier_events(b"", [(Tier.G2, a)])
    with pytest.raises(ValueError, match="G1"):
        tier_events(SPACE, [(Tier.G1, a)])
