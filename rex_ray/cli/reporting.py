"""What ``rex-ray report`` does: reads runs, computes what can be computed of them, writes a page or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rex_ray.cli.counterfactual import counterfactuals
from rex_ray.core.errors import ConfigError
from rex_ray.report.computing.run_facts import run_facts
from rex_ray.report.facts import RunFacts
from rex_ray.report.page.document import run_document
from rex_ray.report.page.html import render_comparison, render_html
from rex_ray.report.reading.load import load_journal, run_of
from rex_ray.report.reading.schema import RunData

__all__ = ["RunReport", "page_of", "report_runs", "write_page"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunReport:
    """A run and what was computed of it."""

    run: RunData
    facts: RunFacts

    def document(self) -> dict[str, Any]:
        """Return its figures as JSON values."""
        return run_document(self.run, self.facts)


def report_runs(runs: Sequence[Path], *, with_estimates: bool) -> list[RunReport]:
    """Read every run, and compute its facts.

    Args:
        runs: storage folders, see ``rex_ray.report.reading.load``.
        with_estimates: whether to replay the run's curves under other policies.

    Raises:
        ConfigError: a run has no journal.
    """
    reports = []
    for path in runs:
        journal = load_journal(path)
        run = run_of(path, journal)
        facts = run_facts(run)
        if with_estimates:
            facts = replace(facts, estimates=counterfactuals(run, journal.header))
        reports.append(RunReport(run=run, facts=facts))
    return reports


def page_of(reports: Sequence[RunReport]) -> str:
    """Return the page of one run, or of several compared."""
    if len(reports) == 1:
        return render_html(reports[0].run, reports[0].facts)
    return render_comparison([one.run for one in reports], [one.facts for one in reports])


def write_page(reports: Sequence[RunReport], target: Path) -> Path:
    """Write the page of one run, or of several compared.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = page_of(reports)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        # A file in the place of the folder: the system says "File exists", which sounds as if nothing were replaced.
        why = f"{target.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"cannot write {target}: {why}; choose another file with --output") from error
    return target
