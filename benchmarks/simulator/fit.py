"""From measured steps to a timing profile: least squares, no figure below 0. Pure.

The step's formula (timing.py) is linear but for its roofline: a step takes the time of all weights
or of its tokens. Which of them bounds a step is guessed, fitted, and guessed again from the fit
until nothing changes. Errors count relative to a step's length, so that short steps matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.engines.sim.core.timing import TimingProfile

FIGURES = ("overhead_s", "weights_s", "token_s", "pair_s", "sequence_s", "kv_token_s")
ROUNDS = 20
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """A step as it was, in the terms of TimingProfile.step_s."""

    tokens: int
    pairs: float
    sequences: int
    kv_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A profile and how far it is off."""

    profile: TimingProfile
    mean_error: float
    """Mean of |fitted - measured| / measured."""
    worst_error: float


def fit(name: str, source: str, samples: Sequence[Sample]) -> Fit:
    """The profile that explains `samples` best. Raises ValueError for fewer than there are figures.

    Where the samples can't tell two figures apart (steps that are never bound by tokens, say), one
    of them is 0 or takes a part of the other.
    """
    if len(samples) < len(FIGURES):
        raise ValueError(f"{len(samples)} steps are too few; {len(FIGURES)} figures are wanted")
    tokens = np.array([s.tokens for s in samples], dtype=float)
    seconds = np.array([s.seconds for s in samples], dtype=float)
    # First guess: the half with fewer tokens is bound by weights.
    bound_by_tokens = tokens > np.median(tokens)
    figures = np.zeros(len(FIGURES))
    for _ in range(ROUNDS):
        figures = _least_squares(_rows(samples, bound_by_tokens), seconds)
        now = tokens * figures[2] > figures[1]
        if (now == bound_by_tokens).all():
            break
        bound_by_tokens = now
    profile = TimingProfile(name, source, **dict(zip(FIGURES, map(float, figures), strict=True)))
    errors = [
        abs(profile.step_s(s.tokens, s.pairs, s.sequences, s.kv_tokens) / s.seconds - 1)
        for s in samples
    ]
    return Fit(profile, sum(errors) / len(errors), max(errors))


def _rows(samples: Sequence[Sample], bound_by_tokens: NDArray[np.bool_]) -> Matrix:
    return np.array(
        [
            [
                1.0,
                0.0 if bound else 1.0,
                s.tokens if bound else 0.0,
                s.pairs,
                s.sequences,
                s.kv_tokens,
            ]
            for s, bound in zip(samples, bound_by_tokens, strict=True)
        ]
    )


def _least_squares(rows: Matrix, seconds: Matrix) -> Matrix:
    """Figures from 0 on with the least relative error: what would be negative is left out."""
    weighted = rows / seconds[:, None]
    scale = np.where(weighted.any(axis=0), np.abs(weighted).max(axis=0), 1.0)
    kept = [i for i in range(rows.shape[1]) if weighted[:, i].any()]
    while True:
        found, *_ = np.linalg.lstsq(weighted[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)
        if (found >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(found))]
    figures = np.zeros(rows.shape[1])
    figures[kept] = np.maximum(found, 0) / scale[kept]
    return figures
