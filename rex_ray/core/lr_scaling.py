"""How the learning rate follows the global batch, ``s = B / M0`` times the reference batch.

One number serves three purposes under AdaScale (Johnson et al. 2020, arXiv:2007.05105): the gain ``r`` is the
factor on the learning rate, ``r / s`` the statistical efficiency of a row, and a step makes the progress of ``r``
reference steps.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, assert_never

__all__ = ["LRRule", "adascale_gain", "lr_factor", "slewed"]

LRRule: TypeAlias = Literal["adascale", "linear", "sqrt", "adam", "none"]

ADAM_EXPONENT = 0.5
"""Adam's step is already divided by the gradient's size, so its rate grows with the root of the gain."""


def adascale_gain(scale: float, noise_scale: float | None, reference_batch_size: int) -> float:
    """Return ``r = s (phi + M0) / (phi + B)``: between 1 (no noise, nothing gained) and ``s`` (all noise).

    Args:
        scale: ``s = B / M0``, positive.
        noise_scale: ``phi`` in rows; None (unknown) counts as 0, the cautious end.
        reference_batch_size: ``M0`` in rows.
    """
    phi = 0.0 if noise_scale is None else noise_scale
    if not scale > 0 or phi < 0 or math.isnan(phi):
        raise ValueError(
            f"the gain needs a positive batch ratio and a noise scale of at least 0, got {scale} and {phi}"
        )
    if math.isinf(phi):
        return scale
    return scale * (phi + reference_batch_size) / (phi + scale * reference_batch_size)


def lr_factor(
    rule: LRRule, global_batch_size: int, reference_batch_size: int, noise_scale: float | None = None
) -> float:
    """Return the factor on the learning rate at ``global_batch_size``; 1 at the reference batch under every rule.

    ``adascale`` is the default for SGD, ``adam`` (its square root) for the Adam family; ``linear`` wants a warm-up
    (``slewed``), ``sqrt`` is the conservative classic, ``none`` leaves the rate alone.
    """
    scale = global_batch_size / reference_batch_size
    match rule:
        case "adascale":
            return adascale_gain(scale, noise_scale, reference_batch_size)
        case "linear":
            return scale
        case "sqrt":
            return math.sqrt(scale)
        case "adam":
            return math.pow(adascale_gain(scale, noise_scale, reference_batch_size), ADAM_EXPONENT)
        case "none":
            return 1.0
        case _ as unreachable:
            assert_never(unreachable)


def slewed(current: float, target: float, max_change: float = 0.02) -> float:
    """Return ``current`` moved towards ``target`` by at most the fraction ``max_change``: one step of a warm-up."""
    return min(max(target, current * (1 - max_change)), current * (1 + max_change))
