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

from rex_ray.core.observations import AllocationApplied, SearchResult, StepObserved, TrialRequested
from rex_ray.core.search_problem import SearchKind, SearchProblem
from rex_ray.core.types import Allocation, BoolArray, FloatArray, IntArray, Problem
from rex_ray.policies.base import Finding, Reallocate, Search, TellTrial

__all__ = ["Alarm", "BatchPlan", "Growth", "Model", "SearchPart", "SearchView", "Shares", "Split", "Trigger"]

GrowthT = TypeVar("GrowthT")
SplitT = TypeVar("SplitT")
TriggerT = TypeVar("TriggerT")
SearchT = TypeVar("SearchT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A global batch size that growth asks for, with the learning-rate factor that goes with it.

    ``predicted_gain`` is what it saves of the time to a reference row's worth of progress, ``1 - goodput now / then``.
    """

    global_batch_size: int
    lr_factor: float
    reason: str = ""
    predicted_gain: float | None = None
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A trigger's verdict: some ranks take ``factors[rank]`` times as long as before, and it will last.

    Where all do by about the same factor, no shares are better than the present ones, and the split says so.
    """

    factors: Mapping[int, float]
    verdict: str
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares for some global batch, and the step time that the split expects of them (None: it has no model)."""

    local_batch_sizes: tuple[int, ...]
    step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchView:
    """What the parts beside a search say at this step.

    Attributes:
        offer: shares that the split would move to.
        alarm: a change of speed that the trigger has just found: what runs is measured afresh.
        is_quiet: the trigger suspects nobody.
    """

    offer: Reallocate | None = None
    alarm: Alarm | None = None
    is_quiet: bool = True


class Model(Protocol):
    """What a split has learnt about times, for the parts beside it to ask."""

    def own_s(self, num_rows: npt.ArrayLike) -> FloatArray | None:
        """Return every rank's expected own time in seconds for its rows, shape ``[n]``; None while unknown."""
        ...

    def step_time_s(self, global_batch_size: int) -> float | None:
        """Return the slowest own time under the best split of so many rows in seconds; None while unknown.

        The reduction's time comes on top; who compares batches adds it.
        """
        ...

    def max_rows(self) -> IntArray | None:
        """Return the most rows per rank that are known to fit its memory, shape ``[n]``; None while nothing is."""
        ...

    def search_problem(self, kind: SearchKind, incumbent: tuple[int, ...], max_trials: int) -> SearchProblem | None:
        """Return what a search for better shares than ``incumbent`` would be asked; None while it cannot be."""
        ...


class Growth(Protocol[GrowthT]):
    """Decides the global batch size."""

    def init(self, problem: Problem, prior: GrowthT | None, current: Allocation | None) -> tuple[BatchPlan, GrowthT]:
        """Begin with a worker group, at the resumed global batch size where there is one."""
        ...

    def observe(
        self, state: GrowthT, step: StepObserved, model: Model | None
    ) -> tuple[BatchPlan | Finding | None, GrowthT]:
        """Judge a step; return the global batch to change to, what a judgement found, or None where none was due."""
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

    def observe(self, state: SplitT, step: StepObserved, use: BoolArray | None = None) -> SplitT:
        """Learn from a step; ``use`` says which ranks' times are beyond suspicion, shape ``[n]``, default all."""
        ...

    def propose(self, state: SplitT) -> Reallocate | Finding | str:
        """Return better shares of the present global batch, what a new review found, or why there are none."""
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

    def observe(
        self, state: TriggerT, step: StepObserved, model: Model | None
    ) -> tuple[Alarm | Finding | None, TriggerT]:
        """Judge a step's own times against the expected ones."""
        ...

    def trusted(self, state: TriggerT) -> BoolArray | None:
        """Return which ranks' newest times are beyond suspicion, shape ``[n]``; None: all of them."""
        ...

    def applied(self, state: TriggerT, applied: AllocationApplied) -> TriggerT:
        """Take note of what the group now runs."""
        ...


class SearchPart(Protocol[SearchT]):
    """Looks for shares that are better than the split's own plan, outside the controller."""

    def init(self, problem: Problem, prior: SearchT | None) -> SearchT:
        """Begin with a worker group."""
        ...

    def busy(self, state: SearchT) -> bool:
        """Whether trials are being measured: the split holds its offers back until they are, but for an alarm's.

        The trigger is shown no step of it: candidates are run *because* the curves err at them, and it could not tell
        that from a change of speed. A part that measures watches for changes itself.
        """
        ...

    def observe(
        self, state: SearchT, step: StepObserved, model: Model | None, look: SearchView
    ) -> tuple[Search | TellTrial | Reallocate | Finding | None, SearchT]:
        """Judge a step: ask for a search, time a trial, or put measured shares in place (or back)."""
        ...

    def trial(
        self, state: SearchT, requested: TrialRequested, model: Model | None
    ) -> tuple[Reallocate | TellTrial | Finding, SearchT]:
        """Run a candidate, or refuse it by telling the search that it is worth nothing (an objective of ``inf``)."""
        ...

    def answer(
        self, state: SearchT, result: SearchResult, model: Model | None
    ) -> tuple[Reallocate | Finding | str, SearchT]:
        """Turn a search's result into a proposal, or say why not."""
        ...

    def doubts(self, state: SearchT) -> bool:
        """Whether the model has been caught erring, so that its word on other sizes must not pass for the truth."""
        ...

    def holds(self, state: SearchT, offer: Reallocate) -> Finding | None:
        """Say why an offer of the split is held back (measured shares promise more), or None; never an alarm's."""
        ...

    def applied(self, state: SearchT, applied: AllocationApplied, model: Model | None) -> SearchT:
        """Take note of what the group now runs, and of what the model says of it before its first step."""
        ...
