"""A median for the few values that a controller asks about at every step: ``np.median`` takes ten times as long."""

from __future__ import annotations

import numpy as np

from rex_ray.core.types import FloatArray

__all__ = ["median"]


def median(values: FloatArray, axis: int = 0) -> FloatArray:
    """Return the medians along ``axis``, of which there is at least one value; all are finite."""
    ordered = np.sort(values, axis=axis)
    count = values.shape[axis]
    high = ordered.take(count // 2, axis=axis)
    result: FloatArray = high if count % 2 else (ordered.take(count // 2 - 1, axis=axis) + high) / 2
    return result
