"""The controller: events in, commands out. It reads no clock, draws no chance and touches no file.

Invariants, each kept by a test in ``tests/control/test_control_controller.py``:

1. *No stale evidence.* A step counts only if it bears the running group's generation and a version that this group
   was given; all others are dropped and counted.
2. *One switch at a time, and never wedged.* While an allocation is on its way no other is decided. It is published
   again every 2 s, and taken back by a new version after 30 s (or 32 steps' time, where steps are long).
3. *All ranks switch at one step.* The workers see to it; the controller takes as proof only a complete step whose
   ranks all bear the new version, which is all that the assembler lets through.
4. *Replay.* State and commands are functions of the policy, the seed and the events, in that order. Versions rise
   strictly over the whole run, also past a restore.
5. *Training never waits for control.* No event asks for an answer, and no fault of a policy's proposal is worth more
   than a note: the group goes on with the allocation that it has.
6. *A decision is a proposal.* The policy learns that one was applied from ``AllocationApplied`` alone, and that comes
   from the group's own steps, never from having decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from rex_ray.control import handlers as do
from rex_ray.control.commands import ApplyAllocation, Command
from rex_ray.control.decisions import publish_command
from rex_ray.control.events import (
    DrainNoticed,
    Event,
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
    TrialProposed,
    WorkerLost,
)
from rex_ray.control.evidence import observe_step
from rex_ray.control.notes import Note
from rex_ray.control.outcome import Handler, Mode, Rules
from rex_ray.control.phases import ControllerState, Ended, Phase, Running, Starting, Switching, Waiting
from rex_ray.core.changed import changed
from rex_ray.core.errors import IllegalEventError
from rex_ray.policies.base import Policy
from rex_ray.policies.bsp import bsp

__all__ = ["TRANSITIONS", "Controller"]

_ALWAYS: dict[type[Event], Handler] = {
    GroupStarted: do.begin_group,
    RunEnded: do.end_run,
    MetricReported: do.note_metric,
    IncidentReported: do.note_metric,
    ScheduleReported: do.note_metric,
    MemoryLimited: do.limit_memory,
    SearchFinished: do.end_search,
    SearchFailed: do.end_search,
    TrialProposed: do.request_trial,
}

TRANSITIONS: Mapping[type[Phase], Mapping[type[Event], Handler]] = {
    Waiting: _ALWAYS
    | {
        Ticked: do.tell_time,
        StepObserved: do.drop_event,
        TelemetryGap: do.drop_event,
        WorkerLost: do.drop_event,
        DrainNoticed: do.drop_event,
        SaveAsked: do.drop_event,
    },
    Starting: _ALWAYS
    | {
        Ticked: do.remind_group,
        StepObserved: observe_step,
        TelemetryGap: do.miss_telemetry,
        WorkerLost: do.lose_worker,
        DrainNoticed: do.request_save,
        SaveAsked: do.request_save,
    },
    Running: _ALWAYS
    | {
        Ticked: do.tell_time,
        StepObserved: observe_step,
        TelemetryGap: do.miss_telemetry,
        WorkerLost: do.lose_worker,
        DrainNoticed: do.request_save,
        SaveAsked: do.request_save,
    },
    Switching: _ALWAYS
    | {
        Ticked: do.remind_group,
        StepObserved: observe_step,
        TelemetryGap: do.miss_telemetry,
        WorkerLost: do.lose_worker,
        DrainNoticed: do.request_save,
        SaveAsked: do.request_save,
    },
    Ended: {},
}
"""Which phase admits which event, and what it does there. What is not in the table is illegal."""

_HISTORY_EVENTS = 16


class Controller:
    """Drives one policy through one run.

    Args:
        policy: judges the observations; with mode ``"off"`` it is never asked.
        seed: seeds every random choice, event by event.
        mode: ``"auto"``, ``"advise"`` (decide and note, publish nothing but the first allocation) or ``"off"``.
    """

    def __init__(self, policy: Policy[Any], *, seed: int = 0, mode: Mode = "auto") -> None:
        self._rules = Rules(policy=bsp() if mode == "off" else policy, seed=seed, mode=mode)
        self._state = ControllerState(phase=Waiting(reason="no group has formed"))
        self._notes: list[Note] = []
        self._history: deque[Event] = deque(maxlen=_HISTORY_EVENTS)

    @property
    def policy(self) -> Policy[Any]:
        """Who judges: the policy it was made with, or that of equal shares where it decides nothing."""
        return self._rules.policy

    @property
    def state(self) -> ControllerState:
        """The controller's whole memory, a value: this is its snapshot."""
        return self._state

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self._state.phase

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take one event and return what the driver should do, in this order.

        Raises:
            IllegalEventError: the present phase does not admit the event; nothing has changed.
            InfeasibleError: no first allocation fits the new group's bounds; nothing has changed.
        """
        try:
            outcome = _handler(self._state.phase, event)(self._rules, self._state, event)
        except IllegalEventError as error:
            raise IllegalEventError(error.message, tuple(_brief(past) for past in self._history)) from None
        self._state = changed(outcome.state, num_events=self._state.num_events + 1)
        self._notes.extend(outcome.notes)
        self._history.append(event)
        return outcome.commands

    def take_notes(self) -> tuple[Note, ...]:
        """Return the notes made since the last call."""
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def restore(self, state: ControllerState) -> None:
        """Go on from a snapshot of a controller with the same policy, seed and mode."""
        self._state = state
        self._notes.clear()
        self._history.clear()

    def unacknowledged(self) -> tuple[ApplyAllocation, ...]:
        """The allocation that no step bears yet, if any: to publish again after a restore, which is harmless."""
        match self._state.phase:
            case Starting(group=group, pending=pending) | Switching(group=group, pending=pending):
                return (publish_command(group, pending),)
            case Running(group=group, allocation=allocation):
                # A restored driver has lost what it had published, and a late joiner may still ask for it.
                return (ApplyAllocation(generation=group.generation, allocation=allocation, reason="restored"),)
            case _:
                return ()


def _handler(phase: Phase, event: Event) -> Handler:
    handler = TRANSITIONS[type(phase)].get(type(event))
    if handler is None:
        raise IllegalEventError(f"{type(event).__name__} is illegal in phase {type(phase).__name__}")
    return handler


def _brief(event: Event) -> str:
    """One line about an event for an error's history."""
    if isinstance(event, StepObserved):
        return f"StepObserved(step={event.step}, version={event.allocation_version}, flags={event.flags!r})"
    text = repr(event)
    return text if len(text) <= 200 else text[:197] + "..."
