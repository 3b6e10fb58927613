"""What every measurement of this package is given and gives back, and how far a counted rate can be trusted.

An error rate without its exposure says nothing: no false alarm in 1,000 steps still allows 37 in 10,000. So rates are
published with exact bounds, which hold also where nothing was counted at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy.stats import beta

from rex_ray.core.rates import poisson_interval

__all__ = ["Budget", "Result", "binomial_interval", "poisson_interval"]


@dataclass(frozen=True, slots=True)
class Budget:
    """How much a measurement may spend.

    Attributes:
        quick: a run of about a tenth of the time: the same code, wider bounds.
        seed: every random choice of the measurement follows from it.
    """

    quick: bool = False
    seed: int = 0

    def scaled(self, full: int, quick: int) -> int:
        """Return how many runs, steps or instances to take: ``full``, or ``quick`` in a quick run."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Result:
    """What a measurement found.

    Attributes:
        figures: flat names to finite numbers; a figure that could not be measured is left out, never NaN.
        tables: name to rows; all rows of a table have the same columns. A row states the exposure behind it (runs,
            steps or decisions), its seeds and, where times were drawn, ``rho`` and ``sd``. The 95 % bounds of a column
            ``x`` are in ``x_low`` and ``x_high``; those of a figure are in the row of any table that has the column
            ``figure`` with its name, in ``low`` and ``high``.
        notes: plain sentences for people: what the figures do not cover, what was worse than hoped.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def binomial_interval(successes: int, trials: int, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a probability (Clopper and Pearson 1934): its coverage is never below ``level``.

    Args:
        successes: how often it happened.
        trials: independent occasions; 0 leaves the probability unknown.
        level: coverage.

    Returns:
        ``(low, high)``, fractions of one.

    Raises:
        ValueError: counts or a level that cannot be.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must be within 0 and the number of trials, got {successes} of {trials}")
    tail = _tail(level)
    low = float(beta.ppf(tail, successes, trials - successes + 1)) if successes else 0.0
    high = float(beta.ppf(1.0 - tail, successes + 1, trials - successes)) if successes < trials else 1.0
    return low, high


def _tail(level: float) -> float:
    if not 0.0 < level < 1.0:
        raise ValueError(f"the level must be within 0 and 1, got {level}")
    return (1.0 - level) / 2
