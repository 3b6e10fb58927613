"""The named figures of a calibration: who measures each, what it should reach, and whether it did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments._harness import Row

__all__ = ["FIGURES", "Figure", "bounds_of", "verdicts"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One named figure.

    Attributes:
        name: as it stands in the JSON.
        module: who measures it.
        at_most: the goal where smaller is better; None: it is published without one.
    """

    name: str
    module: str
    at_most: float | None = None


FIGURES: tuple[Figure, ...] = (
    Figure("gns_bias_max_pct", "gns", 1.0),
    Figure("growth_false_pct", "growth", 5.0),
    Figure("growth_power_8_pct", "growth"),
    Figure("resplit_false_per_10k_ar07_4", "trigger", 1.0),
    Figure("resplit_false_per_10k_ar07_16", "trigger", 1.0),
    Figure("resplit_false_per_10k_ar07_64", "trigger", 1.0),
    Figure("resplit_false_per_10k_spike2_16", "trigger", 1.0),
    Figure("trigger_delay_median_1p5x50", "trigger", 10.0),
    Figure("trigger_delay_p95_1p5x50", "trigger", 14.0),
    Figure("trigger_miss_1p5x50_pct", "trigger"),
    Figure("split_mismatches", "split", 0.0),
    Figure("ax_worst_ratio_to_exact", "search", 1.005),
    Figure("ax_tile32_ratio_to_optimum", "search"),
    Figure("controller_us_per_worker_step_4", "cost", 25.0),
    Figure("controller_us_per_worker_step_1024", "cost", 10.0),
    Figure("split_ms_1024", "split", 20.0),
    Figure("ax_decision_s", "search", 3.0),
)
"""Every figure that is published, in the order of the table."""


def bounds_of(name: str, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[float, float] | None:
    """Return a figure's 95 % bounds from the row that bears its name in the column ``figure``, or None."""
    for rows in tables.values():
        for row in rows:
            low, high = row.get("low"), row.get("high")
            if row.get("figure") == name and low is not None and high is not None:
                return float(low), float(high)
    return None


def verdicts(figures: Mapping[str, float], tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Return the published table: figure, value, 95 % bounds, goal, and whether it is met.

    A goal that lies within the bounds is met or missed by the value alone, which is marked with a "?".
    """
    rows: list[Row] = []
    for figure in FIGURES:
        value, bounds = figures.get(figure.name), bounds_of(figure.name, tables)
        low, high = bounds or (None, None)
        rows.append(
            {
                "figure": figure.name,
                "value": value,
                "low": low,
                "high": high,
                "goal": None if figure.at_most is None else f"<= {figure.at_most:g}",
                "met": _met(value, bounds, figure.at_most),
            }
        )
    return rows


def _met(value: float | None, bounds: tuple[float, float] | None, at_most: float | None) -> str:
    if value is None:
        return "not measured"
    if at_most is None:
        return "no goal"
    low, high = bounds or (-math.inf, -math.inf)
    return ("yes" if value <= at_most else "no") + ("?" if low <= at_most < high else "")
