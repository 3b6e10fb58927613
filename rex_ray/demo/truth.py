"""What the emulated cluster can do: the yardstick that runs are held against. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rex_ray.core.types import FloatArray
from rex_ray.demo.trace import RunTrace
from rex_ray.scenario import WorkerTimeline, true_optimum

__all__ = ["Truth"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """Exact times of the emulated cluster in real seconds, without noise.

    Attributes:
        timelines: each rank's own times, with the script of its slowdowns.
        all_reduce_s: seconds that the reduction adds to each step.
        global_batch_size: rows per step at the start.
    """

    timelines: tuple[WorkerTimeline, ...]
    all_reduce_s: float
    global_batch_size: int
    _best: dict[tuple[int, tuple[float, ...]], tuple[int, ...]] = field(default_factory=dict, repr=False)

    def slowdowns(self, step: int) -> tuple[float, ...]:
        """Return the script's factor per rank at a step."""
        return tuple(line.slowdown(step) for line in self.timelines)

    def own_s(self, num_rows: Sequence[int], slowdowns: Sequence[float] | None = None) -> FloatArray:
        """Return the exact own time per rank for its rows, shape ``[n]``."""
        factors = slowdowns or (1.0,) * len(self.timelines)
        times = [
            line.quiet_time_s(rows, num_rows, slowdown=factor)
            for line, rows, factor in zip(self.timelines, num_rows, factors, strict=True)
        ]
        return np.array(times, dtype=np.float64)

    def step_s(self, num_rows: Sequence[int], slowdowns: Sequence[float] | None = None) -> float:
        """Return the exact time of a step with these rows per rank."""
        return float(self.own_s(num_rows, slowdowns).max()) + self.all_reduce_s

    def best_split(self, num_rows: int, slowdowns: Sequence[float] | None = None) -> tuple[int, ...]:
        """Return the exact optimum for so many rows under so many slowdowns; every rank has a row if there are enough.

        No memory limits: the emulation has none.
        """
        n = len(self.timelines)
        factors = tuple(slowdowns or (1.0,) * n)
        key = (num_rows, factors)
        if key not in self._best:
            if num_rows >= n:
                plan = true_optimum(self.timelines, num_rows, slowdowns=factors, upper=[None] * n)
                self._best[key] = plan.local_batch_sizes
            else:
                quickest = np.argsort(self.own_s((1,) * n, factors), kind="stable")[:num_rows]
                self._best[key] = tuple(int(rank in quickest) for rank in range(n))
        return self._best[key]

    def best_step_s(self, num_rows: int, slowdowns: Sequence[float] | None = None) -> float:
        """Return the exact time of the best split of so many rows."""
        return self.step_s(self.best_split(num_rows, slowdowns), slowdowns)

    def oracle_s(self, trace: RunTrace) -> FloatArray:
        """Return, for each step of a run, the shortest exact time of its rows, shape ``[k]``.

        This oracle knows the script and every curve, and changes shares from one step to the next at no cost. It has
        no noise: what a run's own noise costs it stays in its gap.
        """
        total = trace.num_rows.sum(axis=1).tolist()
        pairs = zip(trace.steps.tolist(), total, strict=True)
        return np.array([self.best_step_s(rows, self.slowdowns(step)) for step, rows in pairs])

    @property
    def optimum(self) -> tuple[int, ...]:
        """Rows per rank of the exact optimum at the start, without slowdowns."""
        return self.best_split(self.global_batch_size)

    @property
    def optimum_step_s(self) -> float:
        """Step time of the optimum."""
        return self.step_s(self.optimum)

    @property
    def peak_rows_per_s(self) -> float:
        """``sum_i max_b b / t_i(b)``: the rate of the cluster if nobody ever waited, nor stood in another's way."""
        return sum(_peak_rate(line, len(self.timelines)) for line in self.timelines)


def _peak_rate(line: WorkerTimeline, num_workers: int) -> float:
    best = 0.0
    for rows in range(1, line.profile.max_local_batch_size + 1):
        alone = [0] * num_workers
        alone[line.rank] = rows
        best = max(best, rows / line.quiet_time_s(rows, alone))
    return best
