"""The exact split for a worker group's speeds of a moment, by the run's own curves."""

from __future__ import annotations

import numpy as np

from rex_ray.core.errors import InfeasibleError
from rex_ray.core.split import exact_split
from rex_ray.core.types import FloatArray
from rex_ray.policies.limits import share_bounds
from rex_ray.report.computing.run_curves import GroupTimes

__all__ = ["ExactSplits"]


class ExactSplits:
    """Exact splits by step; the same question is answered once, and a run has few: a batch, and a set of speeds."""

    def __init__(self, group: GroupTimes) -> None:
        self._group = group
        self._found: dict[tuple[int, bytes], tuple[int, ...]] = {}

    def shares(self, global_batch_size: int, step: int) -> tuple[int, ...]:
        """Return the rows per rank that were best at a step's speeds, noise aside."""
        level = self._group.level[step]
        key = (global_batch_size, level.tobytes())
        if key not in self._found:
            self._found[key] = self._split(global_batch_size, level)
        return self._found[key]

    def quiet_s(self, shares: tuple[int, ...], step: int) -> float:
        """Return the slowest rank's own time with such shares at a step's speeds, noise aside, in seconds."""
        level = self._group.level[step].tolist()
        return max(
            factor * float(curve.predict_s(rows)) if rows else 0.0
            for factor, curve, rows in zip(level, self._group.curves, shares, strict=True)
        )

    def excess(self, shares: tuple[int, ...], step: int) -> float:
        """Return how many times as long as the exact split shares take at a step's speeds."""
        return self.quiet_s(shares, step) / self.quiet_s(self.shares(sum(shares), step), step)

    def _split(self, global_batch_size: int, level: FloatArray) -> tuple[int, ...]:
        curves = [curve.scaled(factor) for curve, factor in zip(self._group.curves, level.tolist(), strict=True)]
        problem = self._group.data.problem
        if problem is None:
            lower = np.zeros(len(curves), dtype=np.int64) + (global_batch_size >= len(curves))
            return exact_split(curves, global_batch_size, lower).local_batch_sizes
        # An epoch's last batch may be cut anyhow.
        multiple = 1 if global_batch_size % problem.local_batch_multiple else problem.local_batch_multiple
        lower, upper = share_bounds(problem, global_batch_size)
        try:
            return exact_split(curves, global_batch_size, lower, upper, multiple).local_batch_sizes
        except InfeasibleError:
            # A last batch between whole multiples, or rows that ran although the limits say that they cannot.
            lower = np.zeros(len(curves), dtype=np.int64) + (global_batch_size >= len(curves))
            return exact_split(curves, global_batch_size, lower).local_batch_sizes
