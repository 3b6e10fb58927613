"""The report as numbers: one JSON document per run, for whoever reads it with a program."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rex_ray.core.plain_json import finite_json
from rex_ray.report.facts import RunFacts
from rex_ray.report.page.key_figures import key_figures
from rex_ray.report.reading.schema import RunData

__all__ = ["run_document"]


def run_document(run: RunData, facts: RunFacts) -> dict[str, Any]:
    """Return a run's figures as JSON values; a number that is not finite is null.

    Args:
        run: the run.
        facts: what was computed of it.
    """
    document: dict[str, Any] = {
        "name": run.name,
        "policy": run.policy,
        "outcome": run.outcome,
        "devices": dict(Counter(run.groups[-1].devices)) if run.groups else {},
        "local_batch_sizes": _last_shares(run),
        "figures": {figure.key: figure.number for figure in key_figures(run, facts)},
        "saving": asdict(facts.saving) if facts.saving is not None else None,
        "rii": facts.rii,
        "overhead": {"fraction": facts.overhead_fraction, "method": facts.overhead_method},
        "ledger": [asdict(row) for row in facts.ledger],
        "estimates": [asdict(row) for row in facts.estimates],
        "metrics": dict(run.metrics[-1].metrics) if run.metrics else {},
        "events": [asdict(event) for event in run.events],
        "notices": list(run.notices),
    }
    finite: dict[str, Any] = finite_json(document)
    return finite


def _last_shares(run: RunData) -> list[int]:
    applied = [row for row in run.decisions if row.applied_at_step is not None and row.after]
    return list(applied[-1].after) if applied else []
