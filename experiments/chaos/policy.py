"""A policy that never rests while losses are positive: it moves rows, grows, searches, and asks for nonsense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.observations import AllocationApplied, Observation, SearchResult, StepObserved, TrialRequested
from rex_ray.core.search_problem import SearchProblem, objective_of
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies.base import (
    ChangeGlobalBatch,
    Decision,
    Finding,
    Keep,
    Proposal,
    Reallocate,
    RequestWorldSize,
    Search,
    TellTrial,
)
from rex_ray.policies.limits import equal_shares

__all__ = ["Unrest", "UnrestState"]

UnrestState: TypeAlias = tuple[tuple[int, ...], tuple[str, int, tuple[int, ...]] | None]
"""The shares that are known to be applied, and the trial that waits to be told: search, number, shares."""

_CURVE = StepTimeCurve(knot_rows=np.array([0.0, 64.0]), knot_s=np.array([0.01, 0.2]), max_trusted_rows=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrest:
    """See the module. A loss of 0 has it rest, so that a run can be seen to settle."""

    name: str = "unrest"
    restlessness: float = 0.25

    def init(
        self, problem: Problem, prior: UnrestState | None = None, current: Allocation | None = None
    ) -> tuple[Proposal, UnrestState]:
        """Begin with the rows that training resumes from, in equal shares."""
        del prior
        rows = current.global_batch_size if current else problem.global_batch_size
        return Proposal(local_batch_sizes=equal_shares(problem, rows)), ((), None)

    def decide(
        self, state: UnrestState, observation: Observation, rng: np.random.Generator
    ) -> tuple[Decision, UnrestState]:
        """Judge one observation."""
        sizes, trial = state
        match observation:
            case AllocationApplied(allocation=allocation):
                return Keep(reason="applied"), (allocation.local_batch_sizes, trial)
            case TrialRequested(search_id=search_id, trial=number, local_batch_sizes=wanted):
                if trial is None and wanted != sizes:
                    proposal = Proposal(local_batch_sizes=wanted)
                    return (
                        Reallocate(proposal=proposal, reason="a trial", search_id=search_id),
                        (sizes, (search_id, number, wanted)),
                    )
                return TellTrial(search_id=search_id, trial=number, objective=float("inf"), reason="refused"), state
            case SearchResult(search_id=search_id, local_batch_sizes=found):
                if found is None or found == sizes:
                    return Keep(reason=observation.reason), (sizes, None)
                proposal = Proposal(local_batch_sizes=found)
                return Reallocate(proposal=proposal, reason="found", search_id=search_id), (sizes, None)
            case StepObserved():
                return self._at_step(sizes, trial, observation, rng)
            case _:
                return Keep(reason=f"saw {type(observation).__name__}"), state

    def _at_step(
        self, sizes: tuple[int, ...], trial: Any, step: StepObserved, rng: np.random.Generator
    ) -> tuple[Decision, UnrestState]:
        if trial is not None and (sizes == trial[2] or step.step % 16 == 0):
            own_s = tuple((step.own_us / 1e6).tolist())
            objective = objective_of(own_s) if sizes == trial[2] else float("inf")
            told = TellTrial(search_id=trial[0], trial=trial[1], objective=objective, reason="timed", own_s=own_s)
            return told, (sizes, None)
        drawn = rng.random()
        if not sizes or not step.loss or drawn >= self.restlessness:
            return Keep(reason="rest", findings=_finding(step)), (sizes, trial)
        return _wish(sizes, drawn / self.restlessness, rng), (sizes, trial)


def _wish(sizes: tuple[int, ...], drawn: float, rng: np.random.Generator) -> Decision:
    """Draw something to ask for."""
    if drawn < 0.05:
        return Reallocate(proposal=Proposal(local_batch_sizes=(*sizes, 1)), reason="nonsense")
    if drawn < 0.1:
        return RequestWorldSize(num_workers=len(sizes) + 1, reason="more hands")
    if drawn < 0.2:
        grown = tuple(int(size) for size in rng.integers(1, 12, len(sizes)))
        return ChangeGlobalBatch(proposal=Proposal(local_batch_sizes=grown, lr_factor=1.5), reason="another batch")
    if drawn < 0.6 and len(sizes) > 1:
        return Search(problem=_question(sizes), reason="is there better?", evidence={"drawn": drawn})
    return Reallocate(proposal=Proposal(local_batch_sizes=_moved(sizes, rng)), reason="a row moves", predicted_gain=0.1)


def _moved(sizes: tuple[int, ...], rng: np.random.Generator) -> tuple[int, ...]:
    giver, taker = int(np.argmax(sizes)), int(rng.integers(len(sizes)))
    moved = list(sizes)
    moved[giver] -= 1
    moved[taker] += 1
    return tuple(moved)


def _question(sizes: tuple[int, ...]) -> SearchProblem:
    return SearchProblem(
        kind="measured",
        plan=sizes,
        incumbent=sizes,
        lower=(1,) * len(sizes),
        upper=(max(sizes) + 4,) * len(sizes),
        shapes=(_CURVE,),
        shape_of=(0,) * len(sizes),
        scales=tuple(1.0 + 0.3 * rank for rank in range(len(sizes))),
        max_trials=4,
    )


def _finding(step: StepObserved) -> tuple[Finding, ...]:
    if step.step % 7:
        return ()
    return (Finding(part="trigger", verdict=f"{step.step % 3}", reason="looked", evidence={"loss": step.loss or 0.0}),)
