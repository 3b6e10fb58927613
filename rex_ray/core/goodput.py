"""Goodput: rows per second times what a row is worth (Pollux, OSDI'21), on *balanced* step times.

The two halves of the method meet here. With equal shares a larger batch soon stops paying on a mixed cluster; asked
for the step time of the best split, it pays for longer.
"""

from __future__ import annotations

import math

from rex_ray.core.lr_scaling import adascale_gain

__all__ = ["break_even_noise_scale", "goodput", "statistical_efficiency"]


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


def break_even_noise_scale(num_rows: int, step_time_s: float, larger: int, larger_time_s: float, gain: float) -> float:
    """Return the noise scale from which the ``larger`` batch has more than ``1 + gain`` times the goodput.

    The ratio of two goodputs grows with the noise scale and does not depend on the reference batch, so that "the
    larger batch pays" is the same as "the noise scale is above this one": a statement that can be tested.

    Args:
        num_rows: a batch.
        step_time_s: its step time.
        larger: a larger batch.
        larger_time_s: its step time.
        gain: least gain in goodput, as a fraction.

    Returns:
        Rows: 0 where the larger batch pays without any noise, ``inf`` where it never does.
    """
    rate = larger / num_rows * step_time_s / larger_time_s / (1.0 + gain)
    if rate <= 1.0:
        return math.inf
    return max(0.0, (larger - rate * num_rows) / (rate - 1.0))
