"""The worker's end of the control plane: what a session needs from whoever decides, and nothing more.

Training never waits for control. Only ``join`` may block, once, within a limit, before the first step; ``send`` and
``latest`` return at once whatever the other side does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.types import Allocation, OptimizerFamily, StepRecord, WorkerSpec

__all__ = [
    "ControlLink",
    "GroupInfo",
    "IncidentRecord",
    "KindLimit",
    "MetricRecord",
    "NullLink",
    "Record",
    "SaveRequest",
    "ScheduleRecord",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What rank 0 tells the controller about the group that just formed.

    Attributes:
        generation: identity of the group (a uuid that rank 0 drew).
        workers: every member, in rank order.
        dataset_size: rows of the training set; None where ranks bring streams that nobody has counted.
        global_batch_size: reference batch, after clamping to a small data set where that was asked for.
        step: next optimizer step (not 0 after a resume).
        allocation: allocation of the checkpoint that training resumes from, or None.
        optimizer: what the gradient is given to, and so how its norms are measured.
        local_batch_multiple: what every share is a multiple of.
    """

    generation: str
    workers: tuple[WorkerSpec, ...]
    dataset_size: int | None
    global_batch_size: int
    step: int
    allocation: Allocation | None
    optimizer: OptimizerFamily = "sgd"
    local_batch_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """Metrics that the user's loop reported; sent by rank 0 only."""

    generation: str
    epoch: int
    step: int
    elapsed_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """How far it is to go, and at what rate; sent by rank 0 only. See ``ScheduleReported`` for its fields."""

    generation: str
    epoch: int
    step: int
    cursor: int
    num_epochs: int | None
    learning_rate: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KindLimit:
    """A kind of device ran out of memory at a share of ``num_rows`` rows."""

    device: str
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentRecord:
    """Something that went wrong on one rank and was dealt with, for the journal and the report.

    Attributes:
        generation: the group.
        rank: where it happened.
        step: optimizer step in hand.
        kind: one of a few short names, e.g. ``"non_finite"``, ``"out_of_memory"``, ``"storage"``.
        message: what happened and what was done, in one sentence.
        limits: what ran out of memory and ended the group, for later groups to keep off; None for all else.
    """

    generation: str
    rank: int
    step: int
    kind: str
    message: str
    limits: KindLimit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Somebody outside of the loop asks the group to save at its next control boundary.

    Attributes:
        number: rises with every request of a run; one that is not higher than the last is that one again.
        reason: why, in a few words.
    """

    number: int
    reason: str


Record: TypeAlias = StepRecord | MetricRecord | IncidentRecord | ScheduleRecord


class ControlLink(Protocol):
    """One rank's connection to the controller."""

    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        """Announce the group and receive its first allocation. Called by rank 0 only.

        Raises:
            LinkError: no answer within ``timeout_s``.
        """
        ...

    def started(self, generation: str) -> None:
        """Called on every rank once the group's generation is agreed, before the first ``send``."""
        ...

    def send(self, records: Sequence[Record]) -> None:
        """Take records along; never blocks, may drop when flooded."""
        ...

    def latest(self) -> Allocation | None:
        """Return the newest allocation that the controller published for this generation; never blocks.

        Only rank 0 is asked.
        """
        ...

    def save_request(self) -> SaveRequest | None:
        """Return the newest request for a save of this generation; never blocks.

        Only rank 0 is asked.
        """
        ...

    def row_limits(self) -> Mapping[str, int]:
        """Return the most rows that kinds of device are given since they ran out of memory; never blocks.

        Empty on all ranks but 0, and before the group joined.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Flush what can be flushed within the limit and stop every thread."""
        ...


class NullLink:
    """Nobody decides: equal shares for ever. The session without a controller, also the fallback's behaviour."""

    def join(self, group: GroupInfo, timeout_s: float) -> Allocation:
        """Return the resumed allocation if it fits the group, else its global batch in equal shares."""
        del timeout_s
        first = group.allocation or Allocation(version=0, local_batch_sizes=(group.global_batch_size,))
        num_workers, multiple = len(group.workers), group.local_batch_multiple
        is_whole = not any(share % multiple for share in first.local_batch_sizes)
        if len(first.local_batch_sizes) == num_workers and is_whole:
            return first
        num_units = max(first.global_batch_size // multiple, 1)
        shares = tuple(units * multiple for units in rows_per_rank(num_units, [1] * num_workers))
        return replace(first, local_batch_sizes=shares)

    def started(self, generation: str) -> None:
        """Nothing to prepare."""

    def send(self, records: Sequence[Record]) -> None:
        """Nobody listens."""

    def latest(self) -> Allocation | None:
        """Nothing is ever published."""
        return None

    def save_request(self) -> SaveRequest | None:
        """Nobody asks."""
        return None

    def row_limits(self) -> Mapping[str, int]:
        """Nothing was learnt."""
        return {}

    def close(self, timeout_s: float) -> None:
        """Nothing to flush."""
