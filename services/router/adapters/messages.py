"""Domain values of the router as protobuf messages, and what a RouteRequest says of its blocks."""

from __future__ import annotations

from forebay.common.v1 import common_pb2
from forebay.router.v1 import router_pb2 as pb

from services.common.errors import ForebayError
from services.common.events.model import Tier
from services.router.core.answers import (
    NodeSnapshot,
    PathScore,
    Placement,
    Scored,
    WorkerSnapshot,
)
from services.router.core.lives import Status
from services.router.core.workers import HolderId, WorkerRole
from services.router.errors import invalid

_STATUS = {
    Status.JOINING: pb.WORKER_STATE_JOINING,
    Status.READY: pb.WORKER_STATE_READY,
    Status.SUSPECT: pb.WORKER_STATE_SUSPECT,
    Status.UNREACHABLE: pb.WORKER_STATE_SUSPECT,
    Status.DRAINING: pb.WORKER_STATE_DRAINING,
}
_TIER = {
    Tier.G2: common_pb2.TIER_G2,
    Tier.G3: common_pb2.TIER_G3,
    Tier.G4: common_pb2.TIER_G4,
}
_ROLE = {
    WorkerRole.BOTH: common_pb2.ROLE_BOTH,
    WorkerRole.PREFILL: common_pb2.ROLE_PREFILL,
    WorkerRole.DECODE: common_pb2.ROLE_DECODE,
}


def given_blocks(request: pb.RouteRequest) -> tuple[list[int], int, int]:
    """Keys, prompt tokens and block size of a request that brings hashes.

    Raises InvalidRequest that names the field.
    """
    size, tokens = request.block_size_tokens, request.prompt_tokens
    if not tokens:
        raise invalid(
            "prompt_tokens: the prompt's length is required with block_hashes, at least 1; "
            "or give token_ids",
            "prompt_tokens",
        )
    if not size:
        raise invalid(
            "block_size_tokens: required unless token_ids are given; "
            "it is the block size that block_hashes were made with",
            "block_size_tokens",
        )
    keys = request.block_hashes[:]
    if len(keys) > tokens // size:
        raise invalid(
            f"block_hashes: {len(keys)} hashes, but {tokens} prompt_tokens have only "
            f"{tokens // size} full blocks of {size}",
            "block_hashes",
        )
    return keys, tokens, size


def holder_message(h: HolderId) -> common_pb2.Holder:
    """A holder on the wire."""
    return common_pb2.Holder(id=h.id, incarnation=h.incarnation, dp_rank=h.dp_rank)


def placement_message(p: Placement) -> pb.RouteResponse:
    """A placement on the wire."""
    leg = p.prefill
    return pb.RouteResponse(
        attempt_id=p.attempt_id,
        worker=holder_message(p.holder),
        address=p.address,
        predicted_cached_tokens=p.predicted_cached_tokens,
        predicted_ttft_ms=p.predicted_ttft_s * 1000,
        policy=p.policy.value,
        prefill_worker=holder_message(leg.holder) if leg else None,
        prefill_address=leg.address if leg else "",
        prefill_attempt_id=leg.attempt_id if leg else "",
        predicted_prefill_cached_tokens=leg.predicted_cached_tokens if leg else 0,
    )


def milliseconds(seconds: float) -> int:
    """Seconds as the wire has them, up to about 49 days."""
    return round(min(max(0.0, seconds) * 1000, 0xFFFF_FFFF))


def waiting_message(number: int, predicted_s: float, most_s: float) -> pb.RouteStreamResponse:
    """The question `number` of a stream waits for room."""
    return pb.RouteStreamResponse(
        correlation_id=number,
        waiting=pb.RouteWaiting(
            predicted_wait_ms=milliseconds(predicted_s), at_most_ms=milliseconds(most_s)
        ),
    )


def failure_message(number: int, exc: ForebayError) -> pb.RouteStreamResponse:
    """Why the question `number` of a stream has no placement."""
    retry_s = float(exc.metadata.get("retry_after_s", 0))
    return pb.RouteStreamResponse(
        correlation_id=number,
        failure=pb.RouteFailure(
            code=exc.code.value[0],
            reason=exc.reason,
            message=exc.message,
            retry_after_ms=milliseconds(retry_s),
            predicted_wait_ms=milliseconds(float(exc.metadata.get("predicted_wait_s", 0))),
        ),
    )


def candidate_message(row: Scored) -> pb.CandidateScore:
    """A row of a scorecard on the wire."""
    c, s = row.candidate, row.score
    if c is None or s is None:
        return pb.CandidateScore(
            worker=holder_message(row.holder),
            reason=row.reason,
            eligible=False,
            role=_ROLE[row.role],
        )
    return pb.CandidateScore(
        worker=holder_message(row.holder),
        g1_tokens=c.g1_tokens,
        g2_tokens=c.g2_tokens,
        g3_tokens=c.g3_tokens,
        g4_tokens=c.g4_tokens,
        peer_tokens=c.peer_tokens,
        uncached_tokens=c.uncached_tokens,
        active_requests=c.active_requests,
        queued_prefill_tokens=c.queued_tokens,
        queue_s=s.queue_s,
        prefill_s=s.prefill_s,
        onboard_s=s.onboard_s,
        imposed_s=s.imposed_s,
        score_s=s.total_s,
        chosen=row.chosen,
        reason=row.reason,
        eligible=True,
        role=_ROLE[row.role],
    )


def path_message(path: PathScore | None) -> pb.PathScore | None:
    """A way to serve a request on the wire."""
    if path is None:
        return None
    return pb.PathScore(
        worker=holder_message(path.holder) if path.holder else None,
        prefill_worker=holder_message(path.prefill) if path.prefill else None,
        queue_s=path.queue_s,
        prefill_s=path.prefill_s,
        transfer_s=path.transfer_s,
        decode_queue_s=path.decode_queue_s,
        stall_s=path.stall_s,
        score_s=path.total_s,
        chosen=path.chosen,
        reason=path.reason,
    )


def node_view(n: NodeSnapshot) -> pb.NodeView:
    """A kvbm daemon on the wire."""
    return pb.NodeView(
        node=common_pb2.Holder(id=n.id, incarnation=n.incarnation),
        address=n.address,
        state=_STATUS[n.status],
        tiers=[
            pb.TierView(
                namespace=t.namespace,
                tier=_TIER[t.tier],
                blocks=t.digest.blocks,
                xor=t.digest.xor,
                latency_s=t.rate.latency_s if t.rate else 0.0,
                block_s=t.rate.block_s if t.rate else 0.0,
            )
            for t in n.tiers
        ],
        entries=n.entries,
        sequence=n.sequence,
        silence_s=n.silence_s,
    )


def worker_view(w: WorkerSnapshot) -> pb.WorkerView:
    """A worker on the wire."""
    report = w.load.report
    return pb.WorkerView(
        worker=holder_message(w.holder),
        model=w.info.model,
        address=w.info.address,
        state=_STATUS[w.status],
        role=_ROLE[w.info.role],
        running_requests=report.running_requests if report else w.load.decoding,
        waiting_requests=report.waiting_requests if report else w.load.queued,
        booked_requests=w.load.booked,
        indexed_blocks=w.indexed_blocks,
        total_blocks=w.info.total_blocks,
        used_blocks=report.used_blocks if report else 0,
        sequence=w.sequence,
        silence_s=w.silence_s,
        placements=w.placements,
        prompt_tokens=w.prompt_tokens,
        cached_tokens=w.cached_tokens,
        pending_prefill_tokens=w.load.queued_tokens,
        kvbm=w.info.kvbm,
        transfer=w.info.transfer,
        held_transfers=report.held_transfers if report else 0,
    )
