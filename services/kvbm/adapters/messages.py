"""Domain values to protobuf messages, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forebay.common.v1 import common_pb2
from forebay.events.v1 import events_pb2
from forebay.kvbm.v1 import kvbm_pb2 as pb

from services.common.arena import Geometry
from services.common.errors import InvalidRequest
from services.common.events.model import Tier
from services.common.events.publisher import publisher_time_us
from services.kvbm.core.catalog import BlockView
from services.kvbm.core.model import CommitResult, ReadyBlock, SlotRef
from services.kvbm.curator import Explanation
from services.kvbm.node import Node
from services.kvbm.readers import Ask, Loaded
from services.kvbm.space import Space

TIERS = {
    Tier.G1: common_pb2.TIER_G1,
    Tier.G2: common_pb2.TIER_G2,
    Tier.G3: common_pb2.TIER_G3,
    Tier.G4: common_pb2.TIER_G4,
}
"""Wire forms of tiers."""
_RESULTS = {
    CommitResult.STORED: pb.COMMIT_RESULT_STORED,
    CommitResult.PENDING: pb.COMMIT_RESULT_PENDING,
    CommitResult.DUPLICATE: pb.COMMIT_RESULT_DUPLICATE,
    CommitResult.FENCED: pb.COMMIT_RESULT_FENCED,
    CommitResult.REFUSED: pb.COMMIT_RESULT_REFUSED,
    CommitResult.RETURNED: pb.COMMIT_RESULT_RETURNED,
}


def geometry_of(m: pb.Geometry) -> Geometry:
    """Raises InvalidRequest for what makes no sense."""
    try:
        return Geometry(m.block_size_tokens, m.shard_bytes, m.ranks, m.layout)
    except ValueError as exc:
        raise InvalidRequest(str(exc), field="geometry") from exc


def geometry_message(g: Geometry) -> pb.Geometry:
    """The wire form."""
    return pb.Geometry(
        block_size_tokens=g.block_size, shard_bytes=g.shard_bytes, ranks=g.ranks, layout=g.layout
    )


def slot_message(ref: SlotRef) -> pb.Slot:
    """The wire form."""
    return pb.Slot(index=ref.index, generation=ref.generation)


def slot_of(m: pb.Slot) -> SlotRef:
    """From the wire form."""
    return SlotRef(m.index, m.generation)


def results_message(results: Sequence[CommitResult]) -> list[pb.CommitResult.ValueType]:
    """The wire forms, in order."""
    return [_RESULTS[r] for r in results]


def leased_message(block: ReadyBlock) -> pb.LeasedBlock:
    """The wire form."""
    return pb.LeasedBlock(slot=slot_message(block.ref), checksums=block.checksums)


def ask_of(m: pb.LookupRequest) -> Ask:
    """Raises InvalidRequest for figures that make no sense."""
    for name, value in (("recompute_block_s", m.recompute_block_s), ("wait_s", m.wait_s)):
        if not 0 <= value < 1e6:
            raise InvalidRequest(f"must be from 0 to a million seconds, not {value}", field=name)
    return Ask(
        m.namespace,
        list(m.keys),
        m.tenant,
        m.skip_blocks,
        m.recompute_block_s,
        m.wait_s,
        m.promote_ms / 1000,
        m.limit_blocks,
    )


def loaded_of(m: pb.LoadReport) -> Loaded:
    """From the wire form."""
    return Loaded(m.lease, m.loaded_blocks, m.seconds, tuple(m.bad_blocks))


def tiers_of(values: Iterable[int]) -> list[Tier]:
    """Raises InvalidRequest for what is no tier of a daemon."""
    tiers = []
    for value in values:
        if value not in (Tier.G2, Tier.G3, Tier.G4):
            raise InvalidRequest("must be TIER_G2, TIER_G3 or TIER_G4", field="tiers")
        tiers.append(Tier(value))
    return tiers


def tier_counts(counts: Mapping[Tier, tuple[int, int]]) -> list[pb.TierCount]:
    """Blocks and bytes by tier."""
    return [
        pb.TierCount(tier=TIERS[tier], blocks=blocks, bytes=size)
        for tier, (blocks, size) in sorted(counts.items())
    ]


def block_info(
    space: Space, view: BlockView, tenants: Mapping[int, str], now_ms: int
) -> pb.BlockInfo:
    """One block, for people."""
    meta = view.meta
    tenant = tenants.get(meta.tenant, f"{meta.tenant:016x}") if meta.tenant else ""
    return pb.BlockInfo(
        namespace=space.namespace,
        key=meta.key,
        parent=meta.parent if any(meta.parent) else b"",
        position=meta.position,
        tenant=tenant,
        tiers=[TIERS[t] for t in view.tiers],
        age_s=max(0.0, (now_ms - meta.created_ms) / 1000),
        idle_s=max(0.0, (now_ms - view.used_ms) / 1000),
        hits=view.hits,
        leases=view.leases,
        pins=view.pins,
    )


def explanation_message(e: Explanation) -> pb.ExplainResponse:
    """The wire form."""
    answer = pb.ExplainResponse(recompute_block_s=e.plan.recompute_block_s, reason=e.plan.reason)
    for v in e.blocks:
        answer.blocks.add(
            position=v.position,
            tiers=[TIERS[t] for t in v.tiers],
            load=v.load,
            reason=v.reason,
            leases=v.view.leases if v.view else 0,
            pins=v.view.pins if v.view else 0,
            hits=v.view.hits if v.view else 0,
        )
    for tier, rate in sorted(e.rates.items()):
        verdict = e.verdicts.get(tier)
        answer.gate.add(
            tier=TIERS[tier],
            latency_s=rate.latency_s,
            block_s=rate.block_s,
            samples=rate.samples,
            refused=verdict.refused if verdict else False,
            predicted_s=verdict.predicted_s if verdict else 0.0,
        )
    return answer


def snapshot_message(node: Node, sequence: int) -> pb.SnapshotResponse:
    """All blocks and rates, as they are at `sequence`."""
    answer = pb.SnapshotResponse(
        publisher=node.id,
        incarnation=node.incarnation,
        sequence=sequence,
        time_unix_us=publisher_time_us(),
    )
    for space in node.spaces.values():
        for part in space.tier_blocks():
            if part.keys:
                answer.blocks.add(
                    tier=TIERS[part.tier],
                    block_hashes=part.keys,
                    namespace=part.namespace,
                )
        for rate in space.told_rates.values():
            answer.rates.add(
                namespace=rate.namespace,
                rate=events_pb2.TierRate(
                    tier=TIERS[rate.tier],
                    latency_s=rate.latency_s,
                    block_s=rate.block_s,
                ),
            )
    return answer
