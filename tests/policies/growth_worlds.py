"""A group that growth alone is shown: norms of a known noise scale, times of a known curve, no controller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from policy_worlds import group, observed

from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, FloatArray, Problem, StepFlag
from rex_ray.policies.base import Finding
from rex_ray.policies.growth.by_noise_scale import NoiseScaleGrowth
from rex_ray.policies.growth.state import GrowthState
from rex_ray.policies.seams import BatchPlan
from rex_ray.sim.gradients import NoisyGradients

PROBLEM = group(["T4"] * 4, 128, steps_per_epoch=400)


@dataclass(frozen=True)
class AffineModel:
    """A step takes ``fixed_s`` and ``row_s`` per row of the whole batch."""

    fixed_s: float = 0.2
    row_s: float = 1e-4

    def own_s(self, num_rows: Any) -> FloatArray:
        return np.full(4, self.step_time_s(int(np.sum(num_rows))))

    def step_time_s(self, global_batch_size: int) -> float | None:
        return self.fixed_s + self.row_s * global_batch_size

    def max_rows(self) -> None:
        return None

    def search_problem(self, kind: Any, incumbent: Any, max_trials: int) -> None:
        return None


@dataclass
class World:
    """Runs growth through steps; a plan is applied ``lag_steps`` after it was first made."""

    growth: NoiseScaleGrowth
    phi: Callable[[int, int], float]
    problem: Problem = PROBLEM
    model: Any = AffineModel()
    truth: Any = AffineModel()
    lag_steps: int = 1
    every: int = 1
    seed: int = 0
    num_dims: int = 64
    loss: Callable[[int, int], float] = lambda step, rows: 2.0
    flags: Callable[[int, int], StepFlag] = lambda step, rows: StepFlag.NONE
    steps_per_epoch: int = 400
    current: Allocation | None = None
    prior: GrowthState | None = None

    def __post_init__(self) -> None:
        first, self.state = self.growth.init(self.problem, self.prior, self.current)
        self.gradients = NoisyGradients(seed=self.seed, num_dims=self.num_dims)
        self.version = 0
        self.step = 0
        self.due: tuple[int, BatchPlan] | None = None
        self.answers: list[tuple[int, BatchPlan | Finding]] = []
        self.batches: list[tuple[int, int, float]] = []
        self.apply(first)

    @property
    def rows(self) -> int:
        return self.batches[-1][1]

    def shares(self, rows: int) -> tuple[int, ...]:
        n = self.problem.num_workers
        return tuple(rows // n + (rank < rows % n) for rank in range(n))

    def apply(self, plan: BatchPlan) -> None:
        self.version += 1
        shares = self.shares(plan.global_batch_size)
        allocation = Allocation(version=self.version, local_batch_sizes=shares, lr_factor=plan.lr_factor)
        self.state = self.growth.applied(self.state, AllocationApplied(allocation=allocation, step=self.step))
        self.batches.append((self.step, plan.global_batch_size, plan.lr_factor))

    def observe(self, **changes: Any) -> StepObserved:
        shares = self.shares(self.rows)
        own_us = [1e6 * self.truth.step_time_s(self.rows)] * len(shares)
        flags = self.flags(self.step, self.rows)
        step = observed(self.step, shares, own_us, epoch=self.step // self.steps_per_epoch, flags=flags)
        step = replace(step, loss=self.loss(self.step, self.rows))
        if self.step % self.every == 0:
            weighted, reduced = self.gradients.draw(self.step, self.phi(self.step, self.rows), shares)
            step = replace(
                step,
                weighted_sq_norm=weighted,
                num_groups=(np.array(shares) > 0).astype(np.int64),
                global_sq_norm=reduced,
            )
        return replace(step, **changes)

    def run(self, num_steps: int, **changes: Any) -> World:
        for _ in range(num_steps):
            if self.due is not None and self.step >= self.due[0]:
                self.apply(self.due[1])
                self.due = None
            answer, self.state = self.growth.observe(self.state, self.observe(**changes), self.model)
            if answer is not None:
                self.answers.append((self.step, answer))
            if isinstance(answer, BatchPlan) and self.due is None:
                self.due = (self.step + self.lag_steps, answer)
            self.step += 1
        return self

    @property
    def sizes(self) -> list[int]:
        """Every global batch in order, without changes of the learning rate alone."""
        sizes = [rows for _, rows, _ in self.batches]
        return [rows for index, rows in enumerate(sizes) if index == 0 or rows != sizes[index - 1]]

    @property
    def findings(self) -> list[Finding]:
        return [answer for _, answer in self.answers if isinstance(answer, Finding)]

    @property
    def plans(self) -> list[BatchPlan]:
        return [answer for _, answer in self.answers if isinstance(answer, BatchPlan)]
