"""What a method is made of: growth of the global batch x split of it x trigger x search, each with a null member.

A method is a composition of four parts, and leaving one out is the ablation, not a special case. Every part obeys the
policy's own law: hyperparameters in the object, memory in a state, and nothing in a state presumes that a proposal
was applied before ``applied`` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy.typing as npt

from rex_ray.core.observations import AllocationApplied, SearchResult, StepObserved
from rex_ray.core.types import Allocation, FloatArray, Problem
from rex_ray.policies.base import Reallocate, Search

__all__ = ["Alarm", "BatchPlan", "Growth", "Model", "SearchPart", "Shares", "Split", "Trigger"]

GrowthT = TypeVar("GrowthT")
SplitT = TypeVar("SplitT")
TriggerT = TypeVar("TriggerT")
SearchT = TypeVar("SearchT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A global batch size that growth asks for, with the learning-rate factor that goes with it."""

    global_batch_size: int
    lr_factor: float
    reason: str = ""
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A trigger's verdict: some ranks take ``factors[rank]`` times as long as before, and it will last."""

    factors: Mapping[int, float]
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares for some global batch, and the step time that the split expects of them (None: it has no model)."""

    local_batch_sizes: tuple[int, ...]
    step_time_s: float | None = None


class Model(Protocol):
    """What a split has learnt about times, for the parts beside it to ask."""

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return every rank's expected own time in seconds for its rows, shape ``[n]``; None while unknown."""
        ...

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return the step time of the best split of so many rows in seconds; None while unknown."""
        ...


class Growth(Protocol[GrowthT]):
    """Decides the global batch size."""

    def init(self, problem: Problem, prior: GrowthT | None, current: Allocation | None) -> tuple[BatchPlan, GrowthT]:
        """Begin with a worker group, at the resumed global batch size where there is one."""
        ...

    def observe(self, state: GrowthT, step: StepObserved, model: Model | None) -> tuple[BatchPlan | None, GrowthT]:
        """Judge a step; return the global batch to change to, or None."""
        ...

    def applied(self, state: GrowthT, applied: AllocationApplied) -> GrowthT:
        """Take note of what the group now runs."""
        ...


class Split(Protocol[SplitT]):
    """Decides each rank's share of a global batch."""

    def init(
        self, problem: Problem, prior: SplitT | None, current: Allocation | None, global_batch_size: int
    ) -> tuple[tuple[int, ...], SplitT]:
        """Begin with a worker group: its first shares."""
        ...

    def observe(self, state: SplitT, step: StepObserved) -> SplitT:
        """Learn from a step."""
        ...

    def propose(self, state: SplitT) -> Reallocate | str:
        """Return better shares of the present global batch, or say why there are none."""
        ...

    def plan(self, state: SplitT, global_batch_size: int) -> Shares:
        """Return shares of another global batch size."""
        ...

    def rescale(self, state: SplitT, factors: Mapping[int, float]) -> SplitT:
        """Take a trigger's word that some ranks' times changed by a factor."""
        ...

    def applied(self, state: SplitT, applied: AllocationApplied) -> SplitT:
        """Take note of what the group now runs."""
        ...

    def model(self, state: SplitT) -> Model | None:
        """Return what is known about times, or None where nothing is learnt."""
        ...


class Trigger(Protocol[TriggerT]):
    """Watches for lasting changes of a rank's speed."""

    def init(self, problem: Problem, prior: TriggerT | None) -> TriggerT:
        """Begin with a worker group."""
        ...

    def observe(self, state: TriggerT, step: StepObserved, model: Model | None) -> tuple[Alarm | None, TriggerT]:
        """Judge a step's own times against the expected ones."""
        ...

    def applied(self, state: TriggerT, applied: AllocationApplied) -> TriggerT:
        """Take note of what the group now runs."""
        ...


class SearchPart(Protocol[SearchT]):
    """Looks for shares that are better than the split's own plan, outside the controller."""

    def init(self, problem: Problem, prior: SearchT | None) -> SearchT:
        """Begin with a worker group."""
        ...

    def seek(self, state: SearchT, offer: Reallocate | None, model: Model | None) -> tuple[Search | None, SearchT]:
        """Ask for a search, given what the split offers at this step, or None."""
        ...

    def answer(self, state: SearchT, result: SearchResult, model: Model | None) -> tuple[Reallocate | str, SearchT]:
        """Turn a search's result into a proposal, or say why not."""
        ...
