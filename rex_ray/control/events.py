"""What can happen to a controller. A closed union; drivers make these, nothing else does.

That an allocation was applied is no event of its own: the controller infers it from the first complete step that
bears the allocation's version, so it can be neither lost nor forged.

Times are integer microseconds (the assembler quantises before the controller sees anything), so that a replay
compares exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rex_ray.core.observations import StepObserved, TelemetryGap
from rex_ray.core.types import Allocation, Problem

__all__ = [
    "ORDINARY_INCIDENTS",
    "DrainNoticed",
    "Event",
    "GroupStarted",
    "IncidentReported",
    "MemoryLimited",
    "MetricReported",
    "RunEnded",
    "SaveAsked",
    "ScheduleReported",
    "SearchFailed",
    "SearchFinished",
    "StepObserved",
    "TelemetryGap",
    "Ticked",
    "TrialProposed",
    "WorkerLost",
]


ORDINARY_INCIDENTS: Final = frozenset({"preflight", "save"})
"""Kinds of incident that are told for the record, not because anything went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStarted:
    """A worker group formed (first start, restart or resize); earlier groups are history.

    Attributes:
        generation: the group's identity.
        problem: workers, reference batch and limits.
        step: the next optimizer step, not 0 after a resume.
        allocation: the allocation of the checkpoint that training resumes from, or None.
        memory: what an earlier controller of the run knew (``remembered``), or None; taken by a controller that knows
            nothing yet.
    """

    generation: str
    problem: Problem
    step: int = 0
    allocation: Allocation | None = None
    memory: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialProposed:
    """A search asks to have a candidate measured."""

    search_id: str
    trial: int
    local_batch_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFinished:
    """A search ended with its best candidate."""

    search_id: str
    local_batch_sizes: tuple[int, ...]
    objective: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFailed:
    """A search died, or ran out of time; the exact split stands."""

    search_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A rank of the running group died; the driver will start a new group or end the run."""

    generation: str
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNoticed:
    """A node with workers on it is about to be taken away; noticed again when its time has nearly come.

    Attributes:
        generation: the group that runs there.
        ranks: its ranks on that node.
        left_us: time until it goes; None where nobody said.
        reason: who takes it away, as far as is known.
    """

    generation: str
    ranks: tuple[int, ...]
    left_us: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAsked:
    """Somebody outside of the loop wants the group to save."""

    generation: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time passed. The controller knows no other clock. ``now_us`` counts from the driver's start, never back."""

    now_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricReported:
    """The user's loop reported metrics (kept in the journal for the report; no decision depends on them)."""

    generation: str
    epoch: int
    step: int
    elapsed_us: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleReported:
    """Rank 0 said how far it is to go, and at what rate (for whoever looks on; no decision depends on it).

    Attributes:
        epoch: the epoch that the loop is in.
        step: the next optimizer step.
        cursor: rows of this epoch that all ranks together have consumed before it.
        num_epochs: epochs that the loop asked for, or None where it did not say.
        learning_rate: the optimizer's own, without the global batch's factor, or None where it cannot be read.
    """

    generation: str
    epoch: int
    step: int
    cursor: int
    num_epochs: int | None = None
    learning_rate: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentReported:
    """A rank dealt with something that went wrong (kept in the journal for the report; no decision depends on it).

    Attributes:
        kind: a short name such as ``"non_finite"`` or ``"out_of_memory"``.
        message: what happened and what was done, in one sentence.
    """

    generation: str
    rank: int
    step: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimited:
    """A worker ran out of memory, which ends its group: later groups give its kind of device fewer rows.

    True whatever group it comes from, and however late.

    Attributes:
        device: the worker's kind of device.
        num_rows: its share of the step.
    """

    generation: str
    rank: int
    step: int
    device: str
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """Training ended; ``reason`` is ``"finished"``, ``"failed: ..."`` or ``"interrupted"``."""

    reason: str


Event: TypeAlias = (
    GroupStarted
    | StepObserved
    | TrialProposed
    | SearchFinished
    | SearchFailed
    | WorkerLost
    | DrainNoticed
    | SaveAsked
    | TelemetryGap
    | Ticked
    | MetricReported
    | ScheduleReported
    | IncidentReported
    | MemoryLimited
    | RunEnded
)
