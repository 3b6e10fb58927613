"""The report's figures in words and numbers: what stands at the top of the page, and the table of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.report.schema import DecisionRow, GroupData, RunData

__all__ = ["DECISION_COLUMNS", "KeyFigure", "decision_rows", "format_gain", "format_shares", "key_figures"]

DECISION_COLUMNS = ("#", "decided", "applied", "rows per rank", "predicted", "measured", "reason")

MIN_STEADY_STEPS = 5
"""Fewer steady steps than this on either side say nothing about a step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFigure:
    """One figure at the top of the page."""

    label: str
    value: str
    detail: str = ""


def key_figures(run: RunData) -> tuple[KeyFigure, ...]:
    """The result in a handful of figures; what the run does not know is left out."""
    figures: list[KeyFigure] = []
    if run.groups:
        figures.extend(_step_figures(run.groups))
    accuracies = [point.metrics["accuracy"] for point in run.metrics if "accuracy" in point.metrics]
    if accuracies:
        figures.append(KeyFigure(label="accuracy", value=f"{accuracies[-1]:.4g}", detail=f"best {max(accuracies):.4g}"))
    if run.metrics:
        last = run.metrics[-1]
        epochs = f"{last.epoch + 1} epoch{'s' if last.epoch else ''}"
        figures.append(KeyFigure(label="elapsed", value=f"{last.elapsed_s:.1f} s", detail=epochs))
    asked = [decision for decision in run.decisions if decision.kind != "first"]
    applied = sum(decision.applied_at_step is not None for decision in asked)
    detail = f"{applied} took effect" if asked else "the first split stood"
    figures.append(KeyFigure(label="changes", value=str(len(asked)), detail=detail))
    return tuple(figures)


def _step_figures(groups: Sequence[GroupData]) -> list[KeyFigure]:
    """Step time and imbalance: the second half of the steady steps, beside those under the first allocation."""
    num_steps = sum(len(group.steps) for group in groups)
    figures = [KeyFigure(label="steps", value=f"{num_steps:,}", detail=f"{groups[-1].num_workers} workers")]
    step_s = np.concatenate([group.step_s[group.steady] for group in groups])
    imbalance = np.concatenate([group.imbalance[group.steady] for group in groups])
    if len(step_s) < MIN_STEADY_STEPS:
        return figures
    half = len(step_s) // 2
    late_s, late = float(np.median(step_s[half:])), float(np.median(imbalance[half:]))
    start = groups[0].steady & (groups[0].versions == groups[0].versions[0])
    s_detail = detail = ""
    if MIN_STEADY_STEPS <= start.sum() < len(step_s):
        s_detail = f"{1e3 * float(np.median(groups[0].step_s[start])):.0f} ms with the first split"
        detail = f"{float(np.median(groups[0].imbalance[start])):.1%} with the first split"
    figures.append(KeyFigure(label="step time", value=f"{1e3 * late_s:.0f} ms", detail=s_detail))
    figures.append(KeyFigure(label="imbalance", value=f"{late:.1%}", detail=detail))
    return figures


def format_gain(gain: float | None) -> str:
    """A gain as a signed change of step time: what was saved carries a minus."""
    return "–" if gain is None else f"{-gain:+.1%}".replace("-", "−")


def format_shares(shares: Sequence[int]) -> str:
    """Rows per rank; a small group's stay on one line."""
    return ("\u00a0/\u00a0" if len(shares) <= 6 else " / ").join(str(rows) for rows in shares) or "–"


def decision_rows(decisions: Sequence[DecisionRow]) -> list[tuple[str, ...]]:
    """The decisions as text, one row each, under ``DECISION_COLUMNS``; page and terminal show the same."""
    return [
        (
            str(decision.number),
            str(decision.decided_at_step) if decision.decided_at_step >= 0 else "start",
            _applied(decision),
            f"{format_shares(decision.before)} → {format_shares(decision.after)}",
            format_gain(decision.predicted_gain),
            format_gain(decision.measured_gain),
            decision.reason,
        )
        for decision in decisions
    ]


def _applied(decision: DecisionRow) -> str:
    if decision.applied_at_step is not None:
        return str(decision.applied_at_step)
    return "not published" if decision.version is None else "never"
