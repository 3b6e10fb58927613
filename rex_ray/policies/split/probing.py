"""Two mirrored allocations at the very start, so that every kind's curve has three sizes before the first plan.

One measured size leaves a curve's slope to a guess. With the probes every kind runs half and one and a half times its
share, half of its ranks first and the other half then, so that ranks of one kind are told apart from sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import Allocation, BoolArray, Problem
from rex_ray.policies.base import Finding, Proposal, Reallocate
from rex_ray.policies.limits import share_bounds
from rex_ray.policies.seams import Model, Shares
from rex_ray.policies.split.spline import SplineSplit, SplineSplitState

__all__ = ["ProbingSplit", "ProbingState", "mirrored_probes"]

PROBE_ID = "probe"
"""Probes are known not to pay by themselves: like a search's trials they are nobody's to judge or to roll back."""

_PATIENCE = 8
"""Times the clean steps of a probe: what is offered for so long is not taken up (it is advice, or was refused), and
must not keep the plan back for good."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbingState:
    """The split's own memory, and the probes still to run, the one under way first."""

    inner: SplineSplitState
    probes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbingSplit:
    """A spline split that runs two probes first where some kind has been measured at one size only.

    Attributes:
        inner: the split; a probe lasts as many clean steps as its first review takes.
    """

    inner: SplineSplit

    def init(
        self, problem: Problem, prior: ProbingState | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], ProbingState]:
        """Begin with a worker group; kinds that are known need no probe, nor do shares that were resumed."""
        shares, inner = self.inner.init(problem, prior.inner if prior else None, current, global_batch_size)
        is_known = all(inner.book.num_sizes(rank) > 1 for rank in range(problem.num_workers))
        probes = () if is_known or current is not None else mirrored_probes(problem, shares)
        return shares, ProbingState(inner=inner, probes=probes)

    def observe(self, state: ProbingState, step: StepObserved, use: BoolArray | None = None) -> ProbingState:
        """Learn from a step; give up probes that nobody runs."""
        inner = self.inner.observe(state.inner, step, use)
        is_vain = bool(state.probes) and inner.num_clean > _PATIENCE * self.inner.min_steps
        return ProbingState(inner=inner, probes=() if is_vain else state.probes)

    def propose(self, state: ProbingState) -> Reallocate | Finding | str:
        """Offer the next probe once what runs has had its clean steps; afterwards what the split offers."""
        if not state.probes:
            return self.inner.propose(state.inner)
        if state.inner.num_clean < self.inner.min_steps:
            return "too few clean steps yet"
        return Reallocate(
            proposal=Proposal(local_batch_sizes=state.probes[0]),
            reason="a probe: half and one and a half times the share, so that curves have a slope",
            search_id=PROBE_ID,
        )

    def plan(self, state: ProbingState, global_batch_size: int) -> Shares:
        """Return the split's plan for another batch."""
        return self.inner.plan(state.inner, global_batch_size)

    def rescale(self, state: ProbingState, factors: Mapping[int, float]) -> ProbingState:
        """Take a trigger's word; what probes would show is not worth waiting for any more."""
        return ProbingState(inner=self.inner.rescale(state.inner, factors))

    def applied(self, state: ProbingState, applied: AllocationApplied) -> ProbingState:
        """Take note of what the group runs; a batch that was changed is not probed."""
        shares, probes = applied.allocation.local_batch_sizes, state.probes
        if probes and shares == probes[0]:
            probes = probes[1:]
        elif probes and sum(shares) != sum(probes[0]):
            probes = ()
        return ProbingState(inner=self.inner.applied(state.inner, applied), probes=probes)

    def model(self, state: ProbingState) -> Model | None:
        """Return the split's model."""
        return self.inner.model(state.inner)


def mirrored_probes(problem: Problem, shares: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return two allocations of the same batch: ranks take turns at half and one and a half times their share.

    Neighbours within a kind get opposite sizes, and the second allocation swaps them. None at all for a single rank,
    or where bounds leave no room.
    """
    lower, upper = share_bounds(problem, sum(shares))
    sizes = np.array(shares, dtype=np.int64)
    order = np.array(sorted(range(len(shares)), key=lambda rank: (problem.workers[rank].device, rank)))
    first, second = sizes.copy(), sizes.copy()
    for low, high in zip(order[0::2], order[1::2], strict=False):
        moved = int(min(sizes[low] // 2, sizes[high] // 2))
        moved -= moved % problem.local_batch_multiple
        first[low], first[high] = sizes[low] - moved, sizes[high] + moved
        second[low], second[high] = sizes[low] + moved, sizes[high] - moved
    for probe in (first, second):
        if (probe < lower).any() or (probe > upper).any():
            return ()
    if (first == sizes).all():
        return ()
    return tuple(first.tolist()), tuple(second.tolist())
