"""What the parts of a method say, as decisions and findings: their reasons, their advice, the rate that goes along."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rex_ray.core.types import Allocation
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Finding, Keep, Part, Reallocate, Search, TellTrial
from rex_ray.policies.seams import Alarm, BatchPlan

__all__ = ["advice", "because_of", "decided", "findings_of", "found", "is_mere_rate", "with_rate"]


def decided(
    answer: Reallocate | Search | TellTrial | Finding | str,
    present: Allocation | None,
    plan: BatchPlan | None,
    advising: Collection[Part],
) -> Decision:
    """Turn a search part's answer into a decision, or into advice; see ``with_rate`` for the arguments."""
    if isinstance(answer, str):
        return Keep(reason=answer)
    if isinstance(answer, Finding):
        return Keep(reason=answer.reason, findings=(answer,))
    if isinstance(answer, Reallocate):
        if "search" in advising:
            return Keep(reason=answer.reason, findings=(*answer.findings, advice(answer, "search")))
        return with_rate(answer, present, plan, advising)
    return answer


def with_rate(
    answer: Reallocate, present: Allocation | None, plan: BatchPlan | None, advising: Collection[Part]
) -> Reallocate:
    """Return a re-split that leaves the learning rate as it is, or takes along what growth would set it to.

    Args:
        answer: other shares of the same batch.
        present: what the group is known to run.
        plan: what growth asked for at the newest step.
        advising: parts whose word is noted and not acted on.
    """
    if present is None:
        return answer
    rate = present.lr_factor
    if plan is not None and plan.global_batch_size == answer.proposal.global_batch_size:
        rate = rate if "growth" in advising else plan.lr_factor
    return replace(answer, proposal=replace(answer.proposal, lr_factor=rate))


def is_mere_rate(asked: ChangeGlobalBatch | Allocation, present: Allocation | None) -> bool:
    """Whether only the learning rate would be another one."""
    shares = asked.local_batch_sizes if isinstance(asked, Allocation) else asked.proposal.local_batch_sizes
    return present is not None and shares == present.local_batch_sizes


def because_of(alarm: Alarm | None, decision: Reallocate) -> Reallocate:
    """Put a trigger's reason and figures beside those of the re-split that it caused."""
    if alarm is None:
        return decision
    return replace(
        decision,
        reason=f"{alarm.reason}; {decision.reason}",
        evidence={**alarm.evidence, **decision.evidence},
    )


def findings_of(answer: Search | TellTrial | Reallocate | Finding | None) -> tuple[Finding, ...]:
    """Return a part's findings, which nobody may lose who decides otherwise."""
    if isinstance(answer, Finding):
        return (answer,)
    return answer.findings if answer is not None else ()


def found(alarm: Alarm) -> Finding:
    """Return what a trigger found."""
    return Finding(part="trigger", verdict=alarm.verdict, reason=alarm.reason, evidence=dict(alarm.evidence))


def advice(decision: Reallocate | ChangeGlobalBatch, part: Part) -> Finding:
    """Return what a part would have done that only advises."""
    return Finding(
        part=part,
        verdict="advises",
        reason=decision.reason,
        evidence=decision.evidence,
        proposal=decision.proposal,
        predicted_gain=decision.predicted_gain,
    )
