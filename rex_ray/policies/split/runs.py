"""Mean times of the allocations that a group has run: what methods without curves learn from.

A run is an allocation, its clean steps summed up. At each new epoch what is known of it counts half, so that an old
slowdown is forgotten in a few epochs. The newest eight allocations are kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.changed import changed
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, IntArray, StepFlag, read_only

__all__ = ["RunLog", "ShareRun"]

_MAX_RUNS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShareRun:
    """Sums over the clean steps under one allocation.

    Attributes:
        local_batch_sizes: rows per rank.
        epoch: newest epoch in it.
        num_steps: steps in it.
        own_us: own time per rank, shape ``[n]``; 0 for a rank without rows.
        slowest_us: the slowest rank's own time.
        sync_us: the least time that a rank was in the reduction.
    """

    local_batch_sizes: tuple[int, ...]
    epoch: int
    num_steps: int
    own_us: IntArray
    slowest_us: int
    sync_us: int

    @property
    def own_s(self) -> FloatArray:
        """Mean own time per rank in seconds, at least a microsecond, shape ``[n]``."""
        return np.maximum(self.own_us / self.num_steps, 1.0) * 1e-6

    @property
    def slowest_s(self) -> float:
        """Mean own time of the slowest rank in seconds, at least a microsecond."""
        return max(self.slowest_us / self.num_steps, 1.0) * 1e-6

    @property
    def step_s(self) -> float:
        """Mean time of a step in seconds: the slowest own time and the reduction without any wait."""
        return self.slowest_s + self.sync_us / self.num_steps * 1e-6

    def with_step(self, own_us: IntArray, step: StepObserved) -> ShareRun:
        """Return the sums with one more step."""
        return changed(
            self,
            num_steps=self.num_steps + 1,
            own_us=read_only(self.own_us + own_us, np.int64),
            slowest_us=self.slowest_us + int(own_us.max()),
            sync_us=self.sync_us + int(step.sync_us.min()),
        )

    def halved(self, epoch: int) -> ShareRun:
        """Return half of it, at least one step, as what is remembered in a later epoch."""
        kept = max(1, self.num_steps // 2)
        return changed(
            self,
            epoch=epoch,
            num_steps=kept,
            own_us=read_only(self.own_us * kept // self.num_steps, np.int64),
            slowest_us=self.slowest_us * kept // self.num_steps,
            sync_us=self.sync_us * kept // self.num_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLog:
    """Runs, the newest last."""

    runs: tuple[ShareRun, ...] = ()

    def take(self, step: StepObserved, sizes: tuple[int, ...]) -> RunLog:
        """Return a log that also knows a step, if it is evidence of ``sizes``."""
        if step.flags != StepFlag.NONE or tuple(step.num_rows.tolist()) != sizes:
            return self
        own_us = np.where(step.num_rows > 0, step.own_us, 0)
        known = next((run for run in self.runs if run.local_batch_sizes == sizes), None)
        if known is None:
            zeros = read_only(np.zeros_like(own_us), np.int64)
            known = ShareRun(
                local_batch_sizes=sizes, epoch=step.epoch, num_steps=0, own_us=zeros, slowest_us=0, sync_us=0
            )
        elif known.epoch != step.epoch:
            known = known.halved(step.epoch)
        others = tuple(run for run in self.runs if run.local_batch_sizes != sizes)
        return RunLog(runs=(*others[1 - _MAX_RUNS :], known.with_step(own_us, step)))
