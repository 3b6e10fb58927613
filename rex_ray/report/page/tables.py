"""The report's tables as text: decisions, searches, judgements, events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rex_ray.report.charts.events import EVENT_WORDS
from rex_ray.report.reading.schema import DecisionRow, EventRow, FindingRow, GroupData, SearchRow

__all__ = [
    "DECISION_COLUMNS",
    "EVENT_COLUMNS",
    "FINDING_COLUMNS",
    "TRIAL_COLUMNS",
    "WORKER_COLUMNS",
    "decision_rows",
    "event_rows",
    "finding_rows",
    "format_gain",
    "format_shares",
    "format_test",
    "trial_rows",
    "worker_rows",
]

DECISION_COLUMNS = ("#", "decided", "applied", "rows per rank", "test", "predicted", "measured", "reason")
FINDING_COLUMNS = ("part", "step", "verdict", "in a row", "test", "would save", "reason")
EVENT_COLUMNS = ("step", "what", "rank", "in words")
WORKER_COLUMNS = ("rank", "device", "machine", "rows at the end", "own time at the end")
TRIAL_COLUMNS = ("search", "step", "rows per rank", "slowest worker", "outcome")

MOST_FINDINGS = 400
"""Findings beyond this many, the oldest, are left out of the page."""

LAST_STEPS = 32
"""What a worker had and took in the end is the median of this many steps."""


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
    shares = (
        f"{format_shares(decision.before)} →\u00a0{format_shares(decision.after)}"  # a line may end before the arrow
    )
    if decision.kind != "change_global_batch":
        return shares
    totals = f"{sum(decision.before)}\u00a0→\u00a0{sum(decision.after)} in all, LR\u00a0×\u00a0{decision.lr_factor:.3g}"
    return f"{totals}: {shares}"


def _applied(decision: DecisionRow) -> str:
    if decision.applied_at_step is not None:
        return str(decision.applied_at_step)
    return "not published" if decision.version is None else "never"


def event_rows(events: Sequence[EventRow]) -> list[tuple[str, ...]]:
    """What happened as text, one row each, under ``EVENT_COLUMNS``."""
    return [
        (
            str(event.step) if event.step >= 0 else "start",
            EVENT_WORDS.get(event.kind, event.kind),
            "–" if event.rank is None else str(event.rank),
            event.text,
        )
        for event in events
    ]


def worker_rows(group: GroupData) -> list[tuple[str, ...]]:
    """A group's workers as text, one row each, under ``WORKER_COLUMNS``: medians of its last ``LAST_STEPS`` steps."""
    whole = np.flatnonzero(~group.partial)[-LAST_STEPS:]
    late = whole if whole.size else np.arange(len(group.steps))[-LAST_STEPS:]
    rows, own_s = np.median(group.num_rows[late], axis=0), np.median(group.own_s[late], axis=0)
    return [
        (str(rank), device, node or "–", f"{rows[rank]:,.0f}", f"{1e3 * own_s[rank]:,.1f} ms")
        for rank, (device, node) in enumerate(zip(group.devices, group.nodes, strict=True))
    ]
