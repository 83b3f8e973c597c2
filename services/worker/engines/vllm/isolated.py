"""vLLM's AsyncLLM: the engine core in a process of its own, so that its steps never hold our loop.

AsyncLLM starts the processes, validates requests and watches over them; outputs are taken from its
core client one step at a time, since its own output handler splits them by request again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq.asyncio
from vllm.config import KVEventsConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from services.common.telemetry.logging import get_logger
from services.worker.adapters.files import DigestCache, link_adapters
from services.worker.config import WorkerSettings
from services.worker.core.blocks import AllDropped, BlockChange
from services.worker.core.model import FinishReason, Sampling
from services.worker.engines.port import (
    EngineDead,
    EngineLoad,
    EngineProfile,
    EngineRequest,
    Output,
    Step,
)
from services.worker.engines.vllm.arguments import engine_config
from services.worker.engines.vllm.environment import tame_logging
from services.worker.engines.vllm.kvfeed import KvFeed
from services.worker.engines.vllm.lifeline import lifeline
from services.worker.engines.vllm.profile import engine_profile, identify
from services.worker.engines.vllm.translate import (
    Intake,
    Running,
    output,
    tier_news,
    transfer_news,
)
from services.worker.errors import EngineStartError

RESET_TIMEOUT_S = 30.0
RESET_TRIALS, RESET_PAUSE_S = 20, 0.05
"""How often, and how far apart, a reset is tried."""
STOP_TIMEOUT_S = 10.0
log = get_logger(__name__)


@asynccontextmanager
async def open_isolated(settings: WorkerSettings) -> AsyncIterator[IsolatedEngine]:
    """Starts the engine's processes. Raises EngineStartError or SettingsError."""
    folder = Path(tempfile.mkdtemp(prefix="forebay-kv-"))
    try:
        llm, adapters, identity = await asyncio.to_thread(_start, settings, folder)
        try:
            tasks = await llm.get_supported_tasks()
            eos = llm.renderer.get_eos_token_id()
            profile = await asyncio.to_thread(
                engine_profile, llm.vllm_config, eos, adapters, identity
            )
            intake = Intake(llm.input_processor, tasks, adapters)
            engine = IsolatedEngine(llm, profile, intake)
            async with engine.running():
                with lifeline(_roots(llm)):
                    yield engine
        finally:
            await asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(settings: WorkerSettings, folder: Path) -> tuple[AsyncLLM, list[Any], dict[str, str]]:
    adapters = link_adapters(settings.adapters, settings.adapter_root, DigestCache())
    ranks = int(settings.engine_args.get("data_parallel_size", 1))
    events = KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        # Several ranks can't share a Unix socket; each then picks a port and says which.
        endpoint=f"ipc://{folder}/events" if ranks == 1 else "tcp://*:0",
        replay_endpoint=f"ipc://{folder}/replay" if ranks == 1 else "tcp://*:0",
    )
    config = engine_config(settings, adapters, events, {})
    identity = identify(config, settings)
    try:
        llm = AsyncLLM(config, Executor.get_class(config), log_stats=True)
    except (ValueError, RuntimeError, OSError) as exc:
        raise EngineStartError(f"vLLM does not start: {exc}") from exc
    tame_logging(settings.engine_log_level)
    return llm, adapters, identity


@dataclass(frozen=True, slots=True)
class _Add:
    request: EngineCoreRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    id: str


@dataclass(frozen=True, slots=True)
class _Poke:
    pass


def _roots(llm: AsyncLLM) -> list[int]:
    manager = llm.engine_core.resources.engine_manager
    return [process.pid for process in getattr(manager, "processes", ())]


class IsolatedEngine:
    """The port's Engine on an AsyncLLM."""

    def __init__(self, llm: AsyncLLM, profile: EngineProfile, intake: Intake) -> None:
        self._llm = llm
        self._profile = profile
        self._intake = intake
        self._steps = 0
        self._since = time.monotonic()
        self._running: dict[str, Running] = {}
        # Bounded by the worker's bound on requests: one add and one abort for each.
        self._commands: asyncio.Queue[_Add | _Abort | _Poke] = asyncio.Queue()
        self._dead: EngineDead | None = None
        self._clears = 0
        self._held: dict[int, int] = {}
        """By rank, as last told."""
        self._cleared = asyncio.Event()
        self._flushes = 0
        self._on_step: Callable[[Step], None] = lambda step: None
        self._on_death: Callable[[EngineDead], None] = lambda dead: None
        self.feeds: tuple[KvFeed, ...] = ()

    @property
    def profile(self) -> EngineProfile:
        """What it serves."""
        return self._profile

    @property
    def progress(self) -> int:
        """Steps done."""
        return self._steps

    def listen(
        self, on_step: Callable[[Step], None], on_death: Callable[[EngineDead], None]
    ) -> None:
        """Hands every later step to `on_step`, and the engine's end to `on_death`."""
        self._on_step, self._on_death = on_step, on_death
        if self._dead is not None:
            on_death(self._dead)

    def submit(self, request: EngineRequest) -> None:
        """Takes a request. Raises InvalidRequest or EngineDead."""
        if self._dead is not None:
            raise self._dead
        made = self._intake.request(request)
        if not self._running:
            self._since = time.monotonic()
        self._running[request.id] = Running(request.id, request.sampling, request.prefill_only)
        self._commands.put_nowait(_Add(made))

    def abort(self, id: str) -> None:
        """Ends a request at once here, and in the engine when its running step ends."""
        if self._running.pop(id, None) is None:
            return
        self._commands.put_nowait(_Abort(id))
        asyncio.get_running_loop().call_soon(
            lambda: self._on_step(
                Step(self._steps, outputs=(Output(id, finish=FinishReason.ABORT),))
            )
        )

    def release_transfer(self, id: str) -> None:
        """Nothing: the engine's process lets go when the lease is over."""

    def poke(self) -> None:
        """Wakes the engine's process, which steps if its connector has something to do."""
        if self._dead is None and self._commands.empty():
            self._commands.put_nowait(_Poke())

    async def reset_cache(self) -> bool:
        """Forgets all blocks, unless requests hold some.

        vLLM reports the clear with its next step only: a request of one token makes it do one.
        """
        if self._dead is not None:
            raise self._dead
        for _ in range(RESET_TRIALS):
            if self._running:
                return False
            if await self._llm.reset_prefix_cache():
                break
            # Saves may hold blocks for a moment.
            await asyncio.sleep(RESET_PAUSE_S)
        else:
            return False
        wanted = self._clears + self._profile.dp_size
        for rank in range(self._profile.dp_size):
            self._flushes += 1
            request = EngineRequest(
                f"flush-{self._flushes}",
                (0,),
                Sampling(max_tokens=1),
                dp_rank=rank if self._profile.dp_size > 1 else None,
            )
            self._commands.put_nowait(_Add(self._intake.request(request)))
        try:
            async with asyncio.timeout(RESET_TIMEOUT_S):
                while self._clears < wanted:
                    self._cleared.clear()
                    await self._cleared.wait()
        except TimeoutError:
            log.warning("the engine did not report its reset")
        return True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the tasks that talk to the engine's processes."""
        sources = self._llm.get_kv_event_sources()
        self.feeds = tuple(
            KvFeed(
                source.endpoint,
                source.replay_endpoint or "",
                self._profile.block_size,
                rank,
                self._take_changes,
            )
            for rank, source in sources.items()
        )
        with zmq.asyncio.Context() as context:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._receive(), name="engine outputs"),
                    group.create_task(self._send(), name="engine commands"),
                    *(
                        group.create_task(self._follow(f, context), name="kv events")
                        for f in self.feeds
                    ),
                ]
                try:
                    yield
                finally:
                    for task in tasks:
                        task.cancel()

    async def _send(self) -> None:
        core = self._llm.engine_core
        while True:
            command = await self._commands.get()
            try:
                if isinstance(command, _Add):
                    await core.add_request_async(command.request)
                elif isinstance(command, _Poke):
                    await core.is_sleeping_async()
                else:
                    await core.abort_requests_async([command.id])
            except Exception as exc:  # the task's boundary: an engine that takes nothing is dead
                self._die(exc)
                return

    async def _receive(self) -> None:
        core = self._llm.engine_core
        while True:
            try:
                outputs = await core.get_output_async()
            except Exception as exc:  # the task's boundary: whatever it was, nothing more comes
                self._die(exc)
                return
            self._on_step(self._step(outputs))

    async def _follow(self, feed: KvFeed, context: zmq.asyncio.Context) -> None:
        try:
            await feed.run(context)
        except Exception as exc:  # the task's boundary: without its events all we say is wrong
            self._die(exc)

    def _step(self, outputs: EngineCoreOutputs) -> Step:
        self._steps += 1
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        mine = []
        for item in outputs.outputs:
            running = self._running.get(item.request_id)
            if running is not None:
                mine.append(output(item, running))
                if item.finish_reason is not None:
                    del self._running[item.request_id]
        loads: tuple[EngineLoad, ...] = ()
        if (stats := outputs.scheduler_stats) is not None:
            per_rank = self._profile.total_blocks // self._profile.dp_size
            loads = (
                EngineLoad(
                    running=stats.num_running_reqs,
                    waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
                    used_blocks=round(stats.kv_cache_usage * per_rank),
                    dp_rank=outputs.engine_index,
                    held_transfers=self._held_transfers(outputs.engine_index, stats),
                ),
            )
        tiers = tier_news(outputs.scheduler_stats)
        transfers = transfer_news(outputs.scheduler_stats, self._profile.block_size)
        return Step(self._steps, seconds, tuple(mine), (), loads, tiers, transfers)

    def _held_transfers(self, rank: int, stats: Any) -> int:
        before = self._held.get(rank, 0)
        self._held[rank] = held = int((stats.kv_connector_stats or {}).get("held", before))
        return held

    def _take_changes(self, changes: list[BlockChange]) -> None:
        self._on_step(Step(self._steps, blocks=tuple(changes)))
        self._clears += sum(isinstance(c, AllDropped) for c in changes)
        self._cleared.set()

    def _die(self, exc: Exception) -> None:
        if self._dead is None:
            self._dead = EngineDead(f"{type(exc).__name__}: {exc}")
            log.error("the engine is dead", error=str(self._dead))
            self._on_death(self._dead)
