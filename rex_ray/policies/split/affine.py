"""Once per epoch, the exact split on straight lines through each worker's own times (Cannikin)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from rex_ray.core.changed import changed
from rex_ray.core.errors import InfeasibleError
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.split import LineSet, SplitPlan, exact_split
from rex_ray.core.types import Allocation, BoolArray, FloatArray, IntArray, Problem
from rex_ray.policies.base import Proposal, Reallocate
from rex_ray.policies.limits import equal_shares, known_bounds, resumed_shares
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.runs import RunLog

__all__ = ["AffineModel", "AffineSplit", "AffineState"]

FORWARD_SHARE = 1 / 3
"""Part of a step's own time after which the first gradients are ready to be reduced: the forward pass, half as long
as the backward one. The records hold the end of the last gradient alone, so it is assumed."""

_SAME_SIZE = 1.05
"""Sizes within 5 % say nothing about a slope."""

_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AffineState:
    """What is known of times and memory, and what the last epoch asks for.

    Attributes:
        problem: the group and its limits.
        memory: peaks of memory per kind and size.
        sizes: shares that the group is known to run, or None before its first step.
        epoch: epoch of the newest step.
        log: runs of this group.
        offer: what the last epoch's times ask for; stands until applied, or until the next epoch.
    """

    problem: Problem
    memory: MemoryBook
    sizes: tuple[int, ...] | None = None
    epoch: int = -1
    log: RunLog
    offer: Reallocate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineSplit:
    """Exact shares on straight lines, decided at each epoch's first step and asked for until they are applied."""

    def init(
        self, problem: Problem, prior: AffineState | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], AffineState]:
        """Begin with the shares that training resumes from, else equal ones. A line is a rank's: none carries over."""
        devices = tuple(worker.device for worker in problem.workers)
        memory = MemoryBook.empty(devices, prior.memory if prior else None)
        fits = memory.max_rows(problem.workers)
        shares = resumed_shares(problem, current, global_batch_size, fits)
        shares = shares or equal_shares(problem, global_batch_size, fits)
        return shares, AffineState(problem=problem, memory=memory, log=RunLog())

    def observe(self, state: AffineState, step: StepObserved, use: BoolArray | None = None) -> AffineState:
        """Take in a clean step; the first step of an epoch has the last one's times judged."""
        del use  # an epoch's mean takes in whatever happened
        if step.epoch > state.epoch:
            state = replace(state, epoch=step.epoch, offer=self._offer(state))
        if state.sizes is None:
            return state
        memory = state.memory.observe(step.num_rows, step.peak_memory_bytes)
        return changed(state, memory=memory, log=state.log.take(step, state.sizes))

    def propose(self, state: AffineState) -> Reallocate | str:
        """Offer the exact split on last epoch's lines."""
        return state.offer or "the shares are those that last epoch's lines ask for"

    def plan(self, state: AffineState, global_batch_size: int) -> Shares:
        """Return the exact split of another batch, equal shares while no line is known."""
        model = _model(state)
        plan = model.exact_plan(global_batch_size)
        if plan is None:
            return Shares(local_batch_sizes=equal_shares(state.problem, global_batch_size, model.max_rows()))
        return Shares(local_batch_sizes=plan.local_batch_sizes, step_time_s=plan.step_time_s)

    def rescale(self, state: AffineState, factors: Mapping[int, float]) -> AffineState:
        """A mean over an epoch knows of no sudden change."""
        del factors
        return state

    def applied(self, state: AffineState, applied: AllocationApplied) -> AffineState:
        """Take note of what the group now runs; what was asked for before is done with."""
        sizes = applied.allocation.local_batch_sizes
        return state if sizes == state.sizes else replace(state, sizes=sizes, offer=None)

    def model(self, state: AffineState) -> Model | None:
        """Return the lines, and the reduction as far as it shows."""
        return _model(state)

    def _offer(self, state: AffineState) -> Reallocate | None:
        if state.sizes is None:
            return None
        model = _model(state)
        lines, plan = model.lines, model.exact_plan(sum(state.sizes))
        if lines is None or plan is None or plan.local_batch_sizes == state.sizes:
            return None
        now_s = model.whole_s(float(lines.own_s(np.array(state.sizes)).max()))
        gain = 1.0 - model.whole_s(plan.step_time_s) / now_s
        if gain <= 0:
            return None
        return Reallocate(
            proposal=Proposal(local_batch_sizes=plan.local_batch_sizes),
            reason=f"the exact split on the workers' straight lines saves {gain:.1%} of {now_s:.4g} s",
            predicted_gain=gain,
            evidence={"step_time_s": now_s, "planned_step_time_s": plan.step_time_s},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AffineModel:
    """Straight lines per worker, and times of *whole* steps, overlap included (see ``growth.beside_whole_steps``)."""

    problem: Problem
    memory: MemoryBook
    log: RunLog

    @property
    def lines(self) -> LineSet | None:
        """Every rank's line, ready to be asked; through the origin while a rank has run one size. None: no step yet."""
        return _lines(self.log, 0.0)

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return every rank's expected own time in seconds, shape ``[n]``; None while unknown.

        Of a rank that has run one size half of the time is taken for constant, as AdaptDL does: who believed the lines
        that shares in proportion to speed come from would never try a larger batch.
        """
        lines = _lines(self.log, 0.5)
        return None if lines is None else lines.own_s(np.asarray(num_rows, dtype=np.int64))

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return the time of a whole step under the exact split in seconds; None while unknown or impossible.

        A batch that memory has not shown to hold is impossible: it is asked for here, not run already.
        """
        fits = self.max_rows()
        if fits is not None and int(fits.sum()) < global_batch_size:
            return None
        plan = self.exact_plan(global_batch_size)
        own_s = None if plan is None else self.own_s(plan.local_batch_sizes)
        return None if own_s is None else self.whole_s(float(own_s.max()))

    def whole_s(self, slowest_s: float) -> float:
        """Return the time of a whole step whose slowest own time is given, in seconds.

        ``max(t + T_u, f t + T_o + T_u)``: bound by computing, the last bucket ``T_u`` comes after the last gradient;
        bound by communication, all of it comes after the first bucket at ``f t``. No measured step is shorter than
        either, so the two are the largest that none contradicts.
        """
        last_s = min((run.step_s - run.slowest_s for run in self.log.runs), default=0.0)
        all_s = min((run.step_s - FORWARD_SHARE * run.slowest_s for run in self.log.runs), default=0.0)
        return max(slowest_s + last_s, FORWARD_SHARE * slowest_s + all_s)

    def max_rows(self) -> IntArray | None:
        """Return the most rows that fit each rank's memory as far as its peaks tell."""
        return self.memory.max_rows(self.problem.workers)

    def exact_plan(self, global_batch_size: int) -> SplitPlan | None:
        """Return the exact split within the ranks' limits, or None where there is none."""
        lines = self.lines
        if lines is None:
            return None
        lower, upper = known_bounds(self.problem, global_batch_size, self.max_rows())
        try:
            return exact_split(lines, global_batch_size, lower, upper, self.problem.local_batch_multiple)
        except InfeasibleError:
            return None

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return nothing: what is exact on the lines is final."""
        del kind, incumbent, max_trials
        return None


def _model(state: AffineState) -> AffineModel:
    return AffineModel(problem=state.problem, memory=state.memory, log=state.log)


@lru_cache(maxsize=4)
def _lines(log: RunLog, constant_share: float) -> LineSet | None:
    """Fit every rank's line, once for all that is asked of a log.

    ``constant_share`` is the part of the time at one size that no row changes, of ranks that have run no other.
    """
    if not log.runs:
        return None
    sizes = np.array([run.local_batch_sizes for run in log.runs])
    own_s = np.array([run.own_s for run in log.runs])
    counts = np.array([run.num_steps for run in log.runs])
    lines = [
        _line(sizes[ran, rank], own_s[ran, rank], counts[ran], constant_share)
        if (ran := sizes[:, rank] > 0).any()
        else None
        for rank in range(sizes.shape[1])
    ]
    known = [line for line in lines if line is not None]
    # A rank that never had a row counts as the middle one of the others, by rows per second.
    middle = sorted(known, key=lambda line: line[0])[len(known) // 2]
    row_s, fixed_s = np.array([middle if line is None else line for line in lines]).T
    return LineSet(np.maximum(fixed_s, _LEAST_S), row_s)


def _line(rows: IntArray, own_s: FloatArray, counts: IntArray, constant_share: float) -> tuple[float, float]:
    """Return seconds per row, and the seconds that no row changes."""
    if rows.max() < _SAME_SIZE * rows.min():
        row_s = float((own_s / rows) @ counts / counts.sum())
        return row_s * (1 - constant_share), row_s * constant_share * float(rows[-1])
    root = np.sqrt(counts) / own_s
    (row_s, fixed_s), _ = nnls(np.stack([rows * root, root], axis=1), np.sqrt(counts))
    return float(row_s), float(fixed_s)
