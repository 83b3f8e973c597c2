"""The picture of the disaggregation demonstration: each token's wait, together and apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.cli.demo.axes import FONT, INK, MUTED, head, save, style

if TYPE_CHECKING:
    from services.cli.demo.disagg import Leg, Result

_TOGETHER, _APART = "#2a78b5", "#e07b39"


def draw(result: Result, model: str, path: Path) -> None:
    """Draws every wait between tokens of the chats, beside the long prompts' waits.

    Raises CliError when `path` can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    whole, apart = result.aggregated[result.best], result.apart
    highest = 1.08 * max(gap for leg in (whole, apart) for _, gap in leg.gaps) * 1000
    with pyplot.rc_context(FONT):
        figure, axes = pyplot.subplots(
            3, 1, figsize=(10.5, 9.5), height_ratios=(1, 1, 0.8), sharex=False
        )
        _gaps(axes[0], whole, f"Together, chunks of {result.best} tokens", _TOGETHER, highest)
        _gaps(axes[1], apart, "Apart: one worker prefills, one decodes", _APART, highest)
        _waits(axes[2], whole, apart)
        head(
            figure,
            f"{len(whole.chats)} chats while {len(whole.longs)} long prompts come",
            f"{model} in float32, two vLLM workers on a core each; the same requests both times",
            0.945,
        )
        figure.subplots_adjust(left=0.09, right=0.98, top=0.89, bottom=0.06, hspace=0.42)
        save(figure, path)


def _gaps(axis: Any, leg: Leg, title: str, color: str, highest: float) -> None:
    gaps = leg.gaps
    axis.scatter(
        [at for at, _ in gaps], [1000 * gap for _, gap in gaps], s=5, color=color, linewidths=0
    )
    axis.axhline(leg.itl_ms(0.99), color=INK, linewidth=0.9, linestyle=":")
    axis.text(0, leg.itl_ms(0.99), f" p99 {leg.itl_ms(0.99):.0f} ms", va="bottom", fontsize=9)
    for answer in leg.longs:
        # Sent when its first token came, less the wait for it.
        axis.axvline(answer.arrivals_s[0] - answer.ttft_s - leg.began_s, color=MUTED, linewidth=0.8)
    axis.set_ylim(0, highest)
    style(axis, f"{title}: milliseconds between tokens; lines: a long prompt comes")


def _waits(axis: Any, whole: Leg, apart: Leg) -> None:
    numbers = range(len(whole.longs))
    axis.bar(
        [n - 0.2 for n in numbers], whole.ttft_s, width=0.38, color=_TOGETHER, label="together"
    )
    axis.bar([n + 0.2 for n in numbers], apart.ttft_s, width=0.38, color=_APART, label="apart")
    axis.set_xticks(list(numbers), [str(n + 1) for n in numbers])
    axis.set_ylim(0, 1.3 * max(*whole.ttft_s, *apart.ttft_s))
    axis.legend(loc="upper right", frameon=False, fontsize=9, ncols=2)
    style(axis, "Time to first token (s) of each long prompt")
