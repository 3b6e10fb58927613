"""From a journal's events and notes to the arrays and rows of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rex_ray.control.commands import Command
from rex_ray.control.events import Event, GroupStarted, MetricReported, RunEnded, StepObserved, WorkerLost
from rex_ray.control.journal import Entry
from rex_ray.control.notes import Applied, Decided, Deferred, Dropped, Found, Measured, Note, Refused, Withdrawn
from rex_ray.core.types import Problem, StepFlag
from rex_ray.report.reading.happenings import Happenings
from rex_ray.report.reading.noise import noise_series
from rex_ray.report.reading.schema import DecisionRow, FindingRow, GroupData, MetricPoint, RunData
from rex_ray.report.reading.searches import SearchLog

__all__ = ["build_run"]


def build_run(name: str, policy: str, settings: Mapping[str, str], entries: Iterable[Entry]) -> RunData:
    """Fold a run's events, each with what the controller made of it, into one value.

    Args:
        name: what to call the run.
        policy: name of its policy.
        settings: what it was asked to do, for display.
        entries: the journal's, in order.
    """
    builder = _Builder()
    for entry in entries:
        builder.take_event(entry.event)
        for command in entry.commands:
            builder.take_command(command)
        for note in entry.notes:
            builder.take_note(note)
    return RunData(
        name=name,
        policy=policy,
        outcome=builder.outcome,
        settings=settings,
        groups=tuple(group.finish() for group in builder.groups if group.steps),
        metrics=tuple(builder.metrics),
        decisions=tuple(builder.decisions),
        findings=tuple(builder.findings),
        searches=builder.searches.rows(),
        events=builder.happenings.rows(),
        noise=noise_series(step for group in builder.groups for step in group.steps),
        notices=(*builder.notices, *builder.drops()),
    )


@dataclass(slots=True)
class _Group:
    generation: str
    problem: Problem
    steps: list[StepObserved] = field(default_factory=list)

    def finish(self) -> GroupData:
        flags = [step.flags for step in self.steps]
        return GroupData(
            generation=self.generation,
            devices=tuple(worker.device for worker in self.problem.workers),
            nodes=tuple(worker.node for worker in self.problem.workers),
            steps=np.array([step.step for step in self.steps], dtype=np.int64),
            versions=np.array([step.allocation_version for step in self.steps], dtype=np.int64),
            num_rows=np.stack([step.num_rows for step in self.steps]),
            own_s=np.stack([step.own_us for step in self.steps]) / 1e6,
            step_s=np.stack([step.step_us for step in self.steps]).mean(axis=1) / 1e6,
            partial=np.array([bool(flag & StepFlag.PARTIAL) for flag in flags]),
            steady=np.array([flag == StepFlag.NONE for flag in flags]),
            problem=self.problem,
        )


@dataclass(slots=True)
class _Builder:
    outcome: str = "unfinished"
    groups: list[_Group] = field(default_factory=list)
    metrics: list[MetricPoint] = field(default_factory=list)
    decisions: list[DecisionRow] = field(default_factory=list)
    findings: list[FindingRow] = field(default_factory=list)
    searches: SearchLog = field(default_factory=SearchLog)
    happenings: Happenings = field(default_factory=Happenings)
    notices: list[str] = field(default_factory=list)
    # Shares that the group is known to run under, and what dropped events of each reason last counted.
    running: tuple[int, ...] = ()
    dropped: dict[str, int] = field(default_factory=dict)

    def take_event(self, event: Event) -> None:
        self.searches.take_event(event, self.last_step)
        self.happenings.take_event(event, self.newest_step)
        match event:
            case GroupStarted():
                if self.groups:
                    self.notices.append(
                        f"step {event.step}: a new group of {event.problem.num_workers} workers started"
                    )
                self.groups.append(_Group(event.generation, event.problem))
                self.running = ()
            case StepObserved() if self.groups and self.groups[-1].generation == event.generation:
                self.groups[-1].steps.append(event)
            case MetricReported():
                elapsed_s = event.elapsed_us / 1e6
                self.metrics.append(
                    MetricPoint(elapsed_s=elapsed_s, epoch=event.epoch, step=event.step, metrics=event.metrics)
                )
            case WorkerLost():
                self.notices.append(f"rank {event.rank} was lost: {event.reason}")
            case RunEnded():
                self.outcome = event.reason
            case _:
                pass

    @property
    def last_step(self) -> int:
        """Newest step of the present group, -1 before its first."""
        return self.groups[-1].steps[-1].step if self.groups and self.groups[-1].steps else -1

    @property
    def newest_step(self) -> int:
        """Newest step of the run, -1 before its first."""
        return next((group.steps[-1].step for group in reversed(self.groups) if group.steps), -1)

    def take_command(self, command: Command) -> None:
        self.searches.take_command(command, self.last_step)

    def take_note(self, note: Note) -> None:
        match note:
            case Decided():
                self._decide(note)
            case Applied():
                self.running = note.local_batch_sizes
                self._amend(note.version, lambda row: replace(row, applied_at_step=note.step, lag_steps=note.lag_steps))
            case Measured():
                self._amend(note.version, lambda row: replace(row, measured_gain=note.gain))
            case Withdrawn():
                waited = f"{note.waited_us / 1e6:.0f} s"
                self.notices.append(f"step {note.step}: version {note.version} withdrawn, not taken up in {waited}")
            case Refused():
                self.notices.append(f"step {note.step}: refused, {note.reason}")
            case Dropped():
                # Noted at the first and at every power of two: the last count is the one to show.
                self.dropped[note.reason] = note.count
            case Found():
                self._find(note)
            case Deferred():
                pass  # it may ask again after the switch, and then stands among the decisions

    def drops(self) -> list[str]:
        """One line per reason for which events were left out."""
        return [f"left out, {reason}: {count} or more" for reason, count in self.dropped.items()]

    def _find(self, note: Found) -> None:
        finding = note.finding
        self.happenings.take_finding(finding, note.step)
        self.findings.append(
            FindingRow(
                part=finding.part,
                step=note.step,
                verdict=finding.verdict,
                count=note.count,
                reason=finding.reason,
                evidence=finding.evidence,
                asks_for=finding.proposal.local_batch_sizes if finding.proposal is not None else (),
                predicted_gain=finding.predicted_gain,
            )
        )

    def _decide(self, note: Decided) -> None:
        self.decisions.append(
            DecisionRow(
                number=len(self.decisions) + 1,
                kind=note.kind,
                decided_at_step=note.step,
                reason=note.reason,
                before=self.running,
                after=note.proposal.local_batch_sizes if note.proposal is not None else (),
                version=note.version,
                predicted_gain=note.predicted_gain,
                lr_factor=note.proposal.lr_factor if note.proposal is not None else 1.0,
                evidence=note.evidence,
            )
        )

    def _amend(self, version: int, amend: Callable[[DecisionRow], DecisionRow]) -> None:
        # Versions rise over the whole run, so one names at most one decision.
        for index, decision in enumerate(self.decisions):
            if decision.version == version:
                self.decisions[index] = amend(decision)
