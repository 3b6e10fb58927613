"""How much of what the cluster could do a run used: RII as ``docs/methods.md`` defines it, and waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import FloatArray, IntArray
from rex_ray.report.computing.run_curves import GroupTimes, RunCurves

__all__ = ["Usage", "usage_of"]

_MOST_POINTS = 120
_END_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Usage:
    """The resource imbalance index ``1 - sum B_k / (sum T_k sum_i max_b b / t_i(b))``, whole and over the run.

    Attributes:
        rii: over all steps.
        start: over the first tenth of the steps.
        end: over the last tenth.
        steps: first step of each stretch, shape ``[p]``.
        values: RII over each stretch, shape ``[p]``.
        waiting: part of the workers' time that was none of their own, ``sum (T_k - t_ik) / (n sum T_k)``.
    """

    rii: float
    start: float
    end: float
    steps: IntArray
    values: FloatArray
    waiting: float


def usage_of(curves: RunCurves) -> Usage:
    """Return a run's usage; a peak rate is the best within the sizes that the kind was measured at."""
    rows = np.concatenate([group.data.num_rows.sum(axis=1) for group in curves.groups])
    step_s = np.concatenate([group.data.step_s for group in curves.groups])
    numbers = np.concatenate([group.data.steps for group in curves.groups])
    possible = np.concatenate([group.data.step_s * _peak_rows_per_s(curves, group) for group in curves.groups])
    made = np.concatenate([[0.0], np.cumsum(rows)])
    could = np.concatenate([[0.0], np.cumsum(possible)])

    def between(start: IntArray | int, stop: IntArray | int) -> FloatArray:
        result: FloatArray = 1.0 - (made[stop] - made[start]) / (could[stop] - could[start])
        return result

    num = rows.size
    borders = np.unique(np.linspace(0, num, min(_MOST_POINTS, num) + 1).astype(np.int64))
    end = max(1, round(_END_SHARE * num))
    own = sum(float(group.data.own_s.sum()) for group in curves.groups)
    whole = sum(float(group.data.step_s.sum()) * group.data.num_workers for group in curves.groups)
    return (
        Usage(
            rii=float(between(0, num)),
            start=float(between(0, end)),
            end=float(between(num - end, num)),
            steps=numbers[borders[:-1]],
            values=between(borders[:-1], borders[1:]),
            waiting=1.0 - own / whole,
        )
        if step_s.size
        else Usage(rii=0.0, start=0.0, end=0.0, steps=numbers, values=rows * 0.0, waiting=0.0)
    )


def _peak_rows_per_s(curves: RunCurves, group: GroupTimes) -> float:
    """Return the rows per second of all ranks at their best sizes together, at their usual speeds."""
    total = 0.0
    for rank, curve in enumerate(group.curves):
        sizes = curves.kinds[int(group.kinds[rank])].sizes.keys
        tried = np.unique(np.concatenate([sizes, np.linspace(sizes[0], sizes[-1], 64)]))
        total += float((tried / curve.predict_s(tried)).max())
    return total
