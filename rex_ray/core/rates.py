"""How far a counted rate can be trusted: no event in 1,000 steps still allows 37 in 10,000."""

from __future__ import annotations

import math

from scipy.special import gammaincinv

__all__ = ["poisson_interval"]


def poisson_interval(num_events: int, exposure: float, level: float = 0.95) -> tuple[float, float]:
    """Return the exact two-sided interval of a rate (Garwood 1936) from events counted over an exposure.

    Args:
        num_events: how often it happened.
        exposure: whatever the rate is per; for a rate per 10,000 steps, ``steps / 10_000``.
        level: coverage, which is never less.

    Returns:
        ``(low, high)``, events per unit of exposure.

    Raises:
        ValueError: a count, an exposure or a level that cannot be.
    """
    if num_events < 0 or not (0 < exposure < math.inf) or not 0 < level < 1:
        raise ValueError(f"a rate needs events >= 0 over a positive exposure, got {num_events}, {exposure}, {level}")
    tail = (1.0 - level) / 2
    low = float(gammaincinv(num_events, tail)) if num_events else 0.0
    return low / exposure, float(gammaincinv(num_events + 1, 1.0 - tail)) / exposure
