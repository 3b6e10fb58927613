"""The result in a handful of figures: as tiles of a page, as rows of a comparison, and as numbers for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.report.facts import RunFacts
from rex_ray.report.page.words import percent, seconds_text
from rex_ray.report.reading.schema import DecisionRow, GroupData, MetricPoint, RunData

__all__ = ["KeyFigure", "key_figures"]

MIN_STEADY_STEPS = 5
"""Fewer steady steps than this on either side say nothing about a step time."""

_BEST = ("accuracy", "val_accuracy", "validation_accuracy", "loss", "val_loss", "perplexity")
"""Metrics that stand at the top where a run reports them, the first of them only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """One figure at the top of the page.

    Attributes:
        key: its name for a program, with the unit.
        label: its name for a reader.
        value: as text.
        detail: what to compare it with, or ``""``.
        number: the value, or None where it is none.
        has_ratio: whether a ratio of two runs' says something.
    """

    key: str
    label: str
    value: str
    detail: str = ""
    number: float | None = None
    has_ratio: bool = False


def key_figures(run: RunData, facts: RunFacts | None = None) -> tuple[KeyFigure, ...]:
    """Return what a reader looks for first; what the run does not know is left out."""
    figures: list[KeyFigure] = []
    if run.groups:
        figures += _step_figures(run.groups)
    if facts is not None:
        figures += _computed_figures(facts)
    figures += _metric_figures(run.metrics)
    if run.noise is not None and np.isfinite(run.noise.noise_scale).any():
        known = float(run.noise.noise_scale[np.isfinite(run.noise.noise_scale)][-1])
        detail = _batches(run.decisions)
        figures.append(
            KeyFigure(
                key="noise_scale_rows", label="noise scale", value=f"{known:,.0f} rows", detail=detail, number=known
            )
        )
    figures.append(_changes(run.decisions))
    troubles = [event for event in run.events if event.kind in {"lost", "incident", "memory"}]
    if troubles:
        lost = sum(event.kind == "lost" for event in troubles)
        detail = f"{lost} worker{'s' if lost != 1 else ''} lost"
        count = len(troubles)
        figures.append(
            KeyFigure(key="num_incidents", label="incidents", value=str(count), detail=detail, number=float(count))
        )
    return tuple(figures)


def _step_figures(groups: Sequence[GroupData]) -> list[KeyFigure]:
    """Step time and imbalance: the second half of the steady steps, beside those under the first allocation.

    Steps of unlike batches are compared by their time per row: a larger batch takes longer and is no slower.
    """
    num_steps = sum(len(group.steps) for group in groups)
    num_rows = int(sum(group.num_rows.sum() for group in groups))
    detail = f"{num_rows:,} rows by {groups[-1].num_workers} workers"
    figures = [
        KeyFigure(
            key="num_steps",
            label="steps",
            value=f"{num_steps:,}",
            detail=detail,
            number=float(num_steps),
            has_ratio=True,
        )
    ]
    whole_s = float(sum(group.step_s.sum() for group in groups))
    figures.append(
        KeyFigure(
            key="all_steps_s",
            label="time in steps",
            value=seconds_text(whole_s),
            detail="evaluations and saves not counted",
            number=whole_s,
            has_ratio=True,
        )
    )
    step_s = np.concatenate([group.step_s[group.steady] for group in groups])
    rows = np.concatenate([group.num_rows[group.steady].sum(axis=1) for group in groups])
    imbalance = np.concatenate([group.imbalance[group.steady] for group in groups])
    if len(step_s) < MIN_STEADY_STEPS:
        return figures
    half = len(step_s) // 2
    late_s, late = float(np.median(step_s[half:])), float(np.median(imbalance[half:]))
    rows_per_s = float(np.median(rows[half:] / step_s[half:]))
    start = groups[0].steady & (groups[0].versions == groups[0].versions[0])
    s_detail = detail = rate_detail = ""
    if MIN_STEADY_STEPS <= start.sum() < len(step_s):
        first_s, first_rows = groups[0].step_s[start], groups[0].num_rows[start].sum(axis=1)
        if (rows[half:] == first_rows[0]).all():
            s_detail = f"{1e3 * float(np.median(first_s)):.0f} ms with the first split"
        else:
            now_s, then_s = float(np.median(step_s[half:] / rows[half:])), float(np.median(first_s / first_rows))
            s_detail = f"{1e3 * now_s:.3g} ms per row, {1e3 * then_s:.3g} ms with the first split and batch"
        rate_detail = f"{float(np.median(first_rows / first_s)):,.0f} at the start"
        detail = f"{percent(float(np.median(groups[0].imbalance[start])))} with the first split"
    figures.append(
        KeyFigure(
            key="step_s",
            label="step time",
            value=f"{1e3 * late_s:.0f} ms",
            detail=s_detail,
            number=late_s,
            has_ratio=True,
        )
    )
    figures.append(
        KeyFigure(
            key="rows_per_s",
            label="rows per second",
            value=f"{rows_per_s:,.0f}",
            detail=rate_detail,
            number=rows_per_s,
            has_ratio=True,
        )
    )
    figures.append(KeyFigure(key="imbalance", label="imbalance", value=percent(late), detail=detail, number=late))
    return figures


def _computed_figures(facts: RunFacts) -> list[KeyFigure]:
    figures = []
    if facts.rii is not None:
        figures.append(
            KeyFigure(
                key="rii",
                label="RII",
                value=f"{facts.rii:.2f}",
                detail="peak rate that went unused",
                number=facts.rii,
                has_ratio=True,
            )
        )
    if facts.overhead_fraction is not None:
        figures.append(
            KeyFigure(
                key="overhead_fraction",
                label="overhead of control",
                value=percent(facts.overhead_fraction),
                detail="of the run's time",
                number=facts.overhead_fraction,
            )
        )
    return figures


def _metric_figures(metrics: Sequence[MetricPoint]) -> list[KeyFigure]:
    figures = []
    reported = {name for point in metrics for name in point.metrics}
    name = next((name for name in _BEST if name in reported), None)
    if name is not None:
        values = [point.metrics[name] for point in metrics if name in point.metrics]
        known = [value for value in values if np.isfinite(value)]
        best = max(known, default=None) if "accuracy" in name else min(known, default=None)
        figures.append(
            KeyFigure(
                key=name,
                label=name.replace("_", " "),
                value=f"{values[-1]:.4g}",
                detail="" if best is None else f"best {best:.4g}",
                number=values[-1],
            )
        )
    if metrics:
        last = metrics[-1]
        epochs = f"{last.epoch + 1} epoch{'s' if last.epoch else ''}"
        figures.append(
            KeyFigure(
                key="elapsed_s",
                label="elapsed",
                value=seconds_text(last.elapsed_s),
                detail=epochs,
                number=last.elapsed_s,
                has_ratio=True,
            )
        )
    return figures


def _changes(decisions: Sequence[DecisionRow]) -> KeyFigure:
    asked = [decision for decision in decisions if decision.kind != "first"]
    applied = sum(decision.applied_at_step is not None for decision in asked)
    moved = sum(decision.moved_rows for decision in asked)
    detail = f"{applied} took effect, {moved} of them moved rows" if asked else "the first split stood"
    count = len(asked)
    return KeyFigure(key="num_changes", label="changes", value=str(count), detail=detail, number=float(count))


def _batches(decisions: Sequence[DecisionRow]) -> str:
    """How the global batch went."""
    applied = [sum(decision.after) for decision in decisions if decision.applied_at_step is not None]
    if not applied:
        return ""
    return f"batch {applied[0]:,}" if applied[-1] == applied[0] else f"batch {applied[0]:,} → {applied[-1]:,}"
