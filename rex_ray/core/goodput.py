"""Goodput: rows per second times what a row is worth (Pollux, OSDI'21), on *balanced* step times.

The two halves of the method meet here. With equal shares a larger batch soon stops paying on a mixed cluster; asked
for the step time of the best split, it pays for longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rex_ray.core.curves import StepTimeCurve
from rex_ray.core.lr_scaling import adascale_gain
from rex_ray.core.split import exact_split

__all__ = ["balanced_step_time_s", "goodput", "statistical_efficiency"]


def statistical_efficiency(global_batch_size: int, reference_batch_size: int, noise_scale: float | None) -> float:
    """Return the worth of a row relative to the reference batch: ``(phi + M0) / (phi + B)``.

    1 at ``M0`` and falling in ``B``, the slower the noisier the gradient. An unknown noise scale counts as 0, the
    lower bound.
    """
    scale = global_batch_size / reference_batch_size
    return adascale_gain(scale, noise_scale, reference_batch_size) / scale


def goodput(global_batch_size: int, step_time_s: float, reference_batch_size: int, noise_scale: float | None) -> float:
    """Return reference-worth rows per second: ``B / T * (phi + M0) / (phi + B)``.

    Raises:
        ValueError: a step time that is not positive and finite.
    """
    if not 0 < step_time_s < math.inf:
        raise ValueError(f"a step takes a positive, finite time, got {step_time_s}")
    worth = statistical_efficiency(global_batch_size, reference_batch_size, noise_scale)
    return global_batch_size / step_time_s * worth


def balanced_step_time_s(
    curves: Sequence[StepTimeCurve],
    global_batch_size: int,
    *,
    sync_s: float = 0.0,
    lower: Sequence[int] | None = None,
    upper: Sequence[int | None] | None = None,
) -> float:
    """Return ``T*(B)``: the step time of the exact split plus the reduction.

    Raises:
        InfeasibleError: the bounds leave no room for ``global_batch_size``.
    """
    return exact_split(curves, global_batch_size, lower, upper).step_time_s + sync_s
