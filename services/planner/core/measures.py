"""What was measured of one group of workers: plain values, from `watch` to `policy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.common.cards import Role
from services.planner.core.steps import StepTime


class GroupKey(NamedTuple):
    """Workers that can be paired: one model, one namespace, one way to hand on KV."""

    model: str
    namespace: bytes
    way: str
    """Empty: they hand nothing on, and can't be moved."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker's record says."""

    id: str
    incarnation: int
    address: str
    group: GroupKey
    role: Role = Role.BOTH
    draining: bool = False


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A living worker that isn't draining, now."""

    info: WorkerInfo
    movable: bool
    """Its record stands, and it can hand KV on."""
    active_tokens: int = 0
    """Prompt tokens of all its requests."""
    hit_tokens: float = 0.0
    """Prompt tokens that its own cache saved in the window: what its cache is worth."""


@dataclass(frozen=True, slots=True)
class Attained:
    """How a target was kept in the window."""

    share: float | None = None
    """Of requests that kept it; None: nothing was seen."""
    count: int = 0
    quantile: float | None = None
    """The latency that the wanted share of requests did not exceed, in seconds."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What the prefill pool does. Rates are tokens a second."""

    rate: float | None = None
    """Prompt tokens that one worker computes in a busy second; None: not measured yet."""
    demand: float = 0.0
    """Prompt tokens to be computed that arrive in a second."""
    pending: float = 0.0
    """Prompt tokens that wait to be computed."""
    mean_tokens: float = 0.0
    """Computed tokens of a prompt, ..."""
    high_tokens: float = 0.0
    """... those of one at the wanted quantile, ..."""
    variation: float = 1.0
    """... and the square of their coefficient of variation."""


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What the pool of decode-capable workers does."""

    step: StepTime | None = None
    """Of steps that only decode; None: not measured yet."""
    batch: int = 0
    """Requests that decode, over all its workers, and those that a rise beyond chance will add."""
    tokens_s: float = 0.0
    """Tokens that they produce in a second."""
    spread: float = 1.0
    """Inter-token latency at the wanted quantile / what `step` says of the present batch; >= 1."""
    kv_used: int = 0
    """Blocks in use by requests, over all its workers, ..."""
    kv_worker: float = 0.0
    """... and blocks of one of them; 0: not known."""


@dataclass(frozen=True, slots=True)
class GroupMeasures:
    """All that a decision about one group needs. Seconds, except where said."""

    key: GroupKey
    workers: tuple[WorkerView, ...] = ()
    """Those that live."""
    ttft: Attained = Attained()
    itl: Attained = Attained()
    fresh_ttft: int = 0
    """Requests whose prefill is over or later than the target, admitted since roles last changed;
    the next two are of them."""
    prefill_high_s: float | None = None
    """From admission to the end of the prefill (or until now), at the wanted quantile."""
    handover_s: float = 0.0
    """From there to the first token at a decode worker, in the median."""
    fresh_itl: int = 0
    """Requests whose inter-token latency was measured since roles last changed, ..."""
    itl_high_s: float | None = None
    """... and that latency at the wanted quantile."""
    prefill: PrefillLoad = PrefillLoad()
    decode: DecodeLoad = DecodeLoad()
    changed_at: float | None = None
    """When a worker's role last changed, by whomever; None: not since we look."""

    def pool(self, *roles: Role) -> tuple[WorkerView, ...]:
        """Living workers of these roles."""
        return tuple(w for w in self.workers if w.info.role in roles)
