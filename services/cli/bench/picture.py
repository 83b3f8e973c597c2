"""The picture of a replay: for each trace, hits and time to first token of each policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.cli.errors import CliError
from services.router.replay.measure import Row

_BEST = "#2a78b5"
_OTHER = "#b8c4d0"
_TAIL = "#e07b39"
_INK = "#2b2f36"
_MUTED = "#7a818c"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws a line of two panels for each trace. Raises CliError when `path` can't be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(row.trace for row in rows))
    most = max(sum(row.trace == trace for row in rows) for trace in traces)
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": _INK}):
        figure, axes = pyplot.subplots(
            len(traces),
            2,
            figsize=(11, (1.4 + 0.34 * most) * len(traces)),
            squeeze=False,
            layout="constrained",
        )
        for line, trace in zip(axes, traces, strict=True):
            mine = [row for row in rows if row.trace == trace]
            _hits(line[0], mine, trace)
            _times(line[1], mine)
        try:
            figure.savefig(path, dpi=150)
        except OSError as exc:
            raise CliError(f"the picture can't be written to {path}: {exc.strerror}") from exc
        finally:
            pyplot.close(figure)


def _hits(axis: Any, rows: Sequence[Row], trace: str) -> None:
    names = [row.policy for row in rows]
    best = max(row.hit_ratio for row in rows)
    colors = [_BEST if row.hit_ratio == best else _OTHER for row in rows]
    axis.barh(names, [row.hit_ratio for row in rows], color=colors, height=0.7)
    axis.axvline(rows[0].pooled_hit_ratio, color=_INK, linewidth=1, linestyle=":")
    axis.set_title(f"{trace}: cached share of prompt tokens", loc="left", fontsize=10.5)
    axis.set_xlabel("dotted: one cache of all workers' room", color=_MUTED)
    _plain(axis)


def _times(axis: Any, rows: Sequence[Row]) -> None:
    places = range(len(rows))
    axis.barh(places, [row.ttft_s.p90 for row in rows], color=_OTHER, height=0.7, label="p90")
    axis.barh(places, [row.ttft_s.mean for row in rows], color=_TAIL, height=0.3, label="mean")
    axis.set_yticks([])
    axis.set_title("time to first token (s)", loc="left", fontsize=10.5)
    axis.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=9, borderpad=0
    )
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=_MUTED, labelcolor=_INK)
