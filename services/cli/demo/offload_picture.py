"""The picture of the offload demonstration: what lay where, what moved, how long people waited."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from services.cli.demo.axes import FONT, MUTED, head, save, style
from services.cli.demo.samples import Sample
from services.cli.demo.visits import Visit

_G1, _G2, _G3 = "#e07b39", "#2a78b5", "#4f9d69"
_OFF = "#b9bfc7"


def draw(
    samples: Sequence[Sample],
    visits: Sequence[Visit],
    on_s: Sequence[float],
    off_s: Sequence[float],
    block_size: int,
    model: str,
    path: Path,
) -> None:
    """Draws four panels over the same seconds. `on_s`, `off_s`: time to first token by visit.

    Raises CliError when `path` can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    at = [s.at_s for s in samples]
    with pyplot.rc_context(FONT):
        figure, axes = pyplot.subplots(
            4, 1, figsize=(10.5, 11), sharex=True, height_ratios=(1, 1, 1, 1.15)
        )
        _lines(
            axes[0],
            "Tokens in each tier",
            at,
            (
                ("G1, the engine's memory", _G1, [s.g1 * block_size for s in samples]),
                ("G2, host memory", _G2, [s.g2 * block_size for s in samples]),
                ("G3, disk", _G3, [s.g3 * block_size for s in samples]),
            ),
        )
        _lines(
            axes[1],
            "Tokens offloaded so far",
            at,
            (
                ("G1 -> G2", _G2, [s.offload_g1_g2 * block_size for s in samples]),
                ("G2 -> G3", _G3, [s.offload_g2_g3 * block_size for s in samples]),
            ),
        )
        _lines(
            axes[2],
            "Tokens brought back so far",
            at,
            (
                ("G2 -> G1", _G2, [s.onboard_g2_g1 * block_size for s in samples]),
                ("G3 -> G1", _G3, [s.onboard_g3_g1 * block_size for s in samples]),
            ),
        )
        _waits(axes[3], visits, on_s, off_s)
        axes[3].set_xlabel("seconds", color=MUTED)
        users = len({v.user for v in visits})
        head(
            figure,
            f"{users} people with long documents come back, {len(visits)} visits",
            f"{model} in float32, one vLLM worker whose own memory (G1) holds two of the documents",
            0.95,
        )
        figure.subplots_adjust(left=0.09, right=0.98, top=0.915, bottom=0.055, hspace=0.34)
        save(figure, path)


def _lines(
    axis: Any,
    title: str,
    at: Sequence[float],
    lines: Sequence[tuple[str, str, Sequence[int]]],
) -> None:
    for label, color, values in lines:
        axis.step(at, values, where="post", color=color, linewidth=2, label=label)
        axis.fill_between(at, values, step="post", color=color, alpha=0.12, linewidth=0)
    axis.legend(loc="upper left", frameon=False, fontsize=9, ncols=len(lines))
    top = max((max(values, default=0) for _, _, values in lines), default=0)
    axis.set_ylim(0, max(1, top) * 1.3)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style(axis, title)


def _waits(
    axis: Any, visits: Sequence[Visit], on_s: Sequence[float], off_s: Sequence[float]
) -> None:
    gap = min((b.at_s - a.at_s for a, b in pairwise(visits)), default=1.0)
    width = 0.38 * gap
    at = [v.at_s for v in visits]
    axis.bar(at, off_s, width=width, align="edge", color=_OFF, label="without kvbm")
    axis.bar([t + width for t in at], on_s, width=width, align="edge", color=_G1, label="with kvbm")
    for visit, off, on in zip(visits, off_s, on_s, strict=True):
        axis.text(
            visit.at_s + width,
            max(off, on) * 1.02,
            f"{visit.user + 1}" if visit.number else f"{visit.user + 1}*",
            ha="center",
            fontsize=7.5,
            color=MUTED,
        )
    axis.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)
    axis.set_ylim(0, max(*on_s, *off_s) * 1.3)
    style(axis, "Time to first token (s) by visit; above: who came, * for the first time")
