"""``rex-ray plan``: what a cluster could do, from public profiles alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.cli.words import hours, network_line, range_text, rows_by_device, shares_text, source_text
from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.scenario import learning_names, load_learning, load_profile, optimal_split, parse_cluster
from rex_ray.sim.limits import ClusterLimits, cluster_limits, network_model
from rex_ray.sim.oracle import FixedBatch

__all__ = ["limits_document", "plan_document", "print_limits", "print_plan"]


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


def plan_document(cluster: str, workload: str, global_batch_size: int | None, network: str) -> dict[str, object]:
    """Return the exact split of one batch on the public profiles, beside equal shares, as plain values.

    Raises:
        ConfigError: an unknown name, or a batch that does not fit.
    """
    devices = parse_cluster(cluster)
    profiles = [load_profile(device, workload) for device in devices]
    sync_s = network_model(workload, network).all_reduce_s(len(devices))
    batch = global_batch_size or _reference_batch(workload, len(devices))
    try:
        plan = optimal_split(profiles, batch)
    except InfeasibleError as error:
        raise ConfigError(f"--global-batch-size {batch} on {cluster}: {error}") from error
    rest, each = batch % len(devices), batch // len(devices)
    equal = [each + (rank < rest) for rank in range(len(devices))]
    fits = all(rows <= profile.max_local_batch_size for rows, profile in zip(equal, profiles, strict=True))
    equal_s = [float(profile.own_time_s(rows)) for rows, profile in zip(equal, profiles, strict=True)]
    return {
        "cluster": cluster,
        "workload": workload,
        "network": network,
        "global_batch_size": batch,
        "sync_s": sync_s,
        "balanced": _split_document(devices, plan.local_batch_sizes, plan.own_s.tolist(), sync_s),
        "equal": _split_document(devices, equal, equal_s, sync_s) if fits else None,
        "sources": [asdict(source) for source in dict.fromkeys(profile.source for profile in profiles)],
    }


def print_plan(found: dict[str, object], console: Console) -> None:
    """Print what ``plan_document`` returned as a table."""
    title = f"{found['workload']} on {found['cluster']}, {found['global_batch_size']} rows a step"
    table = Table("shares", "rows per device", "step", "imbalance", title=title, title_justify="left", box=None)
    for name in ("balanced", "equal"):
        split = found[name]
        if isinstance(split, dict):
            rows = shares_text(split["rows_by_device"])
            table.add_row(name, rows, f"{1000 * split['step_s']:.0f} ms", f"{100 * split['imbalance']:.1f} %")
        else:
            table.add_row(name, "do not fit the smallest device", "", "")
    console.print(table)
    console.print(f"[dim]{escape(network_line(str(found['network'])))}[/]", soft_wrap=True)


def _reference_batch(workload: str, num_workers: int) -> int:
    if workload not in learning_names():
        raise ConfigError(f"{workload!r} has no reference batch in the public profiles: give --global-batch-size")
    return max(load_learning(workload).reference_batch_size, num_workers)


def _split_document(
    devices: Sequence[str], rows: Sequence[int], own_s: Sequence[float], sync_s: float
) -> dict[str, object]:
    return {
        "local_batch_sizes": list(rows),
        "rows_by_device": rows_by_device(devices, rows),
        "step_s": max(own_s) + sync_s,
        "imbalance": max(max(own_s) * len(own_s) / sum(own_s) - 1, 0.0),  # sums round
    }


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
