"""ForebayTransfer: vLLM's interface of a connector that hands KV to other engines and takes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from services.worker.connector.stats import ForebayStats
from services.worker.connector.transfer.scheduler_side import TransferScheduler
from services.worker.connector.transfer.worker_side import Ended, TransferWorker


@dataclass
class TransferMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a step ended."""

    ended: list[Ended] = field(default_factory=list)
    fences: int = 0
    """Agents destroyed so far."""
    fence_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several ranks: a transfer is as good as at the rank where it went worst."""
        assert isinstance(other, TransferMeta), "ranks run the same connector"
        by_request = {e.request: e for e in self.ended}
        for ended in other.ended:
            mine = by_request.get(ended.request)
            if mine is None or ended.why or (not mine.why and ended.seconds > mine.seconds):
                by_request[ended.request] = ended
        fences, fence_s = self.fences + other.fences, max(self.fence_s, other.fence_s)
        return TransferMeta(list(by_request.values()), fences, fence_s)


class ForebayTransfer(NixlPullConnector):  # type: ignore[misc]
    """vLLM's NixlConnector with an agent for each peer, deadlines, and checksums.

    Settings in `kv_connector_extra_config`, beside vLLM's: timeout_s, advertise_host.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        # Not NixlPullConnector's own, which would make halves that are of no use here.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        self.connector_scheduler: TransferScheduler | None = None
        self.connector_worker: TransferWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = TransferScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            self.connector_worker = TransferWorker(vllm_config, self.engine_id, kv_cache_config)
        self._manager: Any = None
        self._counts: Counter[str] = Counter()
        self._ended: list[Ended] = []
        self._told = -1
        self._fences = 0

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the cache manager."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def release(self, request_id: str) -> None:
        """Nobody will take this prefill's KV. Scheduler side."""
        if self.connector_scheduler is not None:
            self.connector_scheduler.release(request_id)

    @property
    def held(self) -> int:
        """Finished prefills whose KV waits to be taken. Scheduler side."""
        return len(self.connector_scheduler.held) if self.connector_scheduler is not None else 0

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What has ended since the last call. Worker side."""
        worker = self.connector_worker
        if worker is None:
            return None
        ended = worker.take_ended()
        fences = worker.agents.fences
        if not ended and fences == self._fences:
            return None
        self._fences = fences
        return TransferMeta(ended, fences, worker.agents.fence_s)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker side says. Scheduler side."""
        super().update_connector_output(connector_output)
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, TransferMeta):
            self._ended += meta.ended
            self._fences = meta.fences

    def get_kv_connector_stats(self) -> ForebayStats | None:
        """Transfers that ended, and how many prefills wait to be taken. Scheduler side."""
        if self.connector_scheduler is None:
            return None
        held = self.held
        if not self._ended and held == self._told:
            return None
        self._told = held
        ended, self._ended = self._ended, []
        return ForebayStats(
            data={
                "transfers": [[e.request, e.blocks, e.bytes, e.seconds, e.why] for e in ended],
                "held": held,
                "fences": self._fences,
            }
        )

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats | None:
        """Figures from their plain form."""
        return ForebayStats(data=data) if data else None

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **more: Any) -> None:
        """None of vLLM's: the worker's shell has its own."""
