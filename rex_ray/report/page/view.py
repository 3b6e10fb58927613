"""One run as its page shows it: figures, drawings and rows of text, before any markup."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.report.charts.figure import Figure
from rex_ray.report.charts.fits import fits_figure
from rex_ray.report.charts.growth import growth_figure
from rex_ray.report.charts.kinds import device_hues, fleet_text
from rex_ray.report.charts.metrics import metric_figures
from rex_ray.report.charts.noise import noise_figure
from rex_ray.report.charts.own_time import own_time_figure
from rex_ray.report.charts.split import split_figure
from rex_ray.report.facts import RunFacts
from rex_ray.report.page.bars import BarRow, estimate_bars, ledger_bars
from rex_ray.report.page.headline import Headline, headline
from rex_ray.report.page.key_figures import KeyFigure, key_figures
from rex_ray.report.page.tables import (
    DECISION_COLUMNS,
    EVENT_COLUMNS,
    FINDING_COLUMNS,
    MOST_FINDINGS,
    TRIAL_COLUMNS,
    WORKER_COLUMNS,
    decision_rows,
    event_rows,
    finding_rows,
    trial_rows,
    worker_rows,
)
from rex_ray.report.page.words import percent
from rex_ray.report.reading.schema import RunData

__all__ = ["RunView", "view_run"]

Rows = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """What a template needs of one run."""

    run: RunData
    prefix: str
    fleet: str
    headline: Headline | None
    key_figures: tuple[KeyFigure, ...]
    figures: tuple[Figure, ...]
    metrics: tuple[Figure, ...]
    workers: Rows
    decisions: Rows
    ledger: list[BarRow]
    overhead: str
    estimates: list[BarRow]
    trials: Rows
    findings: Rows
    findings_left_out: int
    events: Rows
    events_left_out: int
    decision_columns: tuple[str, ...] = DECISION_COLUMNS
    worker_columns: tuple[str, ...] = WORKER_COLUMNS
    trial_columns: tuple[str, ...] = TRIAL_COLUMNS
    finding_columns: tuple[str, ...] = FINDING_COLUMNS
    event_columns: tuple[str, ...] = EVENT_COLUMNS

    @property
    def anchors(self) -> list[tuple[str, str]]:
        """Return the page's sections in order: anchor and name."""
        parts = [(slug(figure.title), figure.title) for figure in self.figures]
        if not self.run.groups:
            parts.append(("empty", "Nothing was measured"))
        parts += [("metrics", "Metrics")] if self.metrics else []
        parts.append(("decisions", "Decisions"))
        optional = (
            (self.ledger or self.overhead, "ledger", "Where the time went"),
            (self.estimates, "policies", "Other policies"),
            (self.trials, "searches", "Searches"),
            (self.findings, "findings", "Judgements"),
            (self.events, "events", "Events"),
            (self.run.notices, "notices", "Notices"),
        )
        parts += [(anchor, name) for there, anchor, name in optional if there]
        return [(self.prefix + anchor, name) for anchor, name in [*parts, ("settings", "Settings")]]


def view_run(run: RunData, facts: RunFacts, prefix: str = "") -> RunView:
    """Draw and word one run.

    Args:
        run: the run.
        facts: what was computed of it.
        prefix: before every anchor, where a page shows several runs.
    """
    overhead = ""
    if facts.overhead_fraction is not None:
        overhead = f"Overhead of control: {percent(facts.overhead_fraction)} of the run's time. {facts.overhead_method}"
    return RunView(
        run=run,
        prefix=prefix,
        fleet=fleet_text(run.groups[-1]) if run.groups else "",
        headline=headline(facts.saving),
        key_figures=key_figures(run, facts),
        figures=_figures(run, facts),
        metrics=metric_figures({run.name: run.metrics}),
        workers=worker_rows(run.groups[-1]) if run.groups else [],
        decisions=decision_rows(run.decisions),
        ledger=ledger_bars(facts.ledger),
        overhead=overhead,
        estimates=estimate_bars(facts.estimates),
        trials=trial_rows(run.searches),
        findings=finding_rows(run.findings),
        findings_left_out=max(len(run.findings) - MOST_FINDINGS, 0),
        events=event_rows(run.events[-MOST_FINDINGS:]),
        events_left_out=max(len(run.events) - MOST_FINDINGS, 0),
    )


def slug(title: str) -> str:
    """Return an anchor for a title."""
    return "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")


def _figures(run: RunData, facts: RunFacts) -> tuple[Figure, ...]:
    """The charts over optimizer steps and rows; none for a run without a complete step."""
    if not run.groups:
        return ()
    hues = device_hues(run.groups)
    figures = [split_figure(run.groups, hues), own_time_figure(run.groups, run.decisions, run.events, hues)]
    if facts.fits:
        figures.append(fits_figure(facts.fits, hues))
    if run.noise is not None:
        figures.append(noise_figure(run.noise, run.groups))
    if (growth := growth_figure(run.decisions, run.groups)) is not None:
        figures.append(growth)
    return tuple(figures)
