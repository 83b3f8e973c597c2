"""Least squares with three coefficients that are never negative, and that forget. Pure numbers.

Made for times: a sample weighs the less the longer it took, and the prior's shape is scaled to the
level that was measured, so that hardware ten times as fast as the default is believed at once.
"""

from __future__ import annotations

from collections.abc import Sequence

Three = tuple[float, float, float]

_DECAY = 0.99
"""What a sample leaves of the weight of those before it."""
_PRIOR_WEIGHT = 0.5
"""Samples that each point of the prior counts as."""
_EVERY = 8
"""Samples between two solutions, once there are many."""
_FEW = 32


class Fit:
    """y = k0 x0 + k1 x1 + k2 x2, from samples and a prior given by points and its coefficients."""

    def __init__(self, prior: Three, points: Sequence[Three]) -> None:
        self._prior = prior
        self._points = tuple(points)
        self._matrix = [0.0] * 6
        self._right = [0.0] * 3
        self._measured = 0.0
        self._expected = 0.0
        self._samples = 0
        self._stale = False
        self._coefficients = prior

    @property
    def coefficients(self) -> Three:
        """What the samples say so far."""
        return self._coefficients

    @property
    def is_young(self) -> bool:
        """Whether each sample may still change it much."""
        return self._samples <= _FEW

    def value(self, x: Three) -> float:
        """The fitted y at x."""
        a, b, c = self._coefficients
        return a * x[0] + b * x[1] + c * x[2]

    def add(self, x: Three, y: float) -> None:
        """A sample; y must be positive."""
        p, q, r = self._prior
        expected = p * x[0] + q * x[1] + r * x[2]
        self._measured = self._measured * _DECAY + y
        self._expected = self._expected * _DECAY + expected
        _accumulate(self._matrix, self._right, x, y, 1 / y, _DECAY)
        self._samples += 1
        if self.is_young or self._samples % _EVERY == 0:
            self._solve()

    def _solve(self) -> None:
        level = self._measured / self._expected
        p, q, r = self._prior
        matrix, right = list(self._matrix), list(self._right)
        for x in self._points:
            y = (p * x[0] + q * x[1] + r * x[2]) * level
            _accumulate(matrix, right, x, y, _PRIOR_WEIGHT / y, 1.0)
        self._coefficients = solve_nonnegative(matrix, right)


def solve_nonnegative(matrix: Sequence[float], right: Sequence[float]) -> Three:
    """The best coefficients from 0 on; `matrix` is symmetric: (00, 01, 02, 11, 12, 22).

    Three are few enough to try every set of those that are 0, and to keep the best.
    """
    best: Three = (0.0, 0.0, 0.0)
    least = 0.0
    for mask in (7, 6, 3, 5, 2, 4, 1):
        kept = [i for i in range(3) if mask >> i & 1]
        solved = _solve(matrix, right, kept)
        if solved is None or min(solved[i] for i in kept) < 0:
            continue
        gain = -sum(solved[i] * right[i] for i in kept)
        if gain < least:
            best, least = solved, gain
            if mask == 7:
                break
    return best


def _accumulate(
    matrix: list[float], right: list[float], x: Three, y: float, weight: float, keep: float
) -> None:
    n = 0
    for i in range(3):
        wx = weight * x[i]
        right[i] = right[i] * keep + wx * y
        for j in range(i, 3):
            matrix[n] = matrix[n] * keep + wx * x[j]
            n += 1


def _solve(matrix: Sequence[float], right: Sequence[float], kept: list[int]) -> Three | None:
    """Coefficients of those kept, the others 0; None where they can't be told apart."""
    full = (
        (matrix[0], matrix[1], matrix[2]),
        (matrix[1], matrix[3], matrix[4]),
        (matrix[2], matrix[4], matrix[5]),
    )
    # Scaled to a diagonal of ones: the features differ by many orders of magnitude.
    scale = {i: full[i][i] ** -0.5 for i in kept if full[i][i] > 0}
    if len(scale) < len(kept):
        return None
    rows = [[full[i][j] * scale[i] * scale[j] for j in kept] + [right[i] * scale[i]] for i in kept]
    size = len(kept)
    for i in range(size):
        pivot = rows[i][i]
        if pivot < 1e-9:
            return None
        for k in range(i + 1, size):
            share = rows[k][i] / pivot
            for j in range(i, size + 1):
                rows[k][j] -= share * rows[i][j]
    out = [0.0, 0.0, 0.0]
    for i in reversed(range(size)):
        rest = rows[i][size] - sum(
            rows[i][j] * out[kept[j]] / scale[kept[j]] for j in range(i + 1, size)
        )
        out[kept[i]] = rest / rows[i][i] * scale[kept[i]]
    return out[0], out[1], out[2]
