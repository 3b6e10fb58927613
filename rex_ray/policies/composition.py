"""The one policy there is: growth x split x trigger x search. Methods differ in parts; baselines have null ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar, assert_never

import numpy as np

from rex_ray.core.apportion import apportion
from rex_ray.core.changed import changed
from rex_ray.core.observations import (
    AllocationApplied,
    Observation,
    SearchResult,
    StepObserved,
    TelemetryGap,
    TrialRequested,
)
from rex_ray.core.types import Allocation, IntArray, Problem
from rex_ray.policies.base import (
    ChangeGlobalBatch,
    Decision,
    Finding,
    Keep,
    Part,
    Proposal,
    Reallocate,
    Search,
    TellTrial,
)
from rex_ray.policies.limits import equal_shares, known_bounds, resumed_shares
from rex_ray.policies.patience import PATIENT_STEPS, is_due
from rex_ray.policies.seams import Alarm, BatchPlan, Growth, Model, SearchPart, SearchView, Split, Trigger
from rex_ray.policies.split.doubted import DoubtedModel
from rex_ray.policies.words import advice, because_of, decided, findings_of, found, is_mere_rate, with_rate

__all__ = ["Composition", "CompositionState"]

GrowthT = TypeVar("GrowthT")
SplitT = TypeVar("SplitT")
TriggerT = TypeVar("TriggerT")
SearchT = TypeVar("SearchT")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompositionState(Generic[GrowthT, SplitT, TriggerT, SearchT]):
    """The parts' memories side by side, the group, and the allocation that it is known to run.

    Attributes:
        problem: the group and its limits.
        growth: the parts' own states.
        split: likewise.
        trigger: likewise.
        search: likewise.
        allocation: what the group is known to run; None before its first step.
        plan: what growth asked for at the newest step.
        change: the same with its shares: an exact split is dear, and is not made again at every step of the asking.
        num_unheeded: steps at which growth has asked for that batch.
    """

    problem: Problem
    growth: GrowthT
    split: SplitT
    trigger: TriggerT
    search: SearchT
    allocation: Allocation | None = None
    plan: BatchPlan | None = None
    change: ChangeGlobalBatch | None = None
    num_unheeded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition(Generic[GrowthT, SplitT, TriggerT, SearchT]):
    """A method: what grows the batch, what splits it, what watches for slowdowns, what searches further.

    Attributes:
        name: the method's name.
        growth: decides the global batch size.
        split: decides the shares of it.
        trigger: watches for lasting changes of speed.
        search: looks for shares better than the split's.
        advising: parts whose word is noted and not acted on.
    """

    name: str
    growth: Growth[GrowthT]
    split: Split[SplitT]
    trigger: Trigger[TriggerT]
    search: SearchPart[SearchT]
    advising: frozenset[Part] = frozenset()

    def init(
        self,
        problem: Problem,
        prior: CompositionState[GrowthT, SplitT, TriggerT, SearchT] | None = None,
        current: Allocation | None = None,
    ) -> tuple[Proposal, CompositionState[GrowthT, SplitT, TriggerT, SearchT]]:
        """Begin with a worker group; see ``Policy.init``."""
        begun = current if prior is None or current is None else self._fitting(problem, prior, current)
        batch, growth = self.growth.init(problem, prior.growth if prior else None, begun)
        rows = batch.global_batch_size
        shares, split = self.split.init(problem, prior.split if prior else None, current, rows)
        if "split" in self.advising:
            fits = _fits(self.split.model(split))
            shares = resumed_shares(problem, current, rows, fits) or equal_shares(problem, rows, fits)
        trigger = self.trigger.init(problem, prior.trigger if prior else None)
        search = self.search.init(problem, prior.search if prior else None)
        state = CompositionState(problem=problem, growth=growth, split=split, trigger=trigger, search=search)
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
                return decided(answer, state.allocation, state.plan, self.advising), replace(state, search=search)
            case TrialRequested():
                run, search = self.search.trial(state.search, observation, self.split.model(state.split))
                return decided(run, state.allocation, state.plan, self.advising), replace(state, search=search)
            case TelemetryGap():
                return Keep(reason="no complete step for a while: the evidence is old"), state
            case _:
                assert_never(observation)

    def _fitting(
        self,
        problem: Problem,
        prior: CompositionState[GrowthT, SplitT, TriggerT, SearchT],
        current: Allocation,
    ) -> Allocation:
        """Return what growth begins with: a batch grown by more workers may not fit the memories that the split knows.

        What it has learnt of them is a limit of today and no part of the problem: they may turn out larger.
        """
        _, split = self.split.init(problem, prior.split, None, problem.global_batch_size)
        fits = _fits(self.split.model(split))
        if fits is None or int(fits.sum()) >= current.global_batch_size:
            return current
        workers = tuple(
            replace(worker, max_local_batch_size=min(int(most), worker.max_local_batch_size or int(most)))
            for worker, most in zip(problem.workers, fits, strict=True)
        )
        batch, _ = self.growth.init(replace(problem, workers=workers), prior.growth, current)
        if batch.global_batch_size >= current.global_batch_size:
            return current
        shares = equal_shares(problem, batch.global_batch_size, fits)
        return Allocation(version=current.version, local_batch_sizes=shares, lr_factor=batch.lr_factor)

    def _judge(
        self, state: CompositionState[GrowthT, SplitT, TriggerT, SearchT], step: StepObserved
    ) -> tuple[Decision, CompositionState[GrowthT, SplitT, TriggerT, SearchT]]:
        findings: list[Finding] = []
        # The trigger compares with what was expected *before* this step could teach the split otherwise.
        verdict, trigger, trusted = None, state.trigger, None
        if not self.search.busy(state.search):
            known = self.split.model(state.split)
            if known is not None and state.allocation is not None and self.search.doubts(state.search):
                known = DoubtedModel(inner=known, sizes=state.allocation.local_batch_sizes)
            verdict, trigger = self.trigger.observe(state.trigger, step, known)
            trusted = self.trigger.trusted(trigger)
        split = self.split.observe(state.split, step, trusted)
        alarm = verdict if isinstance(verdict, Alarm) else None
        if isinstance(verdict, Finding):
            findings.append(verdict)
        elif alarm is not None:
            findings.append(found(alarm))
            if "trigger" in self.advising:
                alarm = None
            else:
                split = self.split.rescale(split, alarm.factors)
        model = self.split.model(split)
        batch, growth = self.growth.observe(state.growth, step, model)
        offer = self.split.propose(split)
        if isinstance(offer, Finding):
            findings.append(offer)
        heard = offer if isinstance(offer, Reallocate) else None
        if heard is not None and "split" in self.advising:
            findings.append(advice(heard, "split"))
            heard = None
        if heard is not None and alarm is None and (held := self.search.holds(state.search, heard)) is not None:
            findings.append(held)
            heard = None
        look = SearchView(offer=heard, alarm=alarm, is_quiet=trusted is None)
        sought, search = self.search.observe(state.search, step, model, look)
        after = changed(state, growth=growth, split=split, trigger=trigger, search=search)
        reason = offer if isinstance(offer, str) else offer.reason
        change, after = self._asked(after, batch, is_news=alarm is not None)
        is_due_now = change is not None and is_due(after.num_unheeded)
        # A mere change of the rate goes with whatever else moves, unless a wrapper holds that back for long; it waits
        # while shares are timed.
        is_taken_along = heard is not None and after.num_unheeded <= PATIENT_STEPS
        goes_along = (
            change is not None
            and is_mere_rate(change, after.allocation)
            and (is_taken_along or self.search.busy(search))
        )
        if change is not None and "growth" in self.advising:
            findings.append(advice(change, "growth"))
        elif change is not None and is_due_now and not goes_along:
            return replace(change, findings=(*findings, *findings_of(sought))), after
        elif isinstance(batch, Finding):
            findings.append(batch)
        return self._choose(after, heard, sought, alarm, findings, reason), after

    def _asked(
        self,
        state: CompositionState[GrowthT, SplitT, TriggerT, SearchT],
        batch: BatchPlan | Finding | None,
        *,
        is_news: bool,
    ) -> tuple[ChangeGlobalBatch | None, CompositionState[GrowthT, SplitT, TriggerT, SearchT]]:
        """Give growth's plan its shares, made afresh where it is another plan or the trigger has news."""
        if not isinstance(batch, BatchPlan):
            return None, state if state.plan is None else changed(state, plan=None, change=None, num_unheeded=0)
        asked = state.plan
        is_same_batch = asked is not None and asked.global_batch_size == batch.global_batch_size
        change = state.change if asked == batch and not is_news else None
        change = self._grow(state, batch) if change is None else change
        num_unheeded = state.num_unheeded + 1 if is_same_batch else 1
        return change, changed(state, plan=batch, change=change, num_unheeded=num_unheeded)

    def _choose(
        self,
        state: CompositionState[GrowthT, SplitT, TriggerT, SearchT],
        offer: Reallocate | None,
        sought: Search | TellTrial | Reallocate | Finding | None,
        alarm: Alarm | None,
        findings: list[Finding],
        reason: str,
    ) -> Decision:
        """An alarm's re-split goes first, then a search that is measuring, then the split's own offer."""
        held = self.search.busy(state.search) and alarm is None
        if sought is not None and not isinstance(sought, Finding) and (offer is None or held):
            decision = decided(sought, state.allocation, state.plan, self.advising)
            return replace(decision, findings=(*findings, *decision.findings))
        findings.extend(findings_of(sought))
        if offer is None or held:
            return Keep(reason=reason, findings=tuple(findings))
        return replace(
            because_of(alarm, with_rate(offer, state.allocation, state.plan, self.advising)), findings=tuple(findings)
        )

    def _applied(
        self, state: CompositionState[GrowthT, SplitT, TriggerT, SearchT], applied: AllocationApplied
    ) -> CompositionState[GrowthT, SplitT, TriggerT, SearchT]:
        growth = self.growth.applied(state.growth, applied)
        if state.allocation is not None and is_mere_rate(applied.allocation, state.allocation):
            # The same shares run on: what is known of their times stays known.
            return replace(state, growth=growth, allocation=applied.allocation, change=None)
        return replace(
            state,
            growth=growth,
            split=self.split.applied(state.split, applied),
            trigger=self.trigger.applied(state.trigger, applied),
            search=self.search.applied(state.search, applied, self.split.model(state.split)),
            allocation=applied.allocation,
            change=None,
        )

    def _grow(self, state: CompositionState[GrowthT, SplitT, TriggerT, SearchT], batch: BatchPlan) -> ChangeGlobalBatch:
        if state.allocation is not None and batch.global_batch_size == state.allocation.global_batch_size:
            shares = state.allocation.local_batch_sizes
        elif "split" in self.advising and state.allocation is not None:
            fits = _fits(self.split.model(state.split))
            lower, upper = known_bounds(state.problem, batch.global_batch_size, fits)
            present = state.allocation.local_batch_sizes
            multiple = state.problem.local_batch_multiple
            shares = tuple(apportion(batch.global_batch_size, present, lower, upper, multiple).tolist())
        else:
            shares = self.split.plan(state.split, batch.global_batch_size).local_batch_sizes
        return ChangeGlobalBatch(
            proposal=Proposal(local_batch_sizes=shares, lr_factor=batch.lr_factor),
            reason=batch.reason,
            predicted_gain=batch.predicted_gain,
            evidence=dict(batch.evidence),
        )


def _fits(model: Model | None) -> IntArray | None:
    """Return the most rows per rank that memories are known to hold, shape ``[n]``; None: nothing is known."""
    return None if model is None else model.max_rows()
