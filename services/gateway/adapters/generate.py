"""One sequence's way over a session: domain work to GenerateRequest, RequestDelta to news."""

from __future__ import annotations

from forebay.worker.v1 import worker_pb2 as pb

from services.common.errors import Internal, error_from_number
from services.gateway.core.logprobs import TokenLogprobs
from services.gateway.core.sampling import Sampling
from services.gateway.ports import Ended, News, Transfer, Work

_ENDED = {
    pb.FINISH_REASON_STOP: Ended.STOP,
    pb.FINISH_REASON_LENGTH: Ended.LENGTH,
    pb.FINISH_REASON_ABORT: Ended.ABORT,
    pb.FINISH_REASON_ERROR: Ended.ERROR,
}


def to_sampling(s: Sampling) -> pb.SamplingParams:
    """The wire form of what the worker needs to know of sampling."""
    return pb.SamplingParams(
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        seed=s.seed,
        stop_token_ids=s.stop_token_ids,
        ignore_eos=s.ignore_eos,
        logprobs=s.logprobs,
        logit_bias=s.logit_bias,
        allowed_token_ids=s.allowed_token_ids,
    )


def to_generate(work: Work) -> pb.GenerateRequest:
    """The wire form of a sequence."""
    return pb.GenerateRequest(
        request_id=work.request_id,
        attempt_id=work.attempt_id,
        model=work.model,
        prompt_token_ids=work.prompt,
        prior_output_token_ids=work.prior,
        sampling=to_sampling(work.sampling),
        tenant=work.tenant,
        cache_salt=work.cache_salt,
        adapter=work.adapter,
        priority=work.priority,
        deadline_ms=work.deadline_ms,
        traceparent=work.trace.get("traceparent", ""),
        tracestate=work.trace.get("tracestate", ""),
        client_request_id=work.client_request_id,
        prefill_only=work.prefill_only,
        transfer=(
            pb.TransferHandle.FromString(work.transfer.handle)
            if work.transfer is not None
            else None
        ),
    )


def to_release(transfer: Transfer) -> pb.ReleaseTransfer:
    """The wire form of letting go."""
    return pb.ReleaseTransfer(request_id=transfer.name)


def transfer_of(delta: pb.RequestDelta) -> Transfer | None:
    """The KV that the end of a prefill leg left; None: none."""
    if not delta.HasField("transfer"):
        return None
    handle = delta.transfer
    name = handle.request_id or delta.request_id
    return Transfer(handle.SerializeToString(), name, handle.tokens)


def merge(news: News, delta: pb.RequestDelta) -> None:
    """Adds a delta to what is known since the last look."""
    if delta.token_ids:
        news.token_ids.extend(delta.token_ids)
    for p in delta.logprobs:
        top = tuple(zip(p.top_token_ids, p.top_logprobs, strict=False))
        news.logprobs.append(TokenLogprobs(p.token_id, p.logprob, top))
    if news.cached_tokens is None and delta.HasField("cached_tokens"):
        news.cached_tokens = delta.cached_tokens
        news.transferred_tokens = delta.transferred_tokens
    if not delta.finish_reason:
        return
    news.ended = _ENDED.get(delta.finish_reason, Ended.ERROR)
    news.transfer = transfer_of(delta)
    if delta.HasField("stop_token_id"):
        news.stop_token_id = delta.stop_token_id
    if news.ended is Ended.ERROR:
        e = delta.error
        news.error = (
            error_from_number(e.code, e.reason, e.message, field=e.field)
            if delta.HasField("error")
            else Internal("the worker gave no reason", reason="ENGINE_ERROR")
        )
