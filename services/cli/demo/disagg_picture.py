"""The picture of the disaggregation demonstration: each token's wait, together and apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.errors import CliError

if TYPE_CHECKING:
    from services.cli.demo.disagg import Leg, Result

_TOGETHER, _APART = "#2a78b5", "#e07b39"
_INK, _MUTED = "#2b2f36", "#7a818c"


def draw(result: Result, model: str, path: Path) -> None:
    """Draws every wait between tokens of the chats, beside the long prompts' waits.

    Raises CliError when `path` can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole, apart = result.aggregated[result.best], result.apart
    highest = 1.08 * max(gap for leg in (whole, apart) for _, gap in leg.gaps) * 1000
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": _INK}):
        figure, axes = pyplot.subplots(
            3, 1, figsize=(10.5, 9.5), height_ratios=(1, 1, 0.8), sharex=False
        )
        _gaps(axes[0], whole, f"Together, chunks of {result.best} tokens", _TOGETHER, highest)
        _gaps(axes[1], apart, "Apart: one worker prefills, one decodes", _APART, highest)
        _waits(axes[2], whole, apart)
        figure.suptitle(
            f"{len(whole.chats)} chats while {len(whole.longs)} long prompts come",
            x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.02,
            0.945,
            f"{model} in float32, two vLLM workers on a core each; the same requests both times",
            color=_MUTED,
            fontsize=9.5,
        )
        figure.subplots_adjust(left=0.09, right=0.98, top=0.89, bottom=0.06, hspace=0.42)
        try:
            figure.savefig(path, dpi=130, facecolor="white", format="png")
        except OSError as exc:
            raise CliError(f"the picture {path} can't be written: {exc.strerror}") from exc
        finally:
            pyplot.close(figure)


def _gaps(axis: Any, leg: Leg, title: str, color: str, highest: float) -> None:
    gaps = leg.gaps
    axis.scatter(
        [at for at, _ in gaps], [1000 * gap for _, gap in gaps], s=5, color=color, linewidths=0
    )
    axis.axhline(leg.itl_ms(0.99), color=_INK, linewidth=0.9, linestyle=":")
    axis.text(0, leg.itl_ms(0.99), f" p99 {leg.itl_ms(0.99):.0f} ms", va="bottom", fontsize=9)
    for answer in leg.longs:
        # Sent when its first token came, less the wait for it.
        axis.axvline(
            answer.arrivals_s[0] - answer.ttft_s - leg.began_s, color=_MUTED, linewidth=0.8
        )
    axis.set_ylim(0, highest)
    _style(axis, f"{title}: milliseconds between tokens; lines: a long prompt comes")


def _waits(axis: Any, whole: Leg, apart: Leg) -> None:
    numbers = range(len(whole.longs))
    axis.bar(
        [n - 0.2 for n in numbers], whole.ttft_s, width=0.38, color=_TOGETHER, label="together"
    )
    axis.bar([n + 0.2 for n in numbers], apart.ttft_s, width=0.38, color=_APART, label="apart")
    axis.set_xticks(list(numbers), [str(n + 1) for n in numbers])
    axis.set_ylim(0, 1.3 * max(*whole.ttft_s, *apart.ttft_s))
    axis.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)
    _style(axis, "Time to first token (s) of each long prompt")


def _style(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axis.tick_params(axis="both", length=0, colors=_MUTED, labelsize=8.5)
    axis.yaxis.grid(True, color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#c9cdd3")
