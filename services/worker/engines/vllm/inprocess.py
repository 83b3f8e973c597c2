"""vLLM's engine core in this process, stepped by a thread of its own.

One thread, one process, a third of AsyncLLM's start time and half of its memory: right for a CPU.
The thread applies commands between steps and hands each step's news to the loop in one call. It
drives the core itself, without LLMEngine's output processor, which detokenizes and aggregates.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import EventBatch, EventPublisher
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.executor import Executor

from services.common.telemetry.logging import get_logger
from services.worker.adapters.files import DigestCache, link_adapters
from services.worker.config import WorkerSettings
from services.worker.core.blocks import BlockChange
from services.worker.core.model import FinishReason
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
from services.worker.engines.vllm.profile import engine_profile, identify
from services.worker.engines.vllm.translate import (
    Intake,
    Running,
    block_changes,
    output,
    tier_news,
    transfer_news,
    transfers_of,
)
from services.worker.errors import EngineStartError

EMPTY_STEP_PAUSE_S = 0.001
"""After a step that had nothing to run, others (a load in the background) get the processor."""
RESET_TRIALS, RESET_PAUSE_S = 100, 0.01
"""How often, and how far apart, a reset waits for saves that hold blocks."""
STOP_TIMEOUT_S = 30.0
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Add:
    request: EngineCoreRequest
    running: Running


@dataclass(frozen=True, slots=True)
class _Abort:
    id: str


@dataclass(frozen=True, slots=True)
class _Call:
    """Runs a function on the core between steps; its result goes to the future."""

    function: Callable[[EngineCore], Any]
    future: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Release:
    """Lets go of a prefill's KV."""

    id: str


@dataclass(frozen=True, slots=True)
class _Poke:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Abort | _Call | _Release | _Poke | _Stop


class _Events(EventPublisher):  # type: ignore[misc]
    """Takes the scheduler's KV events where they arise."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def publish(self, events: EventBatch) -> None:
        self.events.extend(events.events)

    def shutdown(self) -> None:
        pass


@asynccontextmanager
async def open_inprocess(settings: WorkerSettings) -> AsyncIterator[InprocessEngine]:
    """Starts the engine in a thread of this process. Raises EngineStartError or SettingsError."""
    engine = InprocessEngine(settings)
    await engine.started
    try:
        yield engine
    finally:
        await engine.stop()


class InprocessEngine:
    """The port's Engine on an EngineCore of this process."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._loop.create_future()
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._steps = 0
        self._dead: EngineDead | None = None
        self._on_step: Callable[[Step], None] = lambda step: None
        self._on_death: Callable[[EngineDead], None] = lambda dead: None
        self._profile: EngineProfile | None = None
        self._intake: Intake | None = None
        self._stopped = asyncio.Event()
        # Of the engine's thread only.
        self._running: dict[str, Running] = {}
        self._events = _Events()
        threading.Thread(target=self._main, name="engine", daemon=True).start()

    @property
    def profile(self) -> EngineProfile:
        """What it serves."""
        assert self._profile is not None, "the engine has not started"
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
        assert self._intake is not None, "the engine has not started"
        made = self._intake.request(request)
        running = Running(request.id, request.sampling, request.prefill_only)
        self._commands.put(_Add(made, running))

    def abort(self, id: str) -> None:
        """Ends a request when the running step ends."""
        self._commands.put(_Abort(id))

    def release_transfer(self, id: str) -> None:
        """Lets go of the KV of a prefill that nobody will take."""
        if self._dead is None:
            self._commands.put(_Release(id))

    def poke(self) -> None:
        """Steps if the connector has something to be stepped for."""
        if self._dead is None:
            self._commands.put(_Poke())

    async def reset_cache(self) -> bool:
        """Forgets all blocks, unless requests hold some."""
        for _ in range(RESET_TRIALS):
            done = await self.call(_reset)
            if done is not None:
                return bool(done)
            await asyncio.sleep(RESET_PAUSE_S)
        return False

    async def call(self, function: Callable[[EngineCore], Any]) -> Any:
        """Runs `function` on the engine's thread between two steps. Raises EngineDead."""
        if self._dead is not None:
            raise self._dead
        future: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put(_Call(function, future))
        return await future

    async def stop(self) -> None:
        """Stops the engine and its thread."""
        self._commands.put(_Stop())
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._stopped.wait()
        except TimeoutError:
            log.error("the engine's thread did not stop in time", timeout_s=STOP_TIMEOUT_S)

    # Below: the engine's thread.

    def _main(self) -> None:
        try:
            self._serve_until_stopped()
        finally:
            self._on_loop(self._stopped.set)

    def _serve_until_stopped(self) -> None:
        try:
            core = self._start()
        except Exception as exc:  # the start's boundary: reported to who waits for it
            self._on_loop(self._fail_start, exc)
            return
        self._on_loop(self._succeed_start)
        try:
            self._serve(core)
        except Exception as exc:  # the thread's boundary: the engine is dead
            log.exception("the engine failed")
            dead = EngineDead(f"{type(exc).__name__}: {exc}")
            self._on_loop(self._die, dead)
        finally:
            core.shutdown()

    def _start(self) -> EngineCore:
        tame_logging(self._settings.engine_log_level, starting=True)
        adapters = link_adapters(
            self._settings.adapters, self._settings.adapter_root, DigestCache()
        )
        config = engine_config(
            self._settings,
            adapters,
            KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
            {"distributed_executor_backend": "uni"},
        )
        identity = identify(config, self._settings)
        renderer = renderer_from_config(config)
        processor = InputProcessor(config, renderer)
        try:
            core = EngineCore(config, Executor.get_class(config), log_stats=True)
        except (ValueError, RuntimeError, OSError, MemoryError) as exc:
            raise EngineStartError(f"vLLM does not start: {exc}") from exc
        tame_logging(self._settings.engine_log_level)
        core.scheduler.kv_event_publisher = self._events
        self._intake = Intake(processor, core.get_supported_tasks(), adapters)
        self._profile = engine_profile(config, renderer.get_eos_token_id(), adapters, identity)
        return core

    def _serve(self, core: EngineCore) -> None:
        scheduler = core.scheduler
        while True:
            outputs: list[Output] = []
            calls: list[tuple[asyncio.Future[Any], Any]] = []
            if not self._apply(core, outputs, calls):
                return
            blocks = self._take_changes(core)
            if outputs or blocks:
                self._hand_over(Step(self._steps, 0.0, tuple(outputs), blocks, (self._load(core),)))
            for future, result in calls:
                self._on_loop(_resolve, future, result)
            if not scheduler.has_requests():
                continue
            began = time.perf_counter()
            produced, executed = core.step_fn()
            core.post_step(model_executed=executed)
            seconds = time.perf_counter() - began
            self._steps += 1
            mine = produced.get(0) if produced else None
            outputs = []
            for item in mine.outputs if mine else ():
                running = self._running.get(item.request_id)
                if running is not None:
                    outputs.append(output(item, running))
                    if item.finish_reason is not None:
                        del self._running[item.request_id]
            self._hand_over(
                Step(
                    self._steps,
                    seconds,
                    tuple(outputs),
                    self._take_changes(core),
                    (self._load(core),),
                    tier_news(mine.scheduler_stats) if mine else None,
                    transfer_news(mine.scheduler_stats, self.profile.block_size) if mine else (),
                )
            )
            if not executed:
                time.sleep(EMPTY_STEP_PAUSE_S)

    def _apply(
        self,
        core: EngineCore,
        outputs: list[Output],
        calls: list[tuple[asyncio.Future[Any], Any]],
    ) -> bool:
        """Applies all commands that wait, and waits for one when there is nothing to step."""
        wait = not core.scheduler.has_requests()
        while True:
            try:
                command = self._commands.get(block=wait)
            except Empty:
                return True
            wait = False
            match command:
                case _Add(request, running):
                    try:
                        core.add_request(*core.preprocess_add_request(request))
                    except Exception as exc:  # the request's boundary: it fails, the engine lives
                        log.exception("the engine can't take a request", id=running.id)
                        error = f"the engine can't take this request: {type(exc).__name__}"
                        outputs.append(Output(running.id, finish=FinishReason.ERROR, error=error))
                    else:
                        self._running[running.id] = running
                case _Abort(id):
                    if self._running.pop(id, None) is not None:
                        core.abort_requests([id])
                        outputs.append(Output(id, finish=FinishReason.ABORT))
                case _Call(function, future):
                    try:
                        calls.append((future, function(core)))
                    except Exception as exc:  # the call's boundary: its caller hears of it
                        self._on_loop(_fail, future, exc)
                case _Release(id):
                    transfers = transfers_of(core.scheduler.connector)
                    if transfers is not None:
                        transfers.release(id)
                case _Poke():
                    return True
                case _Stop():
                    return False

    def _take_changes(self, core: EngineCore) -> tuple[BlockChange, ...]:
        events, self._events.events = self._events.events, []
        # What changed outside a step (a reset) still waits in the manager.
        events.extend(core.scheduler.kv_cache_manager.take_events())
        return tuple(block_changes(events, self.profile.block_size, 0))

    def _load(self, core: EngineCore) -> EngineLoad:
        scheduler = core.scheduler
        running, waiting = scheduler.get_request_counts()
        pool = scheduler.kv_cache_manager.block_pool
        transfers = transfers_of(scheduler.connector)
        return EngineLoad(
            running=running,
            waiting=waiting,
            used_blocks=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            pending_prefill_tokens=sum(
                max(0, r.num_prompt_tokens - r.num_computed_tokens)
                for r in scheduler.requests.values()
                if not r.is_finished()
            ),
            held_transfers=transfers.held if transfers is not None else 0,
        )

    def _hand_over(self, step: Step) -> None:
        self._on_loop(self._deliver, step)

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            log.debug("news came after the end of the loop")

    # Below: the loop's thread again.

    def _deliver(self, step: Step) -> None:
        try:
            self._on_step(step)
        except (
            Exception
        ) as exc:  # a callback's boundary: unheard steps would leave requests hanging
            log.exception("a step's news could not be handed out")
            self._die(EngineDead(f"its news could not be handed out: {exc}"))

    def _succeed_start(self) -> None:
        if not self.started.done():
            self.started.set_result(None)

    def _fail_start(self, exc: Exception) -> None:
        if not self.started.done():
            self.started.set_exception(exc)

    def _die(self, dead: EngineDead) -> None:
        if self._dead is not None:
            return
        self._dead = dead
        self._on_death(dead)
        while True:
            try:
                command = self._commands.get(block=False)
            except Empty:
                return
            if isinstance(command, _Call) and not command.future.done():
                command.future.set_exception(dead)


def _reset(core: EngineCore) -> bool | None:
    """Whether all blocks are forgotten; None: only saves hold some, and not for long."""
    if core.reset_prefix_cache():
        return True
    return None if not core.scheduler.requests and core.scheduler.has_requests() else False


def _fail(future: asyncio.Future[Any], exc: Exception) -> None:
    if not future.done():
        future.set_exception(exc)


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
