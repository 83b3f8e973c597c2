"""What is seen of a cluster: a live table on a terminal, plain lines elsewhere."""

import json
import os
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from services.cli.adapters.kvbm import TierRow
from services.cli.adapters.rpc import WorkerRow
from services.cli.kvview import tier_table
from services.cli.up.spec import ProcessState, ProcessView

_ROWS = 24
"""Workers that have a row of their own."""
_STYLES = {
    ProcessState.STARTING: "yellow",
    ProcessState.READY: "green",
    ProcessState.BACKOFF: "red",
    ProcessState.DOWN: "bold red",
    ProcessState.STOPPING: "yellow",
    ProcessState.STOPPED: "dim",
}
_ROUTER_STYLES = {"ready": "green", "joining": "yellow", "suspect": "red", "draining": "yellow"}


class Reporter(Protocol):
    """Is told what happens to a cluster."""

    def change(self, view: ProcessView) -> None:
        """A process changed."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def workers(self, rows: Sequence[WorkerRow] | None) -> None:
        """How the workers do now; None when no router answers."""

    def tiers(self, rows: Sequence[TierRow] | None) -> None:
        """What the kvbm holds now; None when it doesn't answer, empty when there is none."""

    def close(self) -> None:
        """Nothing more will come."""


class PlainReporter:
    """One line a change: for pipes, logs and CI."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._since: dict[str, float] = {}

    def change(self, view: ProcessView) -> None:
        """Prints the change, with the time it took to become ready."""
        now = time.monotonic()
        text = f"{view.name:<10} {view.state:<9}"
        if view.state is ProcessState.STARTING:
            self._since.setdefault(view.name, now)
            if not view.pid:
                return
            text += f" pid {view.pid}"
        elif view.state is ProcessState.READY:
            text += f" {view.ready.address}"
            if (since := self._since.pop(view.name, None)) is not None:
                text += f" after {now - since:.1f} s"
        elif view.detail:
            text += f" {view.detail}"
        self._line(text)

    def note(self, text: str) -> None:
        """Prints it."""
        self._line(text)

    def workers(self, rows: Sequence[WorkerRow] | None) -> None:
        """Prints nothing: a table each second is no line of a log."""

    def tiers(self, rows: Sequence[TierRow] | None) -> None:
        """Prints nothing either."""

    def close(self) -> None:
        """Nothing to do."""

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveReporter:
    """A table that stays in place on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._views: dict[str, ProcessView] = {}
        self._since: dict[str, float] = {}
        self._rows: Sequence[WorkerRow] | None = ()
        self._tiers: Sequence[TierRow] | None = ()
        self._live = Live(
            console=console, refresh_per_second=4, get_renderable=self._render, transient=True
        )
        self._live.start()

    def change(self, view: ProcessView) -> None:
        """Takes the change into the table."""
        old = self._views.get(view.name)
        if old is None or old.state is not view.state:
            self._since[view.name] = time.monotonic()
        self._views[view.name] = view
        if view.state in (ProcessState.BACKOFF, ProcessState.DOWN):
            self._console.print(
                Text(f"{view.name} died ({view.detail}); its log: {view.log}", style="red")
            )

    def note(self, text: str) -> None:
        """Prints it above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def workers(self, rows: Sequence[WorkerRow] | None) -> None:
        """Takes the figures into the table."""
        self._rows = rows

    def tiers(self, rows: Sequence[TierRow] | None) -> None:
        """Takes the figures into a table of their own."""
        self._tiers = rows

    def close(self) -> None:
        """Takes the table away and leaves its last state as text."""
        self._live.stop()

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [process_table(tuple(self._views.values()), self._since)]
        serving = any(v.state is ProcessState.READY for v in self._views.values())
        if self._rows and serving:
            parts += [Text(), worker_table(self._rows)]
        elif self._rows is None and serving:
            parts += [Text(), Text("no router answers", style="yellow")]
        if self._tiers and serving:
            parts += [Text(), tier_table(self._tiers)]
        elif self._tiers is None and serving:
            parts += [Text(), Text("kvbm does not answer", style="yellow")]
        return Group(*parts)


class PipeReporter:
    """JSON lines to a file descriptor: how a daemon tells the command that started it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def change(self, view: ProcessView) -> None:
        """Sends the change."""
        self.send({"change": msgspec.to_builtins(view)})

    def note(self, text: str) -> None:
        """Sends the line."""
        self.send({"note": text})

    def workers(self, rows: Sequence[WorkerRow] | None) -> None:
        """Sends nothing."""

    def tiers(self, rows: Sequence[TierRow] | None) -> None:
        """Sends nothing."""

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message; when nobody reads any more, it is dropped."""
        if self._fd >= 0:
            try:
                os.write(self._fd, json.dumps(message).encode() + b"\n")
            except BrokenPipeError:
                self.close()

    def close(self) -> None:
        """Closes the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_reporter(console: Console) -> Reporter:
    """A live table on a terminal, plain lines elsewhere."""
    return LiveReporter(console) if console.is_terminal else PlainReporter(console)


def process_table(views: Sequence[ProcessView], since: dict[str, float] | None = None) -> Table:
    """Processes, one a row; `since`: when each came into its state, on the monotonic clock."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("process", "state", "address", "pid", "restarts", ""):
        table.add_column(column, justify="right" if column in ("pid", "restarts") else "left")
    now = time.monotonic()
    for view in views:
        state: RenderableType = Text(view.state, style=_STYLES[view.state])
        detail = view.detail
        if view.state in (ProcessState.STARTING, ProcessState.STOPPING) and since is not None:
            state = Spinner("dots", text=Text(view.state, style=_STYLES[view.state]))
            detail = f"{now - since.get(view.name, now):.0f} s"
        table.add_row(
            view.name,
            state,
            view.ready.address if view.state is ProcessState.READY else "",
            str(view.pid or ""),
            str(view.restarts or ""),
            Text(detail, style="dim"),
        )
    return table


def worker_table(rows: Sequence[WorkerRow]) -> Table:
    """Workers as a router sees them: cache, load, hit rate; beyond `_ROWS` they are summed up."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in (
        "worker",
        "role",
        "router says",
        "cached blocks",
        "running",
        "waiting",
        "served",
        "hits",
    ):
        left = column in ("worker", "role", "router says")
        table.add_column(column, justify="left" if left else "right")
    for row in rows[:_ROWS]:
        hits = row.hit_rate
        table.add_row(
            row.holder.id,
            row.role,
            Text(row.state, style=_ROUTER_STYLES.get(row.state, "")),
            f"{row.indexed_blocks} of {row.total_blocks}",
            str(row.running),
            str(row.waiting + row.booked),
            str(row.placements),
            "-" if hits is None else f"{hits:.0%}",
        )
    if rest := rows[_ROWS:]:
        prompts = sum(r.prompt_tokens for r in rest)
        table.add_row(
            f"{len(rest)} more",
            "",
            f"{sum(r.state == 'ready' for r in rest)} ready",
            f"{sum(r.indexed_blocks for r in rest)} of {sum(r.total_blocks for r in rest)}",
            str(sum(r.running for r in rest)),
            str(sum(r.waiting + r.booked for r in rest)),
            str(sum(r.placements for r in rest)),
            f"{sum(r.cached_tokens for r in rest) / prompts:.0%}" if prompts else "-",
        )
    return table
