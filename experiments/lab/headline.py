"""The figures by which the paper's claims are judged, from one world of a comparison."""

from __future__ import annotations

import math
from statistics import median

from experiments.lab.cells import Cell
from experiments.lab.summary import accuracy_delta
from experiments.lab.tables import Comparison

__all__ = ["HEADLINE", "figures_of"]

HEADLINE = "4xT4,4xV100"
"""The cluster of the paper's tables that real SGD is run on."""

_OTHERS = ("bsp", "best_fixed_equal", "best_fixed_balanced", "oracle", "oracle_delayed")
_NAMES = {"oracle_delayed": "ratio_rex_oracle_delayed"}


def figures_of(compared: Comparison, world: Cell, suffix: str) -> dict[str, float]:
    """Return the figures of one world, each name with the suffix; those that a missed target leaves open are left out.

    Ratios are of median times to the target; ``accuracy_delta`` is against bsp, in points; ``overhead_pct`` is what
    control costs beside the steps, in per cent of them.
    """
    figures: dict[str, float] = {}
    methods = compared.methods(world)
    for other in _OTHERS:
        if other in methods:
            figures[_NAMES.get(other, f"tta_ratio_rex_{other}")] = compared.ratio(world, "rex", other).value
    mine, baseline = compared.pairs(world, "rex", "bsp")
    if all(result.final_metric is not None for result in (*mine, *baseline)):
        delta = accuracy_delta(mine, baseline)
        figures |= {"accuracy_delta_points": delta.points, "accuracy_delta_lo90": delta.lowest_90}
    figures |= {
        "rii_bsp": median(result.rii for result in baseline),
        "rii_rex": median(result.rii for result in mine),
        "overhead_pct": median(100 * result.charged_s / (result.total_s - result.charged_s) for result in mine),
    }
    clean = suffix.replace(",", "_").replace(":", "_")
    return {f"{name}{clean}": value for name, value in figures.items() if math.isfinite(value)}
