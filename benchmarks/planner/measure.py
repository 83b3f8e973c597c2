"""How well targets were kept: by windows of time, and by requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.planner.model import Life
from services.planner.core.targets import Targets


@dataclass(frozen=True, slots=True)
class Kept:
    """Shares, 0 to 1. A request belongs to the window in which it arrived."""

    windows: float
    """Windows in which the wanted share of requests kept each target."""
    ttft_windows: float
    itl_windows: float
    requests: float
    """Requests that kept both."""


def kept(lives: Iterable[Life], targets: Targets, window_s: float) -> Kept:
    """Windows in which nothing arrived don't count."""
    windows: dict[int, list[tuple[bool, bool]]] = defaultdict(list)
    for life in lives:
        good = (life.ttft_s <= targets.ttft_s, life.itl_s <= targets.itl_s)
        windows[int(life.arrival_s // window_s)].append(good)
    both = ttft = itl = requests = count = 0
    for goods in windows.values():
        first = sum(g[0] for g in goods) >= targets.quantile * len(goods)
        between = sum(g[1] for g in goods) >= targets.quantile * len(goods)
        both += first and between
        ttft += first
        itl += between
        requests += sum(g[0] and g[1] for g in goods)
        count += len(goods)
    n = len(windows) or 1
    return Kept(both / n, ttft / n, itl / n, requests / (count or 1))
