"""The picture of the routing demonstration: who served what, and how long its first token took."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.cli.adapters.http import ChatAnswer
from services.cli.errors import CliError

_COLORS = ("#2a78b5", "#e07b39", "#4f9d69", "#8e5ea2")
_INK = "#2b2f36"
_MUTED = "#7a818c"


def draw(runs: Mapping[str, Sequence[ChatAnswer]], model: str, path: Path) -> None:
    """Draws a column for each policy, time to first token of each request, coloured by worker.

    Below each bar the share of the prompt that came from the cache. Raises CliError when `path`
    can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workers = sorted({a.worker for answers in runs.values() for a in answers})
    color = {worker: _COLORS[i % len(_COLORS)] for i, worker in enumerate(workers)}
    slowest = max(a.ttft_s for answers in runs.values() for a in answers)
    with pyplot.rc_context({"font.family": "DejaVu Sans", "font.size": 10, "text.color": _INK}):
        figure, axes = pyplot.subplots(
            1, len(runs), figsize=(5.6 * len(runs), 4.8), sharey=True, squeeze=False
        )
        for axis, (policy, answers) in zip(axes[0], runs.items(), strict=True):
            _panel(axis, policy, answers, color, slowest)
        axes[0][0].set_ylabel("time to first token (s)", color=_INK)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color[w]) for w in workers]
        figure.legend(
            handles,
            workers,
            loc="upper right",
            bbox_to_anchor=(0.985, 0.985),
            ncols=4,
            frameon=False,
        )
        tokens = next(iter(runs.values()))[0].prompt_tokens
        figure.suptitle(
            f"The same prompt of {tokens} tokens, {len(next(iter(runs.values())))} times",
            x=0.015,
            y=0.975,
            ha="left",
            fontsize=14,
            fontweight="bold",
        )
        figure.text(
            0.015,
            0.875,
            f"{model} in float32 on two vLLM workers, one request after the other, caches empty "
            "at the start of each policy",
            color=_MUTED,
            fontsize=9.5,
        )
        figure.text(
            0.5,
            0.02,
            "below each bar: number of the request, and the share of its prompt from the KV cache",
            ha="center",
            color=_MUTED,
            fontsize=9,
        )
        figure.subplots_adjust(left=0.07, right=0.985, top=0.74, bottom=0.17, wspace=0.06)
        try:
            figure.savefig(path, dpi=150, facecolor="white", format="png")
        except OSError as exc:
            raise CliError(f"the picture {path} can't be written: {exc.strerror}") from exc
        finally:
            pyplot.close(figure)


def _panel(
    axis: Any,
    policy: str,
    answers: Sequence[ChatAnswer],
    color: Mapping[str, str],
    slowest: float,
) -> None:
    numbers = range(1, len(answers) + 1)
    bars = axis.bar(
        numbers, [a.ttft_s for a in answers], width=0.72, color=[color[a.worker] for a in answers]
    )
    axis.bar_label(bars, [f"{a.ttft_s:.2f}" for a in answers], padding=2, fontsize=8.5, color=_INK)
    served = {w: sum(a.worker == w for a in answers) for w in color}
    total = sum(a.ttft_s for a in answers)
    split = " / ".join(str(n) for n in served.values())
    axis.set_title(
        f"{policy}:  {split},  {total:.1f} s of waiting in all",
        loc="left",
        fontsize=11.5,
        fontweight="bold",
        color=_INK,
    )
    axis.set_xticks(
        numbers,
        [f"{n}\n{a.cached_tokens / max(a.prompt_tokens, 1):.0%}" for n, a in enumerate(answers, 1)],
        fontsize=8.5,
        color=_INK,
    )
    axis.set_ylim(0, slowest * 1.12)
    axis.tick_params(axis="both", length=0, colors=_MUTED)
    axis.yaxis.grid(True, color="#e6e8eb", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#c9cdd3")
