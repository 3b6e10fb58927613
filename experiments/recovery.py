"""How long training stands still when machines come and go: ``python -m experiments.recovery --json FILE``.

Live, on an emulated cluster of single-worker nodes, T4 and V100 by published ratios: a worker is killed in the midst of
its backward pass, a node is taken away without notice, one is added, one is taken away with 30 s notice. Each is
befallen a run of its own; with ``--quick`` machines alone come and go, one after the other in one run, and the notice
is 12 s.

- ``seconds``: training stands still, from the last step of the old group to the first one of the new. Where a loss is
  found out only later, that is in it; where a node joins, it trains on until Ray Train resizes the group.
- ``noticed_s``: from the fault itself to that first step.
- ``redone_steps``: steps that were trained twice since no save had them.
- ``lost_rows``, ``doubled_rows``: rows that the model has not seen as often as there were epochs. Both must be 0.
- ``metric_error``: relative difference of the final metric from that of a plain loop in one process to which nothing
  happens, with the same seed. It depends on the step at which each row was seen.
- ``left_behind``: actors, placement groups and processes after the run.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

from experiments._harness import Findings, Row, Settings
from experiments._leftovers import wait_for_no_leftovers
from experiments._page import main
from experiments._recovery_loop import LoggedStep, undisturbed
from experiments._recovery_stage import Stage, stage
from rex_ray.control.commands import RequestCheckpoint
from rex_ray.control.events import GroupStarted
from rex_ray.control.notes import Decided
from rex_ray.control.reading import read_journal
from rex_ray.hosting.journal_files import read_files

__all__ = ["FAULTS", "Fault", "measure", "pauses"]

_LEFT_LIMIT_S: Final = 20.0
_NOTICE_S, _QUICK_NOTICE_S = 30.0, 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What befalls a run.

    Attributes:
        name: for the table.
        strike: has it happen; returns when it did, in s since 1970.
        change: by how many workers the group is larger afterwards.
        counts: whether it is a failure of ``FailureConfig(max_failures=...)``.
    """

    name: str
    strike: Callable[[Stage, float], float]
    change: int
    counts: bool


FAULTS: Final = (
    Fault(
        name="worker killed in mid-backward",
        strike=lambda running, _: running.kill_worker(),
        change=0,
        counts=True,
    ),
    Fault(
        name="node added",
        strike=lambda running, _: running.add_node("another", "V100"),
        change=1,
        counts=False,
    ),
    Fault(
        name="node drained with notice",
        strike=lambda running, notice_s: running.drain_node("V100", notice_s),
        change=-1,
        counts=False,
    ),
    Fault(
        name="node removed",
        strike=lambda running, _: running.remove_node("T4"),
        change=-1,
        counts=True,
    ),
)
"""In the order in which one run can bear them all: it begins with a T4 and a V100."""


def measure(settings: Settings) -> Findings:
    """Measure how long training stands still when machines come and go, and that no row is lost."""
    runs = [FAULTS[1:]] if settings.quick else [(fault,) for fault in FAULTS]
    notice_s = _QUICK_NOTICE_S if settings.quick else _NOTICE_S
    rows: list[Row] = []
    ends: list[Row] = []
    for faults in runs:
        with tempfile.TemporaryDirectory(prefix="rex_ray-recovery-") as folder:
            befallen, end = _run(faults, Path(folder), notice_s)
        rows.extend(befallen)
        ends.append(end)
    figures = {f"{_short(str(row['fault']))}_s": float(row["seconds"] or 0.0) for row in rows}
    totals = {name: float(max(float(end[name] or 0.0) for end in ends)) for name in _TOTALS}
    return Findings(figures=figures | totals, tables={"recovery": rows, "ends": ends}, settings={"notice_s": notice_s})


_TOTALS: Final = ("lost_rows", "doubled_rows", "metric_error", "left_behind")


def _run(faults: Sequence[Fault], folder: Path, notice_s: float) -> tuple[list[Row], Row]:
    """Have faults befall one run, each once the group has settled after the last."""
    rows: list[Row] = []
    num_workers = 2
    with stage(folder, max_failures=sum(fault.counts for fault in faults)) as running:
        for fault in faults:
            seen = len(running.steps)
            struck_s = fault.strike(running, notice_s)
            num_workers += fault.change
            running.settle(num_workers, beyond=seen)
            pause = pauses(running.steps)[-1]
            rows.append(
                {
                    "fault": fault.name,
                    "seconds": round(pause.after.at_s - pause.before.at_s, 1),
                    "noticed_s": round(pause.after.at_s - struck_s, 1),
                    "redone_steps": pause.before.step - pause.after.step + 1,
                    "workers": f"{pause.before.num_workers} to {pause.after.num_workers}",
                }
            )
        metrics = running.finish()
        left = wait_for_no_leftovers(_LEFT_LIMIT_S)
        end = _end(metrics, running, len(left))
    return rows, end


def _end(metrics: dict[str, float], running: Stage, num_left: int) -> Row:
    """Return what a whole run ended with."""
    num_epochs = metrics["epochs"]
    expected = undisturbed(int(num_epochs))
    journal = read_journal(read_files(running.trainer.journal_dir))
    firsts = [note for note in journal.notes if isinstance(note, Decided) and note.kind == "first"]
    groups = [event for event in journal.events if isinstance(event, GroupStarted)]
    first_shares = "; ".join(
        " ".join(
            f"{worker.device}:{share}"
            for worker, share in zip(
                group.problem.workers, first.proposal.local_batch_sizes if first.proposal else (), strict=True
            )
        )
        for group, first in zip(groups, firsts, strict=True)
    )
    return {
        "epochs": int(num_epochs),
        "lost_rows": max(num_epochs - metrics["fewest"], 0.0),
        "doubled_rows": max(metrics["most"] - num_epochs, 0.0),
        "metric_error": abs(metrics["trace"] / expected["trace"] - 1.0),
        "left_behind": num_left,
        "saves_asked_for": sum(isinstance(command, RequestCheckpoint) for command in journal.commands),
        "first_shares": first_shares,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The last step of one group and the first of the next."""

    before: LoggedStep
    after: LoggedStep


def pauses(steps: Sequence[LoggedStep]) -> list[Pause]:
    """Return where one group took another's place, in order."""
    return [
        Pause(before=before, after=after) for before, after in pairwise(steps) if before.generation != after.generation
    ]


def _short(name: str) -> str:
    return "_".join(name.split()[:2])


if __name__ == "__main__":
    main("recovery", measure, sys.argv[1:])
