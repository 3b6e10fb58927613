"""Blocks of samples at one size: where a sample is kept, and whether a block shows that its worker's scale changed."""

from __future__ import annotations

import math

import numpy as np

from rex_ray.core.median import median
from rex_ray.core.types import FloatArray, IntArray

__all__ = ["BLOCK", "LEVEL_BLOCKS", "WINDOW", "compare_blocks", "follow_drift", "slot_for", "whole_blocks"]

WINDOW = 32
"""Newest samples remembered per worker and size; the median of 32 forgets a passing disturbance within 16 steps."""

BLOCK = 16
"""Samples at one size whose median is compared with that of the blocks before: they differ in scale alone."""

MIN_CHANGE, NUM_SDS = 1.2, 5.0
"""A block that is off by this factor, and by so many times its own spread, shows a change of its worker's scale. Noise
of 8 % with a lag-1 memory of .9 hardly ever feigns that."""

LEVEL_BLOCKS = 8
"""Blocks that make up a size's level. One that went on following its samples would follow a drift, and hide it."""

NEWEST_BLOCKS = 6
"""What the fading mean of the blocks after those remembers."""

MIN_DRIFT, NUM_DRIFT_SDS = 1.08, 2.5
"""A fading mean of blocks that is off by this factor, and by so many times a sample's spread, has drifted: what comes
slowly shows in no single block. What is smaller is left to the fit."""

_FIFTHS = 1.683
"""Standard deviations between the fifth from below and the fifth from above, of a normal sample."""


def whole_blocks(counts: IntArray) -> IntArray:
    """Return counts without an unfinished block behind finished ones: its next sample would be of another time."""
    whole: IntArray = np.where(counts >= BLOCK, counts - counts % BLOCK, counts)
    return whole


def compare_blocks(samples: FloatArray, level_s: FloatArray, num_blocks: IntArray) -> tuple[FloatArray, FloatArray]:
    """Compare the newest blocks (shape ``[f, BLOCK]``) with the mean level of those before, 0 where there are none.

    Returns:
        The levels with these blocks, which are the ``num_blocks``-th, and the factors on the workers' scales that they
        show: 1 but where a change is beyond doubt. A block that a change falls into is too spread to say anything.
    """
    middle, spread = _middle_and_spread(np.log(samples))
    known = np.where(level_s > 0, np.log(np.where(level_s > 0, level_s, 1.0)), middle)
    change = middle - known
    is_small = np.abs(change) <= math.log(MIN_CHANGE)
    is_sure = ~is_small & (np.abs(change) > NUM_SDS * spread)
    joins = is_small & (num_blocks <= LEVEL_BLOCKS)
    level: FloatArray = np.exp(known + np.where(joins, change / num_blocks, 0.0))
    factor: FloatArray = np.exp(np.where(is_sure, change, 0.0))
    return level, factor


def follow_drift(
    samples: FloatArray, block_s: FloatArray, level_s: FloatArray, newest_s: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Follow sizes whose level is known, and find what has drifted since.

    Args:
        samples: the windows, shape ``[f, WINDOW]``.
        block_s: median of the newest block of each, shape ``[f]``.
        level_s: the level of each, shape ``[f]``.
        newest_s: fading mean of the blocks since, shape ``[f]``.

    Returns:
        The fading means with these blocks, and the factors on the workers' scales that the windows show: 1 but where
        a drift is beyond doubt. The mean says that there is one, the window how far it has gone.
    """
    middle, spread = _middle_and_spread(np.log(samples))
    known = np.log(level_s)
    newest = np.log(newest_s) + (np.log(block_s) - np.log(newest_s)) / NEWEST_BLOCKS
    is_sure = np.abs(newest - known) > np.maximum(math.log(MIN_DRIFT), NUM_DRIFT_SDS * spread)
    factor: FloatArray = np.exp(np.where(is_sure, middle - known, 0.0))
    followed: FloatArray = np.exp(np.where(is_sure, known, newest))
    return followed, factor


def _middle_and_spread(log_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return each row's median and robust sd, the larger of two: in two modes one of half of the samples is nothing."""
    middle = median(log_s, axis=1)
    ordered = np.sort(log_s, axis=1)
    fifth = log_s.shape[1] // 5
    spread = 1.4826 * median(np.abs(log_s - middle[:, None]), axis=1)
    return middle, np.maximum(spread, (ordered[:, -1 - fifth] - ordered[:, fifth]) / _FIFTHS)


def slot_for(sizes: IntArray, counts: IntArray, last_seen: IntArray) -> int:
    """Return the slot for a new size: a free one, else that of the size whose loss costs the shape least."""
    free = (counts == 0).nonzero()[0]
    if free.size:
        return int(free[0])
    # Of the two sizes nearest to each other one is redundant: the one that was not run for longer.
    order = np.argsort(sizes)
    gaps = np.diff(np.log(sizes[order]))
    nearest = int(np.argmin(gaps))
    pair = order[nearest : nearest + 2]
    return int(pair[np.argmin(last_seen[pair])])
