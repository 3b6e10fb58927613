"""``rex-ray doctor``: what was found of a cluster, as plain values or as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.train.examination import Examination
from rex_ray.worker.preflight.look import ALL_REDUCE_BYTES
from rex_ray.worker.preflight.table import COLUMNS, cells

__all__ = ["examination_document", "print_examination"]

_STYLES = {"fatal": "bold red", "warning": "yellow", "note": "dim"}


def examination_document(found: Examination) -> dict[str, Any]:
    """Return an examination as plain values."""
    return {
        "num_nodes": len(found.nodes),
        "probes": [
            {
                "node": probe.node.node_id,
                "label": probe.node.label,
                "facts": None if probe.facts is None else asdict(probe.facts),
                "error": probe.error,
            }
            for probe in found.probes
        ],
        "backend": found.backend,
        "all_reduce_bytes": ALL_REDUCE_BYTES,
        "all_reduce_s": found.all_reduce_s,
        "findings": [asdict(finding) for finding in found.findings],
        "verdict": found.verdict,
    }


def print_examination(found: Examination, console: Console) -> None:
    """Print an examination: a row per probe that reported, the reduction, and what stands out."""
    console.print(f"{len(found.nodes)} live nodes, a probe on {len(found.probes)} of them", highlight=False)
    if found.workers:
        table = Table(*COLUMNS, box=None)
        for rank, worker in enumerate(found.workers):
            table.add_row(*(escape(cell) for cell in cells(rank, worker)))
        console.print(table)
    if found.all_reduce_s is not None:
        console.print(
            f"an all-reduce of {ALL_REDUCE_BYTES >> 20} MiB over {found.backend} among {len(found.workers)} workers "
            f"took {1e3 * found.all_reduce_s:.1f} ms",
            highlight=False,
        )
    for finding in found.findings:
        console.print(
            f"[{_STYLES[finding.severity]}]{finding.severity}:[/] {escape(finding.text)}",
            soft_wrap=True,
            highlight=False,
        )
    console.print(f"verdict: {found.verdict}", highlight=False)
