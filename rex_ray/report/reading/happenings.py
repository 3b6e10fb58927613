"""What happened to a run beside its decisions, gathered from the journal: losses, incidents, slowdowns."""

from __future__ import annotations

from dataclasses import dataclass, field

from rex_ray.control.events import (
    ORDINARY_INCIDENTS,
    DrainNoticed,
    Event,
    GroupStarted,
    IncidentReported,
    MemoryLimited,
    SaveAsked,
    WorkerLost,
)
from rex_ray.policies.base import Finding
from rex_ray.report.reading.schema import EventRow

__all__ = ["Happenings"]

_ALARMS = {"slow": "slow", "input-bound": "slow", "cluster-wide": "slow", "recovered": "recovered"}
"""Verdicts of the slowdown trigger that say that a speed has changed, and which way."""


@dataclass(slots=True)
class Happenings:
    """Rows in the order of the journal."""

    _rows: list[EventRow] = field(default_factory=list)
    _num_groups: int = 0

    def rows(self) -> tuple[EventRow, ...]:
        """Return what happened."""
        return tuple(self._rows)

    def take_event(self, event: Event, step: int) -> None:
        """Note an event that a reader should see; ``step`` is the newest complete one."""
        match event:
            case GroupStarted():
                self._num_groups += 1
                if self._num_groups > 1:
                    what = f"a new group of {event.problem.num_workers} workers started"
                    self._note(max(step, event.step - 1), "group", None, what)
            case WorkerLost():
                self._note(step, "lost", event.rank, event.reason)
            case IncidentReported():
                kind = "note" if event.kind in ORDINARY_INCIDENTS else "incident"
                self._note(event.step, kind, event.rank, f"{event.kind}: {event.message}")
            case DrainNoticed():
                left = "" if event.left_us is None else f", {event.left_us / 1e6:.0f} s left"
                who = ", ".join(map(str, event.ranks))
                self._note(step, "drain", None, f"the machine of ranks {who} is taken away: {event.reason}{left}")
            case MemoryLimited():
                what = f"out of memory with {event.num_rows} rows: {event.device} gets fewer from now on"
                self._note(event.step, "memory", event.rank, what)
            case SaveAsked():
                self._note(step, "save", None, f"a save was asked for: {event.reason}")
            case _:
                pass

    def take_finding(self, finding: Finding, step: int) -> None:
        """Note an alarm of the slowdown trigger, and the all-clear."""
        kind = _ALARMS.get(finding.verdict) if finding.part == "trigger" else None
        if kind is not None:
            rank = finding.evidence.get("rank")
            alone = finding.verdict != "cluster-wide" and finding.evidence.get("num_ranks", 1.0) == 1.0
            self._note(step, kind, round(rank) if rank is not None and alone else None, finding.reason)

    def _note(self, step: int, kind: str, rank: int | None, text: str) -> None:
        self._rows.append(EventRow(step=step, kind=kind, rank=rank, text=text))
