"""KV from and to other workers, as the shell sees it: handles given out, handles taken.

What can't be used is as good as none: the request computes, and a metric says why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from services.common.cards import Holder
from services.common.telemetry.logging import get_logger
from services.worker.adapters.metrics import WorkerMetrics
from services.worker.connector.transfer.params import decode, encode, prompt_digest
from services.worker.core.model import Generation, Handle
from services.worker.engines.port import TransferNews

MOST_HANDED = 4096
"""Handles remembered for a release; the oldest are left to their lease."""
log = get_logger(__name__)


class Transfers:
    """One worker's handles. Loop's thread only."""

    def __init__(
        self, holder: Holder, namespace: bytes, way: str, lease_s: float, metrics: WorkerMetrics
    ) -> None:
        """`way` as in EngineProfile.transfer; `lease_s`: how long KV waits to be taken."""
        self._holder = holder
        self._namespace = namespace
        self._way = way
        self._lease_s = lease_s
        self._metrics = metrics
        self._handed: OrderedDict[str, str] = OrderedDict()

    def give(
        self,
        id: str,
        generation: Generation,
        tokens: Sequence[int],
        adapter: tuple[str, str],
        params: Mapping[str, Any],
    ) -> Handle:
        """The handle of a prefill that has ended, by the engine's parameters."""
        self._handed[generation.request_id] = id
        if len(self._handed) > MOST_HANDED:
            self._handed.popitem(last=False)
        return Handle(
            source=self._holder.id,
            source_incarnation=self._holder.incarnation,
            source_rank=generation.dp_rank or 0,
            namespace=self._namespace,
            params=encode(params, prompt_digest(tokens, generation.cache_salt, adapter)),
            way=self._way,
            tokens=len(tokens),
            request_id=generation.request_id,
            expires_s=self._lease_s,
        )

    def take(
        self, generation: Generation, tokens: Sequence[int], adapter: tuple[str, str]
    ) -> Mapping[str, Any] | None:
        """The engine's parameters in a request's handle; None: it has none, or none of use."""
        handle = generation.transfer
        if handle is None:
            return None
        params, why = self._read(handle, generation, tokens, adapter)
        if why:
            self._metrics.transfers.labels("refused").inc()
            log.warning(
                "a transfer handle is of no use; the prompt is computed",
                request_id=generation.client_request_id,
                source=handle.source,
                why=why,
            )
        return params

    def _read(
        self,
        handle: Handle,
        generation: Generation,
        tokens: Sequence[int],
        adapter: tuple[str, str],
    ) -> tuple[Mapping[str, Any] | None, str]:
        if not self._way or handle.way != self._way:
            return None, f"it is taken by {handle.way or 'nothing'!r}"
        if handle.namespace != self._namespace:
            return None, "another namespace"
        if handle.source == self._holder.id:
            return None, "it is our own"
        if generation.sampling.prompt_logprobs is not None:
            return None, "log probabilities of a prompt need all of it computed"
        try:
            digest, params = decode(handle.params)
        except ValueError as exc:
            return None, str(exc)
        if digest != prompt_digest(tokens, generation.cache_salt, adapter):
            return None, "another prompt, or another adapter"
        return params, ""

    def released(self, request_id: str) -> str | None:
        """The engine's id of a prefill whose KV nobody will take; None: not known (any more)."""
        return self._handed.pop(request_id, None)

    def ended(self, news: TransferNews) -> None:
        """Counts a transfer that the engine took, or failed to."""
        self._metrics.transfers.labels("failed" if news.why else "taken").inc()
        if not news.why:
            self._metrics.transfer_seconds.observe(news.seconds)
            self._metrics.transfer_bytes.inc(news.bytes)
