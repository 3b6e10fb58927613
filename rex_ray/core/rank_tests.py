"""Whether two samples come from one distribution, judged by ranks alone: many pairs of samples at once.

Step times have spikes, and a test on means believes them. Ranks do not care how far out a spike is. SciPy's
``mannwhitneyu`` gives the same numbers, at 1.2 ms a call; a controller that looks at every step needs microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from rex_ray.core.types import FloatArray

__all__ = ["RankTest", "compare_ranks", "one_sided_p"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTest:
    """What ranks say of ``k`` pairs of samples; see ``compare_ranks``.

    Attributes:
        z: signed statistic, shape ``[k]``; positive where the first sample is the larger one.
        cliffs_delta: ``P(x > y) - P(x < y)`` in [-1, 1], shape ``[k]``: an effect size that no sample count inflates.
    """

    z: FloatArray
    cliffs_delta: FloatArray


def compare_ranks(x: npt.ArrayLike, y: npt.ArrayLike) -> RankTest:
    """Compare ``k`` pairs of samples by the Mann-Whitney test in its normal form.

    With ``U`` the number of pairs ``x_i > y_j``, ties counting half, ``z = (U - n m / 2) / sd(U)`` where
    ``sd(U)^2 = n m / 12 * (N + 1 - sum(t^3 - t) / (N (N - 1)))``, ``N = n + m`` and ``t`` runs over the sizes of
    groups of equal values (Mann and Whitney 1947; ties: Lehmann 1975). A half is taken off ``|U - n m / 2|`` for
    continuity, so ``z`` read as "greater" where it is positive, and as "less" where it is negative, is SciPy's
    ``mannwhitneyu(..., method="asymptotic")`` in that direction. Where all values are equal there is no evidence:
    ``z = 0`` (SciPy returns NaN).

    Args:
        x: first samples, shape ``[k, n]``, finite.
        y: second samples, shape ``[k, m]``, finite.
    """
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    num_first, num_second = first.shape[1], second.shape[1]
    total = num_first + num_second
    above = np.count_nonzero(first[:, :, None] > second[:, None, :], axis=(1, 2))
    below = np.count_nonzero(first[:, :, None] < second[:, None, :], axis=(1, 2))
    pairs = num_first * num_second
    excess = (above - below) / 2.0  # U - n m / 2
    variance = pairs / 12.0 * (total + 1.0 - _tie_term(np.concatenate([first, second], axis=1)))
    shrunk = np.maximum(np.abs(excess) - 0.5, 0.0)
    z = np.sign(excess) * np.where(variance > 0, shrunk / np.sqrt(np.where(variance > 0, variance, 1.0)), 0.0)
    return RankTest(z=z, cliffs_delta=2.0 * excess / pairs)


def one_sided_p(z: float) -> float:
    """Return the chance of a statistic at least as far out in the direction of ``z``, by the normal approximation."""
    return float(ndtr(-abs(z)))


def _tie_term(pooled: FloatArray) -> FloatArray:
    """Return ``sum(t^3 - t) / (N (N - 1))`` per row of ``pooled``, shape ``[k]``."""
    ordered = np.sort(pooled, axis=1)
    total = ordered.shape[1]
    term = np.zeros(len(ordered))
    for row in (ordered[:, 1:] == ordered[:, :-1]).any(axis=1).nonzero()[0]:
        sizes = np.diff(np.flatnonzero(np.diff(ordered[row], prepend=-np.inf, append=np.inf)))
        term[row] = float((sizes**3 - sizes).sum()) / (total * (total - 1))
    return term
