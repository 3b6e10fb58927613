"""Batches that never change: what a sweep over batches finds, in equal shares or exactly split ones.

A user who wants the best fixed batch trains once per candidate and keeps the fastest; here the choice is made on pilot
seeds that no measured run has, and what the sweep took is said beside the result, never added to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from experiments.lab.cells import TRACE, Cell, Result
from experiments.lab.measures import Played, timed
from rex_ray.core.apportion import apportion, rows_per_rank
from rex_ray.core.errors import ConfigError
from rex_ray.scenario import load_learning, load_profile, optimal_split, parse_cluster
from rex_ray.scenario.profiles import DeviceProfile
from rex_ray.sim import Learner, Limits, Scenario, StepTimes
from rex_ray.sim.limits import network_model
from rex_ray.sim.oracle import largest_batch

if TYPE_CHECKING:
    from workloads.learning.recipe import Task

__all__ = ["BATCH_OPTION", "FIXED", "PILOT_SEEDS", "chosen", "fixed_shares", "is_open", "pilot_cells", "run_fixed"]

FIXED = ("best_fixed_equal", "best_fixed_balanced")
"""The controls whose batch is found by a sweep."""

PILOT_SEEDS = (900_001, 900_002, 900_003)
"""Seeds of the sweep; no measured run may have them."""

BATCH_OPTION = "batch"
"""The option of such a cell that names the batch; without it, the batch is still to be found."""


def is_open(cell: Cell) -> bool:
    """Return whether a cell's fixed batch is still to be found."""
    return cell.method in FIXED and BATCH_OPTION not in cell.options


def pilot_cells(cell: Cell) -> list[Cell]:
    """Return the runs of the sweep that finds a cell's batch: each candidate on each pilot seed.

    Raises:
        ConfigError: the cell has a pilot's seed, or its reference batch does not fit in such shares.
    """
    if cell.seed in PILOT_SEEDS:
        raise ConfigError(f"seed {cell.seed} is one of the pilot seeds; measure with another")
    return [
        replace(cell, seed=seed, options={**cell.options, BATCH_OPTION: batch})
        for batch in _candidates(cell)
        for seed in PILOT_SEEDS
    ]


def chosen(cell: Cell, found: Mapping[str, Result]) -> tuple[Cell, float]:
    """Return the cell with the best batch of its sweep, and the virtual seconds that the sweep took on one seed.

    Args:
        cell: an open cell.
        found: results of ``pilot_cells(cell)`` by key.
    """
    by_batch: dict[int, list[Result]] = {}
    for pilot in pilot_cells(cell):
        by_batch.setdefault(int(pilot.options[BATCH_OPTION] or 0), []).append(found[pilot.key])
    better = 1.0 if _higher_is_better(cell) else -1.0
    best = min(by_batch, key=lambda batch: _worth(by_batch[batch], better))
    swept_s = sum(median(result.total_s for result in results) for results in by_batch.values())
    return replace(cell, options={**cell.options, BATCH_OPTION: best}), swept_s


def _worth(results: Sequence[Result], better: float) -> tuple[float, float]:
    """The median time to the target; among batches that mostly miss it, the error that is left."""
    times_s = [math.inf if result.tta_s is None else result.tta_s for result in results]
    return median(times_s), -better * median(result.final_metric or 0.0 for result in results)


def _candidates(cell: Cell) -> list[int]:
    """Return the doublings of the reference batch; for a trace also the best of all, which a formula knows."""
    reference, times = cell.global_batch_size, StepTimes(_profiles(cell), network_model(cell.workload, cell.network))
    equal = cell.method == "best_fixed_equal"
    most = times.most_equal_rows if equal else times.most_rows
    if most < reference:
        raise ConfigError(f"{reference} rows do not fit {cell.cluster} in equal shares of {cell.workload}")
    largest = largest_batch(reference, _dataset_size(cell), most)
    batches = {reference * 2**power for power in range(int(math.log2(largest / reference)) + 1)}
    if cell.learner == TRACE:
        limits = Limits(load_learning(cell.workload), times, reference)
        best = limits.best_fixed_equal if equal else limits.best_fixed_balanced
        batches.add(best.global_batch_size)
    return sorted(batches)


def _dataset_size(cell: Cell) -> int:
    return load_learning(cell.workload).dataset_size if cell.learner == TRACE else _task(cell).dataset_size


def _higher_is_better(cell: Cell) -> bool:
    return cell.learner == TRACE or _task(cell).recipe.higher_is_better


def _task(cell: Cell) -> Task:
    # Torch is slow to import, and traces need none.
    from workloads.learning.tasks import load_task  # noqa: PLC0415

    return load_task(cell.learner)


def _profiles(cell: Cell) -> list[DeviceProfile]:
    return [load_profile(device, cell.workload) for device in parse_cluster(cell.cluster)]


def fixed_shares(cell: Cell) -> tuple[int, ...]:
    """Return the rows per rank of a fixed control's cell that has its batch."""
    profiles = _profiles(cell)
    batch = int(cell.options[BATCH_OPTION] or 0)
    if cell.method == "best_fixed_balanced":
        return optimal_split(profiles, batch, [1.0] * len(profiles)).local_batch_sizes
    caps = [profile.max_local_batch_size for profile in profiles]
    return tuple(apportion(batch, np.ones(len(profiles)), upper=caps).tolist())


def run_fixed(
    scenario: Scenario, learner: Learner, shares: Sequence[int], lr_factor: Callable[[int], float], *, num_steps: int
) -> Played:
    """Train in shares that never change, until the learner is done.

    Args:
        scenario: the world.
        learner: a fresh one.
        shares: rows per rank.
        lr_factor: from a step to its learning-rate factor.
        num_steps: most steps.
    """
    batch, dataset_size = sum(shares), scenario.problem.dataset_size
    rows, left = list[int](), dataset_size
    for step in range(num_steps):
        if learner.is_done:
            break
        rows.append(min(batch, left))
        learner.advance(rows[-1], lr_factor(step))
        left = left - rows[-1] or dataset_size
    return timed(scenario, [rows_per_rank(now, shares) for now in rows])
