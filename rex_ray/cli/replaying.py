"""``rex-ray replay``: the journal as proof."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.control.journalled import library_versions
from rex_ray.control.replay import ReplayReport, replay
from rex_ray.report.build import build_run
from rex_ray.report.load import find_journal, load_journal, run_name
from rex_ray.report.tables import DECISION_COLUMNS, decision_rows

__all__ = ["replay_run"]

_MOST_DIFFERENCES = 10
_LEFT_OUT = frozenset({"test"})  # a terminal is narrow, and the reason names the test as well


def replay_run(run: Path, console: Console) -> bool:
    """Replay a run, print its decisions and what the comparison found; return whether all came out the same."""
    journal = load_journal(run)
    outcome = replay(journal, environment=library_versions())
    name = run_name(find_journal(run))
    data = build_run(name, journal.header.policy, {}, journal.entries)
    if data.decisions:
        table = Table(title=f"{name}: {data.policy}, {data.outcome}", title_justify="left", box=None)
        shown = [index for index, column in enumerate(DECISION_COLUMNS) if column not in _LEFT_OUT]
        for index in shown:
            table.add_column(DECISION_COLUMNS[index], overflow="fold")
        for row in decision_rows(data.decisions):
            table.add_row(*(escape(row[index].replace("\u00a0", "")) for index in shown))
        console.print(table)
    else:
        console.print(f"{escape(name)}: {data.policy}, {escape(data.outcome)}; no decisions")
    _print_outcome(outcome, console)
    return outcome.is_identical


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
