"""A model that has been caught erring: its word counts at the sizes that run, where it is measured, alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.types import FloatArray, IntArray
from rex_ray.policies.seams import Model

__all__ = ["DoubtedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtedModel:
    """``inner`` without its predictions for shares other than ``sizes``.

    Who watches for changes of speed would take an error of the curves at new sizes for a change; told that nothing is
    known there, it begins afresh.
    """

    inner: Model
    sizes: tuple[int, ...]

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return every rank's expected own time for the present shares; None for any others."""
        rows = np.asarray(num_rows)
        return self.inner.own_s(rows) if tuple(rows.tolist()) == self.sizes else None

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return nothing: another split's time is a prediction."""
        del global_batch_size
        return None

    def max_rows(self) -> IntArray | None:
        """Return what fits; peaks of memory are not in doubt."""
        return self.inner.max_rows()

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return the inner model's question."""
        return self.inner.search_problem(kind, incumbent, max_trials)
