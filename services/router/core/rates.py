"""Rates book: how fast each worker prefills, and what one more running decode costs.

Learned from events. A worker's own measurements are shrunk towards those of all workers of its
model, these towards the published default, so that a few odd samples move nothing and mixed
hardware still shows.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECAY = 0.95
"""What a sample leaves of the weight of those before it."""
_PRIOR_TOKENS = 2048.0
"""Tokens of evidence that the prior counts as."""
_FEWEST_TOKENS = 128
"""Prefills below this tell more of overheads than of the rate."""
_WIDEST = 8.0
"""A worker's rate stays within this factor of its model's."""


@dataclass(frozen=True, slots=True)
class RateDefaults:
    """Rates that hold before anything is measured."""

    prefill_tokens_per_s: float = 4000.0
    """Prompt tokens that a worker computes in a second."""
    decode_tokens: float = 16.0
    """One running decode weighs as much as this many prompt tokens waiting ahead."""
    learn: bool = True
    """Whether events correct the prefill rate."""


@dataclass(slots=True)
class _Evidence:
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float) -> None:
        self.tokens = self.tokens * _DECAY + tokens
        self.seconds = self.seconds * _DECAY + seconds

    def rate(self, prior: float) -> float:
        return (self.tokens + _PRIOR_TOKENS) / (self.seconds + _PRIOR_TOKENS / prior)


class RateBook:
    """Rates by slot; slots of one group (a model) share their prior."""

    def __init__(self, defaults: RateDefaults = RateDefaults()) -> None:
        self.defaults = defaults
        self._own: dict[int, _Evidence] = {}
        self._group: dict[int, str] = {}
        self._groups: dict[str, _Evidence] = {}
        self._last_sample: dict[int, float] = {}

    def add_slot(self, slot: int, group: str) -> None:
        """Opens a page for a worker of a model."""
        self._own[slot] = _Evidence()
        self._group[slot] = group
        self._groups.setdefault(group, _Evidence())

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker; what its model's workers taught together stays while one is left."""
        self._own.pop(slot, None)
        self._last_sample.pop(slot, None)
        group = self._group.pop(slot, None)
        if group is not None and group not in self._group.values():
            self._groups.pop(group, None)

    def prefills_done(self, slot: int, tokens: int, admitted_at: float, now: float) -> None:
        """`tokens` were computed for the first tokens that came out at `now`, the oldest of these
        requests having been admitted at `admitted_at`.

        The engine serves in order: it worked on them since then, or since the first tokens before.
        """
        seconds = now - max(admitted_at, self._last_sample.get(slot, admitted_at))
        self._last_sample[slot] = now
        if not self.defaults.learn or tokens < _FEWEST_TOKENS or seconds <= 0:
            return
        self._own[slot].add(tokens, seconds)
        self._groups[self._group[slot]].add(tokens, seconds)

    def prefill_rate(self, slot: int) -> float:
        """Prompt tokens a second."""
        group = self._groups[self._group[slot]].rate(self.defaults.prefill_tokens_per_s)
        return min(max(self._own[slot].rate(group), group / _WIDEST), group * _WIDEST)

    def decode_delay_s(self, prefill_rate: float) -> float:
        """Seconds by which a running decode and a new request hold each other up, at that rate."""
        return self.defaults.decode_tokens / prefill_rate

    def check_invariants(self) -> None:
        """Raises AssertionError when a rate can't be one."""
        assert self._own.keys() == self._group.keys()
        assert self._groups.keys() == set(self._group.values())
        for slot in self._own:
            assert 0 < self.prefill_rate(slot) < float("inf")
