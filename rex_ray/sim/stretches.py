"""Steps in stretches: what the workers take for some tens of steps ahead, as arrays, while nothing is decided anew.

A step's noise and slowdown depend on its number alone, so a stretch can be computed before it is run, and what is left
of it is dropped when shares change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.control.whole_steps import WholeSteps
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import FloatArray, StepFlag
from rex_ray.scenario.timeline import own_times
from rex_ray.sim.seams import StepNorms
from rex_ray.sim.world import Scenario

__all__ = ["Stretch"]

# Longer ones cost memory at a thousand workers, and more to drop; shorter ones more calls per step.
_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Consecutive steps under one allocation with the same rows.

    Attributes:
        first_step: number of the first of them.
        own_s: own time per step and rank in seconds, shape ``[steps, n]``.
        step_s: duration of each step in seconds.
        slowest_s: own time of the slowest rank in each.
        mean_own_s: own time in each, the mean over ranks.
        whole: the same steps as the assembler lets them out.
    """

    first_step: int
    own_s: FloatArray
    step_s: list[float]
    slowest_s: list[float]
    mean_own_s: list[float]
    whole: WholeSteps

    @classmethod
    def ahead(
        cls, scenario: Scenario, step: int, version: int, num_rows: Sequence[int], *, is_single: bool = False
    ) -> Stretch:
        """Compute the times of the steps from ``step`` on.

        Args:
            scenario: the workers and their network.
            step: the first step.
            version: the allocation's version.
            num_rows: rows per rank.
            is_single: only this step will have these rows.
        """
        # Stretches end where those of a run without any switch would, and with them the blocks of noise.
        stop = step + 1 if is_single else step - step % _STEPS + _STEPS
        data_s, compute_s = own_times(scenario.timelines, step, stop, num_rows)
        own_s = data_s + compute_s
        step_s = scenario.network.step_s(data_s, compute_s)
        whole_s = np.broadcast_to(step_s[:, None], own_s.shape)
        return cls(
            first_step=step,
            own_s=own_s,
            step_s=step_s.tolist(),
            slowest_s=own_s.max(axis=1).tolist(),
            mean_own_s=own_s.mean(axis=1).tolist(),
            whole=WholeSteps.of(
                generation=scenario.generation,
                allocation_version=version,
                num_rows=num_rows,
                first_step=step,
                times_s=np.stack([data_s, compute_s, whole_s - own_s, whole_s]),
            ),
        )

    def has(self, step: int, version: int) -> bool:
        """Whether a whole step under this allocation is one of the stretch."""
        return step < self.first_step + len(self.step_s) and version == self.whole.allocation_version

    def observed(self, step: int, *, epoch: int, flags: StepFlag, norms: StepNorms | None) -> StepObserved | None:
        """Return a step as the controller sees it; None where its times are impossible."""
        if norms is None:
            return self.whole.observed(step, epoch=epoch, flags=flags)
        return self.whole.observed(
            step,
            epoch=epoch,
            flags=flags,
            weighted_sq_norm=norms.weighted_sq_norm,
            num_groups=norms.num_groups,
            global_sq_norm=norms.global_sq_norm,
        )
