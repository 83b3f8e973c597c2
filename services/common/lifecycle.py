"""A process's life: start, ready, drain, stop. `run` is the whole of a service's `__main__`.

The first SIGTERM or SIGINT asks for a drain, the second ends the process at once.
"""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path

import uvloop

from services.common.cards import Instance
from services.common.errors import ForebayError
from services.common.telemetry.logging import get_logger

log = get_logger(__name__)

FILES = 65_536
"""Open files that a service may have, as far as the system lets it."""


class Phase(StrEnum):
    """Where a process is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


def _brief(instance: Instance) -> dict[str, object]:
    return {"id": instance.id, "incarnation": instance.incarnation}


class Lifecycle:
    """Phase of this process and the wish to stop. Owned by the loop's thread."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self._stop = asyncio.Event()

    @property
    def stopping(self) -> bool:
        """Whether a stop was asked for."""
        return self._stop.is_set()

    def ready(
        self,
        instance: Instance | None = None,
        ready_file: str = "",
        instances: Sequence[Instance] = (),
    ) -> None:
        """Says that requests are welcome; writes `ready_file` (atomically) when one is named.

        `instances`: all that this process holds, when there are several.
        """
        if not self.stopping:
            self.phase = Phase.READY
        if instance is not None:
            log.info(
                "ready", id=instance.id, address=instance.address, metrics=instance.metrics_address
            )
        if instance is not None and ready_file:
            text = json.dumps(
                {
                    "id": instance.id,
                    "incarnation": instance.incarnation,
                    "pid": os.getpid(),
                    "address": instance.address,
                    "events_address": instance.events_address,
                    "metrics_address": instance.metrics_address,
                    **({"instances": [_brief(i) for i in instances]} if instances else {}),
                }
            )
            scratch = Path(f"{ready_file}.{os.getpid()}")
            scratch.write_text(text)
            scratch.replace(ready_file)

    def stop(self) -> None:
        """Asks for a drain and a stop; idempotent."""
        self.phase = Phase.DRAINING
        self._stop.set()

    async def wait_stop(self) -> None:
        """Returns when a stop is asked for."""
        await self._stop.wait()


def run(main: Callable[[Lifecycle], Awaitable[None]]) -> int:
    """Runs `main` on uvloop and returns the exit code; a ForebayError means a message and 1.

    `main` serves until `lifecycle.wait_stop()` returns, drains, closes what it opened, and returns.
    """

    _allow_files()

    async def body() -> None:
        lifecycle = Lifecycle()
        loop = asyncio.get_running_loop()

        def on_signal(signum: int) -> None:
            if lifecycle.stopping:
                log.warning("forced to stop", signal=signal.Signals(signum).name)
                os._exit(128 + signum)
            log.info("asked to stop", signal=signal.Signals(signum).name)
            lifecycle.stop()

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, on_signal, signum)
        await main(lifecycle)

    failures: list[ForebayError] = []
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    except* ForebayError as group:
        failures = _leaves(group)
    for exc in failures:
        log.error("stopped by an error", error=exc.message, reason=exc.reason)
        print(f"forebay: {exc.message}", file=sys.stderr)
    return 1 if failures else 0


def _allow_files() -> None:
    """Raises the soft limit of open files, often 1,024, towards the hard one: peers are files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _leaves(group: BaseExceptionGroup[ForebayError]) -> list[ForebayError]:
    found: list[ForebayError] = []
    for exc in group.exceptions:
        found.extend(_leaves(exc) if isinstance(exc, BaseExceptionGroup) else [exc])
    return found
