"""The half of the connector beside vLLM's scheduler: its calls become events of the plan.

Nothing here waits or does I/O; the link's thread does. vLLM's objects are read here and in
connector.py alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from services.common.telemetry.logging import get_logger
from services.worker.connector.link import Link
from services.worker.connector.model import Attachment, LoadOrder, Orders, Report, SaveOrder
from services.worker.connector.news import Attached, Committed, Found, Gone, Promoted
from services.worker.connector.plan import Plan
from services.worker.connector.saves import Pick
from services.worker.connector.terms import from_params

log = get_logger(__name__)


class SchedulerSide:
    """One engine's plan, and the G1 blocks that its saves keep. The scheduler's thread only."""

    def __init__(self, block_size: int, plan: Plan, link: Link) -> None:
        self.plan = plan
        self.node = ""
        """Id of the daemon that we are attached to; empty: none."""
        self.prefill_tokens = 0
        """Tokens scheduled in steps' chunks of more than one, since somebody last looked."""
        self._block_size = block_size
        self._link = link
        self._manager: Any = None
        self._pool: Any = None
        self._requests: dict[str, Any] = {}
        self._loads: list[LoadOrder] = []
        self._loading: dict[str, LoadOrder] = {}
        self._pins: dict[int, list[Any]] = {}
        self._attach: Attachment | None = None
        self._mapping = 0
        """Owner whose arena the worker side was told to use and has not answered for."""
        self._linked: dict[str, int] = {}
        self._figures: dict[str, Any] = {}

    def bind(self, manager: Any) -> None:
        """Takes vLLM's cache manager."""
        self._manager, self._pool = manager, manager.block_pool

    @property
    def busy(self) -> bool:
        """Whether the engine must step on, though no request does."""
        self._hear()
        return bool(self.plan.jobs or self._attach is not None or self._mapping)

    def arrive(self, request: Any) -> None:
        """A request is new. One without terms is not the shell's: it is left alone."""
        try:
            terms = from_params(request.kv_transfer_params)
        except (KeyError, TypeError, ValueError) as exc:
            log.warning("a request's terms make no sense", error=repr(exc))
            return
        if terms is not None:
            self._requests[request.request_id] = request
            self.plan.arrive(request.request_id, terms)
            self._tell()

    def match(self, request: Any, local_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the engine's own; None: ask again."""
        if request.skip_reading_prefix_cache or local_tokens % self._block_size:
            return 0
        if (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0
        self._hear()
        if request.request_id not in self._requests:
            return 0
        blocks = self.plan.match(
            request.request_id,
            request.block_hashes,
            min(len(request.block_hashes), (request.num_tokens - 1) // self._block_size),
            local_tokens // self._block_size,
            time.monotonic(),
        )
        self._tell()
        return None if blocks is None else blocks * self._block_size

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The engine has placed a request."""
        id = request.request_id
        ids: Sequence[int] = blocks.get_block_ids()[0] if external_tokens else ()
        try:
            order = self.plan.allocated(
                id, request.block_hashes, ids, external_tokens // self._block_size
            )
        except Exception:
            # The engine waits for these blocks: they must be reported as not loaded.
            log.exception("a load could not be planned", request=id)
            order = LoadOrder(id, tuple(ids), ()) if external_tokens else None
        if order is not None:
            self._loads.append(order)
            self._loading[id] = order

    def orders(self, output: Any, *, saves: bool = True) -> Orders:
        """What the worker side is to do with this step."""
        self._hear()
        for id in output.preempted_req_ids or ():
            self.plan.preempted(id)
        save = self._save(output.num_scheduled_tokens) if saves else None
        loads, self._loads = tuple(self._loads), []
        attach, self._attach = self._attach, None
        self._tell()
        return Orders(attach, loads, (save,) if save is not None else ())

    def figures(self) -> dict[str, Any]:
        """What happened since the last call, and how it is now; empty when nothing is new."""
        counts: dict[str, float] = {}
        if self.plan.counts:
            counts = {name: value for name, value in self.plan.counts.items() if value}
            self.plan.counts.clear()
        linked = self._link.counts.copy()
        if linked != self._linked:
            for name, value in linked.items():
                if new := value - self._linked.get(name, 0):
                    counts[name] = new
            self._linked = linked
        if self.prefill_tokens:
            counts["prefill_tokens"] = self.prefill_tokens
            self.prefill_tokens = 0
        now = {"node": self.node, "slots": len(self._link.slots)}
        if not counts and now == self._figures:
            return {}
        self._figures = now
        return {"counts": counts, **now}

    def _save(self, scheduled: dict[str, int]) -> SaveOrder | None:
        picks: list[Pick] = []
        pinned: list[Any] = []
        plan, size = self.plan, self._block_size
        for id, tokens in scheduled.items():
            request = self._requests.get(id)
            if request is None:
                continue
            computed = request.num_computed_tokens + tokens
            if tokens > 1:
                self.prefill_tokens += tokens
            elif computed % size and id not in plan.behind:
                # A decode within a block: nearly all that most steps bring.
                continue
            keys = request.block_hashes
            complete = min(len(keys), computed // size)
            if not plan.due(id, complete):
                continue
            blocks = self._manager.get_blocks(id).blocks[0]
            for pick in plan.pick(id, keys, _holds(blocks, keys)):
                picks.append(pick)
                pinned.append(blocks[pick.position])
        if not picks:
            return None
        self._pool.touch(pinned)
        order = plan.begin_save(picks, [block.block_id for block in pinned])
        self._pins[order.job] = pinned
        return order

    def report(self, report: Report) -> None:
        """What the worker side tells after a step."""
        now_s = time.monotonic()
        for owner, why in report.attached.items():
            if owner == self._mapping:
                self._mapping = 0
            if why:
                self._link.refuse(owner, why)
            else:
                self._link.ready(owner)
        for id, result in report.loaded.items():
            order = self._loading.pop(id)
            self.plan.loaded(order, result, now_s)
            if result.good < len(order.blocks):
                self._correct(id, len(order.blocks) - result.good)
        for job, saved in report.saved.items():
            self._pool.free_blocks(reversed(self._pins.pop(job)))
            self._link.slots.done(self.plan.saved(job, saved))
        self._tell()

    def _correct(self, id: str, failed_blocks: int) -> None:
        """vLLM counts tokens of a failed load as cached: they were computed."""
        request = self._requests.get(id)
        if request is None or request.prefill_stats is None or request.num_preemptions:
            return
        stats = request.prefill_stats
        failed = min(failed_blocks * self._block_size, stats.num_external_cached_tokens)
        stats.set(
            stats.num_prompt_tokens,
            stats.num_local_cached_tokens,
            stats.num_external_cached_tokens - failed,
        )

    def leave(self, request: Any) -> None:
        """A request has ended."""
        self._requests.pop(request.request_id, None)
        self.plan.leave(request.request_id)
        self._tell()

    def _tell(self) -> None:
        instructions = self.plan.take_instructions()
        if instructions is not None:
            self._link.send(instructions)

    def _hear(self) -> None:
        for news in self._link.take_news():
            match news:
                case Attached(attachment, node):
                    self._attach, self._mapping = attachment, attachment.owner
                    self.node = node
                    self.plan.reach(True)
                case Gone():
                    self._attach, self._mapping = None, 0
                    self.node = ""
                    self.plan.reach(False)
                case Committed(results):
                    self.plan.committed(results, time.monotonic())
                case Promoted(id, lease, ready, promoting):
                    self.plan.promoted(id, lease, ready, promoting)
                case Found(id, terms):
                    self.plan.found(id, terms)

    def stop(self) -> None:
        """Ends the link."""
        self._link.stop()


def _holds(blocks: Sequence[Any], keys: Sequence[bytes]) -> Any:
    """Whether a block stands under its hash in vLLM's cache; no other is ever saved."""

    def holds(position: int) -> bool:
        if position >= len(blocks):
            return False
        named = blocks[position].block_hash
        # vLLM appends the number of the cache group to the hash.
        return named is not None and named[:-4] == keys[position]

    return holds
