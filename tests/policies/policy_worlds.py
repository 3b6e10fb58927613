"""Small worlds that a policy is shown without a controller: a group, its steps, and when its proposals are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rex_ray.core.observations import AllocationApplied, Observation, StepObserved
from rex_ray.core.types import Allocation, Problem, StepFlag, WorkerSpec
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Policy, Proposal, Reallocate

RNG = np.random.default_rng(0)

ALWAYS_EQUAL = ("bsp", "growth10", "pollux")
"""Policies that never move rows at a fixed batch."""

GROWING = ("cannikin", "growth10", "pollux")
"""Policies that are nothing without gradient norms."""


def group(
    devices: Sequence[str],
    global_batch_size: int,
    *,
    lower: int = 1,
    upper: int | None = None,
    steps_per_epoch: int = 50,
) -> Problem:
    workers = tuple(
        WorkerSpec(rank=rank, device=device, min_local_batch_size=lower, max_local_batch_size=upper)
        for rank, device in enumerate(devices)
    )
    return Problem(
        workers=workers,
        global_batch_size=global_batch_size,
        max_global_batch_size=8 * global_batch_size,
        dataset_size=steps_per_epoch * global_batch_size,
    )


def observed(
    step: int,
    num_rows: Sequence[int],
    own_us: Sequence[float],
    *,
    version: int = 1,
    epoch: int = 0,
    flags: StepFlag = StepFlag.NONE,
) -> StepObserved:
    own = np.rint(np.asarray(own_us, dtype=np.float64)).astype(np.int64)
    return StepObserved(
        generation="g",
        epoch=epoch,
        step=step,
        allocation_version=version,
        num_rows=np.asarray(num_rows, dtype=np.int64),
        data_us=np.zeros_like(own),
        compute_us=own,
        sync_us=own.max() - own,
        step_us=np.full_like(own, own.max()),
        flags=flags,
    )


@dataclass(frozen=True)
class Judged:
    """One observation with what the policy made of it."""

    observation: Observation
    decision: Decision
    state: Any

    @property
    def proposal(self) -> Proposal | None:
        return self.decision.proposal if isinstance(self.decision, Reallocate | ChangeGlobalBatch) else None


def live(
    policy: Policy[Any],
    problem: Problem,
    own_us: Callable[[int, Sequence[int]], Sequence[float]],
    *,
    num_steps: int,
    lag_steps: int = 1,
    warm_up_steps: int = 0,
    steps_per_epoch: int = 50,
    keep_states: bool = False,
    measure: Callable[[StepObserved], StepObserved] = lambda step: step,
) -> list[Judged]:
    """Let a policy decide over ``num_steps``; a proposal is applied ``lag_steps`` after it was first made.

    ``measure`` adds to a step what else was measured, such as norms.
    """
    first, state = policy.init(problem)
    sizes, lr_factor, version, due = first.local_batch_sizes, first.lr_factor, 0, (0, first)
    history: list[Judged] = []
    for step in range(num_steps):
        if due is not None and step >= due[0]:
            version, sizes, lr_factor = version + 1, due[1].local_batch_sizes, due[1].lr_factor
            due = None
            allocation = Allocation(version=version, local_batch_sizes=sizes, lr_factor=lr_factor)
            applied = AllocationApplied(allocation=allocation, step=step)
            decision, state = policy.decide(state, applied, RNG)
            history.append(Judged(applied, decision, state if keep_states else None))
        flags = StepFlag.WARM_UP if step < warm_up_steps else StepFlag.NONE
        observation = observed(
            step, sizes, own_us(step, sizes), version=version, epoch=step // steps_per_epoch, flags=flags
        )
        observation = measure(observation)
        decision, state = policy.decide(state, observation, RNG)
        history.append(Judged(observation, decision, state if keep_states or step == num_steps - 1 else None))
        proposal = history[-1].proposal
        if proposal is not None and due is None:
            due = (step + lag_steps, proposal)
    return history


def shares_run(history: Sequence[Judged]) -> list[tuple[int, tuple[int, ...]]]:
    """Return ``(first step, shares)`` of everything that was applied."""
    return [
        (judged.observation.step, judged.observation.allocation.local_batch_sizes)
        for judged in history
        if isinstance(judged.observation, AllocationApplied)
    ]
