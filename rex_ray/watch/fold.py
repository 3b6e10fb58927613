"""The fold: a run's events and notes, one after the other, and what people see of it.

It reads nothing but journal entries, so that a run that is over looks as it did while it went on.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Final

from rex_ray.control.events import (
    ORDINARY_INCIDENTS,
    DrainNoticed,
    GroupStarted,
    IncidentReported,
    MemoryLimited,
    MetricReported,
    RunEnded,
    SaveAsked,
    ScheduleReported,
    SearchFailed,
    SearchFinished,
    StepObserved,
    TelemetryGap,
    Ticked,
    WorkerLost,
)
from rex_ray.control.journal import Entry
from rex_ray.control.notes import Applied, Decided, Measured, Note, Refused, Withdrawn
from rex_ray.control.reading import Earlier
from rex_ray.core.noise_scale import read_moments
from rex_ray.core.types import StepFlag, WorkerSpec
from rex_ray.policies.growth.blocks import NoiseBlocks
from rex_ray.watch import words
from rex_ray.watch.pace import Pace
from rex_ray.watch.plans import Plan, Plans
from rex_ray.watch.seams import Ended, Happened, Progress, Reported, Sight, WorkerView
from rex_ray.watch.slowness import Slowness

__all__ = ["RunFold", "sights_of"]

_NOISE_WINDOW: Final = 1


class RunFold:
    """Takes journal entries in order. Its memory is bounded, whatever the run's length."""

    def __init__(self) -> None:
        self._now_us = 0
        self._step = -1
        self._epoch = -1
        self._generation: str | None = None
        self._workers: tuple[WorkerSpec, ...] = ()
        self._shares: tuple[int, ...] = ()
        self._lr_factor = 1.0
        self._plans = Plans()
        self._slowness = Slowness(())
        self._pace = Pace(0, None)
        self._noise = NoiseBlocks()
        self._num_epochs: int | None = None
        self._learning_rate: float | None = None
        self._num_changes = 0
        self._num_lost = 0
        self._num_incidents = 0
        self._gap: str | None = None

    def take(self, entry: Entry) -> tuple[Sight, ...]:
        """Take in one entry; return what is worth a line, or a tracker's point."""
        event = entry.event
        if isinstance(event, StepObserved):
            self._take_step(event)
            return self._about_notes(entry.notes) if entry.notes else ()
        if isinstance(event, Ticked):
            self._now_us = event.now_us
            self._pace.tick(event.now_us)
            return self._about_notes(entry.notes) if entry.notes else ()
        return (*self._about_event(entry), *self._about_notes(entry.notes))

    def take_earlier(self, earlier: Earlier) -> tuple[Sight, ...]:
        """Take in what was said about an event of long ago, which may be a step that was not read again.

        What it shows is what it showed then, but for the step and the time, which may be those of an event before.
        """
        if earlier.event is None:
            return self._about_notes(earlier.notes)
        return self.take(Entry(number=earlier.number, event=earlier.event, notes=earlier.notes))

    def progress(self) -> Progress:
        """Return where the run stands after the newest entry."""
        own_s = self._slowness.own_s
        slowest_rank, slowest_why = self._slowness.slowest(own_s)
        views = tuple(
            WorkerView(
                rank=worker.rank, device=worker.device, node=worker.node, local_batch_size=rows, own_s=float(time_s)
            )
            for worker, rows, time_s in zip(self._workers, self._shares, own_s.tolist(), strict=False)
        )
        step_us = self._pace.step_us
        mean_s = float(own_s.mean()) if len(own_s) else math.nan
        return Progress(
            elapsed_s=self._now_us / 1e6,
            epoch=self._epoch,
            step=self._step,
            rows_per_s=self._pace.rows_per_s,
            step_s=statistics.median(step_us) / 1e6 if step_us else math.nan,
            global_batch_size=sum(self._shares),
            lr_factor=self._lr_factor,
            workers=views,
            slowest_rank=slowest_rank,
            slowest_why=slowest_why,
            imbalance=float(own_s.max()) / mean_s - 1.0 if mean_s > 0 else math.nan,
            num_epochs=self._num_epochs,
            learning_rate=self._learning_rate,
            noise_scale=self._noise.noise_scale,
            left_s=self._pace.left_s(self._num_epochs) if self._generation is not None else None,
            num_changes=self._num_changes,
            num_lost=self._num_lost,
            num_incidents=self._num_incidents,
            gap=self._gap,
        )

    # --- inside

    def _take_step(self, step: StepObserved) -> None:
        if step.generation != self._generation or len(step.num_rows) != len(self._workers):
            return
        self._step, self._epoch, self._gap = step.step, step.epoch, None
        self._pace.step(step)
        self._slowness.take(step)
        if step.flags & StepFlag.OTHER_PARAMETERS:
            self._noise = self._noise.afresh()
        if step.global_sq_norm is not None and not step.flags & (StepFlag.PARTIAL | StepFlag.SKIPPED):
            self._noise, _ = self._noise.take(read_moments(step), _NOISE_WINDOW)

    def _about_event(self, entry: Entry) -> Iterator[Sight]:
        match entry.event:
            case GroupStarted() as event if event.generation != self._generation:
                first = next((note for note in entry.notes if isinstance(note, Decided)), None)
                if first is not None:  # else it is one whose place was taken
                    self._begin(event, first)
                    yield self._happened("group", words.about_group(event, first))
            case WorkerLost() | DrainNoticed() | SaveAsked() | ScheduleReported() as event:
                if event.generation == self._generation:
                    yield from self._about_group_event(event)
            case MetricReported() as event:
                yield Reported(elapsed_s=self._now_us / 1e6, epoch=event.epoch, step=event.step, metrics=event.metrics)
            case IncidentReported() as event:
                yield self._incident(event)
            case MemoryLimited() as event:
                yield self._happened("incident", words.about_memory(event), rank=event.rank)
            case SearchFinished() | SearchFailed() as event:
                yield self._happened("noted", words.about_search_end(event))
            case TelemetryGap() as event:
                self._gap = f"no complete step since step {event.last_step}"
            case RunEnded() as event:
                self._generation = None
                yield Ended(elapsed_s=self._now_us / 1e6, reason=event.reason)

    def _about_group_event(self, event: WorkerLost | DrainNoticed | SaveAsked | ScheduleReported) -> Iterator[Sight]:
        match event:
            case ScheduleReported():
                self._num_epochs, self._learning_rate = event.num_epochs, event.learning_rate
                self._pace.schedule(event)
            case WorkerLost():
                self._num_lost += 1
                yield self._happened("lost", words.about_loss(event, self._workers), rank=event.rank)
            case DrainNoticed():
                yield self._happened("incident", words.about_drain(event))
            case SaveAsked():
                yield self._happened("noted", f"a save is asked for: {event.reason}")

    def _about_notes(self, notes: Iterable[Note]) -> tuple[Sight, ...]:
        return tuple(sight for note in notes if (sight := self._about_note(note)) is not None)

    def _about_note(self, note: Note) -> Happened | None:
        match note:
            case Decided(kind="first"):
                return None  # told with its group
            case Decided():
                self._plan(note)
                text = words.about_decision(note, self._shares, self._workers, self._lr_factor)
                gain = {} if note.predicted_gain is None else {"predicted_gain": note.predicted_gain}
                return self._happened("decided", text, **{**note.evidence, **gain})
            case Refused():
                return self._happened("decided", words.about_refused(note))
            case Applied():
                return self._applied(note)
            case Measured():
                plan = self._plans.get(note.version)
                decided_step, kind = (None, None) if plan is None else (plan.decided_step, plan.kind)
                text = words.about_measured(note, decided_step, kind)
                return self._happened("measured", text, gain=note.gain)
            case Withdrawn():
                plan = Plan(decided_step=note.step, kind="withdraw", lr_factor=self._lr_factor)
                self._plans.remember(note.by_version, plan)
                return self._happened("withdrawn", words.about_withdrawn(note))
            case _:
                return None

    def _begin(self, event: GroupStarted, first: Decided) -> None:
        self._generation = event.generation
        self._workers = event.problem.workers
        self._step, self._gap = event.step - 1, None
        self._pace = Pace(event.step, event.problem.dataset_size)
        self._slowness = Slowness(self._workers)
        self._plans = Plans()
        self._plan(first)
        if first.proposal is not None:
            self._shares, self._lr_factor = first.proposal.local_batch_sizes, first.proposal.lr_factor
            self._slowness.run(self._shares)

    def _plan(self, note: Decided) -> None:
        if note.version is not None and note.proposal is not None:
            plan = Plan(decided_step=note.step, kind=note.kind, lr_factor=note.proposal.lr_factor)
            self._plans.remember(note.version, plan)

    def _applied(self, note: Applied) -> Happened | None:
        plan = self._plans.get(note.version)
        if plan is not None and plan.kind == "first":
            return None
        self._num_changes += 1
        if plan is not None:
            self._lr_factor = plan.lr_factor
        self._shares = note.local_batch_sizes
        self._slowness.run(self._shares)
        text = words.about_applied(note, self._workers)
        return self._happened("applied", text, global_batch_size=sum(note.local_batch_sizes))

    def _incident(self, event: IncidentReported) -> Happened:
        is_ordinary = event.kind in ORDINARY_INCIDENTS
        self._num_incidents += not is_ordinary
        text = f"rank {event.rank} at step {event.step}: {event.message}"
        return self._happened("noted" if is_ordinary else "incident", text, rank=event.rank)

    def _happened(self, kind: str, text: str, /, **figures: float) -> Happened:
        return Happened(elapsed_s=self._now_us / 1e6, step=self._step, kind=kind, text=text, figures=figures)


def sights_of(entries: Iterable[Entry], every_s: float = 1.0) -> Iterator[Sight]:
    """Yield what a journal's entries show, in order, with where the run stood every so often by its own clock.

    Args:
        entries: of a run, from its first event.
        every_s: shortest time between two ``Progress``; the last entry has one in any case.
    """
    fold = RunFold()
    due_us = 0
    for entry in entries:
        yield from fold.take(entry)
        if isinstance(entry.event, Ticked) and entry.event.now_us >= due_us:
            due_us = entry.event.now_us + round(every_s * 1e6)
            yield fold.progress()
    yield fold.progress()
