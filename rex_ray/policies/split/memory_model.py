"""What a split without curves can say: how many rows fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from rex_ray.core.memory import MemoryBook
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.types import FloatArray, IntArray, Problem

__all__ = ["MemoryModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """A model that knows what fits, and no times."""

    problem: Problem
    memory: MemoryBook

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return nothing."""
        del num_rows
        return None

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return nothing."""
        del global_batch_size
        return None

    def max_rows(self) -> IntArray | None:
        """Return the most rows that fit each rank's memory as far as its peaks tell."""
        return self.memory.max_rows(self.problem.workers)

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return nothing."""
        del kind, incumbent, max_trials
        return None
