"""Charts of a comparison as PNG: few lines, named where they are drawn, readable at half their width.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color), told apart by every kind of sight; who is compared is also told
by position or by a label, never by colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.cells import Cell, Result
from experiments.lab.summary import spread, times_s
from experiments.lab.tables import Comparison
from rex_ray.core.types import FloatArray

__all__ = ["ledger_chart", "metric_chart", "save", "times_chart", "worlds_chart"]

_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
_YELLOW = "#f0e442"
_GREY, _DARK = "#8a8a8a", "#333333"
_STYLE = {
    "font.size": 13,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _DARK,
    "axes.titlesize": 14,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.hashsalt": "rex_ray",
}
_LINES: Mapping[str, tuple[str, str]] = {
    "bsp": (_GREY, "-"),
    "best_fixed_equal": (_ORANGE, "-"),
    "best_fixed_balanced": (_GREEN, "--"),
    "pollux": (_PINK, "-"),
    "cannikin": (_RED, "-"),
    "rex": (_BLUE, "-"),
    "oracle": (_DARK, ":"),
}
_PARTS: Mapping[str, tuple[str, str]] = {
    "growth": (_ORANGE, "other batches"),
    "rate": (_PINK, "learning rate"),
    "unsplit": (_SKY, "equal shares for ever"),
    "exploration": (_YELLOW, "equal at first, on trial"),
    "spline": (_GREEN, "curves not exact"),
    "sensing": (_RED, "noticing late"),
    "lag": (_DARK, "switching late"),
    "charged": (_GREY, "control itself"),
}
_NAMES = {"best_fixed_equal": "best fixed, equal", "best_fixed_balanced": "best fixed, balanced"}
_CONTROLS = ("best_fixed_equal", "best_fixed_balanced", "oracle", "oracle_delayed")


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _styled(draw: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have a function draw in this module's style, and leave matplotlib's own settings alone."""

    @wraps(draw)
    def drawing(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawing


def save(figure: Figure, file: Path) -> None:
    """Write a chart; the same chart gives the same bytes."""
    figure.savefig(file, dpi=110, metadata={"Software": None})


@_styled
def metric_chart(compared: Comparison, world: Cell, target: float, *, metric: str = "accuracy") -> Figure:
    """Draw the metric over virtual time, better ones higher up: medians and quartiles over seeds.

    Args:
        compared: every cell.
        world: which cells are drawn.
        target: the metric that counts as trained.
        metric: ``"accuracy"``, a fraction drawn in per cent, or ``"perplexity"``.
    """
    figure, axes = _new(8.4, 5.2)
    is_accuracy = metric == "accuracy"
    scale, unit = (100, " %") if is_accuracy else (1, "")
    level = scale * target
    # Downwards from the target: so far is drawn, and names stand in 22 parts of it.
    depth = -22 if is_accuracy else 2 * level
    part, best = depth / 22, level
    methods = [method for method in _LINES if method in compared.methods(world)]
    longest_s = max(times_s(list(compared.by_seed(world, "bsp").values())).tolist())
    ends = []
    for method in methods:
        results = list(compared.by_seed(world, method).values())
        grid_s = np.linspace(0, median(result.total_s for result in results), 400)
        curves = scale * np.array([_held(result, grid_s) for result in results])
        colour, dash = _LINES[method]
        axes.plot(grid_s, np.median(curves, axis=0), color=colour, linestyle=dash, linewidth=2.4)
        low, high = np.quantile(curves, [0.25, 0.75], axis=0)
        best = min(best, float(np.nanmin(low)))
        axes.fill_between(grid_s, low, high, color=colour, alpha=0.15, linewidth=0)
        reached_s = spread(results).median_s
        if np.isfinite(reached_s):
            axes.plot([reached_s], [level], marker="o", color=colour, markersize=8, zorder=5)
            ends.append((reached_s, method, colour))
    right_s = 1.08 * min(longest_s, max(result.total_s for result in compared.results)) if ends else None
    axes.set_xlim(0, right_s)
    axes.axhline(level, color=_DARK, linewidth=0.8, linestyle=(0, (2, 3)))
    axes.set_ylim(level + depth, None if is_accuracy else best - part)
    # Names below the target's line, one step down for each, so that near neighbours stay apart.
    for rank, (reached_s, method, colour) in enumerate(sorted(ends)):
        height = level + part * (3.4 + 2.6 * rank)
        axes.plot([reached_s, reached_s], [level, height], color=colour, linewidth=0.8)
        at_right = right_s is not None and reached_s > 0.7 * right_s
        axes.annotate(
            f"{_NAMES.get(method, method)} {reached_s:.0f} s",
            (reached_s, height),
            xytext=(-5 if at_right else 5, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            ha="right" if at_right else "left",
            fontweight="bold" if method == "rex" else "normal",
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 1.5},
            zorder=6,
        )
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel(f"test {metric}{',' if unit else ''}{unit}")
    axes.set_title(f"{metric.capitalize()} over time, {world.learner} on {world.cluster}, to {level:g}{unit}")
    return figure


@_styled
def times_chart(compared: Comparison, world: Cell) -> Figure:
    """Draw every method's time to the target against the reference's: medians, with the lowest and the highest."""
    reference = _reference(compared, world)
    methods = [method for method in compared.methods(world) if method != reference]
    figure, axes = _new(8.4, 0.9 + 0.42 * len(methods))
    _bars(axes, compared, world, methods)
    axes.set_xlabel(f"time to the target, {reference} = 1")
    axes.set_title(_title(world))
    return figure


@_styled
def worlds_chart(compared: Comparison, worlds: Sequence[Cell]) -> Figure:
    """Draw the same for several worlds below one another."""
    references = [_reference(compared, world) for world in worlds]
    methods = [
        [method for method in compared.methods(world) if method != reference]
        for world, reference in zip(worlds, references, strict=True)
    ]
    heights = [len(names) + 2 for names in methods]
    figure = Figure(figsize=(8.4, 0.4 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(worlds), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, world, names in zip(panels, worlds, methods, strict=True):
        _bars(axes, compared, world, names)
        axes.set_title(_title(world))
    panels[-1].set_xlabel(f"time to the target, {references[-1]} = 1")
    return figure


@_styled
def ledger_chart(compared: Comparison, world: Cell) -> Figure | None:
    """Draw where methods that change the batch lose time against the oracle; None where no ledger was kept."""
    rows = {}
    for method in compared.methods(world):
        kept = [result for result in compared.by_seed(world, method).values() if result.lost_s]
        if kept and median(result.smallest_batch for result in kept) < median(r.largest_batch for r in kept):
            rows[method] = {
                part: median(
                    100 * result.lost_s.get(part, 0.0) / (result.total_s - sum(result.lost_s.values()))
                    for result in kept
                )
                for part in _PARTS
            }
    if not rows:
        return None
    figure, axes = _new(8.4, 1.9 + 0.6 * len(rows))
    for height, parts in enumerate(reversed(rows.values())):
        ends = {1: 0.0, -1: 0.0}
        for part, value in parts.items():
            side = 1 if value >= 0 else -1
            axes.barh(height, value, left=ends[side], color=_PARTS[part][0], edgecolor="white", height=0.62)
            ends[side] += value
        axes.annotate(
            f"{sum(parts.values()):+.1f} %",
            (ends[1], height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_DARK,
        )
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.axvline(0, color=_DARK, linewidth=0.8)
    axes.margins(x=0.18)
    axes.set_xlabel("time lost to the oracle, % of its time")
    for colour, name in _PARTS.values():
        axes.bar(0, 0, color=colour, label=name)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(-0.12, 1.0), frameon=False, fontsize=11, handlelength=1.0)
    figure.suptitle(f"Where the time goes, {_title(world)}", x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure


def _reference(compared: Comparison, world: Cell) -> str:
    """Return whose time is 1: the oracle's, or where none was asked, that of the first method."""
    methods = compared.methods(world)
    return "oracle" if "oracle" in methods else methods[0]


def _bars(axes: Axes, compared: Comparison, world: Cell, methods: Sequence[str]) -> None:
    reference_s = spread(list(compared.by_seed(world, _reference(compared, world)).values())).median_s
    longest = 0.0
    for height, method in enumerate(reversed(methods)):
        found = spread(list(compared.by_seed(world, method).values()))
        colour = _BLUE if method == "rex" else _GREY if method in _CONTROLS else _SKY
        if not np.isfinite(found.median_s):
            axes.annotate("target missed", (1.0, height), xytext=(6, 0), textcoords="offset points", va="center")
            continue
        value, low, high = (seconds / reference_s for seconds in (found.median_s, found.lowest_s, found.highest_s))
        high = value if np.isinf(high) else high
        axes.barh(height, value, color=colour, height=0.66)
        axes.plot([low, high], [height, height], color=_DARK, linewidth=1.6)
        longest = max(longest, high)
        axes.annotate(
            f"{value:.2f}" + (f" ({found.num_missed} missed)" if found.num_missed else ""),
            (max(value, high), height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if method == "rex" else "normal",
            color=_DARK,
        )
    axes.set_yticks(range(len(methods)), [_NAMES.get(method, method) for method in reversed(methods)])
    axes.axvline(1, color=_DARK, linewidth=0.9, linestyle=(0, (2, 3)))
    axes.set_xlim(0, 1.12 * longest if longest else None)
    axes.set_ylim(-0.6, len(methods) - 0.4)
    axes.tick_params(axis="y", length=0)


def _held(result: Result, grid_s: FloatArray) -> FloatArray:
    """Return what was last seen at each moment; NaN before the first look."""
    index = np.searchsorted(result.evaluated_s, grid_s, side="right") - 1
    seen = np.asarray(result.metrics)[np.maximum(index, 0)]
    return np.where(index >= 0, seen, np.nan)


def _title(world: Cell) -> str:
    trained = world.workload + " trace" if world.learner == "trace" else world.learner
    disturbed = "" if world.disturbance == "none" else f", {world.disturbance}"
    return f"{trained} on {world.cluster}{disturbed}"


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()
