"""A supervisor in the background: `forebay up --detach` starts one and waits until it serves.

The command reads what the daemon says from a pipe: changes, notes, then "ready" or "failed". The
daemon's own output goes to logs/supervisor.log. Options travel over stdin, not over a command line.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.cli.adapters.kvbm import TierRow
from services.cli.adapters.rpc import WorkerRow
from services.cli.config import child_environment
from services.cli.errors import CliError, PortTaken, StartFailed, StateError
from services.cli.up.options import UpOptions
from services.cli.up.process import ProcessRef, find, send, wait_gone
from services.cli.up.run import Cluster, StopRequests, run_cluster
from services.cli.up.spec import ProcessState, ProcessView, tail
from services.cli.up.view import PipeReporter, Reporter
from services.common.telemetry.logging import get_logger, setup_logging

log = get_logger(__name__)

_END_S = 30.0
"""Longest wait for a daemon to end beyond its drain timeout."""
_ERRORS = {cls.__name__: cls for cls in (CliError, PortTaken, StartFailed, StateError)}


def start_daemon(options: UpOptions, reporter: Reporter) -> None:
    """Starts the daemon and returns when its cluster serves; it then lives on without us.

    Raises what the daemon's start failed with. KeyboardInterrupt stops the daemon and goes on up.
    """
    logs = Path(options.state_dir, "logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StateError(
            f"the state directory {options.state_dir} can't be used: {exc.strerror}",
            hint="Choose another with --state-dir.",
        ) from exc
    read_fd, write_fd = os.pipe()
    with (logs / "supervisor.log").open("ab") as log, os.fdopen(read_fd, "rb") as said:
        # This process ends at once: its child is the daemon, and nobody's to wait for.
        subprocess.run(
            [
                sys.executable,
                "-P",
                "-m",
                "services.cli.up.daemon",
                str(write_fd),
                options.state_dir,
            ],
            input=options.to_json(),
            stdout=log,
            stderr=log,
            pass_fds=(write_fd,),
            start_new_session=True,
            env=child_environment({}),
            check=False,
        )
        os.close(write_fd)
        supervisor: ProcessRef | None = None
        try:
            for line in said:
                message = json.loads(line)
                if "pid" in message:
                    supervisor = find(message["pid"])
                elif "ready" in message:
                    return
                elif "failed" in message:
                    if supervisor is not None:
                        wait_gone(supervisor, _END_S)
                    raise _error(message["failed"])
                else:
                    _relay(message, reporter)
        except KeyboardInterrupt:
            if supervisor is not None:
                send(supervisor, signal.SIGTERM)
                wait_gone(supervisor, options.drain_timeout_s + _END_S)
            raise
    raise StartFailed(
        "the supervisor ended before the cluster was ready",
        process="supervisor",
        tail=tail(logs / "supervisor.log"),
        hint=f"Its whole log: {logs / 'supervisor.log'}",
    )


def _relay(message: dict[str, Any], reporter: Reporter) -> None:
    if "change" in message:
        reporter.change(msgspec.convert(message["change"], ProcessView))
    elif "note" in message:
        reporter.note(message["note"])


def _error(said: dict[str, Any]) -> CliError:
    if said["kind"] == "StartFailed":
        return StartFailed(
            said["message"], process=said["process"], tail=tuple(said["tail"]), hint=said["hint"]
        )
    return _ERRORS.get(said["kind"], CliError)(said["message"], hint=said["hint"])


class _DaemonReporter:
    """Tells the command that started us while it listens, and the log always."""

    def __init__(self, pipe: PipeReporter) -> None:
        self._pipe = pipe

    def change(self, view: ProcessView) -> None:
        """Sends and logs the change."""
        self._pipe.change(view)
        if view.state is ProcessState.STARTING and not view.pid:
            return
        bad = view.state in (ProcessState.BACKOFF, ProcessState.DOWN)
        (log.warning if bad else log.info)(
            "process", name=view.name, state=view.state.value, pid=view.pid, detail=view.detail
        )

    def note(self, text: str) -> None:
        """Sends and logs the line."""
        self._pipe.note(text)
        log.info(text)

    def workers(self, rows: Sequence[WorkerRow] | None) -> None:
        """Drops the figures: who wants them asks with `forebay status`."""

    def tiers(self, rows: Sequence[TierRow] | None) -> None:
        """Drops these too."""

    def close(self) -> None:
        """Closes the pipe."""
        self._pipe.close()


async def _main(options: UpOptions, reporter: PipeReporter) -> None:
    stop = StopRequests()
    stop.on_signals()

    async def serve(cluster: Cluster) -> None:
        reporter.send({"ready": True})
        reporter.close()
        await stop.asked.wait()

    try:
        await run_cluster(options, _DaemonReporter(reporter), stop, serve)
    except CliError as exc:
        log.error(exc.message)
        failed = {"kind": type(exc).__name__, "message": exc.message, "hint": exc.hint}
        if isinstance(exc, StartFailed):
            failed |= {"process": exc.process, "tail": list(exc.tail)}  # type: ignore[dict-item]
        reporter.send({"failed": failed})
        raise


def main() -> None:
    """The daemon: argv[1] is the pipe's descriptor, stdin holds the options."""
    options = UpOptions.from_json(sys.stdin.buffer.read())
    if os.fork() != 0:  # before anything has made a thread
        os._exit(0)
    setup_logging("supervisor")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a health check is no news
    reporter = PipeReporter(int(sys.argv[1]))
    reporter.send({"pid": os.getpid()})
    try:
        asyncio.run(_main(options, reporter))
    except CliError:  # told already
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
