"""What travels from a worker to the control actor: one compact batch per put, of plain arrays and tuples.

Rows of float64 are pickled as one buffer instead of object by object. Integers stay exact: all are below 2^53.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from rex_ray.core.types import FloatArray, StepFlag, StepRecord
from rex_ray.worker.link import IncidentRecord, MetricRecord, Record

__all__ = ["Batch", "decode", "encode"]

_COLUMNS: Final = tuple(field.name for field in fields(StepRecord) if field.name != "generation")
_FLOATS: Final = frozenset({"data_s", "compute_s", "sync_s", "step_s", "weighted_sq_norm", "global_sq_norm", "loss"})


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
    """

    rank: int
    num_dropped: int
    generations: tuple[str, ...]
    steps: FloatArray
    metrics: tuple[MetricRecord, ...]
    incidents: tuple[IncidentRecord, ...] = ()


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
    )


def decode(batch: Batch) -> list[StepRecord]:
    """Return the batch's step records in the order in which they were sent."""
    return [_record(batch.generations[int(row[0])], row[1:].tolist()) for row in batch.steps]


def _record(generation: str, row: list[float]) -> StepRecord:
    values = {name: _value(name, figure) for name, figure in zip(_COLUMNS, row, strict=True)}
    return StepRecord(generation=generation, **values)  # type: ignore[arg-type]


def _value(name: str, figure: float) -> float | int | StepFlag | None:
    if np.isnan(figure):
        return None
    if name == "flags":
        return StepFlag(int(figure))
    return figure if name in _FLOATS else int(figure)
