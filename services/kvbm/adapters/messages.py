"""Domain values to protobuf messages, and back."""

from __future__ import annotations

import time
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
from services.kvbm.core.peers import PeerId
from services.kvbm.curator import Explanation
from services.kvbm.node import Node, check_hash
from services.kvbm.readers import Ask, Hint, Loaded
from services.kvbm.space import Space
from services.kvbm.tiers.peer import Peers, Tallies

TIERS = {
    Tier.G1: common_pb2.TIER_G1,
    Tier.G2: common_pb2.TIER_G2,
    Tier.G3: common_pb2.TIER_G3,
    Tier.G4: common_pb2.TIER_G4,
    Tier.PEER: common_pb2.TIER_PEER,
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


def seconds_of(value: float, field: str) -> float:
    """Raises InvalidRequest for what is no time to wait."""
    if not 0 <= value < 1e6:
        raise InvalidRequest(f"must be from 0 to a million seconds, not {value}", field=field)
    return value


def checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Raises InvalidRequest for what are no full hashes."""
    for key in keys:
        check_hash(key, "keys")
    return list(keys)


def ask_of(m: pb.LookupRequest) -> Ask:
    """Raises InvalidRequest for figures that make no sense."""
    seconds_of(m.recompute_block_s, "recompute_block_s")
    seconds_of(m.wait_s, "wait_s")
    return Ask(
        m.namespace,
        list(m.keys),
        m.tenant,
        m.skip_blocks,
        m.recompute_block_s,
        m.wait_s,
        m.promote_ms / 1000,
        m.limit_blocks,
        hints_of(m.peers),
    )


def hints_of(peers: Iterable[pb.PeerHint]) -> list[Hint]:
    """From the wire form."""
    return [Hint(PeerId(p.node), p.first_block, p.blocks) for p in peers]


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
            peer=v.peer,
        )
    for source, rate in e.peers.items():
        of_peer = e.verdicts[source]
        answer.peers.add(
            node="" if isinstance(source, Tier) else source,
            latency_s=rate.latency_s,
            block_s=rate.block_s,
            samples=rate.samples,
            refused=of_peer.refused,
            predicted_s=of_peer.predicted_s,
        )
    for tier, rate in sorted(e.rates.items()):
        if tier is Tier.PEER:
            continue
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


def peer_stats(peers: Peers | None, off: str) -> pb.PeerStats:
    """The exchange with other nodes, for people."""
    if peers is None:
        return pb.PeerStats(state=off)
    window = peers.exports.window
    answer = pb.PeerStats(
        state=peers.state,
        window_bytes=window.size,
        window_used_bytes=window.used,
        exports=len(window),
        agents=peers.agents,
    )
    for info, why in peers.book.standings(time.monotonic()):
        tally = peers.tallies.get(info.id, Tallies())
        state = f"avoided: {why}" if why else "connected" if peers.connected(info.id) else "ok"
        answer.known.add(
            node=info.id,
            address=info.address,
            state=state,
            fetched_blocks=tally.blocks,
            failures=tally.failures,
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
