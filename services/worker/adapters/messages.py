"""Between worker.proto's messages and the worker's domain."""

from __future__ import annotations

from forebay.worker.v1 import worker_pb2 as pb

from services.common.cards import Holder
from services.worker.core.backlog import Frame
from services.worker.core.model import (
    Delta,
    FinishReason,
    Generation,
    Handle,
    PositionLogprobs,
    Sampling,
)

_FINISH = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}


def sampling(m: pb.SamplingParams) -> Sampling:
    """Sampling parameters; absent fields take OpenAI's defaults."""

    def given(name: str, value: float, default: float) -> float:
        return value if m.HasField(name) else default  # type: ignore[arg-type]

    return Sampling(
        max_tokens=m.max_tokens,
        min_tokens=m.min_tokens,
        temperature=given("temperature", m.temperature, 1.0),
        top_p=given("top_p", m.top_p, 1.0),
        top_k=m.top_k,
        min_p=m.min_p,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=given("repetition_penalty", m.repetition_penalty, 1.0),
        seed=m.seed if m.HasField("seed") else None,
        stop_token_ids=tuple(m.stop_token_ids),
        ignore_eos=m.ignore_eos,
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        logit_bias=dict(m.logit_bias),
        allowed_token_ids=tuple(m.allowed_token_ids),
        prompt_logprobs=m.prompt_logprobs if m.HasField("prompt_logprobs") else None,
    )


def generation(m: pb.GenerateRequest) -> Generation:
    """A request."""
    unbuilt = (*(("kv_lease",) if m.kv_lease else ()),)
    return Generation(
        request_id=m.request_id,
        attempt_id=m.attempt_id,
        model=m.model,
        prompt=tuple(m.prompt_token_ids),
        sampling=sampling(m.sampling),
        prior_output=tuple(m.prior_output_token_ids),
        cache_salt=m.cache_salt,
        adapter=m.adapter,
        tenant=m.tenant,
        priority=m.priority,
        deadline_s=m.deadline_ms / 1000,
        traceparent=m.traceparent,
        tracestate=m.tracestate,
        dp_rank=m.dp_rank if m.HasField("dp_rank") else None,
        client_request_id=m.client_request_id,
        prefill_only=m.prefill_only,
        transfer=_handle_back(m.transfer) if m.HasField("transfer") else None,
        unbuilt=unbuilt,
    )


def delta(d: Delta) -> pb.RequestDelta:
    """News of a request."""
    m = pb.RequestDelta(
        request_id=d.request_id,
        token_ids=d.token_ids,
        logprobs=[_position(p) for p in d.logprobs],
        finish_reason=_FINISH[d.finish],
        stop_token_id=d.stop_token_id,
        cached_tokens=d.cached_tokens,
        prompt_logprobs=[_position(p) for p in d.prompt_logprobs],
        transfer=None if d.transfer is None else _handle(d.transfer),
        transferred_tokens=d.transferred_tokens,
    )
    if d.failure is not None:
        m.error.code = d.failure.code
        m.error.reason = d.failure.reason
        m.error.message = d.failure.message
        m.error.field = d.failure.field
    return m


def frame(f: Frame) -> pb.SessionResponse:
    """What a session sends at once."""
    return pb.SessionResponse(step=f.step, deltas=[delta(d) for d in f.deltas])


def _handle(h: Handle) -> pb.TransferHandle:
    return pb.TransferHandle(
        source=Holder(h.source, h.source_incarnation, h.source_rank).to_proto(),
        namespace=h.namespace,
        engine_params=h.params,
        expires_ms=round(h.expires_s * 1000),
        way=h.way,
        tokens=h.tokens,
        request_id=h.request_id,
    )


def _handle_back(m: pb.TransferHandle) -> Handle:
    return Handle(
        source=m.source.id,
        source_incarnation=m.source.incarnation,
        source_rank=m.source.dp_rank,
        namespace=m.namespace,
        params=m.engine_params,
        way=m.way,
        tokens=m.tokens,
        request_id=m.request_id,
        expires_s=m.expires_ms / 1000,
    )


def _position(p: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        token_id=p.token_id,
        logprob=p.logprob,
        rank=p.rank,
        top_token_ids=p.top_token_ids,
        top_logprobs=p.top_logprobs,
    )
