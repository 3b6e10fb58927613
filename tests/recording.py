"""Records a run as a live driver would: the real controller, an arithmetic cluster, the real files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rex_ray.control.commands import ApplyAllocation
from rex_ray.control.events import GroupStarted, MetricReported, RunEnded, Ticked
from rex_ray.control.journal import Chunk
from rex_ray.control.journalled import JournalledController, Turn
from rex_ray.core.apportion import rows_per_rank
from rex_ray.core.types import Allocation, Problem, StepFlag, StepRecord, WorkerSpec

DEVICES = ("T4", "T4", "V100", "V100")
SECONDS_PER_ROW = {"T4": 0.004, "V100": 0.001}
GLOBAL_BATCH = 64
DATASET = 64 * 10 + 30
EPOCHS = 4
LAG_STEPS = 3


def record_run(folder: Path, *, policy: str) -> None:
    """Write ``folder/rex_ray/journal`` of a finished run under ``policy``."""
    journal = folder / "rex_ray" / "journal"
    journal.mkdir(parents=True)

    def append(chunks: Iterable[Chunk]) -> None:
        for name, data in chunks:
            with (journal / name).open("ab") as file:
                file.write(data)

    controller, chunks = JournalledController.begin(policy=policy, seed=1)
    append(chunks)
    pending: list[tuple[int, Allocation]] = []
    step = 0

    def take(turn: Turn) -> None:
        append(turn.chunks)
        due = step + (LAG_STEPS if step else 0)
        pending.extend((due, c.allocation) for c in turn.commands if isinstance(c, ApplyAllocation))

    workers = tuple(WorkerSpec(rank=r, device=d, node=f"node-{d.lower()}") for r, d in enumerate(DEVICES))
    problem = Problem(workers=workers, global_batch_size=GLOBAL_BATCH, max_global_batch_size=512, dataset_size=DATASET)
    take(controller.handle(GroupStarted(generation="g", problem=problem)))
    running = pending.pop(0)[1]
    now_us = 0
    for epoch in range(EPOCHS):
        rows_left = DATASET
        while rows_left:
            while pending and pending[0][0] <= step:
                running = pending.pop(0)[1]
            rows = rows_per_rank(min(rows_left, GLOBAL_BATCH), running.local_batch_sizes)
            records = _records(step, epoch, running, rows)
            take(controller.add(records))
            now_us += round(1e6 * records[0].step_s)
            rows_left -= sum(rows)
            step += 1
        metrics = {"accuracy": 1.0 - 0.5**epoch, "rows_seen_exactly_once": 1.0}
        take(
            controller.handle(
                MetricReported(generation="g", epoch=epoch, step=step, elapsed_us=now_us, metrics=metrics)
            )
        )
        take(controller.handle(Ticked(now_us=now_us)))
    take(controller.handle(RunEnded(reason="finished")))
    append(controller.flush())


def _records(step: int, epoch: int, running: Allocation, rows: tuple[int, ...]) -> list[StepRecord]:
    own_s = [0.02 + SECONDS_PER_ROW[device] * count for device, count in zip(DEVICES, rows, strict=True)]
    step_s = max(own_s) + 0.01
    flags = StepFlag.WARM_UP if step < 3 else StepFlag.NONE
    if rows != running.local_batch_sizes:
        flags |= StepFlag.PARTIAL
    return [
        StepRecord(
            generation="g",
            epoch=epoch,
            rank=rank,
            step=step,
            allocation_version=running.version,
            num_rows=count,
            data_s=0.0,
            compute_s=own,
            sync_s=step_s - own,
            step_s=step_s,
            flags=flags,
        )
        for rank, (count, own) in enumerate(zip(rows, own_s, strict=True))
    ]
