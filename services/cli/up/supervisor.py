"""Keeps processes alive: starts them, sees when they are ready, restarts what dies, stops in order.

It knows nothing of what the processes are; plan.py does. Children die with the supervisor, however
it dies (children.py), and lead process groups of their own, so that a Ctrl-C in the terminal
reaches the supervisor alone.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from services.cli.errors import StartFailed
from services.cli.up import children
from services.cli.up.process import ProcessRef, find, send
from services.cli.up.spec import (
    Backoff,
    ProcessSpec,
    ProcessState,
    ProcessView,
    Ready,
    exit_text,
    tail,
)

_PROBE_EVERY_S = 0.05
_ENDED = (ProcessState.DOWN, ProcessState.STOPPED)

OnChange = Callable[[ProcessView], None]
"""Called in the loop's thread after each change of a process."""


class _Keeper:
    """One process through all its lives. Owned by the loop's thread."""

    def __init__(
        self, spec: ProcessSpec, log: Path, *, restart: bool, backoff: Backoff, on_change: OnChange
    ) -> None:
        self.spec = spec
        self.view = ProcessView(
            spec.name,
            spec.kind,
            ProcessState.STOPPED,
            command=spec.command,
            env=spec.env,
            log=str(log),
        )
        self.changed = asyncio.Event()
        self._log = log
        self._restart = restart
        self._backoff = backoff
        self._on_change = on_change
        self._wanted = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._was_ready = False
        self._busy = False

    def want(self, spec: ProcessSpec | None = None) -> None:
        """Asks for the process to run, by a new spec if one is given."""
        self.spec = spec or self.spec
        if self.view.state in _ENDED:
            # Set here already, so that whoever waits for it does not see the end of an older life.
            self._was_ready = False
            self._set(state=ProcessState.STARTING, detail="", **_words(self.spec))
        self._unwanted.clear()
        self._wanted.set()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, after `grace_s` SIGKILL; returns when it is gone and won't come back."""
        self.want_nothing()
        if not self._busy and self.view.state not in _ENDED:  # asked for, not yet begun
            self._set(state=ProcessState.STOPPED)
        ref = self.ref
        if ref is not None:
            self._set(state=ProcessState.STOPPING)
            send(ref, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._until_ended()
        except TimeoutError:
            self.kill()
            await self._until_ended()

    def want_nothing(self) -> None:
        """Says that the end of the process, when it comes, is on purpose."""
        self._wanted.clear()
        self._unwanted.set()

    def kill(self) -> None:
        """SIGKILL to the process and its group."""
        if self.ref is not None:
            send(self.ref, signal.SIGKILL, group=True)

    @property
    def ref(self) -> ProcessRef | None:
        """The running life, if any."""
        return ProcessRef(self.view.pid, self.view.start_time) if self.view.pid else None

    async def _until_ended(self) -> None:
        while self.view.state not in _ENDED:
            self.changed.clear()
            await self.changed.wait()

    def _set(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]
        self.changed.set()
        self._on_change(self.view)

    async def run(self) -> None:
        """The keeping itself; ends only by cancellation, and then takes the process along."""
        while True:
            await self._wanted.wait()
            if self._wanted.is_set():  # not taken back in the meantime
                self._busy = True
                await self._keep()

    async def _keep(self) -> None:
        """Lives of the process until it is stopped, or dies for good."""
        failures = 0
        while True:
            born = time.monotonic()
            code = await self._live()
            if self._unwanted.is_set():
                return self._end(ProcessState.STOPPED, code)
            if not self._restart or not self._was_ready:
                # Dying before the first readiness is a wrong setting more often than bad luck.
                self._wanted.clear()
                return self._end(ProcessState.DOWN, code)
            long_life = time.monotonic() - born > self._backoff.forget_s
            failures = 1 if long_life else failures + 1
            pause = self._backoff.pause(failures)
            self._set(
                state=ProcessState.BACKOFF,
                detail=f"{exit_text(code)}; again in {pause:g} s",
                restarts=self.view.restarts + 1,
                **_gone(code),
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._unwanted.wait()
                return self._end(ProcessState.STOPPED, code)

    def _end(self, state: ProcessState, code: int) -> None:
        self._busy = False
        asked = state is ProcessState.STOPPED and code in (0, -signal.SIGTERM)
        self._set(state=state, detail="" if asked else exit_text(code), **_gone(code))

    async def _live(self) -> int:
        """One life: start, ready, end. Returns the exit code."""
        spec = self.spec
        if spec.ready_file is not None:
            spec.ready_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            process = await children.start(spec, log)
        ref = find(process.pid)
        self._set(
            state=ProcessState.STOPPING if self._unwanted.is_set() else ProcessState.STARTING,
            pid=process.pid,
            start_time=ref.start_time if ref else 0,
            ready=Ready(),
            detail="",
            **_words(spec),
        )
        if self._unwanted.is_set() and ref is not None:  # stopped while it was being started
            send(ref, signal.SIGTERM)
        try:
            async with asyncio.TaskGroup() as tasks:
                probing = tasks.create_task(self._watch_ready(spec, process.pid))
                code = await process.wait()
                probing.cancel()
        except BaseException:
            self.kill()
            await asyncio.shield(process.wait())
            raise
        return code

    async def _watch_ready(self, spec: ProcessSpec, pid: int) -> None:
        while True:
            if (ready := await spec.probe(pid)) is not None:
                break
            await asyncio.sleep(_PROBE_EVERY_S)
        self._was_ready = True
        if self.view.state is ProcessState.STARTING:
            self._set(state=ProcessState.READY, ready=ready)


class Supervisor:
    """Keeps a set of processes; made by `supervise`."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        log_dir: Path,
        *,
        restart: bool,
        backoff: Backoff,
        on_change: OnChange,
    ) -> None:
        self._tasks = tasks
        self._log_dir = log_dir
        self._restart = restart
        self._backoff = backoff
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._keepers: dict[str, _Keeper] = {}
        self._running: list[asyncio.Task[None]] = []

    @property
    def processes(self) -> tuple[ProcessView, ...]:
        """All processes, in the order in which they were added."""
        return tuple(k.view for k in self._keepers.values())

    def start(self, spec: ProcessSpec) -> None:
        """Starts a process, or starts a stopped one again (by this spec)."""
        keeper = self._keepers.get(spec.name)
        if keeper is None:
            keeper = _Keeper(
                spec,
                self._log_dir / f"{spec.name}.log",
                restart=self._restart,
                backoff=self._backoff,
                on_change=self._note,
            )
            self._keepers[spec.name] = keeper
            self._running.append(self._tasks.create_task(keeper.run(), name=f"keep {spec.name}"))
        keeper.want(spec)

    def start_what_is_down(self) -> tuple[str, ...]:
        """Starts every process that died and was not restarted; returns their names."""
        down = [k for k in self._keepers.values() if k.view.state is ProcessState.DOWN]
        for keeper in down:
            keeper.want()
        return tuple(k.spec.name for k in down)

    async def wait_ready(self, names: Iterable[str], timeout_s: float) -> None:
        """Returns when all of them are ready.

        Raises StartFailed, with the last log lines, for one that ended or was not ready in time.
        """
        keepers = [self._keepers[name] for name in names]
        try:
            async with asyncio.timeout(timeout_s):
                while waited := [k for k in keepers if k.view.state is not ProcessState.READY]:
                    for keeper in waited:
                        if keeper.view.state in _ENDED:
                            raise _start_failed(
                                keeper.view, f"ended before it was ready ({keeper.view.detail})"
                            )
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise _start_failed(waited[0].view, f"was not ready within {timeout_s:g} s") from None

    def _note(self, view: ProcessView) -> None:
        self._changed.set()
        self._on_change(view)

    async def stop(self, names: Iterable[str], grace_s: float) -> None:
        """Stops these at the same time: SIGTERM, after `grace_s` seconds SIGKILL."""
        async with asyncio.TaskGroup() as tasks:
            for name in names:
                tasks.create_task(self._keepers[name].stop(grace_s))

    async def stop_kinds(self, kinds: Iterable[str], grace_s: float) -> None:
        """Stops all processes of one kind after those of another, in the order given."""
        for kind in kinds:
            await self.stop(
                [name for name, k in self._keepers.items() if k.spec.kind == kind], grace_s
            )

    def kill_all(self) -> None:
        """SIGKILL to everything at once; nothing is restarted."""
        for keeper in self._keepers.values():
            keeper.want_nothing()
            keeper.kill()

    def close(self) -> None:
        """Ends the keeping, and kills what still runs."""
        for task in self._running:
            task.cancel()


@asynccontextmanager
async def supervise(
    log_dir: Path,
    *,
    restart: bool = True,
    backoff: Backoff | None = None,
    on_change: OnChange = lambda view: None,
) -> AsyncIterator[Supervisor]:
    """A supervisor whose processes write to `log_dir`/NAME.log; kills what is left at the end.

    `log_dir` must exist.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(
                tasks, log_dir, restart=restart, backoff=backoff or Backoff(), on_change=on_change
            )
            try:
                yield supervisor
            finally:
                supervisor.close()
    except BaseExceptionGroup as group:
        raise single(group) from None


def _words(spec: ProcessSpec) -> dict[str, object]:
    return {"command": spec.command, "env": spec.env}


def _gone(code: int) -> dict[str, int]:
    return {"pid": 0, "start_time": 0, "exit_code": code}


def _start_failed(view: ProcessView, what: str) -> StartFailed:
    return StartFailed(
        f"{view.name} {what}",
        process=view.name,
        tail=tail(Path(view.log)),
        hint=f"Its whole log: {view.log}",
    )


def single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception in a group, however deep; the group itself when there are several."""
    exc: BaseException = group
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return group if isinstance(exc, BaseExceptionGroup) else exc
