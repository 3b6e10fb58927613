"""Whole rows from fractional shares: the largest-remainder method, with bounds.

Rounding each share on its own loses or invents rows (64 rows over three workers would become 63), so every
integer split in rex_ray comes from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import FloatArray, IntArray

__all__ = ["apportion", "in_units", "rows_per_rank"]

# Two remainders nearer than this are a tie and go to the lower rank: an ulp must not decide who gets a row.
_TIE = 1e-9
_UNBOUNDED = np.iinfo(np.int64).max // 4


def apportion(
    total: int,
    weights: npt.ArrayLike,
    lower: npt.ArrayLike | None = None,
    upper: npt.ArrayLike | None = None,
    multiple: int = 1,
) -> IntArray:
    """Divide ``total`` rows in proportion to ``weights``, in whole rows with an exact sum.

    The fractional quota is ``clip(level * weights, lower, upper)`` with the one ``level`` that makes it sum to
    ``total``; it is rounded down and the rows left over go to the largest remainders, ties to the lower rank. So
    every count is within one row of its quota and within its bounds. Ranks of weight 0 stay at their lower bound
    unless the others are full.

    Args:
        total: rows to divide, at least 0.
        weights: finite and non-negative, shape ``[n]``; all zero means equal weights.
        lower: fewest rows per rank, shape ``[n]``; default 0.
        upper: most rows per rank, shape ``[n]``; default unbounded.
        multiple: rows that stay together: they are divided, and the law above holds, in units of it.

    Returns:
        Rows per rank, shape ``[n]``, summing to ``total``.

    Raises:
        ValueError: weights that are negative, not finite or none at all.
        InfeasibleError: the bounds leave no room for ``total``, or it is no multiple of ``multiple``.
    """
    if multiple > 1:
        least = None if lower is None else -(-np.asarray(lower, dtype=np.int64) // multiple)
        most = None if upper is None else np.asarray(upper, dtype=np.int64) // multiple
        return multiple * apportion(in_units(total, multiple), weights, least, most)
    w = np.asarray(weights, dtype=np.float64)
    if w.ndim != 1 or w.size == 0 or not np.isfinite(w).all() or (w < 0).any():
        raise ValueError(f"weights must be a non-empty list of finite non-negative numbers, got {w.tolist()}")
    lo = np.zeros(w.size, dtype=np.int64) if lower is None else np.asarray(lower, dtype=np.int64)
    hi = np.full(w.size, _UNBOUNDED) if upper is None else np.minimum(np.asarray(upper, dtype=np.int64), _UNBOUNDED)
    _check_bounds(total, lo, hi)
    positive = w > 0
    if not positive.any():
        w, positive = np.ones_like(w), np.ones_like(positive)
    rest = total - int(lo[~positive].sum())
    if rest > hi[positive].sum(dtype=np.float64):
        counts = hi.copy()
        spill = total - int(hi[positive].sum())
        counts[~positive] = apportion(spill, np.ones(int((~positive).sum())), lo[~positive], hi[~positive])
        return counts
    counts = lo.copy()
    counts[positive] = _round_quota(rest, _quota(rest, w[positive], lo[positive], hi[positive]), hi[positive])
    return counts


def in_units(num_rows: int, multiple: int) -> int:
    """Return how many times ``multiple`` rows ``num_rows`` are.

    Raises:
        InfeasibleError: no whole number of times.
    """
    units, rest = divmod(num_rows, multiple)
    if rest:
        raise InfeasibleError(f"{num_rows} rows cannot be shared out in multiples of {multiple}")
    return units


def rows_per_rank(num_rows: int, local_batch_sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the real rows per rank of a batch of ``num_rows`` rows under the shares ``local_batch_sizes``.

    Only an epoch's last batch differs from its shares. The law, for ``B = sum(local_batch_sizes)``:

    * the counts sum to ``num_rows``, and equal the shares when ``num_rows == B``;
    * a smaller batch never gives a rank more than its share, so a memory limit that the shares respect holds;
    * a rank that has a share gets at least one row, unless there are fewer rows than such ranks; a rank
      without a share gets none;
    * otherwise each count is within one row of ``num_rows * b_i / B``.

    It is computed in integers throughout: every rank works out every rank's count on its own, and on mixed
    machines a float sum may differ in its last bit.

    Raises:
        ValueError: a negative count, or no share at all for the rows.
    """
    shares = tuple(int(share) for share in local_batch_sizes)
    total = sum(shares)
    if num_rows < 0 or min(shares, default=-1) < 0 or (total == 0 and num_rows > 0):
        raise ValueError(f"cannot divide {num_rows} rows by the shares {shares}")
    if total in (num_rows, 0):
        return shares
    quotas = [divmod(num_rows * share, total) for share in shares]
    counts = [whole for whole, _ in quotas]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-quotas[rank][1], rank))
    for rank in by_remainder[: num_rows - sum(counts)]:
        counts[rank] += 1
    empty = [rank for rank, share in enumerate(shares) if share > 0 and counts[rank] == 0]
    if num_rows >= sum(share > 0 for share in shares):
        for rank in empty:
            counts[max(range(len(shares)), key=counts.__getitem__)] -= 1
            counts[rank] = 1
    return tuple(counts)


def _check_bounds(total: int, lo: IntArray, hi: IntArray) -> None:
    least, most = int(lo.sum()), hi.sum(dtype=np.float64)
    if total < 0 or (lo < 0).any() or (lo > hi).any() or not least <= total <= most:
        raise InfeasibleError(
            f"cannot divide {total} rows over {lo.size} ranks: the lower bounds sum to {least}, the upper to {most:.0f}"
            + ("" if (lo <= hi).all() else f", and rank {int(np.argmax(lo > hi))}'s bounds cross")
        )


def _quota(total: int, w: FloatArray, lo: IntArray, hi: IntArray) -> FloatArray:
    """Return ``clip(level * w, lo, hi)`` for the level that makes it sum to ``total``; all ``w`` are positive."""
    # The sum is piecewise linear in the level: rank i joins its slope at lo / w and leaves it at hi / w. Every sum and
    # slope is taken afresh: accumulated, a large weight that has left would leave its rounding in place of small ones.
    first, last = lo / w, hi / w
    levels = np.sort(np.concatenate([first, last]))
    sums = np.clip(levels[:, None] * w, lo, hi).sum(axis=1)
    at = max(int(np.searchsorted(sums, total, side="right")) - 1, 0)
    slope = float(w[(first <= levels[at]) & (levels[at] < last)].sum())
    level = levels[at] + ((total - sums[at]) / slope if slope > 0 else 0.0)
    quota: FloatArray = np.clip(level * w, lo, hi)
    return quota


def _round_quota(total: int, quota: FloatArray, hi: IntArray) -> IntArray:
    """Round down, then hand out the rest by largest remainder within the upper bounds."""
    counts = np.floor(quota + _TIE).astype(np.int64)
    # Rounded to the tie width, so that a stable sort leaves equal remainders in rank order.
    order = np.argsort(-np.round(quota - counts, 9), kind="stable")
    for rank in order[counts[order] < hi[order]][: total - int(counts.sum())]:
        counts[rank] += 1
    return counts
