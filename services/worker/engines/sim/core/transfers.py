"""KV on its way into a simulated engine from others, instead of being computed.

What comes shares one wire: one transfer after the other, each with the wire's latency and a time
for each token. The blocks that it fills are the request's from its beginning on, and can be hit
from its end on. The other end is not simulated: it is never busy.
"""

from __future__ import annotations

import heapq
import math

from services.worker.engines.sim.core.model import SimTransfer
from services.worker.engines.sim.core.run import Run
from services.worker.engines.sim.core.timing import TimingProfile


class Transfers:
    """The transfers of one engine, by the time of their end."""

    def __init__(self, profile: TimingProfile) -> None:
        self._profile = profile
        self._free = -math.inf
        """When the wire is free again."""
        self._coming: list[tuple[float, Run, SimTransfer]] = []

    def begin(self, run: Run, tokens: int, now: float) -> None:
        """Brings so many tokens' KV to a request that has the blocks for them."""
        profile = self._profile
        seconds = profile.transfer_latency_s + tokens * profile.transfer_token_s
        self._free = max(now, self._free) + seconds
        news = SimTransfer(run.request.id, tokens, seconds)
        heapq.heappush(self._coming, (self._free, run, news))

    def next_time(self) -> float | None:
        """When the next one ends; None: there are none."""
        return self._coming[0][0] if self._coming else None

    def ended(self, now: float) -> list[tuple[Run, SimTransfer]]:
        """Requests whose KV has arrived since the last call; aborted ones are among them."""
        arrived: list[tuple[Run, SimTransfer]] = []
        while self._coming and self._coming[0][0] <= now:
            _, run, news = heapq.heappop(self._coming)
            arrived.append((run, news))
        return arrived

    def runs(self) -> list[Run]:
        """Requests that wait for theirs; aborted ones are among them."""
        return [run for _, run, _ in self._coming]
