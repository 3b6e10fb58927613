"""``rex-ray replay``: the journal as proof."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rex_ray.control.journalled import library_versions
from rex_ray.control.replay import replay
from rex_ray.report.page.tables import DECISION_COLUMNS, decision_rows
from rex_ray.report.reading.build import build_run
from rex_ray.report.reading.load import find_journal, load_journal, run_name

__all__ = ["print_replay", "replay_document"]

_MOST_DIFFERENCES = 10


def replay_document(run: Path) -> dict[str, Any]:
    """Replay a run and return its decisions, and what the comparison found, as plain values.

    Args:
        run: see ``find_journal``.

    Raises:
        ConfigError: no journal, or one that cannot be read.
    """
    journal = load_journal(run)
    outcome = replay(journal, environment=library_versions())
    name = run_name(find_journal(run))
    data = build_run(name, journal.header.policy, {}, journal.entries)
    rows = decision_rows(data.decisions)
    return {
        "run": name,
        "policy": data.policy,
        "outcome": data.outcome,
        "decisions": [dict(zip(DECISION_COLUMNS, row, strict=True)) for row in rows],
        "num_events": outcome.num_events,
        "num_commands": outcome.num_commands,
        "is_identical": outcome.is_identical,
        "differences": [asdict(difference) for difference in outcome.differences],
        "remarks": list(outcome.remarks),
    }


def print_replay(found: Mapping[str, Any], console: Console) -> None:
    """Print what ``replay_document`` returned."""
    title = f"{escape(found['run'])}: {found['policy']}, {escape(found['outcome'])}"
    console.print(title if found["decisions"] else f"{title}; no decisions", soft_wrap=True, highlight=False)
    _print_decisions(found["decisions"], console)
    _print_outcome(found, console)


def _print_decisions(decisions: Sequence[Mapping[str, str]], console: Console) -> None:
    """Two lines each: in a terminal a column for reasons is too narrow to be read."""
    for cells in decisions:
        known = [
            f"{name} {cells[name]}" for name in ("decided", "applied", "predicted", "measured") if cells[name] != "–"
        ]
        line = f"  {cells['#']}: {cells['rows per rank']}; {', '.join(known)}".replace("\u00a0", "")
        console.print(f"{escape(line)}\n    [dim]{escape(cells['reason'])}[/]", soft_wrap=True, highlight=False)


def _print_outcome(found: Mapping[str, Any], console: Console) -> None:
    for remark in found["remarks"]:
        console.print(f"[dim]{escape(remark)}[/]")
    replayed = f"{found['num_events']:,} events replayed, {found['num_commands']:,} commands"
    if found["is_identical"]:
        console.print(f"[green]identical:[/] {replayed}, every command and note the same")
        return
    differences = found["differences"]
    console.print(f"[bold red]different:[/] {replayed}, {len(differences)} differences")
    for difference in differences[:_MOST_DIFFERENCES]:
        console.print(f"  event {difference['number']}: {escape(difference['what'])}")
    if len(differences) > _MOST_DIFFERENCES:
        console.print(f"  and {len(differences) - _MOST_DIFFERENCES} more")
