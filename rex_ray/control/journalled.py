"""A controller with its journal and its assembler: the order "journal, handle, write, emit" kept in one place.

A driver gives events and records in, appends the chunks that come out, in order, and only then emits the commands::

    journalled, chunks = JournalledController.begin(policy="rex", seed=0)     # or JournalledController.resume(files)
    append(chunks)
    turn = journalled.handle(Ticked(now_us=...))                              # or journalled.add(records)
    append(turn.chunks)
    emit(turn.commands)

At the end, or whenever the journal should be up to date on disk: ``append(journalled.flush())``.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy

from rex_ray.control.assembly import StepAssembler, TelemetryWatch
from rex_ray.control.commands import ApplyAllocation, Command
from rex_ray.control.controller import Controller
from rex_ray.control.events import Event, GroupStarted, StepObserved, Ticked
from rex_ray.control.journal import Chunk, Entry, Header, JournalWriter
from rex_ray.control.notes import Note
from rex_ray.control.outcome import Mode
from rex_ray.control.phases import Ended, Running, Starting, Switching, Waiting
from rex_ray.control.reading import Earlier, read_recent
from rex_ray.control.replay import controller_for, restore
from rex_ray.control.step_files import newest_steps_file
from rex_ray.core.types import StepRecord
from rex_ray.policies.base import Policy

__all__ = ["JournalledController", "Turn", "library_versions"]

_FLUSH_AFTER_US = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a driver does next: append ``chunks``, then emit ``commands``, then show ``entries`` to whoever looks on.

    Attributes:
        chunks: to append to the journal.
        commands: to carry out.
        entries: what was handled, with what it led to; of a driver that goes on from a journal, what was since the
            newest snapshot.
        earlier: of such a driver, what was before.
    """

    chunks: tuple[Chunk, ...] = ()
    commands: tuple[Command, ...] = ()
    entries: tuple[Entry, ...] = ()
    earlier: tuple[Earlier, ...] = ()

    @property
    def notes(self) -> tuple[Note, ...]:
        """What the controller said, in order."""
        return tuple(note for entry in self.entries for note in entry.notes)


def library_versions() -> dict[str, str]:
    """Return what a figure's last bits may depend on."""
    return {
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


class JournalledController:
    """Drives a controller and keeps its journal. Made by ``begin`` or ``resume``."""

    def __init__(self, controller: Controller, writer: JournalWriter) -> None:
        self._controller = controller
        self._writer = writer
        self._assembler = _assembler_for(controller)
        self._watch = TelemetryWatch()
        self._retired: Counter[str] = Counter()
        self._flushed_us = controller.state.now_us

    @classmethod
    def begin(
        cls,
        *,
        policy: str,
        policy_options: Mapping[str, Any] | None = None,
        seed: int = 0,
        mode: Mode = "auto",
        environment: Mapping[str, str] | None = None,
        custom_policy: Policy[Any] | None = None,
    ) -> tuple[JournalledController, tuple[Chunk, ...]]:
        """Begin a run and its journal.

        Args:
            policy: name of the policy, written into the header.
            policy_options: its options.
            seed: seed of every random choice.
            mode: see ``Controller``.
            environment: what the driver knows of the machine (CPU, ...), beside the libraries' versions.
            custom_policy: the policy itself where it is not a registered one.

        Raises:
            ConfigError: no such policy or option.
        """
        header = Header(
            seed=seed,
            mode=mode,
            policy=policy,
            policy_options=dict(policy_options or {}),
            environment=library_versions() | dict(environment or {}),
        )
        controller = controller_for(header, custom_policy)
        journalled = cls(controller, JournalWriter(header=header, state=controller.state))
        return journalled, journalled.flush()

    @classmethod
    def resume(
        cls,
        files: Mapping[str, bytes],
        *,
        environment: Mapping[str, str] | None = None,
        custom_policy: Policy[Any] | None = None,
    ) -> tuple[JournalledController, Turn]:
        """Go on from the journal that an earlier driver left, at the very event that it last wrote.

        The turn's commands publish what was not seen applied once more. The clock goes on as well: add the time
        since the restart to ``now_us``. What is read, and how long it takes, does not grow with the run's steps.

        Args:
            files: the journal's files by name; old ones are not asked for.
            environment: see ``begin``.
            custom_policy: see ``begin``.

        Raises:
            CodecError: the files are no journal, or one that does not hold together.
        """
        recent = read_recent(files)
        controller = restore(recent, custom_policy, must_agree=True)
        header = replace(
            recent.header,
            environment=library_versions() | dict(environment or {}),
            first_event=controller.state.num_events,
            driver=len(recent.headers),
        )
        writer = JournalWriter(header=header, state=controller.state, num_files=newest_steps_file(files))
        journalled = cls(controller, writer)
        chunks, commands = journalled.flush(), controller.unacknowledged()
        return journalled, Turn(chunks=chunks, commands=commands, entries=recent.entries, earlier=recent.earlier)

    @property
    def controller(self) -> Controller:
        """The controller itself, for looking at."""
        return self._controller

    @property
    def now_us(self) -> int:
        """Time of the last tick."""
        return self._controller.state.now_us

    @property
    def dropped(self) -> dict[str, int]:
        """What was turned away so far, by reason: by the present group's assembler and by the controller."""
        counts = Counter(self._controller.state.dropped) + self._retired
        return dict(counts + Counter(self._assembler.dropped if self._assembler else {}))

    def add(self, records: Iterable[StepRecord]) -> Turn:
        """Take records of single ranks; every step that they complete is handled."""
        if self._assembler is None:
            self._retired["record without a group"] += sum(1 for _ in records)
            return Turn()
        return self._handle_all(self._assembler.add(records))

    def handle(self, event: Event) -> Turn:
        """Take one event. A tick also asks whether telemetry has been missing for too long.

        Raises:
            IllegalEventError: see ``Controller.handle``; nothing is journalled.
            InfeasibleError: see ``Controller.handle``; nothing is journalled.
        """
        turn = self._handle_all([event])
        if isinstance(event, Ticked) and self._assembler is not None:
            last_step = self._controller.state.last_step
            gap = self._watch.look(event.now_us, self._assembler.generation, last_step)
            if gap is not None:
                after = self._handle_all([gap])
                turn = Turn(
                    chunks=turn.chunks + after.chunks,
                    commands=turn.commands + after.commands,
                    entries=turn.entries + after.entries,
                )
        return turn

    def flush(self) -> tuple[Chunk, ...]:
        """Return everything that the journal still holds back."""
        self._flushed_us = self.now_us
        return self._writer.flush(self._controller.state)

    def _handle_all(self, events: Iterable[Event]) -> Turn:
        commands: list[Command] = []
        entries: list[Entry] = []
        urgent = False
        for event in events:
            number = self._controller.state.num_events
            told = self._controller.handle(event)
            said = self._controller.take_notes()
            entry = Entry(number=number, event=event, commands=told, notes=said)
            self._writer.record(entry)
            commands.extend(told)
            entries.append(entry)
            urgent = urgent or self._is_urgent(event, told)
            self._keep_assembler(event, told)
        return Turn(chunks=self.flush() if urgent else (), commands=tuple(commands), entries=tuple(entries))

    def _is_urgent(self, event: Event, commands: tuple[Command, ...]) -> bool:
        """Steps and ticks may wait for company, all else is written at once; before commands, everything is."""
        if commands or self._writer.is_full:
            return True
        if isinstance(event, Ticked):
            return event.now_us - self._flushed_us >= _FLUSH_AFTER_US
        return not isinstance(event, StepObserved)

    def _keep_assembler(self, event: Event, commands: tuple[Command, ...]) -> None:
        """A group has its own assembler, which knows every version that the group was given."""
        phase = self._controller.phase
        if isinstance(phase, Waiting | Ended):
            self._retire_assembler()
        elif isinstance(event, GroupStarted) and (
            self._assembler is None or self._assembler.generation != event.generation
        ):
            self._retire_assembler()
            self._assembler = StepAssembler(event.generation, event.problem.num_workers, first_step=event.step)
        if self._assembler is not None:
            for command in commands:
                if isinstance(command, ApplyAllocation):
                    self._assembler.publish(command.allocation.version)

    def _retire_assembler(self) -> None:
        if self._assembler is not None:
            self._retired.update(self._assembler.dropped)
            self._assembler = None


def _assembler_for(controller: Controller) -> StepAssembler | None:
    """Return the assembler of a restored controller's group: it expects the next step and knows its versions."""
    state = controller.state
    if not isinstance(state.phase, Starting | Running | Switching):
        return None
    group = state.phase.group
    assembler = StepAssembler(group.generation, group.problem.num_workers, first_step=state.last_step + 1)
    assembler.publish(group.first_version)
    assembler.publish(state.next_version - 1)
    return assembler
