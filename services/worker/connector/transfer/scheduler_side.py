"""The half of vLLM's NixlConnector beside the scheduler, with checksums and releases."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from services.worker.connector.transfer import sums as block_sums
from services.worker.connector.transfer.params import sums_of, with_sums
from services.worker.connector.transfer.worker_side import Orders

MAX_HELD_SHARE = 0.5
"""Share of the cache's blocks that finished prefills may hold; more are let go of at once."""


class TransferScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Names what peers may read. The scheduler's thread."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._advertised = str(extra.get("advertise_host") or self.side_channel_host)
        self._most_held = int(kv_cache_config.num_blocks * MAX_HELD_SHARE)
        self._releases: set[str] = set()
        self.held: dict[str, int] = {}
        """Finished prefills whose KV waits to be taken, and their blocks."""

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Of a prefill, its blocks stay, and their sums go with the handle."""
        delay, params = super().request_finished(request, block_ids)
        if not delay or params is None:
            return delay, params
        blocks = params["remote_block_ids"][0]
        if sum(self.held.values()) + len(blocks) > self._most_held:
            # Else prefills that nobody takes would leave no room for the next.
            self._reqs_need_send.pop(request.request_id, None)
            self._reqs_not_processed.add(request.request_id)
            return False, None
        self.held[request.request_id] = len(blocks)
        cache = block_sums.of_engine(self.engine_id)
        params["remote_host"] = self._advertised
        return delay, with_sums(params, cache.of(blocks) if cache is not None else None)

    def release(self, request_id: str) -> None:
        """Nobody will take this prefill's KV."""
        if request_id in self.held:
            self._releases.add(request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """The step's orders."""
        wanted = {
            id: sums_of(entry[0].kv_transfer_params) for id, entry in self._reqs_need_recv.items()
        }
        meta = super().build_connector_meta(scheduler_output)
        orders = Orders()
        orders.__dict__.update(vars(meta))
        orders.sums, orders.releases = wanted, self._releases
        self._releases = set()
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        """What the worker side says is over."""
        super().update_connector_output(connector_output)
        for id in connector_output.finished_sending or ():
            self.held.pop(id, None)
