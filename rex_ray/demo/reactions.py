"""How a run answered a scenario's script: its decisions against what is known to have happened. Pure.

A decision counts from the newest step that the controller knew of; how long the switch then took to reach the workers
(telemetry, boundary, what the loaders had drawn ahead) stands beside it as its lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rex_ray.demo.script import EventKind, ScriptedEvent
from rex_ray.demo.truth import Truth
from rex_ray.report.reading.schema import DecisionRow

__all__ = ["EventOutcome", "false_reallocations", "first_reaction_steps", "judge_events", "switches"]

WATCH_STEPS = 40
"""Steps after an event's end whose switches still count as answers to it, unless another event begins."""

NEAR_OPTIMUM = 1.10
"""Shares are back once their exact step time is within this factor of the optimum's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOutcome:
    """What a run made of one event.

    Attributes:
        kind: see ``ScriptedEvent.kind``.
        rank: who was slow; None: everybody.
        device: its kind of device, ``""`` for everybody.
        factor: by how much.
        onset_step: first slow step.
        end_step: first step that was normal again for good.
        moves: switches decided from the onset until the next event, or ``WATCH_STEPS`` after the end.
        decision_step: newest step known when rows were first taken from the slow worker, or None.
        reaction_steps: that minus ``onset_step``.
        applied_step: first step under those shares.
        lag_steps: the switch's own, from decision to that step.
        recovery_decision_step: newest step known at the first switch after the end to shares that are near the
            optimum again; None without one, also where there was nothing to take back.
        recovery_steps: that minus ``end_step``.
    """

    kind: EventKind
    rank: int | None
    device: str
    factor: float
    onset_step: int
    end_step: int
    moves: int
    decision_step: int | None = None
    reaction_steps: int | None = None
    applied_step: int | None = None
    lag_steps: int | None = None
    recovery_decision_step: int | None = None
    recovery_steps: int | None = None


def switches(decisions: Sequence[DecisionRow]) -> list[DecisionRow]:
    """Return the changes of shares that were published, without the trials of a search: those are to be taken back."""
    return [row for row in decisions if row.kind == "reallocate" and row.version is not None]


def false_reallocations(decisions: Sequence[DecisionRow], truth: Truth) -> int:
    """Count the switches that the truth does not justify.

    False is a switch whose shares would not make the step shorter than those in use: by the exact times, under the
    script's slowdowns at the newest step that was known. So the answer to an event is none, a move that only noise
    asked for is one, and so is a move away from an optimum that it cannot improve on.
    """
    count = 0
    for row in switches(decisions):
        slowdowns = truth.slowdowns(max(row.decided_at_step, 0))
        count += truth.step_s(row.after, slowdowns) >= truth.step_s(row.before, slowdowns)
    return count


def judge_events(
    script: Sequence[ScriptedEvent], decisions: Sequence[DecisionRow], truth: Truth, devices: Sequence[str]
) -> tuple[EventOutcome, ...]:
    """Return what became of each event of the script, in its order."""
    made = switches(decisions)
    outcomes = []
    for index, event in enumerate(script):
        later = [other.onset_step for other in script[index + 1 :]]
        until = min([event.end_step + WATCH_STEPS, *later])
        outcomes.append(
            _judge(event, [row for row in made if event.onset_step <= row.decided_at_step < until], truth, devices)
        )
    return tuple(outcomes)


def first_reaction_steps(outcomes: Sequence[EventOutcome]) -> int | None:
    """Return the slowest first reaction to a lasting slowdown of one worker; None without such, or if one had none."""
    reactions = [outcome.reaction_steps for outcome in outcomes if outcome.kind == "slowdown"]
    known = [steps for steps in reactions if steps is not None]
    return max(known) if known and len(known) == len(reactions) else None


def _judge(event: ScriptedEvent, answers: Sequence[DecisionRow], truth: Truth, devices: Sequence[str]) -> EventOutcome:
    rank, end = event.rank, event.end_step
    first = back = None
    if rank is not None:
        first = next((x for x in answers if x.decided_at_step < end and x.after[rank] < x.before[rank]), None)
    if first is not None:
        back = next((x for x in answers if x.decided_at_step >= end and _is_near(x.after, truth)), None)
    return EventOutcome(
        kind=event.kind,
        rank=rank,
        device="" if rank is None else devices[rank],
        factor=event.factor,
        onset_step=event.onset_step,
        end_step=end,
        moves=len(answers),
        decision_step=first.decided_at_step if first else None,
        reaction_steps=first.decided_at_step - event.onset_step if first else None,
        applied_step=first.applied_at_step if first else None,
        lag_steps=first.lag_steps if first else None,
        recovery_decision_step=back.decided_at_step if back else None,
        recovery_steps=back.decided_at_step - end if back else None,
    )


def _is_near(rows: Sequence[int], truth: Truth) -> bool:
    return truth.step_s(rows) <= NEAR_OPTIMUM * truth.best_step_s(sum(rows))
