"""What the requests of one group of workers saw, over the window, whichever worker they had."""

from __future__ import annotations

from math import inf

from services.planner.core.legs import Leg, Legs, prompt_of
from services.planner.core.measures import Attained
from services.planner.core.runs import Running
from services.planner.core.steps import StepFit
from services.planner.core.windows import Window, quantile_of


class GroupLog:
    """Latencies, arrivals and learned rates of one group."""

    def __init__(self, window_s: float, now: float) -> None:
        self.window_s = window_s
        self.began = self.used_at = now
        self.ttft = Window(window_s)
        """Of whole requests, both legs."""
        self.prefill = Window(window_s)
        """Their part up to the end of the prefill, ..."""
        self.handover = Window(window_s)
        """... and from there to the first token at a decode worker."""
        self.itl = Window(window_s)
        """Mean seconds between tokens, of requests that ended."""
        self.batches = Window(window_s)
        """Requests that decode, at each tick."""
        self.arrivals = Window(window_s)
        """Prompt tokens to be computed that came to the prefill pool, or to all while there is
        none."""
        self.prompt = Window(window_s)
        """Prompt tokens of prefills that ended, ..."""
        self.computed = Window(window_s)
        """... and how many of them were computed."""
        self.pool = False
        """Whether it has workers that only prefill."""
        self.fit = StepFit()
        self.rate: float | None = None
        """Last prefill rate of a worker that was measured."""
        self.changed_at: float | None = None
        self._legs = Legs()

    def admitted(self, running: Running, now: float, *, pooled: bool) -> None:
        """A worker took a request; `pooled`: its prefill counts as demand on the prefill pool."""
        event = running.admitted
        if event.transfer_tokens and (leg := self._legs.take(prompt_of(event))) is not None:
            running.lead_s = now - leg.admitted_at
            running.prefilled_s = leg.ended_at - leg.admitted_at
            self.prefill.add(now, running.prefilled_s, leg.admitted_at)
        if pooled and running.to_compute:
            self.arrivals.add(now, running.to_compute)

    def first_token(self, running: Running, computed: int, now: float) -> None:
        """A request's prefill is over."""
        if running.at is None:
            return
        event = running.admitted
        own = now - running.at
        if not event.transfer_tokens:
            self.prompt.add(now, event.prompt_tokens)
            self.computed.add(now, computed)
        if event.prefill_only:
            self._legs.ended(prompt_of(event), Leg(running.at, now))
        elif not event.transfer_tokens:
            self.prefill.add(now, own, running.at)
            self.ttft.add(now, own, running.at)
        else:
            lead, prefilled = running.lead_s, running.prefilled_s
            if lead is None:
                # Its first leg wasn't seen: as long as others' were, so that it isn't taken for
                # quick.
                lead = prefilled = quantile_of(self.prefill.values(), 0.5) or 0.0
            began = running.at - lead
            self.ttft.add(now, own + lead, began)
            self.handover.add(now, own + lead - prefilled, began)

    def finished(self, running: Running, output_tokens: int, now: float) -> None:
        """A request has left; of its tokens the first came with the prefill."""
        if running.first_at is not None and output_tokens > 1 and not running.admitted.prefill_only:
            self.itl.add(now, (now - running.first_at) / (output_tokens - 1), running.first_at)

    def prune(self, now: float) -> None:
        """Forgets what is older than the window."""
        for window in self._windows():
            window.prune(now)
        self._legs.prune(now)

    @property
    def since(self) -> float:
        """What began earlier says nothing of the pools as they are now."""
        return -inf if self.changed_at is None else self.changed_at

    @property
    def uncached(self) -> float:
        """Share of prompt tokens that had to be computed; 1 while nothing is known."""
        prompt = self.prompt.total()
        return min(1.0, self.computed.total() / prompt) if prompt else 1.0

    def _windows(self) -> tuple[Window, ...]:
        return (
            self.ttft,
            self.prefill,
            self.handover,
            self.itl,
            self.arrivals,
            self.prompt,
            self.computed,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when figures contradict each other."""
        for window in self._windows():
            window.check_invariants()
        self._legs.check_invariants()


def attained(values: list[float], target: float, quantile: float, *, late: int = 0) -> Attained:
    """How a target was kept; `late` requests have not ended and have missed it already."""
    count = len(values) + late
    if not count:
        return Attained()
    kept = sum(v <= target for v in values)
    # A late one will be at least this long; what more it becomes isn't known yet.
    whole = values + [max([target, *values]) * 1.01] * late
    return Attained(kept / count, count, quantile_of(whole, quantile))
