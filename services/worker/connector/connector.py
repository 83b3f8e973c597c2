"""ForebayConnector: vLLM's connector interface, and nothing else. See plan.py for what it decides.

An exception that leaves a connector ends vLLM's engine: here none does. What fails is logged and
counted, and the engine goes on as if there were no tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from services.common.arena import Geometry
from services.common.telemetry.logging import get_logger
from services.worker.connector.copier import Copier
from services.worker.connector.copying import CopyThread
from services.worker.connector.geometry import (
    check_cache,
    check_config,
    check_layout,
    in_layer_order,
)
from services.worker.connector.link import Link
from services.worker.connector.model import Orders, Report
from services.worker.connector.news import Hello
from services.worker.connector.plan import Plan
from services.worker.connector.saves import ahead_blocks
from services.worker.connector.scheduler_side import SchedulerSide
from services.worker.connector.stats import ForebayStats
from services.worker.connector.worker_side import NO_ENDS, WorkerSide

MANY_ERRORS = 20
"""After so many exceptions the connector neither loads nor saves any more."""
log = get_logger(__name__)


@dataclass
class Meta(KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders."""

    orders: Orders


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A step's report."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """There is one rank alone (see check_config)."""
        raise NotImplementedError("several ranks")


@dataclass
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What the worker side tells the scheduler's when the cache exists."""

    geometry: Geometry
    g1_bytes: int


class ForebayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads and saves KV blocks between vLLM's cache and the node's arena.

    Settings in `kv_connector_extra_config`: address, namespace (hex), worker, model.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config)
        check_cache(kv_cache_config)
        self._extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._namespace = bytes.fromhex(self._extra["namespace"])
        self._block_size = int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)
        self._blocks = int(kv_cache_config.num_blocks)
        self._errors: Counter[str] = Counter()
        self._scheduler: SchedulerSide | None = None
        self._link: Link | None = None
        self._worker: WorkerSide | None = None
        self._handshake: Handshake | None = None
        self._ends = NO_ENDS
        self._manager: Any = None
        self._is_scheduler = role == KVConnectorRole.SCHEDULER

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss later."""
        return False

    # Scheduler side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Takes the cache manager; the link begins when the cache's geometry is known."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Takes the worker side's geometry, and begins."""
        handshake = metadata[0]
        hello = Hello(
            namespace=self._namespace,
            geometry=handshake.geometry,
            worker=str(self._extra.get("worker", "")),
            model=str(self._extra.get("model", "")),
            g1_bytes=handshake.g1_bytes,
        )
        step_tokens = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
        ahead = ahead_blocks(step_tokens, self._block_size)
        link = Link(self._extra["address"], hello, grant_blocks=ahead)
        plan = Plan(
            link.slots,
            # Never more than a quarter of the cache: requests need the rest.
            pin_limit=max(1, min(ahead, self._blocks // 4)),
            ask_s=float(self._extra.get("timeout_s", 0.25)),
        )
        side = SchedulerSide(self._block_size, plan, link)
        side.bind(self._manager)
        link.start()
        self._link, self._scheduler = link, side

    def on_new_request(self, request: Any) -> None:
        """A request came."""
        self._guard("on_new_request", lambda s: s.arrive(request), None)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens in G2 beyond the engine's own, always loaded asynchronously; None: soon."""
        if self._broken:
            return 0, False
        tokens = self._guard("match", lambda s: s.match(request, num_computed_tokens), 0)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated; those with external tokens are to be loaded."""
        self._guard("allocated", lambda s: s.allocated(request, blocks, num_external_tokens), None)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's loads and saves."""
        saves = not self._broken
        return Meta(
            self._guard("orders", lambda s: s.orders(scheduler_output, saves=saves), Orders())
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """The worker side's report."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, WorkerMeta):
            self._guard("report", lambda s: s.report(meta.report), None)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks may go: those that are being saved are kept by us."""
        self._guard("leave", lambda s: s.leave(request), None)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping until the blocks of saves are free again."""
        return bool(self._guard("busy", lambda s: s.busy, False))

    def get_kv_connector_stats(self) -> ForebayStats | None:
        """Figures since the last call; of the scheduler side."""
        if self._scheduler is None:
            return None
        data = self._guard("stats", lambda s: s.figures(), {})
        if self._errors:
            counts = data.setdefault("counts", {})
            counts["errors"] = self._errors.total()
            self._told += self._errors.total()
            self._errors.clear()
        return ForebayStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ForebayStats | None:
        """Figures from their plain form."""
        return ForebayStats(data=data) if data else None

    def reset_cache(self) -> bool | None:
        """G1 alone is reset; tiers have a Clear of their own."""
        return True

    _told = 0

    @property
    def _broken(self) -> bool:
        return self._told + self._errors.total() >= MANY_ERRORS

    def _guard(self, what: str, act: Callable[[SchedulerSide], Any], otherwise: Any) -> Any:
        if self._scheduler is None:
            return otherwise
        try:
            return act(self._scheduler)
        except Exception:  # the engine's boundary
            self._errors[what] += 1
            log.exception("the connector failed; the engine goes on", call=what)
            return otherwise

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Takes the cache's tensors. Raises EngineStartError for a layout that isn't known."""
        caches = in_layer_order(kv_caches)
        layout = check_layout(caches, self._blocks)
        geometry = Geometry(self._block_size, layout.shard_bytes, 1, layout.words)
        self._handshake = Handshake(geometry, layout.shard_bytes * self._blocks)
        copies = CopyThread(
            lambda arena, verify: Copier(caches, arena, 0, verify),
            self._namespace,
            layout.shard_bytes,
        )
        self._worker = WorkerSide(copies)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The geometry, for the scheduler side."""
        return self._handshake

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the step's loads; nothing waits for them."""
        orders = self._orders()
        if orders is not None and self._worker is not None:
            self._worker.begin(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves begin after the forward pass."""

    def wait_for_save(self) -> None:
        """Hands the step's complete blocks to the copying thread; waits for nothing."""
        orders = self._orders()
        if orders is not None and self._worker is not None:
            try:
                self._worker.after_forward(orders)
            except Exception:  # the engine's boundary
                self._errors["after_forward"] += 1
                log.exception("a save could not be started")
                self._worker.drop(orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose load is over."""
        if self._worker is None:
            return None, None
        self._ends = self._worker.take()
        return None, set(self._ends.finished)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded, of the requests that `get_finished` just named."""
        return set(self._ends.invalid)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The report that goes with them."""
        ends, self._ends = self._ends, NO_ENDS
        return WorkerMeta(ends.report) if ends.report else None

    def shutdown(self) -> None:
        """Ends threads."""
        if self._worker is not None:
            self._worker.stop()
        if self._scheduler is not None:
            self._scheduler.stop()

    def _orders(self) -> Orders | None:
        meta = self._connector_metadata
        return meta.orders if isinstance(meta, Meta) else None
