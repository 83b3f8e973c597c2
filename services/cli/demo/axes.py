"""What the demonstrations' pictures look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.cli.errors import CliError

INK, MUTED = "#2b2f36", "#7a818c"
FONT = {"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK}


def style(axis: Any, title: str) -> None:
    """A panel with its title, a faint grid, and no frame."""
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axis.tick_params(axis="both", length=0, colors=MUTED, labelsize=8.5)
    axis.yaxis.grid(True, color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#c9cdd3")


def head(figure: Any, title: str, below: str, below_at: float) -> None:
    """A picture's title, and a line below it at that height."""
    figure.suptitle(title, x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold")
    figure.text(0.02, below_at, below, color=MUTED, fontsize=9.5)


def save(figure: Any, path: Path) -> None:
    """Writes a picture and lets go of it. Raises CliError when `path` can't be written."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130, facecolor="white", format="png")
    except OSError as exc:
        raise CliError(f"the picture {path} can't be written: {exc.strerror}") from exc
    finally:
        pyplot.close(figure)
