"""Between the port's values and vLLM's: requests in; outputs, block events and statistics out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinish
from vllm.v1.engine.input_processor import InputProcessor

from services.common.cards import Adapter
from services.common.errors import InvalidRequest
from services.common.ids import BlockKey
from services.worker.core.blocks import AllDropped, BlockChange, CopiesAdded, CopiesDropped
from services.worker.core.model import FinishReason, PositionLogprobs, Sampling
from services.worker.engines.port import EngineRequest, Output, TierNews, TransferNews

_FINISH = {
    VllmFinish.STOP: FinishReason.STOP,
    VllmFinish.LENGTH: FinishReason.LENGTH,
    VllmFinish.ABORT: FinishReason.ABORT,
    VllmFinish.ERROR: FinishReason.ERROR,
    VllmFinish.REPETITION: FinishReason.STOP,
}
_SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Running:
    """What must be remembered of a request to read its outputs."""

    id: str
    sampling: Sampling
    prefill_only: bool = False


class Intake:
    """Makes vLLM's requests. One for each engine; on the loop's thread."""

    def __init__(
        self, processor: InputProcessor, tasks: tuple[Any, ...], adapters: Iterable[Adapter]
    ) -> None:
        self._processor = processor
        self._tasks = tasks
        self._lora = {
            a.name: LoRARequest(lora_name=a.name, lora_int_id=i, lora_path=a.path)
            for i, a in enumerate(adapters, 1)
        }

    def request(self, request: EngineRequest) -> EngineCoreRequest:
        """vLLM's form of a request. Raises InvalidRequest for what vLLM refuses."""
        sampling = sampling_params(request.sampling)
        if params := {**(request.kv or {}), **_transfer(request)}:
            sampling.extra_args = {"kv_transfer_params": params}
        try:
            return self._processor.process_inputs(
                request.id,
                tokens_input(list(request.token_ids), cache_salt=request.cache_salt or None),
                sampling,
                supported_tasks=self._tasks,
                lora_request=self._lora[request.adapter] if request.adapter else None,
                priority=request.priority,
                data_parallel_rank=request.dp_rank,
            )
        except (ValueError, VLLMClientError) as exc:
            # vLLM's validation names the parameter when it knows it.
            field = getattr(exc, "parameter", None) or ""
            raise InvalidRequest(f"the engine refuses the request: {exc}", field=field) from exc


def _transfer(request: EngineRequest) -> Mapping[str, Any]:
    """What vLLM's connector is to know of a prefill for others, or by others."""
    if request.prefill_only:
        return {"do_remote_decode": True, "do_remote_prefill": False}
    return request.transfer or {}


def sampling_params(s: Sampling) -> SamplingParams:
    """vLLM's form of sampling parameters; text is the gateway's business, so no detokenizing."""
    return SamplingParams(
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        # vLLM reads a seed of -1 as none.
        seed=None if s.seed is None else s.seed & _SEED_MASK,
        stop_token_ids=list(s.stop_token_ids),
        ignore_eos=s.ignore_eos,
        logprobs=s.logprobs,
        prompt_logprobs=s.prompt_logprobs,
        logit_bias=dict(s.logit_bias) or None,
        allowed_token_ids=list(s.allowed_token_ids) or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        skip_clone=True,
    )


def output(o: EngineCoreOutput, running: Running) -> Output:
    """The port's form of what a step brought to one request."""
    finish = None if o.finish_reason is None else _FINISH[o.finish_reason]
    stop = o.stop_reason if isinstance(o.stop_reason, int) else None
    return Output(
        id=running.id,
        token_ids=tuple(o.new_token_ids),
        logprobs=_logprobs(o.new_logprobs, running.sampling.logprobs),
        prompt_logprobs=_logprobs(o.new_prompt_logprobs_tensors, running.sampling.prompt_logprobs),
        finish=finish,
        stop_token_id=stop if stop in running.sampling.stop_token_ids else None,
        cached_tokens=None if o.prefill_stats is None else o.prefill_stats.num_cached_tokens,
        queued_s=_queued(o),
        error="the engine could not finish this request" if finish is FinishReason.ERROR else "",
        transfer=o.kv_transfer_params if running.prefill_only and finish is not None else None,
    )


def _queued(o: EngineCoreOutput) -> float | None:
    times = {e.type: e.timestamp for e in reversed(o.events or ())}
    queued = times.get(EngineCoreEventType.QUEUED)
    scheduled = times.get(EngineCoreEventType.SCHEDULED)
    return None if queued is None or scheduled is None else scheduled - queued


def _logprobs(table: Any, wanted: int | None) -> tuple[PositionLogprobs, ...]:
    """Rows of [chosen, best, second ...]; as wide as the batch's widest wish, so cut to ours."""
    if table is None or wanted is None:
        return ()
    ids, values, ranks, *_ = table
    return tuple(
        PositionLogprobs(
            token_id=row_ids[0],
            logprob=row[0],
            rank=rank,
            top_token_ids=tuple(row_ids[1 : wanted + 1]),
            top_logprobs=tuple(row[1 : wanted + 1]),
        )
        for row_ids, row, rank in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
    )


def block_changes(events: Iterable[Any], block_size: int, dp_rank: int) -> list[BlockChange]:
    """The port's form of vLLM's KV events (integer hashes).

    Of a hybrid model only the first group counts, and only full blocks: routers know no others.
    """
    changes: list[BlockChange] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            changes.append(AllDropped(dp_rank))
        elif event.group_idx:
            continue
        elif isinstance(event, BlockStored):
            if event.block_size == block_size:
                changes.append(CopiesAdded(_keys(event.block_hashes), dp_rank))
        elif isinstance(event, BlockRemoved):
            changes.append(CopiesDropped(_keys(event.block_hashes), dp_rank))
    return changes


def tier_news(stats: Any) -> TierNews | None:
    """What the connector says in vLLM's statistics, if anything."""
    data = stats.kv_connector_stats if stats is not None else None
    return TierNews(data.get("counts", {}), data.get("node")) if data else None


def transfer_news(stats: Any, block_size: int) -> tuple[TransferNews, ...]:
    """The transfers that ended, by the connector's word in vLLM's statistics."""
    data = stats.kv_connector_stats if stats is not None else None
    return tuple(
        TransferNews(id, blocks * block_size, size, seconds, why)
        for id, blocks, size, seconds, why in (data or {}).get("transfers", ())
    )


def transfers_of(connector: Any) -> Any:
    """The engine's ForebayTransfer, by itself or among others; None without one."""
    children = getattr(connector, "sub_connectors", None) or [connector]
    return next((c for c in children if hasattr(c, "held")), None)


def _keys(hashes: Iterable[Any]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(h) for h in hashes)
