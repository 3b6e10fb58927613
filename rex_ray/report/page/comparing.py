"""Several runs side by side: figures with ratios to the first run's, and where the splits ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.report.charts.split import planned_shares
from rex_ray.report.facts import RunFacts
from rex_ray.report.page.key_figures import KeyFigure, key_figures
from rex_ray.report.page.words import percent, ratio_text, seconds_text
from rex_ray.report.reading.schema import MetricPoint, RunData

__all__ = ["CompareCell", "CompareRow", "compare_figures", "split_ends", "unique_names"]

_RISING = ("accuracy", "val_accuracy", "validation_accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCell:
    """A figure of one run, with its ratio to the first run's or ``""``."""

    value: str
    ratio: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """A figure of all runs."""

    label: str
    cells: tuple[CompareCell, ...]


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names that differ: of runs of one name the second is ``name (2)``."""
    taken: dict[str, int] = {}
    unique = []
    for name in names:
        taken[name] = taken.get(name, 0) + 1
        unique.append(name if taken[name] == 1 else f"{name} ({taken[name]})")
    return unique


def compare_figures(runs: Sequence[RunData], facts: Sequence[RunFacts]) -> list[CompareRow]:
    """Return every key figure that some run has, in the order of the first that has it."""
    by_run = [{figure.key: figure for figure in key_figures(run, fact)} for run, fact in zip(runs, facts, strict=True)]
    labels = {key: figure.label for figures in by_run for key, figure in figures.items()}
    rows = [_reached(runs), _saved(facts)]
    rows += [
        CompareRow(label=label, cells=tuple(_cell(key, figures, by_run[0]) for figures in by_run))
        for key, label in labels.items()
    ]
    return [row for row in rows if row is not None]


def _cell(key: str, figures: Mapping[str, KeyFigure], first: Mapping[str, KeyFigure]) -> CompareCell:
    figure, base = figures.get(key), first.get(key)
    if figure is None:
        return CompareCell(value="–")
    ratio = ""
    if figure.has_ratio and figure is not base and base is not None and base.number and figure.number is not None:
        ratio = ratio_text(figure.number / base.number)
    return CompareCell(value=figure.value, ratio=ratio)


def _saved(facts: Sequence[RunFacts]) -> CompareRow | None:
    if all(fact.saving is None for fact in facts):
        return None
    cells = [
        "–"
        if fact.saving is None
        else f"{percent(fact.saving.fraction)} ({percent(fact.saving.low)} to {percent(fact.saving.high)})"
        for fact in facts
    ]
    return CompareRow(
        label="saved against equal shares (estimate)", cells=tuple(CompareCell(value=cell) for cell in cells)
    )


def _reached(runs: Sequence[RunData]) -> CompareRow | None:
    """When each run reached the best accuracy that all of them reached."""
    for name in _RISING:
        best = [max((p.metrics[name] for p in run.metrics if name in p.metrics), default=None) for run in runs]
        known = [value for value in best if value is not None and np.isfinite(value)]
        if len(known) == len(runs):
            level = min(known)
            times = [_first_s(run.metrics, name, level) for run in runs]
            cells = [
                CompareCell(value=seconds_text(at), ratio=ratio_text(at / times[0]) if k and times[0] > 0 else "")
                for k, at in enumerate(times)
            ]
            return CompareRow(label=f"{name.replace('_', ' ')} {level:.4g} in", cells=tuple(cells))
    return None


def _first_s(metrics: Sequence[MetricPoint], name: str, level: float) -> float:
    return next(point.elapsed_s for point in metrics if point.metrics.get(name, -np.inf) >= level)


def split_ends(runs: Sequence[RunData]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows: of every kind of device, the rows of a worker at each run's end."""
    ends: list[dict[str, str]] = []
    for run in runs:
        end: dict[str, str] = {}
        if run.groups:
            group = run.groups[-1]
            shares = planned_shares(group)[1][-1]
            for device in sorted(set(group.devices)):
                rows = shares[[d == device for d in group.devices]]
                low, high = int(rows.min()), int(rows.max())
                end[device] = f"{low:,}" if low == high else f"{low:,} – {high:,}"
            end["global batch"] = f"{int(shares.sum()):,}"
        ends.append(end)
    kinds = sorted({kind for end in ends for kind in end if kind != "global batch"})
    names = ["global batch", *kinds] if kinds else []
    columns = ("run", *names)
    return columns, [(run.name, *(end.get(name, "–") for name in names)) for run, end in zip(runs, ends, strict=True)]
