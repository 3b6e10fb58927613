"""Medians and quartiles of many groups of values at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import FloatArray, IntArray

__all__ = ["Quartiles", "quartiles_by"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Quartiles:
    """Order statistics per group, shapes ``[g]``.

    Attributes:
        keys: the groups, rising.
        counts: values in each.
        low: lower quartile.
        middle: median.
        high: upper quartile.
    """

    keys: IntArray
    counts: IntArray
    low: FloatArray
    middle: FloatArray
    high: FloatArray


def quartiles_by(keys: IntArray, values: FloatArray) -> Quartiles:
    """Return the quartiles of ``values`` per key, both of shape ``[m]``, as ``numpy.quantile`` interpolates them.

    One sort of everything: a call per group would cost more than the sort where sizes are many.
    """
    order = np.lexsort((values, keys))
    ordered = values[order]
    found, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)

    def at(share: float) -> FloatArray:
        place = share * (counts - 1)
        below = np.floor(place).astype(np.int64)
        above = np.minimum(below + 1, counts - 1)
        low, high = ordered[starts + below], ordered[starts + above]
        result: FloatArray = low + (place - below) * (high - low)
        return result

    return Quartiles(keys=found, counts=counts, low=at(0.25), middle=at(0.5), high=at(0.75))
