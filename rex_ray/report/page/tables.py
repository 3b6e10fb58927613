"""The report's figures in words and numbers: what stands at the top of the page, and the table of decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rex_ray.report.reading.schema import DecisionRow, FindingRow, GroupData, RunData, SearchRow

__all__ = [
    "DECISION_COLUMNS",
    "FINDING_COLUMNS",
    "TRIAL_COLUMNS",
    "KeyFigure",
    "decision_rows",
    "finding_rows",
    "format_gain",
    "format_shares",
    "format_test",
    "key_figures",
    "trial_rows",
]

DECISION_COLUMNS = ("#", "decided", "applied", "rows per rank", "test", "predicted", "measured", "reason")
FINDING_COLUMNS = ("part", "step", "verdict", "in a row", "test", "would save", "reason")
TRIAL_COLUMNS = ("search", "step", "rows per rank", "slowest worker", "outcome")

MOST_FINDINGS = 400
"""Findings beyond this many, the oldest, are left out of the page."""

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
    if run.noise is not None and np.isfinite(run.noise.noise_scale).any():
        known = run.noise.noise_scale[np.isfinite(run.noise.noise_scale)]
        figures.append(KeyFigure(label="noise scale", value=f"{known[-1]:,.0f} rows", detail=_batches(run.decisions)))
    asked = [decision for decision in run.decisions if decision.kind != "first"]
    applied = sum(decision.applied_at_step is not None for decision in asked)
    moved = sum(decision.moved_rows for decision in asked)
    detail = f"{applied} took effect, {moved} of them moved rows" if asked else "the first split stood"
    figures.append(KeyFigure(label="changes", value=str(len(asked)), detail=detail))
    return tuple(figures)


def _step_figures(groups: Sequence[GroupData]) -> list[KeyFigure]:
    """Step time and imbalance: the second half of the steady steps, beside those under the first allocation.

    Steps of unlike batches are compared by their time per row: a larger batch takes longer and is no slower.
    """
    num_steps = sum(len(group.steps) for group in groups)
    figures = [KeyFigure(label="steps", value=f"{num_steps:,}", detail=f"{groups[-1].num_workers} workers")]
    step_s = np.concatenate([group.step_s[group.steady] for group in groups])
    rows = np.concatenate([group.num_rows[group.steady].sum(axis=1) for group in groups])
    imbalance = np.concatenate([group.imbalance[group.steady] for group in groups])
    if len(step_s) < MIN_STEADY_STEPS:
        return figures
    half = len(step_s) // 2
    late_s, late = float(np.median(step_s[half:])), float(np.median(imbalance[half:]))
    start = groups[0].steady & (groups[0].versions == groups[0].versions[0])
    s_detail = detail = ""
    if MIN_STEADY_STEPS <= start.sum() < len(step_s):
        first_s, first_rows = groups[0].step_s[start], groups[0].num_rows[start].sum(axis=1)
        if (rows[half:] == first_rows[0]).all():
            s_detail = f"{1e3 * float(np.median(first_s)):.0f} ms with the first split"
        else:
            now_s, then_s = float(np.median(step_s[half:] / rows[half:])), float(np.median(first_s / first_rows))
            s_detail = f"{1e3 * now_s:.3g} ms per row, {1e3 * then_s:.3g} ms with the first split and batch"
        detail = f"{float(np.median(groups[0].imbalance[start])):.1%} with the first split"
    figures.append(KeyFigure(label="step time", value=f"{1e3 * late_s:.0f} ms", detail=s_detail))
    figures.append(KeyFigure(label="imbalance", value=f"{late:.1%}", detail=detail))
    return figures


def _batches(decisions: Sequence[DecisionRow]) -> str:
    """How the global batch went."""
    applied = [sum(decision.after) for decision in decisions if decision.applied_at_step is not None]
    if not applied:
        return ""
    return f"batch {applied[0]:,}" if applied[-1] == applied[0] else f"batch {applied[0]:,} → {applied[-1]:,}"


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
            _change(decision),
            format_test(decision.evidence),
            format_gain(decision.predicted_gain),
            format_gain(decision.measured_gain),
            decision.reason,
        )
        for decision in decisions
    ]


def finding_rows(findings: Sequence[FindingRow]) -> list[tuple[str, ...]]:
    """What the parts judged as text, one row each, under ``FINDING_COLUMNS``; the newest ``MOST_FINDINGS``."""
    return [
        (
            finding.part,
            str(finding.step) if finding.step >= 0 else "start",
            finding.verdict,
            str(finding.count),
            format_test(finding.evidence),
            format_gain(finding.predicted_gain),
            finding.reason + (f" (asks for {format_shares(finding.asks_for)})" if finding.asks_for else ""),
        )
        for finding in findings[-MOST_FINDINGS:]
    ]


def trial_rows(searches: Sequence[SearchRow]) -> list[tuple[str, ...]]:
    """Searches and their trials as text, under ``TRIAL_COLUMNS``: a line for each search, then one per trial."""
    rows: list[tuple[str, ...]] = []
    for number, search in enumerate(searches, start=1):
        result = f", {format_shares(search.result)}" if search.result else ""
        name = f"{number}: {search.kind}"
        started = f"from {format_shares(search.plan)}"
        rows.append((name, str(search.started_at_step), started, "", search.outcome + result))
        rows += [
            (
                f"{number}, trial {trial.trial}",
                str(trial.asked_at_step),
                format_shares(trial.local_batch_sizes),
                "–" if trial.slowest_s is None else f"{1e3 * trial.slowest_s:.1f} ms",
                _told(trial.objective),
            )
            for trial in search.trials
        ]
    return rows


def _told(objective: float | None) -> str:
    if objective is None:
        return "not measured"
    return "refused" if math.isinf(objective) else f"measured, objective {objective:.4f}"


def format_test(evidence: Mapping[str, float]) -> str:
    """The test behind a judgement: its p and its effect size, as far as they are known."""
    parts = []
    if (p_value := evidence.get("p_value")) is not None:
        parts.append(f"p\u00a0=\u00a0{p_value:.2g}")
    if (effect := evidence.get("effect")) is not None:
        parts.append(f"effect\u00a0{effect:+.2f}".replace("-", "−"))
    return ", ".join(parts) or "–"


def _change(decision: DecisionRow) -> str:
    """Shares before and after; where the batch or the learning rate changes as well, that comes first."""
    shares = f"{format_shares(decision.before)} → {format_shares(decision.after)}"
    if decision.kind != "change_global_batch":
        return shares
    totals = f"{sum(decision.before)}\u00a0→\u00a0{sum(decision.after)} in all, LR\u00a0×\u00a0{decision.lr_factor:.3g}"
    return f"{totals}: {shares}"


def _applied(decision: DecisionRow) -> str:
    if decision.applied_at_step is not None:
        return str(decision.applied_at_step)
    return "not published" if decision.version is None else "never"
