"""A worker group as a controller sees it, a policy that never rests, and steps with every column filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.control.commands import ApplyAllocation, Command
from rex_ray.control.events import GroupStarted
from rex_ray.core.observations import AllocationApplied, Observation, StepObserved
from rex_ray.core.types import Allocation, Problem, StepFlag, StepRecord, WorkerSpec
from rex_ray.policies.base import Decision, Keep, Proposal, Reallocate


def problem_of(num_workers: int = 2, rows: int = 32, most: int | None = None) -> Problem:
    workers = tuple(WorkerSpec(rank=rank, device="T4", max_local_batch_size=most) for rank in range(num_workers))
    return Problem(workers=workers, global_batch_size=rows, max_global_batch_size=8 * rows, dataset_size=100 * rows)


def started(generation: str = "g", *, num_workers: int = 2, step: int = 0, allocation: Allocation | None = None):
    return GroupStarted(generation=generation, problem=problem_of(num_workers), step=step, allocation=allocation)


def step_of(
    step: int,
    version: int,
    *,
    generation: str = "g",
    rows: Sequence[int] = (16, 16),
    own_us: Sequence[int] = (50_000, 50_000),
    epoch: int = 0,
    flags: StepFlag = StepFlag.NONE,
) -> StepObserved:
    own = np.array(own_us, dtype=np.int64)
    return StepObserved(
        generation=generation,
        epoch=epoch,
        step=step,
        allocation_version=version,
        num_rows=np.array(rows, dtype=np.int64),
        data_us=own // 10,
        compute_us=own - own // 10,
        sync_us=own.max() - own,
        step_us=np.full_like(own, own.max()),
        flags=flags,
    )


def record_of(rank: int, step: int, **changes) -> StepRecord:
    fields = {
        "generation": "g",
        "epoch": 0,
        "rank": rank,
        "step": step,
        "allocation_version": 1,
        "num_rows": 16,
        "data_s": 0.001,
        "compute_s": 0.05,
        "sync_s": 0.01,
        "step_s": 0.0612,
    }
    return StepRecord(**(fields | changes))


def allocations_in(commands: Sequence[Command]) -> list[Allocation]:
    return [command.allocation for command in commands if isinstance(command, ApplyAllocation)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restless:
    """Asks for a change at every step: one row more for rank 0, from what it knows to be applied. State: that."""

    name: str = "restless"
    every: int = 1

    def init(self, problem: Problem, prior: tuple[int, ...] | None = None, current: Allocation | None = None):
        del prior
        n = problem.num_workers
        rows = current.global_batch_size if current else problem.global_batch_size
        return Proposal(local_batch_sizes=(rows - n + 1,) + (1,) * (n - 1)), ()

    def decide(
        self, state: tuple[int, ...], observation: Observation, rng: np.random.Generator
    ) -> tuple[Decision, tuple[int, ...]]:
        if isinstance(observation, AllocationApplied):
            return Keep(reason="applied"), observation.allocation.local_batch_sizes
        if not isinstance(observation, StepObserved) or not state or observation.step % self.every:
            return Keep(reason="nothing to say"), state
        # Draws, so that a replay must find the same generator.
        shift = int(rng.integers(1, max(2, min(state[0], 5))))
        sizes = (
            (state[0] - shift, *state[1:-1], state[-1] + shift) if len(state) > 1 and state[0] > shift else state[::-1]
        )
        return Reallocate(
            proposal=Proposal(local_batch_sizes=sizes), reason=f"move {shift} rows", predicted_gain=0.1
        ), state
