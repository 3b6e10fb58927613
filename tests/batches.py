"""A group of a slow and a fast worker, and records that it might send."""

from __future__ import annotations

from collections.abc import Iterable

from rex_ray.control.events import GroupStarted
from rex_ray.core.types import Allocation, Problem, StepRecord, WorkerSpec
from rex_ray.worker.link import GroupInfo

SECONDS_PER_ROW = (0.002, 0.001)


def workers(most_rows: int | None = None) -> tuple[WorkerSpec, ...]:
    devices = enumerate(("T4", "V100"))
    return tuple(WorkerSpec(rank=rank, device=device, max_local_batch_size=most_rows) for rank, device in devices)


def group(most_rows: int | None = None) -> GroupInfo:
    return GroupInfo(
        generation="g",
        workers=workers(most_rows),
        dataset_size=320,
        global_batch_size=32,
        step=0,
        allocation=None,
    )


def started(most_rows: int | None = None) -> GroupStarted:
    problem = Problem(workers=workers(most_rows), global_batch_size=32, max_global_batch_size=256, dataset_size=320)
    return GroupStarted(generation="g", problem=problem)


def first_allocation() -> Allocation:
    return Allocation(version=1, local_batch_sizes=(16, 16))


def records(rank: int, steps: Iterable[int], allocation: Allocation, generation: str = "g") -> list[StepRecord]:
    """Steps of one rank, as slow as its rows."""
    rows = allocation.local_batch_sizes[rank]
    own_s = SECONDS_PER_ROW[rank] * rows
    return [
        StepRecord(
            generation=generation,
            epoch=0,
            rank=rank,
            step=step,
            allocation_version=allocation.version,
            num_rows=rows,
            data_s=0.0,
            compute_s=own_s,
            sync_s=0.0,
            step_s=own_s,
        )
        for step in steps
    ]
