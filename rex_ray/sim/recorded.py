"""The engine fed with a recording instead of timelines: what would this controller have decided in that run?

The step times are the recording's; publishing and applying are done here. If the controller decides as the recorded
one did, its allocations carry the recorded versions and shares, and each switch finds what it needs. Where it does
not, the first difference is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rex_ray.control.assembly import StepAssembler
from rex_ray.control.commands import ApplyAllocation, Command
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, GroupStarted
from rex_ray.control.notes import Decided, Note
from rex_ray.control.replay import find_difference
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Allocation, StepRecord

__all__ = ["RecordedRun", "compare_decisions", "feed_recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What a controller did with a recorded run.

    Attributes:
        notes: everything that it said, in order.
        commands: everything that it commanded, in order.
        differences: steps that ran under shares which this controller had not published, in words.
    """

    notes: tuple[Note, ...]
    commands: tuple[Command, ...]
    differences: tuple[str, ...]

    @property
    def decisions(self) -> tuple[Decided, ...]:
        """Its decisions, in order."""
        return tuple(note for note in self.notes if isinstance(note, Decided))


def feed_recorded(controller: Controller, events: Iterable[Event]) -> RecordedRun:
    """Drive a fresh controller with a recorded run's events, its complete steps taken apart and assembled anew.

    Args:
        controller: a fresh one with the recorded run's policy, seed and mode (``control.replay.controller_for``).
        events: the recorded run's events in order (``Journal.events``, ``SimulatedRun.events``).
    """
    group: _RecordedGroup | None = None
    commands: list[Command] = []
    differences: list[str] = []
    for event in events:
        if isinstance(event, GroupStarted) and (group is None or group.generation != event.generation):
            group = _RecordedGroup(event)
        told: list[Command] = []
        if isinstance(event, StepObserved) and group is not None and event.generation == group.generation:
            for step in group.run_again(event, differences):
                told.extend(controller.handle(step))
        else:
            told.extend(controller.handle(event))
        if group is not None:
            group.publish(told)
        commands.extend(told)
    return RecordedRun(notes=controller.take_notes(), commands=tuple(commands), differences=tuple(differences))


def compare_decisions(recorded: Sequence[Note], told: Sequence[Note]) -> str | None:
    """Return the first difference between two runs' decisions (order, shares, reasons, figures), or None."""
    old, new = ([note for note in notes if isinstance(note, Decided)] for notes in (recorded, told))
    if len(old) != len(new):
        return f"{len(old)} decisions were recorded, {len(new)} were made"
    return find_difference(CODEC.encode(tuple(old)), CODEC.encode(tuple(new)), "decisions")


class _RecordedGroup:
    """One recorded worker group, running under what the controller at hand publishes."""

    def __init__(self, event: GroupStarted) -> None:
        self.generation = event.generation
        # A recorded step is complete, so one that is missing was dropped and is not waited for.
        self._assembler = StepAssembler(
            event.generation, event.problem.num_workers, first_step=event.step, max_lag_steps=0
        )
        self._published: dict[int, Allocation] = {}

    def publish(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, ApplyAllocation) and command.generation == self.generation:
                self._published[command.allocation.version] = command.allocation
                self._assembler.publish(command.allocation.version)

    def run_again(self, step: StepObserved, differences: list[str]) -> list[StepObserved]:
        """Run a recorded step under the allocation of the recorded version, as this controller published it."""
        allocation = self._published.get(step.allocation_version)
        rows = tuple(int(count) for count in step.num_rows)
        if allocation is None:
            differences.append(f"step {step.step} ran under version {step.allocation_version}, which was not published")
        elif rows_per_rank(sum(rows), allocation.local_batch_sizes) != rows:
            differences.append(f"step {step.step} ran with {rows}, published were {allocation.local_batch_sizes}")
        return self._assembler.add(_records(step))


def _records(step: StepObserved) -> list[StepRecord]:
    """Take a complete step apart into what its ranks had sent."""
    return [
        StepRecord(
            generation=step.generation,
            epoch=step.epoch,
            rank=rank,
            step=step.step,
            allocation_version=step.allocation_version,
            num_rows=int(step.num_rows[rank]),
            data_s=int(step.data_us[rank]) / 1e6,
            compute_s=int(step.compute_us[rank]) / 1e6,
            sync_s=int(step.sync_us[rank]) / 1e6,
            step_s=int(step.step_us[rank]) / 1e6,
            weighted_sq_norm=None if step.weighted_sq_norm is None else float(step.weighted_sq_norm[rank]),
            num_norm_steps=step.num_norm_steps,
            num_groups=1 if step.num_groups is None else int(step.num_groups[rank]),
            global_sq_norm=step.global_sq_norm if rank == 0 else None,
            loss=step.loss,
            peak_memory_bytes=_peak(step, rank),
            flags=step.flags,
        )
        for rank in range(len(step.num_rows))
    ]


def _peak(step: StepObserved, rank: int) -> int | None:
    if step.peak_memory_bytes is None or step.peak_memory_bytes[rank] < 0:
        return None
    return int(step.peak_memory_bytes[rank])
