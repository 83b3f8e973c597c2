"""The terminal: results on stdout, everything else on stderr; errors as one line and a hint."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from services.cli.errors import CliError, StartFailed
from services.cli.model import OnStage

_TYPICAL_CONVERSION_S = 45.0


def stdout() -> Console:
    """For results."""
    return Console(highlight=False)


def stderr() -> Console:
    """For progress and messages."""
    return Console(stderr=True, highlight=False)


def print_error(exc: CliError, console: Console) -> None:
    """An error for people: the log's last lines if a process failed, what is wrong, what to do."""
    if isinstance(exc, StartFailed) and exc.tail:
        console.print(Text(f"--- last lines of {exc.process}'s log", style="dim"))
        for line in exc.tail:
            console.print(Text(line, style="dim"), soft_wrap=True)
        console.print(Text("---", style="dim"))
    console.print(Text.assemble(("forebay: ", "bold red"), (exc.message, "")), soft_wrap=True)
    if exc.hint:
        console.print(Text(exc.hint), soft_wrap=True)


@contextmanager
def stage_progress(title: str, console: Console) -> Iterator[OnStage]:
    """A bar that follows a conversion's stages, from the first on; plain lines off a terminal."""
    if not console.is_terminal:
        began = time.monotonic()

        def line(stage: str, share: float) -> None:
            console.print(f"{title}: {stage} ({time.monotonic() - began:.0f} s)", markup=False)

        yield line
        return
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[stage]}"),
        console=console,
        transient=True,
    )
    task = progress.add_task(title, total=1.0, visible=False, stage="")
    ended = threading.Event()

    def creep() -> None:
        # Stages are long and silent: in between the bar moves as they usually do, short of the end.
        while not ended.wait(0.25):
            done = progress.tasks[0].completed
            progress.update(task, completed=done + (0.99 - done) * 0.25 / _TYPICAL_CONVERSION_S * 2)

    def on_stage(stage: str, share: float) -> None:
        done = max(share, progress.tasks[0].completed)
        progress.update(task, visible=True, stage=stage, completed=done)

    with progress:
        thread = threading.Thread(target=creep, daemon=True)
        thread.start()
        try:
            yield on_stage
        finally:
            ended.set()
            thread.join()
