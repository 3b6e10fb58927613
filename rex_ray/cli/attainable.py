"""``rex-ray plan --limits``: the most that any method can give on a cluster, from public profiles alone."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.cli.words import hours, network_line, range_text, source_text
from rex_ray.scenario import parse_cluster
from rex_ray.sim.limits import ClusterLimits, cluster_limits
from rex_ray.sim.oracle import FixedBatch

__all__ = ["limits_document", "print_limits"]


def limits_document(cluster: str, workload: str, global_batch_size: int | None, network: str) -> dict[str, object]:
    """Return the limits of a cluster as plain values: the fields of ``ClusterLimits``.

    Raises:
        ConfigError: see ``parse_cluster`` and ``cluster_limits``.
    """
    return asdict(_limits(cluster, workload, global_batch_size, network))


def print_limits(cluster: str, workload: str, global_batch_size: int | None, network: str, console: Console) -> None:
    """Print the limits of a cluster as a table.

    Raises:
        ConfigError: see ``limits_document``.
    """
    found = _limits(cluster, workload, global_batch_size, network)
    console.print(
        f"The most that any method can give: {found.workload} on {found.cluster}, to {found.target}", soft_wrap=True
    )
    table = Table("who", "batch", "shares", "hours", "oracle saves", box=None)
    low, high = found.oracle_batches
    table.add_row("oracle", range_text(low, high), "exact split", hours(found.oracle_s), "")
    for name, shares, best in (
        ("best fixed balanced", "exact split", found.best_fixed_balanced),
        ("best fixed filled", "equal until full", found.best_fixed_filled),
        ("best fixed equal", "equal", found.best_fixed_equal),
    ):
        table.add_row(name, *_fixed_cells(found, shares, best))
    for batch, time_s in found.bsp_s.items():
        fixed = None if time_s is None else FixedBatch(global_batch_size=batch, time_s=time_s)
        table.add_row("bsp", *_fixed_cells(found, "equal", fixed, batch))
    console.print(table)
    for line in _assumptions(found):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def _limits(cluster: str, workload: str, global_batch_size: int | None, network: str) -> ClusterLimits:
    return cluster_limits(parse_cluster(cluster), workload, reference_batch_size=global_batch_size, network=network)


def _fixed_cells(
    found: ClusterLimits, shares: str, fixed: FixedBatch | None, batch: int | None = None
) -> tuple[str, str, str, str]:
    if fixed is None:
        return ("" if batch is None else str(batch), shares, "does not fit", "")
    return (str(fixed.global_batch_size), shares, hours(fixed.time_s), f"{100 * found.saving(fixed.time_s):.1f} %")


def _assumptions(found: ClusterLimits) -> list[str]:
    growth = (
        f"reference batch {found.reference_batch_size}; growth to at most {found.largest_batch} (8 reference batches, "
        f"a 16th of the data set, {found.most_rows} rows that were run on such devices)"
    )
    return [
        growth,
        network_line(found.network),
        "no noise, no slowdowns, no time to learn or to switch; every batch with a learning rate that is right for it",
        *(f"source: {source_text(source)}" for source in found.sources),
    ]
