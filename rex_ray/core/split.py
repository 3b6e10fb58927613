"""The exact split of a global batch: minimise the slowest worker's own time, in whole rows.

For non-decreasing step times the smallest feasible deadline can be found by bisection, because the most rows that
worker ``i`` finishes within a deadline, ``cap_i``, never falls as the deadline grows. The answer equals brute force
(tested), so whatever a search later improves on it is an error of the curves, not of the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.apportion import apportion, in_units
from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.types import FloatArray, IntArray, read_only

__all__ = ["CurveSet", "LineSet", "SplitPlan", "exact_split"]

# Deadlines nearer than this (relative) are one deadline: far below any measurement, far above rounding.
_SAME_TIME = 1e-9

_MAX_CUTS, _CUT_CELLS = 15, 256
"""Deadlines tried at once, and the most cells (deadlines times workers) that they may have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPlan:
    """A split and what the curves say about it.

    Attributes:
        local_batch_sizes: rows per rank.
        step_time_s: own time of the slowest rank.
        own_s: own time per rank, shape ``[n]``; 0 for a rank without rows.
    """

    local_batch_sizes: tuple[int, ...]
    step_time_s: float
    own_s: FloatArray


class CurveSet:
    """Several workers' curves, evaluated together: workers that share a shape are one array operation."""

    def __init__(self, curves: Sequence[StepTimeCurve]) -> None:
        groups: dict[tuple[int, int], list[int]] = {}
        for rank, curve in enumerate(curves):
            groups.setdefault((id(curve.knot_rows), id(curve.knot_s)), []).append(rank)
        self._groups = [(replace(curves[ranks[0]], scale=1.0), np.array(ranks)) for ranks in groups.values()]
        self._inverses = [_Inverse(shape.knot_rows, shape.knot_s) for shape, _ in self._groups]
        self._scales = np.array([curve.scale for curve in curves])
        self.num_workers = len(curves)

    def own_s(self, num_rows: IntArray) -> FloatArray:
        """Return the own time per rank, shape ``[n]``; no rows take no time."""
        own = np.empty(self.num_workers)
        for shape, ranks in self._groups:
            own[ranks] = shape.predict_s(num_rows[ranks])
        result: FloatArray = np.where(num_rows > 0, own * self._scales, 0.0)
        return result

    def most_rows(self, deadlines_s: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
        """Return the most rows done by each deadline (shape ``[m]``) per rank, within bounds, shape ``[m, n]``."""
        rows = np.empty((deadlines_s.size, self.num_workers))
        level = deadlines_s[:, None] / self._scales
        for inverse, (_, ranks) in zip(self._inverses, self._groups, strict=True):
            rows[:, ranks] = inverse.rows_within(level[:, ranks])
        return _whole_rows(rows, lower, upper)


class LineSet(CurveSet):
    """Several workers' straight lines ``fixed + per_row * rows``, all of them one array operation.

    Args:
        fixed_s: seconds at any rows but none, positive, shape ``[n]``.
        row_s: seconds per row, at least 0, shape ``[n]``.
    """

    def __init__(self, fixed_s: FloatArray, row_s: FloatArray) -> None:
        self._fixed_s, self._row_s = fixed_s, row_s
        self.num_workers = fixed_s.size

    def own_s(self, num_rows: IntArray) -> FloatArray:
        """Return the own time per rank, shape ``[n]``; no rows take no time."""
        result: FloatArray = np.where(num_rows > 0, self._fixed_s + self._row_s * num_rows, 0.0)
        return result

    def most_rows(self, deadlines_s: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
        """Return the most rows done by each deadline (shape ``[m]``) per rank, within bounds, shape ``[m, n]``."""
        left_s = deadlines_s[:, None] - self._fixed_s
        is_flat = self._row_s == 0
        rows = np.where(is_flat, np.where(left_s < 0, -1.0, np.inf), left_s / np.where(is_flat, 1.0, self._row_s))
        return _whole_rows(rows, lower, upper)


def _whole_rows(rows: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
    # A deadline met exactly must not lose its row to rounding.
    return np.floor(np.minimum(np.maximum(rows * (1 + _SAME_TIME / 10), lower), upper)).astype(np.int64)


class _Inverse:
    """``StepTimeCurve.rows_within`` of one shape with all divisions made beforehand, for finite limits."""

    def __init__(self, knot_rows: FloatArray, knot_s: FloatArray) -> None:
        rise, run = np.diff(knot_s), np.diff(knot_rows)
        self._rows, self._s, self._last = knot_rows, knot_s, knot_s.size - 2
        # Within a flat piece there is no limit but its far end's, which belongs to the next piece.
        self._rows_per_s = np.where(rise > 0, run / np.where(rise > 0, rise, 1.0), 0.0)
        self._is_endless = not rise[-1] > 0

    def rows_within(self, limit_s: FloatArray) -> FloatArray:
        right = self._s.searchsorted(limit_s, side="right")
        left = np.minimum(np.maximum(right - 1, 0), self._last)
        rows: FloatArray = self._rows[left] + (limit_s - self._s[left]) * self._rows_per_s[left]
        if self._is_endless:
            rows = np.where(left == self._last, np.inf, rows)
        return np.where(right == 0, -1.0, rows)


class _InUnits(CurveSet):
    """The curves of a set over units of several rows: a deadline's whole units are its whole rows' whole units."""

    def __init__(self, rows: CurveSet, multiple: int) -> None:
        self._rows, self._multiple = rows, multiple
        self.num_workers = rows.num_workers

    def own_s(self, num_units: IntArray) -> FloatArray:
        return self._rows.own_s(num_units * self._multiple)

    def most_rows(self, deadlines_s: FloatArray, lower: IntArray, upper: IntArray) -> IntArray:
        most = self._rows.most_rows(deadlines_s, lower * self._multiple, upper * self._multiple)
        return most // self._multiple


def exact_split(
    curves: Sequence[StepTimeCurve] | CurveSet,
    global_batch_size: int,
    lower: Sequence[int] | IntArray | None = None,
    upper: Sequence[int | None] | IntArray | None = None,
    multiple: int = 1,
) -> SplitPlan:
    """Minimise the slowest rank's own time over all integer splits of ``global_batch_size``.

    Among the optima, ranks that are not the bottleneck have as many rows as fit (the smallest spread), and rows
    that several ranks could take at the same time are shared out evenly, lower ranks first.

    Args:
        curves: own time per rank; as a set where the same curves are asked about again.
        global_batch_size: rows to split.
        lower: fewest rows per rank, default 1.
        upper: most rows per rank, None where unknown, default none. A curve's ``max_trusted_rows`` is not
            enforced here: the caller decides how far to trust it.
        multiple: every share is a multiple of it, and none is better among those that are.

    Raises:
        InfeasibleError: the bounds leave no room for ``global_batch_size``, or it is no multiple of ``multiple``.
    """
    workers = curves if isinstance(curves, CurveSet) else CurveSet(curves)
    n = workers.num_workers
    if multiple > 1:
        least = np.ones(n, dtype=np.int64) if lower is None else np.array(lower, dtype=np.int64)
        most = [None] * n if upper is None else list(upper)
        units = exact_split(
            _InUnits(workers, multiple),
            in_units(global_batch_size, multiple),
            -(-least // multiple),
            [None if rows is None else int(rows) // multiple for rows in most],
        )
        sizes_in_rows = tuple(multiple * share for share in units.local_batch_sizes)
        return replace(units, local_batch_sizes=sizes_in_rows)
    lo = np.ones(n, dtype=np.int64) if lower is None else np.array(lower, dtype=np.int64)
    hi = np.full(n, global_batch_size)
    if isinstance(upper, np.ndarray):
        hi = np.minimum(upper, global_batch_size)
    elif upper is not None:
        hi = np.array([global_batch_size if most is None else min(most, global_batch_size) for most in upper])
    _check_bounds(global_batch_size, lo, hi, upper)
    below, within = _bracket(workers, global_batch_size, lo, hi)
    sizes = below + _admit(workers.own_s(within), within - below, global_batch_size - int(below.sum()))
    own_s = workers.own_s(sizes)
    return SplitPlan(
        local_batch_sizes=tuple(sizes.tolist()),
        step_time_s=float(own_s.max()),
        own_s=read_only(own_s, np.float64),
    )


def _bracket(workers: CurveSet, total: int, lo: IntArray, hi: IntArray) -> tuple[IntArray, IntArray]:
    """Bisect the deadline until at most one more row per rank, or one plateau, is in question.

    A worker that its lower bound makes slower than the deadline does not slacken that of the others.

    Returns:
        Rows per rank done by a deadline that is too early (they sum to less than ``total``, or are the lower
        bounds) and by one that is late enough (at least ``total``), shape ``[n]`` each.
    """
    early, late = 0.0, float(workers.own_s(hi).max())
    below, within = lo, hi
    # Few workers are tried at several deadlines in one array operation, whose price hardly depends on its size.
    num_cuts = max(1, min(_MAX_CUTS, _CUT_CELLS // workers.num_workers))
    cuts = np.arange(1, num_cuts + 1) / (num_cuts + 1)
    while (within - below).max() > 1 and late - early > _SAME_TIME * late:
        deadlines_s = early + (late - early) * cuts
        rows = workers.most_rows(deadlines_s, lo, hi)
        first = int(rows.sum(axis=1).searchsorted(total))
        if first < num_cuts:
            late, within = float(deadlines_s[first]), rows[first]
        if first > 0:
            early, below = float(deadlines_s[first - 1]), rows[first - 1]
    return below, within


def _admit(finish_s: FloatArray, room: IntArray, rows: int) -> IntArray:
    """Hand ``rows`` to the ranks that have ``room``, earliest finish first; ties share them evenly."""
    order = np.argsort(np.where(room > 0, finish_s, np.inf), kind="stable")
    last = int(np.searchsorted(np.cumsum(room[order]), rows))
    deadline_s = finish_s[order[min(last, room.size - 1)]]
    extra = np.where(finish_s < deadline_s * (1 - _SAME_TIME), room, 0)
    tied = np.where(finish_s <= deadline_s * (1 + _SAME_TIME), room - extra, 0)
    left = rows - int(extra.sum())
    if np.count_nonzero(tied) == 1:
        return extra + np.where(tied > 0, left, 0)
    return extra + apportion(left, tied, upper=tied)


def _check_bounds(total: int, lo: IntArray, hi: IntArray, upper: Sequence[int | None] | IntArray | None) -> None:
    if lo.size == 0 or lo.size != hi.size:
        raise InfeasibleError(f"cannot split {total} rows over {lo.size} workers with {hi.size} upper bounds")
    if int(lo.sum()) > total:
        raise InfeasibleError(
            f"a global batch of {total} rows is too small for {lo.size} workers that need {int(lo.sum())} together"
        )
    if (lo > hi).any() or int(hi.sum()) < total:
        limits = "none" if upper is None else str(list(upper)[:16])
        raise InfeasibleError(
            f"a global batch of {total} rows does not fit {lo.size} workers: at most {int(hi.sum())} rows together "
            f"(upper bounds {limits}, lower bounds {lo[:16].tolist()})"
        )
