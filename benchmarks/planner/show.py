"""A load's figures as a table."""

from __future__ import annotations

from typing import Any

from rich.table import Table

PLANNER = "planner"
"""Name of the planner's row; others are named by their number of prefill workers."""


def show(name: str, found: dict[str, Any]) -> Table:
    """One load, for people."""
    t = found["targets"]
    table = Table(
        title=f"{name}: {found['requests']} requests; first token {t['ttft_s']:g} s, "
        f"between tokens {t['itl_s'] * 1e3:g} ms, for {t['quantile']:.0%}"
    )
    table.add_column("prefill workers")
    for column in ("windows with both", "first token", "between tokens", "requests with both"):
        table.add_column(column, justify="right")
    table.add_column("moves", justify="right")
    for split_name, row in found["rows"].items():
        style = "bold" if split_name in (PLANNER, found["best_fixed"]) else None
        cells = (
            f"{row[key]:.1%}" for key in ("windows", "ttft_windows", "itl_windows", "requests")
        )
        table.add_row(split_name, *cells, str(row["moves"]), style=style)
    return table
