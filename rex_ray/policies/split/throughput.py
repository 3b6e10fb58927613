"""Equal shares, and Pollux's model of how long a step takes at another batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rex_ray.core.changed import changed
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.throughput import PerfParams, fit_perf_params
from rex_ray.core.types import Allocation, BoolArray, FloatArray, IntArray, Problem
from rex_ray.policies.base import Reallocate
from rex_ray.policies.limits import equal_shares, share_bounds
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.runs import RunLog

__all__ = ["ThroughputModel", "ThroughputSample", "ThroughputSplit", "ThroughputState"]

_MAX_PAST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSample:
    """Mean times of a batch on a group: rows per worker, the slowest gradient's and the whole step's seconds."""

    num_nodes: int
    num_workers: int
    local_rows: int
    grad_s: float
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThroughputState:
    """What is known of times and memory.

    Attributes:
        problem: the group and its limits.
        memory: peaks of memory per kind and size.
        sizes: shares that the group is known to run, or None before its first step.
        log: runs of this group.
        past: what earlier groups left behind.
    """

    problem: Problem
    memory: MemoryBook
    sizes: tuple[int, ...] | None = None
    log: RunLog
    past: tuple[ThroughputSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSplit:
    """Equal shares for ever, whose times growth asks about."""

    def init(
        self, problem: Problem, prior: ThroughputState | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], ThroughputState]:
        """Begin with equal shares, as far as memories are known to hold them.

        Mean times of earlier groups are kept by their number of workers.
        """
        del current
        devices = tuple(worker.device for worker in problem.workers)
        past = () if prior is None else (*prior.past, *_samples(prior.problem, prior.log))[-_MAX_PAST:]
        memory = MemoryBook.empty(devices, prior.memory if prior else None)
        state = ThroughputState(problem=problem, memory=memory, log=RunLog(), past=past)
        return equal_shares(problem, global_batch_size, memory.max_rows(problem.workers)), state

    def observe(self, state: ThroughputState, step: StepObserved, use: BoolArray | None = None) -> ThroughputState:
        """Take in a clean step."""
        del use  # a mean takes in whatever happened
        if state.sizes is None:
            return state
        memory = state.memory.observe(step.num_rows, step.peak_memory_bytes)
        return changed(state, memory=memory, log=state.log.take(step, state.sizes))

    def propose(self, state: ThroughputState) -> Reallocate | str:
        """Offer nothing."""
        del state
        return "shares are equal"

    def plan(self, state: ThroughputState, global_batch_size: int) -> Shares:
        """Return equal shares of another batch."""
        fits = state.memory.max_rows(state.problem.workers)
        return Shares(local_batch_sizes=equal_shares(state.problem, global_batch_size, fits))

    def rescale(self, state: ThroughputState, factors: Mapping[int, float]) -> ThroughputState:
        """A mean over a whole run knows of no sudden change."""
        del factors
        return state

    def applied(self, state: ThroughputState, applied: AllocationApplied) -> ThroughputState:
        """Take note of what the group now runs."""
        return replace(state, sizes=applied.allocation.local_batch_sizes)

    def model(self, state: ThroughputState) -> Model | None:
        """Return the fitted model of whole steps."""
        return ThroughputModel(problem=state.problem, memory=state.memory, log=state.log, past=state.past)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThroughputModel:
    """Pollux's ``T_iter``: times of *whole* steps, the reduction included (see ``growth.beside_whole_steps``)."""

    problem: Problem
    memory: MemoryBook
    log: RunLog
    past: tuple[ThroughputSample, ...]

    @property
    def params(self) -> PerfParams | None:
        """The seven parameters; None before the first clean step."""
        return _fitted((*self.past, *_samples(self.problem, self.log))) if self.log.runs else None

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return nothing: the model knows no single rank."""
        del num_rows
        return None

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return ``T_iter`` in seconds at equal shares; None while unknown, or where one does not fit."""
        params, n = self.params, self.problem.num_workers
        local_rows = -(-global_batch_size // n)
        if params is None or local_rows > self._most_local_rows(global_batch_size):
            return None
        return float(params.step_s(_num_nodes(self.problem), n, local_rows))

    def max_rows(self) -> IntArray | None:
        """Return the most rows that fit each rank's memory as far as its peaks tell."""
        return self.memory.max_rows(self.problem.workers)

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return nothing: shares are equal."""
        del kind, incumbent, max_trials
        return None

    def _most_local_rows(self, global_batch_size: int) -> int:
        upper = share_bounds(self.problem, global_batch_size)[1]
        fits = self.max_rows()
        return int(np.min(upper if fits is None else np.minimum(upper, fits)))


def _num_nodes(problem: Problem) -> int:
    """Return how many machines there are; where a worker's is not named, each has its own."""
    names = {worker.node for worker in problem.workers}
    return problem.num_workers if "" in names else len(names)


def _samples(problem: Problem, log: RunLog) -> tuple[ThroughputSample, ...]:
    return tuple(
        ThroughputSample(
            num_nodes=_num_nodes(problem),
            num_workers=problem.num_workers,
            local_rows=max(run.local_batch_sizes),
            grad_s=run.slowest_s,
            step_s=run.step_s,
        )
        for run in log.runs
    )


@lru_cache(maxsize=8)
def _fitted(samples: tuple[ThroughputSample, ...]) -> PerfParams:
    """Fit once for all that is asked of the same samples."""
    return fit_perf_params(
        [sample.num_nodes for sample in samples],
        [sample.num_workers for sample in samples],
        [sample.local_rows for sample in samples],
        [sample.grad_s for sample in samples],
        [sample.step_s for sample in samples],
    )
