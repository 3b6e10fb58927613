"""``rex-ray plan``: what a cluster could do before it is rented, from public profiles or a run's own curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.cli.fleet import Fleet, fleet_of
from rex_ray.cli.mixes import Mix, advice, all_mixes, prices_of
from rex_ray.cli.words import duration, misfit_text, network_line, range_text, rows_by_device, shares_text
from rex_ray.core.errors import ConfigError, InfeasibleError
from rex_ray.scenario import LearningCurve, learning_names, load_learning, optimal_split
from rex_ray.sim.limits import NO_NETWORK
from rex_ray.sim.oracle import Limits
from rex_ray.sim.step_times import StepTimes

__all__ = ["plan_document", "print_plan"]

_LOOKS_PCT = (0, 5, 20, 50, 80, 100)
"""Where the best batch is told, in per cent of the progress to the target."""

_MOST_SHOWN = 12


def plan_document(
    cluster: str,
    workload: str,
    global_batch_size: int | None,
    network: str | None,
    *,
    run: Path | None = None,
    with_prices: bool = False,
    prices: Sequence[str] = (),
) -> dict[str, Any]:
    """Return a plan for a cluster as plain values.

    Args:
        cluster: see ``parse_cluster``.
        workload: whose public step times and noise scales count.
        global_batch_size: rows to split, and the reference batch ``M0``; None: the source's own.
        network: kind of device whose measured all-reduce counts, or ``"none"``; None: the run's, else that of T4 nodes.
        run: a run whose own curves are planned with, or None.
        with_prices: whether smaller mixes are looked at, with what they cost.
        prices: the user's ``DEVICE=USD`` per hour.

    Returns:
        The exact split of one batch beside equal shares; with a public noise scale the way ``to_target``; with prices
        the ``mixes`` and ``advice``; ``notices`` of what is not known.

    Raises:
        ConfigError: an unknown name, a batch that does not fit, or a run that has learnt nothing.
    """
    fleet = fleet_of(cluster, workload, network or "", network_line(network or "T4"), run)
    profiles = fleet.ranks(fleet.devices)
    batch = global_batch_size or _reference_batch(workload, len(profiles))
    try:
        plan = optimal_split(profiles, batch)
    except InfeasibleError as error:
        most = sum(profile.max_local_batch_size for profile in profiles)
        raise ConfigError(misfit_text(batch, cluster, len(profiles), most)) from error
    rest, each = batch % len(profiles), batch // len(profiles)
    equal = [each + (rank < rest) for rank in range(len(profiles))]
    fits = all(rows <= profile.max_local_batch_size for rows, profile in zip(equal, profiles, strict=True))
    equal_s = [float(profile.own_time_s(rows)) for rows, profile in zip(equal, profiles, strict=True)]
    learning = load_learning(workload) if workload in learning_names() else None
    found: dict[str, Any] = {
        "cluster": cluster,
        "workload": workload,
        "network": network or (NO_NETWORK if run else "T4"),
        "network_text": fleet.network_text,
        "global_batch_size": batch,
        "sync_s": fleet.network.all_reduce_s(len(profiles)),
        "balanced": _split_document(fleet, plan.local_batch_sizes, plan.own_s.tolist()),
        "equal": _split_document(fleet, equal, equal_s) if fits else None,
        "sources": [asdict(source) for source in dict.fromkeys(profile.source for profile in profiles)],
        "run": fleet.run,
        "measured": {device: asdict(measured) for device, measured in fleet.measured.items()},
        "to_target": None if learning is None else _to_target(fleet, learning, batch),
        "notices": _notices(fleet, workload, learning),
    }
    if run is not None and network is None:
        found["network"] = "measured"
    return found | (_rent(fleet, learning, batch, prices) if with_prices or prices else {})


def print_plan(found: Mapping[str, Any], console: Console) -> None:
    """Print what ``plan_document`` returned."""
    title = f"{found['workload']} on {found['cluster']}, {found['global_batch_size']} rows a step"
    table = Table("shares", "rows per device", "step", "imbalance", title=title, title_justify="left", box=None)
    for name in ("balanced", "equal"):
        split = found[name]
        if split is None:
            table.add_row(name, "do not fit the smallest device", "", "")
            continue
        rows = shares_text(split["rows_by_device"])
        beyond = f" ({', '.join(split['extrapolated'])} extrapolated)" if split["extrapolated"] else ""
        table.add_row(name, rows + beyond, f"{1000 * split['step_s']:.0f} ms", f"{100 * split['imbalance']:.1f} %")
    console.print(table)
    if found["to_target"] is not None:
        _print_to_target(found["to_target"], console)
    if "mixes" in found:
        _print_mixes(found, console)
    for line in (*found["notices"], found["network_text"]):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True, highlight=False)


def _reference_batch(workload: str, num_workers: int) -> int:
    if workload not in learning_names():
        raise ConfigError(f"{workload!r} has no reference batch in the public profiles: give --global-batch-size")
    return max(load_learning(workload).reference_batch_size, num_workers)


def _split_document(fleet: Fleet, rows: Sequence[int], own_s: Sequence[float]) -> dict[str, Any]:
    return {
        "local_batch_sizes": list(rows),
        "rows_by_device": rows_by_device(fleet.devices, rows),
        "step_s": float(fleet.network.step_s([0.0] * len(own_s), own_s)),
        "imbalance": max(max(own_s) * len(own_s) / sum(own_s) - 1, 0.0),  # sums round
        "extrapolated": _extrapolated(fleet, rows),
    }


def _extrapolated(fleet: Fleet, rows: Sequence[int]) -> list[str]:
    """Return the measured kinds of which more or fewer rows are planned than the run has run."""
    planned = zip(fleet.devices, rows, strict=True)
    beyond = (kind for kind, count in planned if kind in fleet.measured and not fleet.is_measured(kind, count))
    return list(dict.fromkeys(beyond))


def _to_target(fleet: Fleet, learning: LearningCurve, reference_batch_size: int) -> dict[str, Any]:
    """Return the way to the target: at the best batch of every moment, and at fixed ones; exact splits throughout."""
    profiles = fleet.ranks(fleet.devices)
    limits = Limits(learning, StepTimes(profiles, fleet.network), reference_batch_size)
    looks = []
    for percent in _LOOKS_PCT:
        phi = float(learning.noise_scale_at(learning.target_rows * percent / 100))
        batch = limits.best_batch(phi)
        rows = optimal_split(profiles, batch).local_batch_sizes
        looks.append(
            {
                "progress_pct": percent,
                "noise_scale": phi,
                "global_batch_size": batch,
                "rows_by_device": rows_by_device(fleet.devices, rows),
                "extrapolated": _extrapolated(fleet, rows),
            }
        )
    return {
        "target": learning.target,
        "reference_batch_size": reference_batch_size,
        "largest_batch": limits.largest_batch,
        "best_s": limits.oracle_s,
        "best_batches": looks,
        "this_batch_s": limits.balanced_s(reference_batch_size),
        "best_fixed": asdict(limits.best_fixed_balanced),
    }


def _rent(fleet: Fleet, learning: LearningCurve | None, batch: int, overrides: Sequence[str]) -> dict[str, Any]:
    prices = prices_of(fleet, overrides)
    missing = [kind for kind in fleet.profiles if kind not in prices]
    mixes: list[Mix] = [] if learning is None else all_mixes(fleet, learning, batch, prices)
    return {
        "usd_per_hour": prices,
        "without_price": missing,
        "mixes": [asdict(mix) for mix in mixes],
        "advice": advice(mixes, fleet.devices),
    }


def _notices(fleet: Fleet, workload: str, learning: LearningCurve | None) -> list[str]:
    said = []
    for device in fleet.profiles:
        measured = fleet.measured.get(device)
        if measured is not None:
            span = range_text(measured.fewest_rows, measured.most_rows)
            said.append(
                f"{device}: the curve that {fleet.run} learnt, measured at {span} rows, extrapolated beyond, and not "
                f"planned above {measured.reach_rows}"
            )
        elif fleet.run is not None:
            said.append(f"{device}: not in {fleet.run}, so public times of another machine stand beside measured ones")
    if learning is None:
        said.append(f"no source measured the noise scale of {workload}: no time to a target, no best batch, no cost")
    else:
        said.append(
            "times to the target: no noise, no slowdowns, nothing to learn; every batch with a learning rate that is "
            "right for it; noise scales of a public run"
        )
    return said


def _print_to_target(found: Mapping[str, Any], console: Console) -> None:
    fixed = found["best_fixed"]
    console.print(
        f"to {found['target']}: {duration(found['best_s'])} at the best batch of every moment, "
        f"{duration(fixed['time_s'])} at {fixed['global_batch_size']} rows throughout (the best fixed), "
        f"{duration(found['this_batch_s'])} at {found['reference_batch_size']}; batches from "
        f"{found['reference_batch_size']} to {found['largest_batch']}, exact splits",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("progress", "noise scale", "best batch", "rows per device", box=None)
    for look in found["best_batches"]:
        beyond = f" ({', '.join(look['extrapolated'])} extrapolated)" if look["extrapolated"] else ""
        table.add_row(
            f"{look['progress_pct']} %",
            f"{look['noise_scale']:,.0f}",
            str(look["global_batch_size"]),
            shares_text(look["rows_by_device"]) + beyond,
        )
    console.print(table)


def _print_mixes(found: Mapping[str, Any], console: Console) -> None:
    prices = ", ".join(f"{kind} {usd:.3f}" for kind, usd in found["usd_per_hour"].items())
    if prices:
        console.print(f"USD per hour: {prices}", soft_wrap=True, highlight=False)
    if found["without_price"]:
        kind = found["without_price"][0]
        console.print(
            f"no price is known of {', '.join(found['without_price'])}: give for example --price {kind}=1.50",
            soft_wrap=True,
            highlight=False,
        )
    if not found["mixes"]:
        return
    shown = _shown(found["mixes"])
    table = Table("mix", "to target", "USD", "batch", "", box=None)
    for mix in shown:
        table.add_row(
            mix["cluster"],
            duration(mix["time_s"]),
            "" if mix["usd"] is None else f"{mix['usd']:.2f}",
            range_text(mix["smallest_batch"], mix["largest_batch"], "-"),
            "best trade" if mix["is_pareto"] else "",
        )
    console.print(table)
    console.print(f"[dim]{len(shown)} of {len(found['mixes'])} mixes; all with --json[/]", highlight=False)
    for line in found["advice"]:
        console.print(escape(line), soft_wrap=True, highlight=False)


def _shown(mixes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the whole, each kind alone in full, and the best trades, evenly thinned where there are many."""
    most = max(mixes, key=lambda mix: mix["num_workers"])
    alone: dict[str, Mapping[str, Any]] = {}
    for mix in mixes:
        kind = mix["cluster"].partition("x")[2]
        if "," not in kind and mix["num_workers"] > alone.get(kind, {"num_workers": 0})["num_workers"]:
            alone[kind] = mix
    front = [mix for mix in mixes if mix["is_pareto"]]
    kept = [front[int(at)] for at in np.linspace(0, len(front) - 1, min(_MOST_SHOWN, len(front)))]
    return [mix for mix in mixes if mix is most or any(mix is other for other in (*alone.values(), *kept))]
