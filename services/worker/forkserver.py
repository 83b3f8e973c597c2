"""Forks workers that need not import vLLM: `python -m services.worker.forkserver --help`.

Importing vLLM and torch takes most of an engine's start (on CPUs 15 of 20 s), the same each time.
This process does it once, for workers with settings like its own, and forks one for each request
(services/common/forking.py). A worker that needs another environment at import, or an engine in
processes of its own, is executed instead: it starts as slowly as by itself, and is the same.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import setproctitle
from pydantic import Field

from services.common.cards import Instance, InstanceKind
from services.common.forking import Request, listen, serve, threads
from services.common.lifecycle import Lifecycle
from services.common.settings import settings_config
from services.common.telemetry.logging import get_logger, setup_logging
from services.worker.config import WorkerSettings
from services.worker.engines.vllm.environment import (
    at_import,
    mode_of,
    prepare,
    restart_for_threads,
)

log = get_logger(__name__)


class ForkServerSettings(WorkerSettings):
    """Those of the workers, and where to ask for one."""

    model_config = settings_config("worker")

    socket: str = Field(min_length=1)
    """Unix socket on which it is asked for workers."""


def main() -> int:
    """Imports, serves; in a child, runs the worker that was asked for. Returns its exit code."""
    setproctitle.getproctitle()  # finds its place in memory, which changes of the environment hide
    # Threads would be lost in the children, and what they hold stay locked. Before numpy's import.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    settings = ForkServerSettings.load_or_exit()
    restart_for_threads(settings)
    setup_logging(settings.service, level=settings.log_level, fmt=settings.log_format)
    listener = listen(Path(settings.socket))
    mode = prepare(settings)
    imported = at_import(settings, mode) if mode == "inprocess" else None
    if imported is not None:
        _import()
    if (count := threads()) != 1:
        log.warning("workers start by themselves: an import has started threads", threads=count)
        imported = None
    me = Instance(settings.id or "forkserver", InstanceKind.WORKER, 0, settings.socket)
    Lifecycle().ready(me, settings.ready_file)
    return _work(serve(listener), imported)


def _import() -> None:
    """All that a worker with an engine in its process imports, but NIXL: its threads are many."""
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.cpu_worker  # noqa: F401 - vLLM imports both by name

    import services.worker.__main__
    import services.worker.connector.connector
    import services.worker.engines.vllm.inprocess  # noqa: F401


def _work(request: Request, imported: dict[str, str] | None) -> int:
    """The child: becomes the worker, by what is imported if that fits."""
    command = list(request.command)
    setproctitle.setproctitle(shlex.join(command))
    sys.argv = command[command.index("-m") + 1 :]
    settings = WorkerSettings.load_or_exit()
    if (
        settings.engine != "vllm"
        or imported is None
        or at_import(settings, mode_of(settings)) != imported
    ):
        os.execv(command[0], command)
    os.environ.update(imported)
    from services.worker.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
