"""Whether the exact split is exact, how fast, and whether curves should be probed before the first one.

Against brute force; for up to 1,024 workers; and whole runs with two mirrored probes at the start beside runs that
begin with the exact split on one measured size and correct it as they go.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from experiments.calibration._bounds import Budget, Result, binomial_interval
from rex_ray.control.controller import Controller
from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.split import CurveSet, exact_split
from rex_ray.core.types import FloatArray, read_only
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import NoiseModel, load_profile, profile_names, true_optimum
from rex_ray.sim import Scenario, mixed_cluster, simulate

__all__ = ["measure"]

GOAL_MS_1024 = 20.0

_SAME_TIME = 1e-9
_NUM_INSTANCES = (1000, 100)
_REPEATS = (40, 8)
_WORKERS = (4, 16, 64, 256, 1024)
_ROWS_PER_WORKER = 64

_PROBE_NOISES = {"dedicated": NoiseModel.dedicated(), "shared": NoiseModel.shared()}
_PROBE_STEPS, _PROBE_ROWS = (100, 500), 32


def measure(budget: Budget) -> Result:
    """Compare with brute force on small random instances, and time large ones (CPU time of this process)."""
    rng = np.random.default_rng(budget.seed)
    num_instances = budget.scaled(*_NUM_INSTANCES)
    mismatches, worst = 0, 0.0
    for _ in range(num_instances):
        excess = _excess(rng)
        mismatches += excess > _SAME_TIME
        worst = max(worst, excess)
    low, high = binomial_interval(mismatches, num_instances)
    rows = [_timed(num_workers, budget.scaled(*_REPEATS), rng) for num_workers in _WORKERS]
    probes = [_probed(scenario, budget.seed, *names) for scenario, *names in _mixes(budget)]
    early, late = (float(np.median([row[f"total_ratio_{steps}"] for row in probes])) for steps in _PROBE_STEPS)
    return Result(
        figures={
            "split_mismatches": float(mismatches),
            "split_ms_1024": float(rows[-1]["median_ms"]),
            "probe_total_ratio_100": early,
            "probe_total_ratio_500": late,
        },
        tables={
            "brute force": [
                {
                    "figure": "split_mismatches",
                    "instances": num_instances,
                    "seed": budget.seed,
                    "mismatches": mismatches,
                    "worst_excess": worst,
                    "low": low * num_instances,
                    "high": high * num_instances,
                }
            ],
            "cost": rows,
            "mirrored probes": probes,
        },
        notes=[
            "brute force: 2 to 4 workers of 0 to 14 rows, random bounds; curves with kinks, plateaus, edges of tiles",
            "cost: CPU time of one thread, curves fitted beforehand; 64 rows per worker, two kinds, a scale per worker",
            "mirrored probes: duration of a run with them over that of one without, after 100 and 500 steps; medians",
        ],
    )


def _excess(rng: np.random.Generator) -> float:
    """Return by how much the exact split of one random instance misses the best of all splits, relative."""
    n = int(rng.integers(2, 5))
    curves = [_random_curve(rng) for _ in range(n)]
    lower = rng.integers(0, 3, n)
    upper = lower + rng.integers(1, 13, n)
    total = int(rng.integers(lower.sum(), upper.sum() + 1))
    if total == 0:
        return 0.0
    plan = exact_split(curves, total, lower.tolist(), upper.tolist())
    sizes = np.array(plan.local_batch_sizes)
    if sizes.sum() != total or (sizes < lower).any() or (sizes > upper).any():
        return float("inf")
    workers = CurveSet(curves)
    tables = [workers.own_s(np.full(n, rows)) for rows in range(int(upper.max()) + 1)]
    best = min(max(tables[rows][rank] for rank, rows in enumerate(split)) for split in _all_splits(total, lower, upper))
    return float(plan.step_time_s / best - 1.0)


def _all_splits(total: int, lower: Sequence[int], upper: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to share out ``total`` rows within the bounds."""
    if len(lower) == 1:
        if lower[0] <= total <= upper[0]:
            yield (total,)
        return
    for rows in range(int(lower[0]), min(int(upper[0]), total) + 1):
        for rest in _all_splits(total - rows, lower[1:], upper[1:]):
            yield (rows, *rest)


def _random_curve(rng: np.random.Generator) -> StepTimeCurve:
    """A non-decreasing chain of straight pieces, some of them flat, some steep over one row as a tile's edge is."""
    num_knots = int(rng.integers(2, 7))
    rows = np.concatenate([[0.0], np.cumsum(rng.choice([1.0, 2.0, 5.0, 8.0], num_knots - 1))])
    rises = rng.exponential(1.0, num_knots - 1) * (rng.random(num_knots - 1) > 0.3)
    seconds = 0.05 + np.concatenate([[0.0], np.cumsum(rises)])
    return StepTimeCurve(
        knot_rows=read_only(rows, np.float64),
        knot_s=read_only(seconds, np.float64),
        scale=float(rng.choice([1.0, 1.0, 2.5])),
        max_trusted_rows=64,
    )


def _timed(num_workers: int, repeats: int, rng: np.random.Generator) -> dict[str, Any]:
    kinds = [_random_saturating(rng) for _ in range(2)]
    curves = [kinds[rank % 2].scaled(float(rng.uniform(0.9, 1.1))) for rank in range(num_workers)]
    total = _ROWS_PER_WORKER * num_workers
    spent_ms = []
    for _ in range(repeats):
        began = time.process_time()
        exact_split(curves, total, upper=[2 * _ROWS_PER_WORKER] * num_workers)
        spent_ms.append(1e3 * (time.process_time() - began))
    return {
        "num_workers": num_workers,
        "repeats": repeats,
        "seed": 0,
        "median_ms": float(np.median(spent_ms)),
        "p95_ms": float(np.quantile(spent_ms, 0.95)),
        "goal_ms": GOAL_MS_1024 if num_workers == 1024 else 0.0,
    }


def _random_saturating(rng: np.random.Generator) -> StepTimeCurve:
    """A host-bound start, then a straight line, in eight pieces as a fitted spline has them."""
    rows: FloatArray = np.linspace(0.0, 2.0 * _ROWS_PER_WORKER, 9)
    slope = float(rng.uniform(0.0005, 0.002))
    seconds = np.maximum(0.02 + slope * rows, slope * 40.0 + 0.02)
    return StepTimeCurve(
        knot_rows=read_only(rows, np.float64),
        knot_s=read_only(seconds, np.float64),
        max_trusted_rows=4 * _ROWS_PER_WORKER,
    )


def _mixes(budget: Budget) -> Iterator[tuple[Scenario, str, str, str]]:
    """Yield two workers each of a T4 and of another kind, for every workload and kind that has a profile."""
    others = [(device, workload) for device, workload in profile_names() if device != "T4"]
    pairs = [(device, workload) for device, workload in others if ("T4", workload) in profile_names()]
    for device, workload in pairs[:: 1 if not budget.quick else 6]:
        # Probes run one and a half times the share, which has to fit.
        most = min(load_profile(kind, workload).max_local_batch_size for kind in ("T4", device))
        rows = 4 * min(_PROBE_ROWS, int(most / 1.5))
        for name, noise in _PROBE_NOISES.items():
            scenario = mixed_cluster(
                ("T4", "T4", device, device), workload, global_batch_size=rows, noise=noise, seed=budget.seed
            )
            yield scenario, workload, f"2xT4,2x{device}", name


def _probed(scenario: Scenario, seed: int, workload: str, cluster: str, noise: str) -> dict[str, Any]:
    best_s = true_optimum(scenario.timelines, scenario.problem.global_batch_size).step_time_s
    off = {"growth": "off", "trigger": "off", "search": "off"}
    runs = [
        simulate(Controller(make_policy("rex", {**off, "probe": probe})), scenario, num_steps=_PROBE_STEPS[-1])
        for probe in (False, True)
    ]
    ends = [run.allocations[-1][1].local_batch_sizes for run in runs]
    slowest = [
        max(line.quiet_time_s(rows, sizes) for line, rows in zip(scenario.timelines, sizes, strict=True))
        for sizes in ends
    ]
    ratios = {f"total_ratio_{k}": float(runs[1].step_s[:k].sum() / runs[0].step_s[:k].sum()) for k in _PROBE_STEPS}
    return {
        "workload": workload,
        "cluster": cluster,
        "noise": noise,
        "seed": seed,
        **ratios,
        "to_optimum": slowest[0] / best_s,
        "probed_to_optimum": slowest[1] / best_s,
    }
