"""A worker's clean steps cut into pieces of the same rows and the same speed.

Changes of speed are looked for where the rows stay the same; what happens where rows change is for ``spells`` to judge,
which knows all workers of a kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import maximum_filter1d

from rex_ray.core.types import BoolArray, FloatArray, IntArray

__all__ = ["WINDOW_STEPS", "Pieces", "cut_pieces"]

WINDOW_STEPS = 6
"""Steps on either side of a change of speed. Production slowdowns last 12 steps in the median, and a re-split comes
some 14 steps after onset, so a longer window would find its change only where rows have changed as well."""

_LEAST_CHANGE = float(np.log(1.15))
_NUM_SDS = 4.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pieces:
    """One worker's clean steps, ``m`` of them, in ``p`` pieces.

    Attributes:
        of_step: the piece that each step is in, rising from 0, shape ``[m]``.
        num_rows: rows per step, shape ``[p]``.
        counts: steps, shape ``[p]``.
        log_s: median log own time, shape ``[p]``.
        begins_by_change: whether the speed changed while rows did not, shape ``[p]``; the first piece begins so, too.
        sample_sd: robust sd of a step's log own time around its piece's.
    """

    of_step: IntArray
    num_rows: IntArray
    counts: IntArray
    log_s: FloatArray
    begins_by_change: BoolArray
    sample_sd: float


def cut_pieces(num_rows: IntArray, log_own_s: FloatArray) -> Pieces:
    """Cut a worker's clean steps.

    Args:
        num_rows: rows of each, positive, shape ``[m]``.
        log_own_s: log of own time in seconds, shape ``[m]``.
    """
    is_switch = np.diff(num_rows, prepend=num_rows[:1]) != 0
    is_change = np.zeros(num_rows.size, dtype=np.bool_)
    is_change[_changes(np.cumsum(is_switch), log_own_s)] = True
    is_change[:1] = True
    starts = is_switch | is_change
    of_step = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    counts = np.diff(np.append(first, num_rows.size))
    ordered = log_own_s[np.lexsort((log_own_s, of_step))]
    log_s = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    misses = np.abs(log_own_s - log_s[of_step])[counts[of_step] > 2]
    return Pieces(
        of_step=of_step,
        num_rows=num_rows[first],
        counts=counts,
        log_s=log_s,
        begins_by_change=is_change[first],
        sample_sd=1.4826 * float(np.median(misses)) if misses.size else 0.0,
    )


def _changes(segment: IntArray, log_own_s: FloatArray) -> IntArray:
    """Return the steps at which the speed has changed while rows had not."""
    width = WINDOW_STEPS
    nowhere: IntArray = np.zeros(0, dtype=np.int64)
    if log_own_s.size < 2 * width:
        return nowhere
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(log_own_s, width), axis=1)
    middle = (windows[:, (width - 1) // 2] + windows[:, width // 2]) / 2
    # The change before step k compares the window that ends there with the one that begins there.
    change = np.abs(middle[width:] - middle[:-width])
    is_whole = segment[: 1 - 2 * width] == segment[2 * width - 1 :]
    if not is_whole.any():
        return nowhere
    # A difference of two medians is centred at 0, and most are of steps without any change.
    spread = 1.4826 * float(np.median(change[is_whole]))
    change = np.where(is_whole, change, 0.0)
    peak = maximum_filter1d(change, size=2 * width - 1)
    found = np.flatnonzero((change == peak) & (change > max(_LEAST_CHANGE, _NUM_SDS * spread)))
    # Equal neighbours on a plateau are one change.
    changes: IntArray = found[np.diff(found, prepend=-width) >= width] + width
    return changes
