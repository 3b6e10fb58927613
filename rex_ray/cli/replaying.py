"""``rex-ray replay``: the journal as proof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from rex_ray.control.journalled import library_versions
from rex_ray.control.replay import ReplayReport, replay
from rex_ray.report.page.tables import DECISION_COLUMNS, decision_rows
from rex_ray.report.reading.build import build_run
from rex_ray.report.reading.load import find_journal, load_journal, run_name
from rex_ray.report.reading.schema import DecisionRow

__all__ = ["replay_run"]

_MOST_DIFFERENCES = 10


def replay_run(run: Path, console: Console) -> bool:
    """Replay a run, print its decisions and what the comparison found; return whether all came out the same."""
    journal = load_journal(run)
    outcome = replay(journal, environment=library_versions())
    name = run_name(find_journal(run))
    data = build_run(name, journal.header.policy, {}, journal.entries)
    if data.decisions:
        console.print(f"{escape(name)}: {data.policy}, {escape(data.outcome)}", soft_wrap=True, highlight=False)
        _print_decisions(data.decisions, console)
    else:
        console.print(f"{escape(name)}: {data.policy}, {escape(data.outcome)}; no decisions")
    _print_outcome(outcome, console)
    return outcome.is_identical


def _print_decisions(decisions: Sequence[DecisionRow], console: Console) -> None:
    """Two lines each: in a terminal a column for reasons is too narrow to be read."""
    for row in decision_rows(decisions):
        cells = dict(zip(DECISION_COLUMNS, row, strict=True))
        known = [
            f"{name} {cells[name]}" for name in ("decided", "applied", "predicted", "measured") if cells[name] != "–"
        ]
        line = f"  {cells['#']}: {cells['rows per rank']}; {', '.join(known)}".replace("\u00a0", "")
        console.print(f"{escape(line)}\n    [dim]{escape(cells['reason'])}[/]", soft_wrap=True, highlight=False)


def _print_outcome(outcome: ReplayReport, console: Console) -> None:
    for remark in outcome.remarks:
        console.print(f"[dim]{escape(remark)}[/]")
    replayed = f"{outcome.num_events:,} events replayed, {outcome.num_commands:,} commands"
    if outcome.is_identical:
        console.print(f"[green]identical:[/] {replayed}, every command and note the same")
        return
    console.print(f"[bold red]different:[/] {replayed}, {len(outcome.differences)} differences")
    for difference in outcome.differences[:_MOST_DIFFERENCES]:
        console.print(f"  event {difference.number}: {escape(difference.what)}")
    if len(outcome.differences) > _MOST_DIFFERENCES:
        console.print(f"  and {len(outcome.differences) - _MOST_DIFFERENCES} more")
