"""What a run's growth and searches did, as its journal tells it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rex_ray.control.commands import StartSearch, TellTrial
from rex_ray.control.events import SearchFailed, SearchFinished, TrialProposed
from rex_ray.control.journal import Entry
from rex_ray.report.reading.schema import DecisionRow

__all__ = ["BatchChange", "SearchOutcome", "batch_changes", "search_outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChange:
    """One change of the global batch.

    Attributes:
        step: newest step known at the decision.
        before: rows per step before.
        after: rows per step asked for.
        lr_factor: factor on the learning rate that goes with it.
        applied_step: first step under it, or None.
        reason: the policy's own words.
        evidence: the figures of its test.
    """

    step: int
    before: int
    after: int
    lr_factor: float
    applied_step: int | None
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """What became of a run's searches.

    Attributes:
        started: searches begun.
        trials: candidates that a search asked to have measured.
        told: objectives that were told back.
        finished: searches that ended with a candidate.
        failed: searches that ended without one.
    """

    started: int = 0
    trials: int = 0
    told: int = 0
    finished: int = 0
    failed: int = 0


def batch_changes(decisions: Sequence[DecisionRow]) -> tuple[BatchChange, ...]:
    """Return the published changes of the global batch, in order."""
    return tuple(
        BatchChange(
            step=row.decided_at_step,
            before=sum(row.before),
            after=sum(row.after),
            lr_factor=row.lr_factor,
            applied_step=row.applied_at_step,
            reason=row.reason,
            evidence=row.evidence,
        )
        for row in decisions
        if row.kind == "change_global_batch" and row.version is not None
    )


def search_outcome(entries: Sequence[Entry]) -> SearchOutcome:
    """Count what a journal says of searches."""
    commands = [command for entry in entries for command in entry.commands]
    events = [entry.event for entry in entries]
    return SearchOutcome(
        started=sum(isinstance(command, StartSearch) for command in commands),
        trials=sum(isinstance(event, TrialProposed) for event in events),
        told=sum(isinstance(command, TellTrial) for command in commands),
        finished=sum(isinstance(event, SearchFinished) for event in events),
        failed=sum(isinstance(event, SearchFailed) for event in events),
    )
