"""The workers' reports as a table of plain text: for a log, where every line should stand alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

from rex_ray.worker.preflight.facts import WorkerFacts

__all__ = ["COLUMNS", "cells", "one_line", "text_table"]

COLUMNS = ("rank", "host", "kind", "device", "memory", "driver", "torch", "CUDA", "NCCL", "python", "rex_ray", "dtypes")


def cells(rank: int, worker: WorkerFacts) -> tuple[str, ...]:
    """Return a worker's row, one cell per column."""
    dtypes = [name for name, has in (("bf16", worker.bf16), ("fp16", worker.fp16)) if has]
    memory = "-" if worker.memory_bytes is None else f"{worker.memory_bytes / 2**30:.1f} GiB"
    return (
        str(rank),
        worker.host,
        worker.kind,
        worker.device_name or worker.device_type,
        memory,
        worker.driver or "-",
        worker.torch,
        worker.cuda or "-",
        worker.nccl or "-",
        worker.python,
        worker.rex_ray,
        " ".join(dtypes) or "fp32 only",
    )


def text_table(workers: Sequence[WorkerFacts]) -> str:
    """Return the table; columns that say the same of every worker still say it."""
    rows = [COLUMNS, *(cells(rank, worker) for rank, worker in enumerate(workers))]
    widths = [max(len(row[k]) for row in rows) for k in range(len(COLUMNS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def one_line(workers: Sequence[WorkerFacts]) -> str:
    """Return the reports in one line, workers that are alike together."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, worker in enumerate(workers):
        alike.setdefault(astuple(worker)[1:], []).append(rank)
    names = [field.name for field in fields(WorkerFacts)][1:]
    parts = []
    for values, ranks in alike.items():
        named = zip(names, values, strict=True)
        told = ", ".join(f"{name} {value}" for name, value in named if value not in (None, False))
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {told}")
    return "; ".join(parts)
