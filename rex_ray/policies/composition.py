"""The one policy there is: growth x split x trigger x search. Methods differ in parts; baselines have null ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar, assert_never

import numpy as np

from rex_ray.core.observations import AllocationApplied, Observation, SearchResult, StepObserved, TelemetryGap
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Keep, Proposal, Reallocate
from rex_ray.policies.seams import Alarm, BatchPlan, Growth, SearchPart, Split, Trigger

__all__ = ["Composition", "CompositionState"]

GrowthT = TypeVar("GrowthT")
SplitT = TypeVar("SplitT")
TriggerT = TypeVar("TriggerT")
SearchT = TypeVar("SearchT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompositionState(Generic[GrowthT, SplitT, TriggerT, SearchT]):
    """The parts' memories side by side, and the allocation that the group is known to run."""

    growth: GrowthT
    split: SplitT
    trigger: TriggerT
    search: SearchT
    allocation: Allocation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition(Generic[GrowthT, SplitT, TriggerT, SearchT]):
    """A method: what grows the batch, what splits it, what watches for slowdowns, what searches further.

    Attributes:
        name: the method's name.
        growth: decides the global batch size.
        split: decides the shares of it.
        trigger: watches for lasting changes of speed.
        search: looks for shares better than the split's.
    """

    name: str
    growth: Growth[GrowthT]
    split: Split[SplitT]
    trigger: Trigger[TriggerT]
    search: SearchPart[SearchT]

    def init(
        self,
        problem: Problem,
        prior: CompositionState[GrowthT, SplitT, TriggerT, SearchT] | None = None,
        current: Allocation | None = None,
    ) -> tuple[Proposal, CompositionState[GrowthT, SplitT, TriggerT, SearchT]]:
        """Begin with a worker group; see ``Policy.init``."""
        batch, growth = self.growth.init(problem, prior.growth if prior else None, current)
        shares, split = self.split.init(problem, prior.split if prior else None, current, batch.global_batch_size)
        trigger = self.trigger.init(problem, prior.trigger if prior else None)
        search = self.search.init(problem, prior.search if prior else None)
        state = CompositionState(growth=growth, split=split, trigger=trigger, search=search)
        return Proposal(local_batch_sizes=shares, lr_factor=batch.lr_factor), state

    def decide(
        self,
        state: CompositionState[GrowthT, SplitT, TriggerT, SearchT],
        observation: Observation,
        rng: np.random.Generator,
    ) -> tuple[Decision, CompositionState[GrowthT, SplitT, TriggerT, SearchT]]:
        """Judge one observation; see ``Policy.decide``."""
        del rng
        match observation:
            case StepObserved():
                return self._judge(state, observation)
            case AllocationApplied():
                return Keep(reason="an allocation was applied"), self._applied(state, observation)
            case SearchResult():
                answer, search = self.search.answer(state.search, observation, self.split.model(state.split))
                return self._with_lr(answer, state), replace(state, search=search)
            case TelemetryGap():
                return Keep(reason="no complete step for a while: the evidence is old"), state
            case _:
                assert_never(observation)

    def _judge(
        self, state: CompositionState[GrowthT, SplitT, TriggerT, SearchT], step: StepObserved
    ) -> tuple[Decision, CompositionState[GrowthT, SplitT, TriggerT, SearchT]]:
        # The trigger compares with what was expected *before* this step could teach the split otherwise.
        alarm, trigger = self.trigger.observe(state.trigger, step, self.split.model(state.split))
        split = self.split.observe(state.split, step)
        if alarm is not None:
            split = self.split.rescale(split, alarm.factors)
        batch, growth = self.growth.observe(state.growth, step, self.split.model(split))
        answer = self._grow(split, batch) if batch is not None else self.split.propose(split)
        offer = answer if isinstance(answer, Reallocate) else None
        wanted, search = self.search.seek(state.search, offer, self.split.model(split))
        state = CompositionState(
            growth=growth, split=split, trigger=trigger, search=search, allocation=state.allocation
        )
        if wanted is not None and not isinstance(answer, ChangeGlobalBatch):
            return wanted, state
        return _because_of(alarm, self._with_lr(answer, state)), state

    def _applied(
        self, state: CompositionState[GrowthT, SplitT, TriggerT, SearchT], applied: AllocationApplied
    ) -> CompositionState[GrowthT, SplitT, TriggerT, SearchT]:
        return replace(
            state,
            growth=self.growth.applied(state.growth, applied),
            split=self.split.applied(state.split, applied),
            trigger=self.trigger.applied(state.trigger, applied),
            allocation=applied.allocation,
        )

    def _grow(self, split: SplitT, batch: BatchPlan) -> ChangeGlobalBatch:
        plan = self.split.plan(split, batch.global_batch_size)
        return ChangeGlobalBatch(
            proposal=Proposal(local_batch_sizes=plan.local_batch_sizes, lr_factor=batch.lr_factor),
            reason=batch.reason,
            evidence=dict(batch.evidence),
        )

    def _with_lr(
        self,
        answer: Reallocate | ChangeGlobalBatch | str,
        state: CompositionState[GrowthT, SplitT, TriggerT, SearchT],
    ) -> Decision:
        """A mere re-split leaves the learning rate as it is, which only the composition knows."""
        if isinstance(answer, str):
            return Keep(reason=answer)
        if isinstance(answer, Reallocate) and state.allocation is not None:
            return replace(answer, proposal=replace(answer.proposal, lr_factor=state.allocation.lr_factor))
        return answer


def _because_of(alarm: Alarm | None, decision: Decision) -> Decision:
    """Put a trigger's reason and figures beside those of the re-split that it caused."""
    if alarm is None or not isinstance(decision, Reallocate):
        return decision
    return replace(
        decision,
        reason=f"{alarm.reason}; {decision.reason}",
        evidence={**alarm.evidence, **decision.evidence},
    )
