"""What travels from a worker to the control actor: one compact batch per put, of plain arrays and tuples.

Rows of float64 are pickled as one buffer instead of object by object. Integers stay exact: all are below 2^53. What
arrives is judged before it is believed: anybody on the cluster can put anything into a queue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from rex_ray.control.codec import CodecError
from rex_ray.core.types import FloatArray, StepFlag, StepRecord
from rex_ray.worker.link import IncidentRecord, KindLimit, MetricRecord, Record, ScheduleRecord

__all__ = ["Batch", "checked", "decode", "encode"]

_COLUMNS: Final = tuple(field.name for field in fields(StepRecord) if field.name != "generation")
_TIMES: Final = frozenset({"data_s", "compute_s", "sync_s", "step_s"})
_FLOATS: Final = _TIMES | {"weighted_sq_norm", "global_sq_norm", "loss"}
_OPTIONAL: Final = frozenset({"weighted_sq_norm", "global_sq_norm", "loss", "peak_memory_bytes"})
_LARGEST: Final = 2.0**53
# Least value of each whole number; rows and ranks below zero are the assembler's to count.
_WHOLE: Final = {
    column: {"num_norm_steps": 1.0, "rank": -_LARGEST, "num_rows": -_LARGEST}.get(name, 0.0)
    for column, name in enumerate(_COLUMNS, start=1)
    if name not in _FLOATS
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Records of one worker.

    Attributes:
        rank: who measured.
        num_dropped: records that this worker has dropped so far because nobody took them.
        generations: the groups that the rows belong to; mostly one.
        steps: one row per step record, shape ``[k, columns]``; NaN for None. The first column indexes ``generations``.
        metrics: metric records as they are; there are few.
        incidents: likewise.
        schedules: likewise.
    """

    rank: int
    num_dropped: int
    generations: tuple[str, ...]
    steps: FloatArray
    metrics: tuple[MetricRecord, ...]
    incidents: tuple[IncidentRecord, ...] = ()
    schedules: tuple[ScheduleRecord, ...] = ()


def encode(rank: int, records: Sequence[Record], num_dropped: int = 0) -> Batch:
    """Pack records for the queue.

    A figure that is not a number becomes "not measured", as the assembler would have it anyway.
    """
    steps = [record for record in records if isinstance(record, StepRecord)]
    generations = tuple(dict.fromkeys(record.generation for record in steps))
    rows = np.full((len(steps), 1 + len(_COLUMNS)), np.nan)
    for row, record in zip(rows, steps, strict=True):
        row[0] = generations.index(record.generation)
        for column, name in enumerate(_COLUMNS, start=1):
            value = getattr(record, name)
            if value is not None:
                row[column] = value
    return Batch(
        rank=rank,
        num_dropped=num_dropped,
        generations=generations,
        steps=rows,
        metrics=tuple(record for record in records if isinstance(record, MetricRecord)),
        incidents=tuple(record for record in records if isinstance(record, IncidentRecord)),
        schedules=tuple(record for record in records if isinstance(record, ScheduleRecord)),
    )


def checked(batch: object) -> Batch:
    """Return what came out of the queue, if it is a batch of this version.

    Raises:
        CodecError: it is something else, or not shaped like one; the message says what.
    """
    if not isinstance(batch, Batch):
        raise CodecError(f"the telemetry queue held a {type(batch).__name__} instead of a batch")
    if not (_is_count(batch.rank) and _is_count(batch.num_dropped)):
        raise CodecError(f"a batch's rank {batch.rank!r} or drops {batch.num_dropped!r} are no counts")
    if not isinstance(batch.generations, tuple) or not all(isinstance(name, str) for name in batch.generations):
        raise CodecError(f"a batch of rank {batch.rank} does not name its groups")
    steps = batch.steps
    if not isinstance(steps, np.ndarray) or steps.dtype != np.float64 or steps.ndim != 2:
        raise CodecError(f"a batch of rank {batch.rank} holds no table of figures")
    if steps.shape[1] != 1 + len(_COLUMNS):
        raise CodecError(
            f"a batch of rank {batch.rank} has {steps.shape[1]} columns instead of {1 + len(_COLUMNS)}: another "
            "version of rex_ray runs there"
        )
    kinds = ((batch.metrics, MetricRecord), (batch.incidents, IncidentRecord), (batch.schedules, ScheduleRecord))
    if not all(_all_are(records, kind) for records, kind in kinds):
        raise CodecError(f"a batch of rank {batch.rank} holds records of an unknown kind")
    return batch


def decode(batch: Batch) -> list[StepRecord]:
    """Return the batch's step records in the order in which they were sent, without those that are none.

    A row whose whole numbers are missing, fractions or beyond any run's is left out; times, norms and losses may be
    anything here, and are the assembler's to judge.
    """
    return [_record(batch.generations[int(row[0])], row[1:].tolist()) for row in batch.steps[_are_records(batch)]]


def is_sound_metric(record: MetricRecord) -> bool:
    """Whether a metric can be journalled."""
    return (
        isinstance(record.generation, str)
        and _is_count(record.epoch)
        and _is_count(record.step)
        and isinstance(record.elapsed_s, int | float)
        and math.isfinite(record.elapsed_s)
        and isinstance(record.metrics, Mapping)
        and all(isinstance(name, str) and isinstance(value, int | float) for name, value in record.metrics.items())
    )


def is_sound_incident(record: IncidentRecord) -> bool:
    """Whether an incident can be journalled."""
    texts = (record.generation, record.kind, record.message)
    limits = record.limits
    is_limit = isinstance(limits, KindLimit) and isinstance(limits.device, str) and _is_count(limits.num_rows)
    return (
        all(isinstance(text, str) for text in texts)
        and _is_count(record.rank)
        and _is_count(record.step)
        and (limits is None or is_limit)
    )


def is_sound_schedule(record: ScheduleRecord) -> bool:
    """Whether a schedule can be journalled."""
    counts = (record.epoch, record.step, record.cursor)
    rate = record.learning_rate
    return (
        isinstance(record.generation, str)
        and all(_is_count(count) for count in counts)
        and (record.num_epochs is None or _is_count(record.num_epochs))
        and (rate is None or (isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)))
    )


def _are_records(batch: Batch) -> np.ndarray:
    rows = batch.steps
    are = (rows[:, 0] >= 0) & (rows[:, 0] < len(batch.generations))
    for column, least in _WHOLE.items():
        figures = rows[:, column]
        # A NaN fails every comparison.
        whole = (figures >= least) & (figures <= _LARGEST) & (figures == np.floor(figures))
        are &= whole | np.isnan(figures) if _COLUMNS[column - 1] in _OPTIONAL else whole
    return are


def _record(generation: str, row: list[float]) -> StepRecord:
    values = {name: _value(name, figure) for name, figure in zip(_COLUMNS, row, strict=True)}
    return StepRecord(generation=generation, **values)  # type: ignore[arg-type]


def _value(name: str, figure: float) -> float | int | StepFlag | None:
    if math.isnan(figure):
        return figure if name in _TIMES else None
    if name == "flags":
        return StepFlag(int(figure))
    return figure if name in _FLOATS else int(figure)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST


def _all_are(records: object, kind: type) -> bool:
    return isinstance(records, tuple) and all(isinstance(record, kind) for record in records)
