"""Growth beside a split whose model speaks of whole steps: the reduction is in them, and nothing comes on top."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.changed import changed
from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import Finding
from rex_ray.policies.growth.by_noise_scale import NoiseScaleGrowth
from rex_ray.policies.growth.state import GrowthState
from rex_ray.policies.seams import BatchPlan, Model

__all__ = ["BesideWholeSteps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideWholeSteps:
    """``inner``, shown steps without a reduction, and if wanted other periods than epochs.

    Attributes:
        inner: judges.
        decide_steps: steps between two decisions of a rule that decides once per epoch; 0: once per epoch.
    """

    inner: NoiseScaleGrowth
    decide_steps: int = 0

    def __post_init__(self) -> None:
        if self.decide_steps < 0:
            raise ConfigError(
                f"decide_steps must be a number of steps, or 0 to decide once per epoch, got {self.decide_steps}"
            )

    def init(
        self, problem: Problem, prior: GrowthState | None, current: Allocation | None
    ) -> tuple[BatchPlan, GrowthState]:
        """Begin with a worker group; see ``NoiseScaleGrowth.init``."""
        return self.inner.init(problem, prior, current)

    def observe(
        self, state: GrowthState, step: StepObserved, model: Model | None
    ) -> tuple[BatchPlan | Finding | None, GrowthState]:
        """Judge a step whose reduction is the model's business."""
        if step.weighted_sq_norm is not None or step.global_sq_norm is not None:
            period = step.step // self.decide_steps if self.decide_steps else step.epoch
            step = replace(step, sync_us=np.zeros_like(step.sync_us), epoch=period)
            # A decision rests on the times of today: in short epochs a forecast would outlive the one it was made for.
            if period != state.epoch and state.forecast:
                state = changed(state, forecast={})
        return self.inner.observe(state, step, model)

    def applied(self, state: GrowthState, applied: AllocationApplied) -> GrowthState:
        """Take note of what the group now runs."""
        return self.inner.applied(state, applied)
