"""A worker's speed over a run, told apart from what its rows explain.

A worker that is slowed down and then given fewer rows would pass for one on a flat curve: its time hardly changes while
its rows halve. So changes of speed are looked for where the rows stay the same, and carried over the moment at which
rows change: the switch moves the rows, not the device. At a size that the worker has run before, the time it took then
says what its speed is now.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.ndimage import maximum_filter1d

from rex_ray.core.types import FloatArray, IntArray

__all__ = ["WINDOW_STEPS", "WorkerSpeeds", "worker_speeds"]

WINDOW_STEPS = 6
"""Steps on either side of a change of speed. Production slowdowns last 12 steps in the median, and a re-split comes
some 14 steps after onset, so a longer window would find its change only where rows have changed as well."""

_LEAST_CHANGE = float(np.log(1.15))
_NUM_SDS = 4.5
# Below this a speed is its usual one: what is left of noise in the medians must not add up over a long run.
_SNAP = float(np.log(1.08))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerSpeeds:
    """One worker's clean steps, ``m`` of them, in pieces of the same rows and speed.

    Attributes:
        log_slowdown: log factor on its usual own time, constant within a piece and 0 where it is usual, shape ``[m]``.
        piece: number of the piece that each step is in, rising from 0, shape ``[m]``.
    """

    log_slowdown: FloatArray
    piece: IntArray


def worker_speeds(num_rows: IntArray, log_own_s: FloatArray) -> WorkerSpeeds:
    """Return a worker's speed at each of its clean steps.

    Args:
        num_rows: rows of each, positive, shape ``[m]``.
        log_own_s: log of own time in seconds, shape ``[m]``.
    """
    if num_rows.size == 0:
        return WorkerSpeeds(log_slowdown=np.zeros(0), piece=np.zeros(0, dtype=np.int64))
    is_switch = np.concatenate([[False], np.diff(num_rows) != 0])
    segment = np.cumsum(is_switch)
    starts = is_switch.copy()
    starts[0] = True
    starts[_changes(segment, log_own_s)] = True
    piece = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    counts = np.diff(np.append(first, num_rows.size))
    level = _piece_medians(piece, first, counts, log_own_s)
    slowdown = _carry(num_rows[first], is_switch[first], level, counts)
    return WorkerSpeeds(log_slowdown=slowdown[piece], piece=piece)


def _changes(segment: IntArray, log_own_s: FloatArray) -> IntArray:
    """Return the steps at which the speed has changed while rows had not."""
    width = WINDOW_STEPS
    num_centres = log_own_s.size - 2 * width + 1
    if num_centres < 1:
        return np.zeros(0, dtype=np.int64)
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(log_own_s, width), axis=1)
    middle = (windows[:, (width - 1) // 2] + windows[:, width // 2]) / 2
    # The change before step k compares the window that ends there with the one that begins there.
    change = np.abs(middle[width:] - middle[:-width])
    is_whole = segment[: -2 * width + 1] == segment[2 * width - 1 :]
    if not is_whole.any():
        return np.zeros(0, dtype=np.int64)
    # A difference of two medians is centred at 0, and most are of steps without any change.
    spread = 1.4826 * float(np.median(change[is_whole]))
    change = np.where(is_whole, change, 0.0)
    peak = maximum_filter1d(change, size=2 * width - 1)
    found = np.flatnonzero((change == peak) & (change > max(_LEAST_CHANGE, _NUM_SDS * spread)))
    # Equal neighbours on a plateau are one change.
    keep = np.concatenate([[True], np.diff(found) >= width]) if found.size else np.zeros(0, dtype=np.bool_)
    changes: IntArray = found[keep] + width
    return changes


def _piece_medians(piece: IntArray, first: IntArray, counts: IntArray, values: FloatArray) -> FloatArray:
    ordered = values[np.lexsort((values, piece))]
    middle: FloatArray = (ordered[first + (counts - 1) // 2] + ordered[first + counts // 2]) / 2
    return middle


def _carry(rows: IntArray, is_switch: IntArray, level: FloatArray, counts: IntArray) -> FloatArray:
    """Return the log slowdown of every piece: a walk over pieces, of which a run has few."""
    usual: dict[int, tuple[float, int]] = {}  # log own time at the usual speed, and steps behind it, per size
    slowdown, now, before = np.zeros(level.size), 0.0, float(level[0])
    walk = zip(rows.tolist(), is_switch.tolist(), level.tolist(), counts.tolist(), strict=True)
    for index, (size, switched, here, count) in enumerate(walk):
        known, weight = usual.get(size, (0.0, 0))
        if weight >= WINDOW_STEPS:
            now = here - known
        elif not switched:
            now += here - before
        if abs(now) < _SNAP:
            now = 0.0
        usual[size] = ((known * weight + (here - now) * count) / (weight + count), weight + count)
        slowdown[index], before = now, here
    return slowdown
