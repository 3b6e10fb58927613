"""What a run saved against equal shares of the same global batches, and how sure that is.

Every step is asked what equal shares would have made of it: each rank's own time is scaled by its curve, from the rows
that it had to the rows that it would have had. So whatever slowed a rank in that very step, noise or a neighbour, slows
it in the equal split as well, and the two are compared in one and the same world.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import FloatArray, IntArray
from rex_ray.report.computing.equal import equal_rows
from rex_ray.report.computing.replicates import CurveReplicate, replicates
from rex_ray.report.computing.run_curves import GroupTimes, RunCurves
from rex_ray.report.facts import Saving

__all__ = ["saving_of"]

_MOST_STEPS = 2_000
"""Steps that the interval is taken over, evenly spaced: what curves leave open is the same for all steps of a size."""

_METHOD = (
    "Estimated on the run's own measurements: in every step each worker's own time is scaled by its kind's fitted "
    "curve from the rows that it had to those of equal shares, so that slowdowns and noise of that step count for "
    "both; the rest of the step (reduction, optimizer) is kept. The interval is 95 % of {count} refits to the measured "
    "medians moved by their noise, with a slope that is uncertain where no size was measured{caution}."
)


def saving_of(curves: RunCurves) -> Saving:
    """Return the saving of a run; exactly 0 where it ran equal shares."""
    parts = [_Equal.of(group) for group in curves.groups]
    equal_s, run_s = float(sum(part.step_s.sum() for part in parts)), curves.run_s
    every = max(1, sum(part.step_s.size for part in parts) // _MOST_STEPS)
    samples = [_Sample.of(part, every) for part in parts]
    about_s = sum(sample.step_s(None) for sample in samples)
    others = [sum(sample.step_s(shapes) for sample in samples) / about_s for shapes in replicates(curves.kinds)]
    low_s, high_s = np.quantile(equal_s * np.array(others), [0.025, 0.975])
    return Saving(
        fraction=1.0 - run_s / equal_s,
        low=float(1.0 - run_s / min(low_s, equal_s)),
        high=float(1.0 - run_s / max(high_s, equal_s)),
        equal_s=equal_s,
        run_s=run_s,
        method=_METHOD.format(count=len(others), caution=_caution(curves, parts)),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Equal:
    """A group's steps in equal shares: rows (``[k, n]``), own times (``[k, n]``), the rest and the whole (``[k]``)."""

    group: GroupTimes
    rows: IntArray
    own_s: FloatArray
    rest_s: FloatArray
    is_same: FloatArray
    step_s: FloatArray

    @classmethod
    def of(cls, group: GroupTimes) -> _Equal:
        rows = equal_rows(group.data)
        own_s = group.own_s(rows)
        # What a switch cost, equal shares would not have paid.
        rest_s = np.where(group.is_switch, np.median(group.rest_s), group.rest_s)
        is_same = (rows == group.data.num_rows).all(axis=1) & ~group.is_switch
        step_s = np.where(is_same, group.data.step_s, own_s.max(axis=1) + rest_s)
        return cls(group=group, rows=rows, own_s=own_s, rest_s=rest_s, is_same=is_same, step_s=step_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sample:
    """Evenly spaced steps of a group, at which other curves are tried."""

    equal: _Equal
    steps: IntArray
    base_s: FloatArray

    @classmethod
    def of(cls, equal: _Equal, every: int) -> _Sample:
        steps = np.arange(0, equal.step_s.size, every)
        group = equal.group
        base = [curve.predict_s(equal.rows[steps, rank]) for rank, curve in enumerate(group.curves)]
        had = [curve.predict_s(group.data.num_rows[steps, rank]) for rank, curve in enumerate(group.curves)]
        return cls(equal=equal, steps=steps, base_s=np.stack(base, axis=1) / np.stack(had, axis=1))

    def step_s(self, shapes: tuple[CurveReplicate, ...] | None) -> float:
        """Return the steps' seconds in equal shares together, by other curves of the kinds."""
        own_s, same = self.equal.own_s[self.steps], self.equal.is_same[self.steps]
        if shapes is not None:
            rows, had = self.equal.rows[self.steps], self.equal.group.data.num_rows[self.steps]
            kinds = self.equal.group.kinds
            moved = np.empty_like(own_s)
            for kind, shape in enumerate(shapes):
                ranks = np.flatnonzero(kinds == kind)
                moved[:, ranks] = shape.predict_s(rows[:, ranks]) / shape.predict_s(had[:, ranks])
            own_s = own_s * moved / self.base_s
        whole = np.where(same, self.equal.step_s[self.steps], own_s.max(axis=1) + self.equal.rest_s[self.steps])
        return float(whole.sum())


def _caution(curves: RunCurves, parts: list[_Equal]) -> str:
    """Say for which kinds equal shares lie outside of what was measured for much of the run."""
    far = set[str]()
    for part in parts:
        for at, kind in enumerate(curves.kinds):
            rows = part.rows[:, part.group.kinds == at]
            if rows.size and np.mean((rows > 1.1 * kind.sizes.keys[-1]) | (rows < kind.sizes.keys[0] / 1.1)) > 0.5:
                far.add(kind.device)
    if not far:
        return ""
    return f"; equal shares lie beyond what {' and '.join(sorted(far))} ran, so that part is extrapolated"
