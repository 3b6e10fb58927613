"""How far off the noise scale is: for equal and skewed shares, beside the formula that knows equal shares only.

Norms are drawn with a known noise scale (``sim.gradients``), estimated by the functions that the policy uses, and
summed before the ratio is taken, as it does. A second table says what is left of that after as few steps as the policy
has at its first look.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from experiments.calibration._bounds import Budget, Result
from rex_ray.core.noise_scale import MIN_BLOCKS, moments_of_sums
from rex_ray.core.types import FloatArray
from rex_ray.policies.growth.blocks import BLOCK_STEPS
from rex_ray.sim.gradients import NoisyGradients

__all__ = ["measure"]

SHARES = ((64, 64, 64, 64), (30, 31, 97, 98), (16, 16, 112, 112), (4, 4, 124, 124))
PHI_OVER_BATCH = (0.5, 2.0)
FEW_PHI_OVER_BATCH = (0.5, 2.0, 8.0)
NUM_DIMS = 64
_CHUNKS = 60
_WINDOW_STEPS = MIN_BLOCKS * BLOCK_STEPS


def measure(budget: Budget) -> Result:
    """Measure the bias over many draws, and the spread over few."""
    num_draws = budget.scaled(300_000, 60_000)
    bias = [
        _bias_row(shares, ratio, num_draws, budget.seed + 100 * index)
        for index, shares in enumerate(SHARES)
        for ratio in PHI_OVER_BATCH
    ]
    worst = max(bias, key=lambda row: abs(row["bias_pct"]))
    worst |= {
        "figure": "gns_bias_max_pct",
        "low": max(0.0, abs(worst["bias_pct"]) - 1.96 * worst["standard_error_pct"]),
        "high": abs(worst["bias_pct"]) + 1.96 * worst["standard_error_pct"],
    }
    few = [
        _few_row(ratio, num_dims, budget.scaled(4000, 500), budget.seed)
        for ratio in FEW_PHI_OVER_BATCH
        for num_dims in (8, 64)
    ]
    notes = (
        f"normal noise of {NUM_DIMS} dimensions; the figure is the largest of {len(bias)} and holds its sampling error",
        "BatchNorm makes a gradient depend on the size of its share; that bias is not in these draws",
    )
    return Result(figures={"gns_bias_max_pct": abs(worst["bias_pct"])}, tables={"bias": bias, "few": few}, notes=notes)


def _bias_row(shares: tuple[int, ...], ratio: float, num_draws: int, seed: int) -> dict[str, Any]:
    rows = np.array(shares, dtype=np.float64)
    batch, groups = float(rows.sum()), len(shares)
    phi = ratio * batch
    trace, signal, naive = (np.zeros(_CHUNKS) for _ in range(3))
    naive_signal = np.zeros(_CHUNKS)
    for chunk in range(_CHUNKS):
        gradients = NoisyGradients(seed=seed + chunk, num_dims=NUM_DIMS)
        weighted, reduced = gradients.draw_runs(num_draws // _CHUNKS, 1, phi, rows)
        moments = moments_of_sums(weighted.sum(axis=-1), groups, batch, reduced)
        trace[chunk], signal[chunk] = (float(part.mean()) for part in moments)
        mean_norm, share = (weighted / rows).mean(axis=-1), batch / groups
        naive_trace = (mean_norm - reduced) / (1 / share - 1 / batch)
        naive[chunk] = naive_trace.mean()
        naive_signal[chunk] = (reduced - naive_trace / batch).mean()
    biases = 100 * (trace / signal / phi - 1)
    return {
        "shares": "/".join(map(str, shares)),
        "phi_over_batch": ratio,
        "bias_pct": 100 * (float(trace.mean() / signal.mean()) / phi - 1),
        "standard_error_pct": float(biases.std(ddof=1)) / math.sqrt(_CHUNKS),
        "trace_bias_pct": 100 * (float(trace.mean()) / phi - 1),
        "signal_bias_pct": 100 * (float(signal.mean()) - 1),
        "equal_share_trace_bias_pct": 100 * (float(naive.mean()) / phi - 1),
        "draws": num_draws // _CHUNKS * _CHUNKS,
        "num_dims": NUM_DIMS,
        "seed": seed,
        "figure": None,
        "low": None,
        "high": None,
    }


def _few_row(ratio: float, num_dims: int, num_runs: int, seed: int) -> dict[str, Any]:
    """The noise scale from the first eight blocks alone."""
    batch = 256.0
    rows = np.full(4, batch / 4)
    gradients = NoisyGradients(seed=seed, num_dims=num_dims)
    weighted, reduced = gradients.draw_runs(num_runs, _WINDOW_STEPS, ratio * batch, rows)
    trace, signal = (part.sum(axis=1) for part in moments_of_sums(weighted.sum(axis=-1), 4, batch, reduced))
    hidden = signal <= 0
    found: FloatArray = trace[~hidden] / signal[~hidden] / (ratio * batch)
    ranked = np.append(np.sort(found), np.full(int(hidden.sum()), np.inf))
    low, middle, high = (float(ranked[int(part * num_runs)]) for part in (0.05, 0.5, 0.95))
    return {
        "phi_over_batch": ratio,
        "num_dims": num_dims,
        "steps": _WINDOW_STEPS,
        "ratio_p05": low,
        "ratio_median": middle,
        "ratio_p95": high if math.isfinite(high) else None,
        "beyond_measure_pct": 100 * float(hidden.mean()),
        "runs": num_runs,
        "seed": seed,
    }
