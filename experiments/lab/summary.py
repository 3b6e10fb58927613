"""From results on many seeds to what is said of them: medians, spreads, ratios in pairs, and what accuracy costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt
from scipy import stats

from experiments.lab.cells import Result
from rex_ray.core.types import FloatArray

__all__ = ["MARGIN_POINTS", "AccuracyDelta", "Ratio", "Spread", "accuracy_delta", "ratio", "spread", "times_s"]

MARGIN_POINTS = 0.3
"""Accuracy that is less than this below the baseline's, in points, counts as not inferior."""

_NUM_RESAMPLES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of times to a target; those that missed it count as endless.

    Attributes:
        median_s: the middle one; infinite where half of them missed.
        lowest_s: the shortest.
        quarter_s: the first quartile.
        three_quarters_s: the third.
        highest_s: the longest.
        num_missed: how many missed the target.
    """

    median_s: float
    lowest_s: float
    quarter_s: float
    three_quarters_s: float
    highest_s: float
    num_missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of two medians, with its 95 % percentile bootstrap interval over paired seeds.

    Infinite where the first is endless, NaN where the second is.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyDelta:
    """Final accuracy against a baseline's on the same seeds, in points.

    Attributes:
        points: the mean difference.
        lowest_90: what it is at least, with 90 % confidence (one-sided, Student's t over seeds).
    """

    points: float
    lowest_90: float

    @property
    def is_not_inferior(self) -> bool:
        """Whether a loss of the margin can be ruled out."""
        return self.lowest_90 > -MARGIN_POINTS


def times_s(results: Sequence[Result]) -> FloatArray:
    """Return the seconds to the target, infinite where it was missed, shape ``[seeds]``."""
    return np.array([math.inf if result.tta_s is None else result.tta_s for result in results])


def spread(results: Sequence[Result]) -> Spread:
    """Return how the times to the target are spread."""
    times = np.sort(times_s(results))
    # Quartiles that are values themselves: between a number and infinity there is nothing.
    quarters = [float(times[round(part * (times.size - 1))]) for part in (0.25, 0.75)]
    return Spread(
        median_s=median(times.tolist()),
        lowest_s=float(times[0]),
        quarter_s=quarters[0],
        three_quarters_s=quarters[1],
        highest_s=float(times[-1]),
        num_missed=int(np.isinf(times).sum()),
    )


def ratio(results: Sequence[Result], others: Sequence[Result], *, seed: int = 0) -> Ratio:
    """Return the ratio of the median times to the target.

    Args:
        results: of one method by seed.
        others: of another on the same seeds, in the same order.
        seed: of the bootstrap, which draws seeds, not runs: what a pair shares is not taken for chance.

    Raises:
        ValueError: the two differ in length, or are empty.
    """
    times, references = times_s(results), times_s(others)
    if times.size != references.size or times.size == 0:
        raise ValueError(f"a paired ratio needs as many runs on both sides, got {times.size} and {references.size}")
    drawn = np.random.default_rng(seed).integers(times.size, size=(_NUM_RESAMPLES, times.size))
    with np.errstate(invalid="ignore"):
        ratios = _over(np.median(times[drawn], axis=1), np.median(references[drawn], axis=1))
        value = float(_over(np.median(times), np.median(references)))
        # Whole order statistics: between a number and infinity there is nothing.
        low, high = np.quantile(ratios, [0.025, 0.975], method="nearest")
    return Ratio(value=value, low=float(low), high=float(high))


def _over(times: npt.ArrayLike, references: npt.ArrayLike) -> FloatArray:
    """Return the ratio; NaN where the reference is endless, which is no triumph that a number could name."""
    below = np.asarray(references, dtype=np.float64)
    result: FloatArray = np.where(np.isinf(below), np.nan, np.asarray(times) / below)
    return result


def accuracy_delta(results: Sequence[Result], others: Sequence[Result]) -> AccuracyDelta:
    """Return the difference of final metrics that are fractions of right answers, in points.

    Raises:
        ValueError: fewer than two pairs, or runs without a metric.
    """
    pairs = [(mine.final_metric, other.final_metric) for mine, other in zip(results, others, strict=True)]
    deltas = np.array([100 * (mine - other) for mine, other in pairs if mine is not None and other is not None])
    if deltas.size < 2 or deltas.size < len(pairs):
        raise ValueError(f"accuracies are compared on two pairs at least, each with a metric, got {pairs}")
    error = float(deltas.std(ddof=1)) / math.sqrt(deltas.size)
    points = float(deltas.mean())
    return AccuracyDelta(points=points, lowest_90=points - float(stats.t.ppf(0.9, deltas.size - 1)) * error)
