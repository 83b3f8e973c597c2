"""What a person sees of a replay: how far it is, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.cli.bench.run import OnProgress
from services.router.replay.measure import Row


@contextmanager
def follow(console: Console) -> Iterator[OnProgress]:
    """A bar for what runs; off a terminal a line for each run."""
    if not console.is_terminal:

        def line(title: str, share: float) -> None:
            if share == 0:
                console.print(title, markup=False)

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading", total=1.0)

        def move(title: str, share: float) -> None:
            progress.update(task, description=title, completed=share)

        yield move


def table(rows: Sequence[Row]) -> Table:
    """All rows; the best of each trace in bold.

    TTFT's mean and percentiles are seconds, ITL is its p99 in ms, us the mean time of a decision.
    """
    shown = Table(box=None, header_style="dim")
    shown.add_column("trace")
    shown.add_column("policy")
    for name in ("hits", "of pool", "TTFT s", "p50", "p90", "p99", "ITL ms", "imbal.", "us"):
        shown.add_column(name, justify="right")
    last = ""
    for row in rows:
        mine = [r for r in rows if r.trace == row.trace]
        t = row.ttft_s

        def cell(value: float, best: float, text: str) -> str:
            return f"[bold]{text}[/]" if value == best else text

        shown.add_row(
            row.trace if row.trace != last else "",
            row.policy,
            cell(row.hit_ratio, max(r.hit_ratio for r in mine), f"{row.hit_ratio:.3f}"),
            f"{row.hit_ratio / row.pooled_hit_ratio:.3f}" if row.pooled_hit_ratio else "-",
            cell(t.mean, min(r.ttft_s.mean for r in mine), f"{t.mean:.3f}"),
            f"{t.p50:.3f}",
            cell(t.p90, min(r.ttft_s.p90 for r in mine), f"{t.p90:.3f}"),
            f"{t.p99:.3f}",
            f"{row.itl_p99_s * 1000:.1f}",
            f"{row.imbalance:.2f}",
            f"{row.decision_us:.0f}",
        )
        last = row.trace
    return shown
