"""What a search for better shares is asked: one value that policy, journal and helper process share.

A policy answers a measured trial with ``TellTrial(objective=objective_of(own_s), own_s=own_s)``: every rank's own
time lets the helper correct its curves and split exactly on them again; the objective alone is enough for Ax. ``inf``
refuses a trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.types import FloatArray, IntArray

__all__ = ["SPREAD_WEIGHT", "SearchKind", "SearchProblem", "group_by_speed", "objective_of"]

SearchKind: TypeAlias = Literal["model", "measured"]

SPREAD_WEIGHT = 0.25
"""What a fully idle group would add to the objective. The slowest rank alone leaves a search blind to every candidate
that moves rows among the others; this little slope tells it which way is downhill (a choice, not a measurement)."""


_SPEED_STEP = math.log(1.15)
_MAX_GROUPS = 4


def objective_of(own_s: npt.ArrayLike) -> float:
    """Return what a search minimises: ``log max_i t_i + 0.25 (1 - mean_i t_i / max_i t_i)``.

    Measured trials and curves are judged by the same function, so that both may stand in one search.

    Args:
        own_s: seconds per rank, shape ``[n]``; ranks without rows (0) count neither as slow nor as idle.

    Returns:
        Log seconds; ``inf`` where no rank has rows, or the time of one that has is no time: infinite, NaN, negative.
    """
    times: FloatArray = np.asarray(own_s, dtype=np.float64)
    busy = times[times != 0]
    if busy.size == 0 or not (np.isfinite(busy) & (busy > 0)).all():
        return math.inf
    slowest = float(busy.max())
    return math.log(slowest) + SPREAD_WEIGHT * (1.0 - float(busy.mean()) / slowest)


def group_by_speed(curves: Sequence[StepTimeCurve], num_rows: float) -> IntArray:
    """Return the group of every worker, shape ``[n]``: 0 is the fastest.

    Workers are sorted by their time for ``num_rows`` rows, and a group ends where it jumps by more than 15 %; of more
    than three such jumps the three widest count.
    """
    logs = np.log([float(curve.predict_s(num_rows)) for curve in curves])
    order = np.argsort(logs, kind="stable")
    jumps = np.diff(logs[order])
    widest = np.argsort(-jumps, kind="stable")[: _MAX_GROUPS - 1]
    ends = np.zeros(order.size, dtype=np.int64)
    ends[1 + widest[jumps[widest] > _SPEED_STEP]] = 1
    groups = np.empty(order.size, dtype=np.int64)
    groups[order] = np.cumsum(ends)
    return groups


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchProblem:
    """Find shares of one global batch whose slowest rank is faster than under ``plan``.

    Attributes:
        kind: ``"model"`` judges candidates by the curves alone; ``"measured"`` asks for each to be run.
        plan: the exact split on the curves: the first trial, and what a failed search falls back to.
        incumbent: the shares that the group runs.
        lower: fewest rows per rank.
        upper: most rows per rank, within memory and the curves' reach.
        shapes: the distinct curves, each at scale 1.
        shape_of: index into ``shapes`` per rank.
        scales: factor on the rank's shape.
        max_trials: candidates to look at, ``plan`` included.
        local_batch_multiple: what every candidate's shares are multiples of.
    """

    kind: SearchKind
    plan: tuple[int, ...]
    incumbent: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    shapes: tuple[StepTimeCurve, ...]
    shape_of: tuple[int, ...]
    scales: tuple[float, ...]
    max_trials: int
    local_batch_multiple: int = 1

    @property
    def global_batch_size(self) -> int:
        """Rows to share out."""
        return sum(self.plan)

    def curves(self) -> tuple[StepTimeCurve, ...]:
        """Return every rank's curve."""
        return tuple(
            replace(self.shapes[shape], scale=scale) for shape, scale in zip(self.shape_of, self.scales, strict=True)
        )

    def groups(self) -> IntArray:
        """Return the group of every rank whose rows move together, shape ``[n]``, by speed.

        Ranks that the plan gives no rows belong to group 0: they stay at their bounds wherever they are counted.
        """
        curves = self.curves()
        busy = np.flatnonzero(self.plan)
        groups = np.zeros(len(self.plan), dtype=np.int64)
        groups[busy] = group_by_speed([curves[rank] for rank in busy], self.global_batch_size / groups.size)
        return groups

    @staticmethod
    def condense(
        curves: Sequence[StepTimeCurve],
    ) -> tuple[tuple[StepTimeCurve, ...], tuple[int, ...], tuple[float, ...]]:
        """Return ``(shapes, shape_of, scales)`` of every rank's curve: workers of one kind share their arrays."""
        index: dict[tuple[int, int], int] = {}
        shapes: list[StepTimeCurve] = []
        shape_of = []
        for curve in curves:
            key = (id(curve.knot_rows), id(curve.knot_s))
            if key not in index:
                index[key] = len(shapes)
                shapes.append(replace(curve, scale=1.0))
            shape_of.append(index[key])
        return tuple(shapes), tuple(shape_of), tuple(curve.scale for curve in curves)
