"""Rates book: how long each worker takes to prefill a prompt, and for a token of its decodes.

    prefill seconds      = a x requests + b x uncached + c x uncached x context
    seconds of one token = d + e x batch + f x KV tokens of the batch

`uncached` is what is computed, `context` the mean number of tokens that those attend to. Both are
learned from events: from admission (or the first token before) to first token, and from first token
to the end. The shape (a, b, c and d, e, f) is fitted over all workers of a model, by least squares
that forget; how fast one worker is beside that is a single factor of its own, so that mixed
hardware shows after a few requests and odd samples move nothing. Published defaults hold before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from services.router.core.fit import Fit

_DECAY = 0.95
"""What a sample leaves of the weight of those before it, in a worker's factor."""
_DECAY_ALL = 0.99
"""The same, for all workers of a model together."""
_PRIOR_TOKENS = 2048.0
"""Tokens of evidence that the prior counts as."""
_FEWEST_TOKENS = 128
"""Prefills below this tell more of overheads than of a worker's speed."""
_WIDEST = 8.0
"""A worker stays within this factor of its model, a sample of what was expected of it."""
_A_BATCH = (1.0, 8.0, 16384.0)
"""A batch of middle size."""
_FEWEST_OUTPUT = 8
"""Answers below this tell little of the pace of decodes."""


@dataclass(frozen=True, slots=True)
class RateDefaults:
    """Rates that hold before anything is measured."""

    prefill_tokens_per_s: float = 4000.0
    """Prompt tokens that a worker computes in a second."""
    context_tokens: float = 65536.0
    """Mean context at which attention costs as much as everything else of a prefill, in tokens."""
    decode_s: float = 0.02
    """A decoded token of a request that runs alone, in seconds."""
    learn: bool = True
    """Whether events correct the rates."""


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """A prefill at a worker, in seconds: request_s + uncached x (token_s + pair_s x context)."""

    request_s: float
    token_s: float
    pair_s: float

    def seconds(self, requests: float, tokens: float, pairs: float) -> float:
        """Of so many requests with `tokens` uncached ones; pairs = sum of uncached x context."""
        return self.request_s * requests + self.token_s * tokens + self.pair_s * pairs

    @property
    def tokens_per_s(self) -> float:
        """Rate of a long prompt without context."""
        return 1 / self.token_s


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds of one token at one worker: `base_s` + `sequence_s` x batch + `kv_s` x KV tokens."""

    base_s: float
    sequence_s: float
    kv_s: float

    def imposed_s(self, kv_tokens: float) -> float:
        """By how much another request with so much KV makes each token of the others later."""
        return self.sequence_s + self.kv_s * kv_tokens


@dataclass(slots=True)
class _Ratio:
    """Measured seconds, and what they were measured of, both forgetting.

    A shape is linear, so what it expects of all samples follows from the sum of their features: by
    what the shape is now, not by what it was when they came.
    """

    decay: float = _DECAY
    measured: float = 0.0
    features: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def add(self, measured: float, features: tuple[float, float, float]) -> None:
        d, (a, b, c), (x, y, z) = self.decay, self.features, features
        self.measured = self.measured * d + measured
        self.features = a * d + x, b * d + y, c * d + z

    def value(self, shape: Fit, prior_s: float) -> float:
        """Measured over expected, with a prior of 1."""
        return (self.measured + prior_s) / (shape.value(self.features) + prior_s)


@dataclass(slots=True)
class _Group:
    """What all workers of a model taught together."""

    prefill: Fit
    decode: Fit
    prefill_all: _Ratio = field(default_factory=lambda: _Ratio(_DECAY_ALL))
    decode_all: _Ratio = field(default_factory=lambda: _Ratio(_DECAY_ALL))
    slots: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Page:
    group: _Group
    prefill: _Ratio = field(default_factory=_Ratio)
    decode: _Ratio = field(default_factory=_Ratio)
    last_first_token: float | None = None
    times: PrefillTimes | None = None
    """Worked out until the next sample."""
    decode_times: DecodeTimes | None = None


class RateBook:
    """Rates by slot; slots of one group (a model) share their shape."""

    def __init__(self, defaults: RateDefaults = RateDefaults()) -> None:
        self.defaults = defaults
        token = 1 / defaults.prefill_tokens_per_s
        self._prior = PrefillTimes(0.0, token, token / defaults.context_tokens)
        self._decode_prior = DecodeTimes(defaults.decode_s, token, 0.0)
        self._pages: dict[int, _Page] = {}
        self._groups: dict[str, _Group] = {}
        self._names: dict[int, str] = {}

    def add_slot(self, slot: int, group: str) -> None:
        """Opens a page for a worker of a model."""
        known = self._groups.get(group)
        if known is None:
            p, d = self._prior, self._decode_prior
            known = self._groups[group] = _Group(
                Fit(
                    (p.request_s, p.token_s, p.pair_s),
                    # A prompt of middle length, a short one, and the end of a long one.
                    (
                        (1, _PRIOR_TOKENS, _PRIOR_TOKENS**2 / 2),
                        (1, 64, 2048),
                        (1, 1024, 1024 * 32768),
                    ),
                ),
                Fit(
                    (d.base_s, d.sequence_s, d.kv_s),
                    ((1, 1, 1024), (1, 16, 16384), (1, 4, 65536)),
                ),
            )
        known.slots.add(slot)
        self._names[slot] = group
        self._pages[slot] = _Page(known)

    def remove_slot(self, slot: int) -> None:
        """Forgets a worker; what its model's workers taught together stays while one is left."""
        page = self._pages.pop(slot, None)
        if page is not None:
            page.group.slots.discard(slot)
            name = self._names.pop(slot)
            if not page.group.slots:
                del self._groups[name]

    def group(self, slot: int) -> str:
        """Whose workers teach it, and learn from it."""
        return self._names[slot]

    def prefills_done(
        self, slot: int, requests: int, tokens: int, pairs: float, admitted_at: float, now: float
    ) -> Collection[int]:
        """`tokens` were computed for the first tokens of `requests` that came out at `now`, the
        oldest of these having been admitted at `admitted_at`; `pairs` = sum of tokens x context.

        The engine serves in order: it worked on them since then, or since the first tokens before.
        Returns the slots whose rates to read anew: of what is hardly known, the first word of one
        worker tells of all, and must not make it look unlike them. Later they can wait for a tick.
        """
        page = self._pages[slot]
        last = page.last_first_token
        seconds = now - (admitted_at if last is None else max(admitted_at, last))
        page.last_first_token = now
        if not self.defaults.learn or tokens < _FEWEST_TOKENS or seconds <= 0:
            return ()
        features = float(requests), float(tokens), pairs
        shape = page.group.prefill
        expected = shape.value(features)
        prior_s = self._prior_s(shape)
        factor = _factor(page.prefill, page.group.prefill_all, shape, prior_s)
        level = page.group.prefill_all.value(shape, prior_s) * factor * expected
        # One request that was held up by something else must not count for a hundred.
        seconds = min(max(seconds, level / _WIDEST), level * _WIDEST)
        page.prefill.add(seconds, features)
        page.group.prefill_all.add(seconds, features)
        shape.add(features, seconds / factor)
        self._stale(page.group)
        return page.group.slots if shape.is_young else (slot,)

    def decoded(
        self, slot: int, tokens: int, seconds: float, batch: float, kv_tokens: float
    ) -> Collection[int]:
        """A request got `tokens` after its first in `seconds`, in a batch of that mean size.

        Returns what `prefills_done` returns.
        """
        if not self.defaults.learn or tokens < _FEWEST_OUTPUT or seconds <= 0:
            return ()
        page = self._pages[slot]
        features = 1.0, batch, kv_tokens
        shape = page.group.decode
        expected = shape.value(features)
        factor = _factor(page.decode, page.group.decode_all, shape, 16 * expected)
        level = page.group.decode_all.value(shape, 16 * expected) * factor * expected
        pace = min(max(seconds / tokens, level / _WIDEST), level * _WIDEST)
        page.decode.add(pace, features)
        page.group.decode_all.add(pace, features)
        shape.add(features, pace / factor)
        self._stale(page.group)
        return page.group.slots if shape.is_young else (slot,)

    def prefill(self, slot: int) -> PrefillTimes:
        """Seconds of a prefill there."""
        page = self._pages[slot]
        if page.times is None:
            shape = page.group.prefill
            factor = _factor(page.prefill, page.group.prefill_all, shape, self._prior_s(shape))
            a, b, c = shape.coefficients
            least = self._prior.token_s / 1e6
            page.times = PrefillTimes(a * factor, max(b * factor, least), c * factor)
        return page.times

    def decode(self, slot: int) -> DecodeTimes:
        """Seconds of a token there."""
        page = self._pages[slot]
        if page.decode_times is None:
            shape = page.group.decode
            a, b, c = shape.coefficients
            prior_s = 16 * shape.value(_A_BATCH)
            factor = _factor(page.decode, page.group.decode_all, shape, prior_s)
            # A decode is a token through the network at least, however little of that shows where
            # batches never grow: else a crowd of decodes would weigh nothing.
            least = self.prefill(slot).token_s
            page.decode_times = DecodeTimes(a * factor, max(b * factor, least), c * factor)
        return page.decode_times

    def prefill_rate(self, slot: int) -> float:
        """Prompt tokens a second, for prompts of a few thousand tokens."""
        return _PRIOR_TOKENS / self.prefill(slot).seconds(1, _PRIOR_TOKENS, _PRIOR_TOKENS**2 / 2)

    def check_invariants(self) -> None:
        """Raises AssertionError when a rate can't be one."""
        assert self._pages.keys() == self._names.keys()
        assert {s for g in self._groups.values() for s in g.slots} == self._pages.keys()
        for slot in self._pages:
            times, decode = self.prefill(slot), self.decode(slot)
            assert 0 < times.token_s < float("inf")
            assert 0 <= min(times.request_s, times.pair_s) < float("inf")
            assert 0 <= min(decode.base_s, decode.sequence_s, decode.kv_s) < float("inf")

    def _prior_s(self, shape: Fit) -> float:
        return shape.value((1.0, _PRIOR_TOKENS, _PRIOR_TOKENS**2 / 2))

    def _stale(self, group: _Group) -> None:
        for slot in group.slots:
            page = self._pages[slot]
            page.times = page.decode_times = None


def _factor(one: _Ratio, everybody: _Ratio, shape: Fit, prior_s: float) -> float:
    """How much slower one worker is than its model's all together; as they are, until known."""
    expected = shape.value(everybody.features)
    if not everybody.measured or not expected:
        return 1.0
    level = everybody.measured / expected
    factor = (one.measured / level + prior_s) / (shape.value(one.features) + prior_s)
    return min(max(factor, 1 / _WIDEST), _WIDEST)
