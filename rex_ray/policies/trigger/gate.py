"""Whether an alarm is worth a move: what slow steps cost against what a move costs that comes for an event too short.

A move arrives some steps late, and so does the move back. An event that is over by then has cost its own slow steps
and, on top, the steps that healthy workers spend with the shares of a slow one. Acting once the slow steps seen have
cost as much as a useless move would is never worse than twice the best (the ski-rental rule; for training: Greyhound,
USENIX ATC 2025). What earlier events teach about lengths does better than that where there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.core.types import FloatArray, IntArray

__all__ = ["Stakes", "expected_use_steps", "stakes"]


_LEAST_COUNT, _LEAST_SHARE, _MANY = 2, 0.25, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stakes:
    """What is to be won and lost, in microseconds per step.

    Attributes:
        slow_us: step time while the event lasts and nobody moves.
        gain_us: what new shares would save of it.
        loss_us: what they would cost once the event is over.
        healthy_us: step time before.
    """

    slow_us: float
    gain_us: float
    loss_us: float
    healthy_us: float


def stakes(num_rows: IntArray, healthy_us: FloatArray, slow_us: FloatArray) -> Stakes:
    """Return what an event puts at stake, on the assumption that own times are proportional to rows.

    Balanced shares make every rank's time ``T = sum_i b_i / sum_i (b_i / t_i)``, and give rank ``i`` the part
    ``T / t_i`` of its present rows, which take that part of its healthy time once the event is over.

    Args:
        num_rows: present shares, shape ``[n]``, positive.
        healthy_us: each rank's own time before the event under the present shares, shape ``[n]``, positive.
        slow_us: the same while it lasts.
    """
    balanced = float(num_rows.sum() / (num_rows / slow_us).sum())
    after = float((healthy_us * balanced / slow_us).max())
    slow, healthy = float(slow_us.max()), float(healthy_us.max())
    return Stakes(
        slow_us=slow, gain_us=max(slow - balanced, 0.0), loss_us=max(after - healthy, 0.0), healthy_us=healthy
    )


def expected_use_steps(lengths: Sequence[int], age: int, lag_steps: float) -> float:
    """Return how many steps new shares would be of use, as earlier events tell: ``E[(length - age - lag)+]``.

    Only events that lasted longer than ``age`` can tell. Where one at most did, this one is of a new kind, and is
    expected to last as long again as it has (the Lindy rule, which heavy tails follow). Where less than a quarter of
    them would have been of use at all, the mean is the word of few, whose length may be a mistake: 0 then.

    Args:
        lengths: of earlier events in steps.
        age: steps that this one has lasted so far.
        lag_steps: steps until new shares arrive.
    """
    longer = np.array([length for length in lengths if length > age], dtype=np.float64)
    if longer.size < _LEAST_COUNT:
        return max(age - lag_steps, 0.0)
    # The longest of many is left out of the mean: it may be an event whose end went by unnoticed.
    told = np.sort(longer)[:-1] if longer.size >= _MANY else longer
    use = np.maximum(told - age - lag_steps, 0.0)
    return float(use.mean()) if (use > 0).mean() >= _LEAST_SHARE else 0.0
