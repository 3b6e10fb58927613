"""Searches for better shares, gathered from the events and commands in which they pass through the journal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rex_ray.control.commands import CancelSearch, Command, StartSearch, TellTrial
from rex_ray.control.events import Event, SearchFailed, SearchFinished, TrialProposed
from rex_ray.report.reading.schema import SearchRow, TrialRow

__all__ = ["SearchLog"]


@dataclass(slots=True)
class SearchLog:
    """Searches by identity, in the order of their starts."""

    _rows: dict[str, SearchRow] = field(default_factory=dict)

    def rows(self) -> tuple[SearchRow, ...]:
        """Return what is known of each."""
        return tuple(self._rows.values())

    def take_command(self, command: Command, step: int) -> None:
        """Note a start, an objective or an end."""
        match command:
            case StartSearch(search_id=search_id, problem=problem):
                self._rows[search_id] = SearchRow(
                    search_id=search_id, kind=problem.kind, started_at_step=step, plan=problem.plan
                )
            case TellTrial(search_id=search_id) if search_id in self._rows:
                row = self._rows[search_id]
                slowest_s = max(command.own_s, default=None)
                told = tuple(
                    replace(trial, objective=command.objective, slowest_s=slowest_s)
                    if trial.trial == command.trial
                    else trial
                    for trial in row.trials
                )
                self._rows[search_id] = replace(row, trials=told)
            case CancelSearch(search_id=search_id) if search_id in self._rows:
                self._end(search_id, f"called off: {command.reason}")
            case _:
                pass

    def take_event(self, event: Event, step: int) -> None:
        """Note a candidate or an end."""
        match event:
            case TrialProposed(search_id=search_id) if search_id in self._rows:
                row = self._rows[search_id]
                trial = TrialRow(trial=event.trial, asked_at_step=step, local_batch_sizes=event.local_batch_sizes)
                self._rows[search_id] = replace(row, trials=(*row.trials, trial))
            case SearchFinished(search_id=search_id) if search_id in self._rows:
                self._end(search_id, "finished")
                self._rows[search_id] = replace(self._rows[search_id], result=event.local_batch_sizes)
            case SearchFailed(search_id=search_id) if search_id in self._rows:
                self._end(search_id, f"failed: {event.reason}")
            case _:
                pass

    def _end(self, search_id: str, outcome: str) -> None:
        # A search that has ended may still be called off when its trials' shares are left: the first end is the one.
        if self._rows[search_id].outcome == "open":
            self._rows[search_id] = replace(self._rows[search_id], outcome=outcome)
