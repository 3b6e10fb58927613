"""What measured curves and peaks of memory say to whoever asks: expected times, exact splits, limits, searches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import InfeasibleError
from rex_ray.core.memory import MemoryBook
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.split import CurveSet, SplitPlan, exact_split
from rex_ray.core.step_time import StepTimeBook
from rex_ray.core.types import FloatArray, IntArray, Problem, read_only
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
        known = _known(self.book.settled)
        return None if known is None else known.curves.own_s(np.asarray(num_rows, dtype=np.int64))

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return the step time of the exact split, or None while it is unknown or impossible."""
        plan = self.exact_plan(global_batch_size)
        return None if plan is None else plan.step_time_s

    def max_rows(self) -> IntArray | None:
        """Return the most rows that fit each rank's memory as far as its peaks tell; None while none were seen."""
        return self.memory.max_rows(self.problem.workers)

    def exact_plan(self, global_batch_size: int) -> SplitPlan | None:
        """Return the exact split within the ranks' limits and the curves' reach, or None where there is none."""
        known = _known(self.book.settled)
        if known is None:
            return None
        lower, upper = self._bounds(global_batch_size, known.reach)
        if upper.sum() < global_batch_size:
            return None  # asked for often by growth, and cheaper to say than an error is to raise
        try:
            return exact_split(known.curves, global_batch_size, lower, upper, self.problem.local_batch_multiple)
        except InfeasibleError:
            return None

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return the search around the exact split of the incumbent's rows, or None while that is unknown."""
        plan = self.exact_plan(sum(incumbent))
        if plan is None:
            return None
        known = _known(self.book.settled)
        assert known is not None
        lower, upper = self._bounds(sum(incumbent), known.reach)
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
            local_batch_multiple=self.problem.local_batch_multiple,
        )

    def _bounds(self, global_batch_size: int, reach: IntArray) -> tuple[IntArray, IntArray]:
        """Return the ranks' limits, the upper ones within the curves' reach and what memory is known to hold."""
        lower, upper = share_bounds(self.problem, global_batch_size)
        upper = np.minimum(upper, reach)
        fits = self.max_rows()
        if fits is not None:
            upper = np.minimum(upper, fits)
        multiple = self.problem.local_batch_multiple
        return lower, np.maximum(upper // multiple * multiple, lower)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Known:
    """Every rank's curve, ready to be asked, and how far each reaches in rows, shape ``[n]``."""

    curves: CurveSet
    reach: IntArray


@lru_cache(maxsize=4)
def _known(book: StepTimeBook) -> _Known | None:
    """Return the curves of a book, made once for all that is asked of it; None while some rank's is unknown."""
    if not book.is_complete:
        return None
    curves = book.curves()
    reach = read_only([curve.max_trusted_rows for curve in curves], np.int64)
    return _Known(curves=CurveSet(curves), reach=reach)
