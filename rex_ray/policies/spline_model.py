"""What measured curves and peaks of memory say to whoever asks: expected times, exact splits, limits, searches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import InfeasibleError
from rex_ray.core.memory import MemoryBook
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.split import CurveSet, SplitPlan, exact_split
from rex_ray.core.step_time import StepTimeBook
from rex_ray.core.types import FloatArray, IntArray, Problem
from rex_ray.policies.limits import share_bounds

__all__ = ["SplineModel"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplineModel:
    """The books' answers, to the split itself and to the parts beside it."""

    problem: Problem
    book: StepTimeBook
    memory: MemoryBook

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return every rank's expected own time, or None while some rank's curve is unknown."""
        if not self.book.is_complete:
            return None
        return CurveSet(self.book.curves()).own_s(np.asarray(num_rows, dtype=np.int64))

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return the step time of the exact split, or None while it is unknown or impossible."""
        plan = self.exact_plan(global_batch_size)
        return None if plan is None else plan.step_time_s

    def max_rows(self) -> IntArray | None:
        """Return the most rows that fit each rank's memory as far as its peaks tell; None while none were seen."""
        return self.memory.max_rows(self.problem.workers)

    def exact_plan(self, global_batch_size: int) -> SplitPlan | None:
        """Return the exact split within the ranks' limits and the curves' reach, or None where there is none."""
        if not self.book.is_complete:
            return None
        lower, upper = self._bounds(global_batch_size)
        try:
            return exact_split(self.book.curves(), global_batch_size, lower.tolist(), upper.tolist())
        except InfeasibleError:
            return None

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return the search around the exact split of the incumbent's rows, or None while that is unknown."""
        plan = self.exact_plan(sum(incumbent))
        if plan is None:
            return None
        lower, upper = self._bounds(sum(incumbent))
        shapes, shape_of, scales = SearchProblem.condense(self.book.curves())
        return SearchProblem(
            kind=kind,
            plan=plan.local_batch_sizes,
            incumbent=incumbent,
            lower=tuple(lower.tolist()),
            upper=tuple(upper.tolist()),
            shapes=shapes,
            shape_of=shape_of,
            scales=scales,
            max_trials=max_trials,
        )

    def _bounds(self, global_batch_size: int) -> tuple[IntArray, IntArray]:
        """Return the ranks' limits, the upper ones within the curves' reach and what memory is known to hold."""
        lower, upper = share_bounds(self.problem, global_batch_size)
        reach = np.array([curve.max_trusted_rows for curve in self.book.curves()], dtype=np.int64)
        upper = np.minimum(upper, reach)
        fits = self.max_rows()
        if fits is not None:
            upper = np.minimum(upper, fits)
        return lower, np.maximum(upper, lower)
