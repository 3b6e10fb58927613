"""How long a worker takes for ``b`` rows: one representation, and the ways to fit it to few noisy sizes.

Every curve is a chain of straight pieces between knots. That is enough for a kink (a saturating device), for a
tile step and for a sampled spline, and it can be inverted exactly, which is all that the split of a batch needs.

A small number of sizes cannot carry a free fit: splines through {56 .. 72} rows miss the rest of the range by
factors. So each fit is told what is plausible, by one pseudo-measurement at zero rows that counts for next to
nothing as soon as the data say anything themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression, nnls

from rex_ray.core.types import FloatArray, read_only

__all__ = ["StepTimeCurve", "fit_curve"]

FIXED_SHARE = 0.3
"""Share of the time at one measured size that is assumed not to depend on the rows (the rest is proportional)."""

EXTRAPOLATION = 2.0
"""A curve is evidence up to this multiple of the largest measured size."""

MIN_SPAN = 1.5
"""Three or more sizes give a curve its bends only if the largest is this many times the smallest."""

# Relative sd of one sample, and of the guess FIXED_SHARE: they weigh the pseudo-measurement.
_SAMPLE_SD, _GUESS_SD = 0.04, 0.2
# Prior sd of a bend, as a change of the elasticity dlog t / dlog b: full saturation is a bend of 1.
_BEND_SD = 0.5
_MAX_WEIGHT = 50.0
_PIECES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimeCurve:
    """A worker's own time as a function of its rows: positive, non-decreasing, finite; straight beyond both ends.

    Attributes:
        knot_rows: rows at the knots, increasing, the first 0; shape ``[k]``, ``k >= 2``.
        knot_s: seconds at the knots, positive and non-decreasing; shape ``[k]``. Workers of one kind share both.
        scale: factor on the whole curve: this worker's time relative to its kind.
        max_trusted_rows: beyond it the straight continuation is a guess; a planner should not go there.
    """

    knot_rows: FloatArray
    knot_s: FloatArray
    scale: float = 1.0
    max_trusted_rows: int

    def predict_s(self, num_rows: npt.ArrayLike) -> FloatArray:
        """Return the own time in seconds for each count of rows (any shape). Negative counts count as 0."""
        rows = np.maximum(np.asarray(num_rows, dtype=np.float64), 0.0)
        beyond = np.maximum(rows - self.knot_rows[-1], 0.0)
        result: FloatArray = self.scale * (np.interp(rows, self.knot_rows, self.knot_s) + self._tail * beyond)
        return result

    def rows_within(self, limit_s: npt.ArrayLike) -> FloatArray:
        """Return the most (fractional) rows that take no longer than each limit: the inverse of ``predict_s``.

        -1 where not even zero rows fit, ``inf`` where any number does.
        """
        level = np.asarray(limit_s, dtype=np.float64) / self.scale
        return _invert(self.knot_rows, self.knot_s, level)

    def scaled(self, factor: float) -> StepTimeCurve:
        """Return the curve of a worker that takes ``factor`` times as long."""
        return replace(self, scale=self.scale * factor)

    @property
    def _tail(self) -> float:
        """Seconds per row beyond the last knot, at scale 1."""
        return float((self.knot_s[-1] - self.knot_s[-2]) / (self.knot_rows[-1] - self.knot_rows[-2]))


def _invert(knot_rows: FloatArray, knot_s: FloatArray, level: FloatArray) -> FloatArray:
    """Return the largest abscissa with a time of at most ``level``; flat pieces count to their far end."""
    right = np.searchsorted(knot_s, level, side="right")
    left = np.clip(right - 1, 0, knot_s.size - 2)
    rise = knot_s[left + 1] - knot_s[left]
    run = knot_rows[left + 1] - knot_rows[left]
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = knot_rows[left] + (level - knot_s[left]) * np.where(rise > 0, run / rise, np.inf)
    # On a flat tail the last knot itself is "inside" with 0 * inf; any count of rows fits there.
    inside = np.where(np.isnan(inside), np.inf, inside)
    result: FloatArray = np.where(right == 0, -1.0, inside)
    return result


def fit_curve(num_rows: npt.ArrayLike, own_s: npt.ArrayLike, counts: npt.ArrayLike) -> StepTimeCurve:
    """Fit a curve to one time per distinct size.

    By the number ``k`` of sizes: one gives ``t1 (0.3 + 0.7 b / b1)``; two, or a span of less than 1.5, a non-negative
    straight line; more a convex chain of non-negative hinges. Where that misses the points by clearly more than their
    noise (tile steps, a host-bound start, a memory that spills), it is isotonic values joined by a monotone cubic
    (PCHIP); in the first case only if those do not.

    Args:
        num_rows: distinct positive sizes, increasing, shape ``[k]``, ``k >= 1``.
        own_s: positive seconds at each size, shape ``[k]``.
        counts: samples behind each time, shape ``[k]``; weights saturate at 50.

    Returns:
        A curve of scale 1, trusted up to twice the largest size.
    """
    b = np.asarray(num_rows, dtype=np.float64)
    t = np.asarray(own_s, dtype=np.float64)
    weight = np.minimum(np.asarray(counts, dtype=np.float64), _MAX_WEIGHT)
    bends = b[:-1] if b.size >= 3 and b[-1] / b[0] >= MIN_SPAN else b[:0]
    knots = _fit_hinges(b, t, weight, bends)
    if b.size >= 2 and _misfit(knots, b, t, weight) > 1.0:
        monotone = _fit_monotone(b, t, weight)
        # Times that fall with the rows are a change of speed or noise: over a small span a line is the better guess.
        if bends.size or _misfit(monotone, b, t, weight) <= 1.0:
            knots = monotone
    rows, seconds = knots
    # Positive even where the fit puts everything into the slope: no step is free.
    seconds = np.maximum.accumulate(np.maximum(seconds, 1e-3 * t.min()))
    return StepTimeCurve(
        knot_rows=read_only(rows, np.float64),
        knot_s=read_only(seconds, np.float64),
        max_trusted_rows=int(EXTRAPOLATION * b[-1]),
    )


def _misfit(knots: tuple[FloatArray, FloatArray], b: FloatArray, t: FloatArray, weight: FloatArray) -> float:
    """Return by how much a chain misses the times, in root mean square of what their noise explains."""
    tolerance = 0.01 + 2.0 * _SAMPLE_SD / np.sqrt(weight)
    return math.sqrt(float(np.mean(((np.interp(b, *knots) / t - 1.0) / tolerance) ** 2)))


def _fit_hinges(b: FloatArray, t: FloatArray, weight: FloatArray, bends: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Fit ``a + c b + sum_j h_j max(0, b - bends_j)``, all coefficients >= 0, to relative errors.

    With no bends this is the non-negative straight line, and with one size the line through it and the guess.
    """
    heaviest = int(np.argmax(weight))
    guess_s = FIXED_SHARE * t[heaviest]
    guess_weight = (_SAMPLE_SD / _GUESS_SD) ** 2
    rows = np.concatenate([[0.0], b])
    design = np.stack([np.ones_like(rows), rows, *(np.maximum(rows - bend, 0.0) for bend in bends)], axis=1)
    root = np.sqrt(np.concatenate([[guess_weight], weight])) / np.concatenate([[t[heaviest]], t])
    # A faint ridge on the bends keeps two sizes that are close together from making one out of their noise.
    ridge = np.zeros((bends.size, 2 + bends.size))
    ridge[:, 2:] = np.diag(_SAMPLE_SD / _BEND_SD * bends / t[: bends.size])
    weighted = np.concatenate([design * root[:, None], ridge])
    # Columns of like size: nnls compares their gradients against one absolute tolerance.
    norms = np.linalg.norm(weighted, axis=0)
    target = np.concatenate([np.concatenate([[guess_s], t]) * root, np.zeros(bends.size)])
    solution, _ = nnls(weighted / norms, target)
    knots = np.unique(np.concatenate([rows, [2.0 * b[-1]]]))
    basis = np.stack([np.ones_like(knots), knots, *(np.maximum(knots - bend, 0.0) for bend in bends)], axis=1)
    return knots, basis @ (solution / norms)


def _fit_monotone(b: FloatArray, t: FloatArray, weight: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Isotonic values joined by a monotone cubic, straight to zero rows and beyond the last size."""
    level = isotonic_regression(t, weights=weight / t**2).x
    line_rows, line_s = _fit_hinges(b, t, weight, b[:0])
    start = min(float(line_s[0]), float(level[0]))
    fine = np.unique(np.concatenate([b, *(np.linspace(x, y, _PIECES + 1) for x, y in pairwise(b))]))
    # The slope beyond the data: that of the upper half, kept near the slope of the straight line through all of it.
    overall = float((line_s[-1] - line_s[0]) / line_rows[-1])
    middle = (b.size - 1) // 2
    upper = float((level[-1] - level[middle]) / (b[-1] - b[middle]))
    tail = min(max(upper, 0.5 * overall), 2.0 * max(overall, level[-1] / b[-1] * (1 - FIXED_SHARE)))
    rows = np.concatenate([[0.0], fine, [2.0 * b[-1]]])
    seconds = np.concatenate([[start], PchipInterpolator(b, level)(fine), [level[-1] + tail * b[-1]]])
    return rows, seconds
