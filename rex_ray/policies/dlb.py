"""DLB: once per epoch, shares in proportion to last epoch's measured speed.

Ye et al. 2022, *DLB: A dynamic load balance strategy for distributed training of deep neural networks*
(doi 10.1109/TETCI.2022.3220224, arXiv:2007.11831): with shares ``p_i`` and own times ``t_i`` of an epoch, the next
epoch's are ``p_i' = (p_i / t_i) / sum_j (p_j / t_j)``, which would equalise the times if they were proportional to the
rows.

What the paper leaves open, and what is done here: which steps make an epoch's ``t_i`` (the clean ones under the shares
that it ended with, since a change arrives some steps late); how ``p_i' B`` becomes whole rows
(largest remainder, so none is lost); a rank that had no rows (it counts as fast as the median of the others);
memories (no rank is given more rows than its kind has shown to hold); a restart (the shares resumed from where memories
hold them, else equal ones; rates are not carried over).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.memory import MemoryBook
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, BoolArray, FloatArray, IntArray, Problem, StepFlag, read_only
from rex_ray.policies.base import Proposal, Reallocate
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.limits import equal_shares, known_bounds, resumed_shares
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.memory_model import MemoryModel

__all__ = ["EpochSplit", "EpochSplitState", "dlb"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochSplitState:
    """Sums over the clean steps of the present epoch under the present shares, and what the last one taught.

    Attributes:
        problem: the group and its limits.
        memory: peaks of memory per kind and size.
        sizes: shares that the group is known to run, or None before its first step.
        epoch: epoch that the sums belong to.
        rows: rows per rank, shape ``[n]``.
        own_us: own time per rank, shape ``[n]``.
        rate: rows per second per rank in the last epoch, shape ``[n]``; None before the first has ended.
        planned: the shares that these rates ask for, decided when the epoch ended.
    """

    problem: Problem
    memory: MemoryBook
    sizes: tuple[int, ...] | None
    epoch: int
    rows: IntArray
    own_us: IntArray
    rate: FloatArray | None = None
    planned: Shares | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSplit:
    """Proportional shares, decided at each epoch's first step and asked for until they are applied."""

    def init(
        self, problem: Problem, prior: EpochSplitState | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], EpochSplitState]:
        """Begin with the shares that training resumes from, else equal ones; of earlier groups peaks of memory stay."""
        memory = MemoryBook.empty(
            tuple(worker.device for worker in problem.workers), prior.memory if prior is not None else None
        )
        fits = memory.max_rows(problem.workers)
        shares = resumed_shares(problem, current, global_batch_size, fits)
        shares = shares or equal_shares(problem, global_batch_size, fits)
        zeros = read_only([0] * problem.num_workers, np.int64)
        return shares, EpochSplitState(problem=problem, memory=memory, sizes=None, epoch=-1, rows=zeros, own_us=zeros)

    def observe(self, state: EpochSplitState, step: StepObserved, use: BoolArray | None = None) -> EpochSplitState:
        """Add a clean step to its epoch's sums; the first step of an epoch closes the one before."""
        del use  # an epoch's mean takes in whatever happened
        if step.epoch > state.epoch:
            zeros = read_only([0] * len(state.rows), np.int64)
            ended = replace(state, epoch=step.epoch, rows=zeros, own_us=zeros, rate=_rate(state))
            state = replace(ended, planned=self._planned(ended))
        if step.flags != StepFlag.NONE:
            return state
        return replace(
            state,
            memory=state.memory.observe(step.num_rows, step.peak_memory_bytes),
            rows=read_only(state.rows + step.num_rows, np.int64),
            own_us=read_only(state.own_us + np.where(step.num_rows > 0, step.own_us, 0), np.int64),
        )

    def propose(self, state: EpochSplitState) -> Reallocate | str:
        """Offer the shares that last epoch's speeds ask for."""
        if state.sizes is None or state.rate is None or state.planned is None:
            return "no epoch has ended yet"
        if state.planned.local_batch_sizes == state.sizes:
            return "the shares are those that last epoch's speeds ask for"
        now_s = float(np.max(np.array(state.sizes) / state.rate))
        planned_s = state.planned.step_time_s or now_s
        return Reallocate(
            proposal=Proposal(local_batch_sizes=state.planned.local_batch_sizes),
            reason=f"shares in proportion to the speeds measured in epoch {state.epoch - 1}",
            predicted_gain=1.0 - planned_s / now_s,
            evidence={"step_time_s": now_s, "planned_step_time_s": planned_s},
        )

    def _planned(self, state: EpochSplitState) -> Shares | None:
        if state.sizes is None or state.rate is None:
            return None
        return self.plan(state, sum(state.sizes))

    def plan(self, state: EpochSplitState, global_batch_size: int) -> Shares:
        """Return the proportional shares of a batch, equal ones while no speed is known."""
        fits = state.memory.max_rows(state.problem.workers)
        if state.rate is None:
            return Shares(local_batch_sizes=equal_shares(state.problem, global_batch_size, fits))
        lower, upper = known_bounds(state.problem, global_batch_size, fits)
        shares = apportion(global_batch_size, state.rate, lower, upper, state.problem.local_batch_multiple)
        return Shares(
            local_batch_sizes=tuple(int(share) for share in shares), step_time_s=float(np.max(shares / state.rate))
        )

    def rescale(self, state: EpochSplitState, factors: Mapping[int, float]) -> EpochSplitState:
        """Divide the speeds of the ranks that slowed down."""
        if state.rate is None:
            return state
        slower = np.ones_like(state.rate)
        for rank, factor in factors.items():
            slower[rank] = factor
        rescaled = replace(state, rate=read_only(state.rate / slower, np.float64))
        return replace(rescaled, planned=self._planned(rescaled))

    def applied(self, state: EpochSplitState, applied: AllocationApplied) -> EpochSplitState:
        """Begin the sums anew under what the group now runs; a plan for another global batch is void."""
        sizes = applied.allocation.local_batch_sizes
        zeros = read_only([0] * len(sizes), np.int64)
        known = replace(state, sizes=sizes, rows=zeros, own_us=zeros)
        stale = state.planned is not None and sum(state.planned.local_batch_sizes) != sum(sizes)
        return replace(known, planned=self._planned(known)) if stale else known

    def model(self, state: EpochSplitState) -> Model | None:
        """Return what is known of memory: a rate is no model of a curve, and growth and triggers learn no times."""
        return MemoryModel(problem=state.problem, memory=state.memory)


def _rate(state: EpochSplitState) -> FloatArray | None:
    """Return rows per second per rank over the epoch in ``state``, or the older rates if it taught nothing."""
    measured = (state.rows > 0) & (state.own_us > 0)
    if not measured.any():
        return state.rate
    rate = np.zeros(len(state.rows))
    rate[measured] = state.rows[measured] / (state.own_us[measured] * 1e-6)
    rate[~measured] = np.median(rate[measured])
    return read_only(rate, np.float64)


def dlb() -> Composition[None, EpochSplitState, None, None]:
    """Dynamic load balance once per epoch at a fixed global batch."""
    return Composition(name="dlb", growth=FixedBatch(), split=EpochSplit(), trigger=NoTrigger(), search=NoSearch())
