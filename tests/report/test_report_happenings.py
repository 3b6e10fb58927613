"""What happened stands in the report once, at its step, and what only was told is no trouble."""

from __future__ import annotations

import pytest

from rex_ray.control.events import (
    ORDINARY_INCIDENTS,
    DrainNoticed,
    GroupStarted,
    IncidentReported,
    MemoryLimited,
    SaveAsked,
    Ticked,
    WorkerLost,
)
from rex_ray.core.types import Problem, WorkerSpec
from rex_ray.policies.base import Finding
from rex_ray.report.reading.happenings import Happenings

GROUP = GroupStarted(
    generation="g",
    problem=Problem(
        workers=tuple(WorkerSpec(rank=rank, device="T4") for rank in range(3)),
        global_batch_size=32,
        max_global_batch_size=32,
        dataset_size=100,
    ),
    step=12,
)


def test_a_group_after_the_first_is_an_event() -> None:
    happenings = Happenings()
    happenings.take_event(GROUP, -1)
    assert happenings.rows() == ()
    happenings.take_event(GROUP, 9)
    (row,) = happenings.rows()
    assert (row.kind, row.step, row.text) == ("group", 11, "a new group of 3 workers started")


def test_losses_drains_and_memory_are_told_with_whose_they_are() -> None:
    happenings = Happenings()
    happenings.take_event(WorkerLost(generation="g", rank=2, reason="its node died"), 40)
    happenings.take_event(DrainNoticed(generation="g", ranks=(0, 1), left_us=30_000_000, reason="spot"), 41)
    happenings.take_event(SaveAsked(generation="g", reason="spot"), 41)
    happenings.take_event(MemoryLimited(generation="g", rank=1, step=44, device="T4", num_rows=96), 43)
    happenings.take_event(Ticked(now_us=1), 44)
    rows = happenings.rows()
    assert [(row.kind, row.step, row.rank) for row in rows] == [
        ("lost", 40, 2),
        ("drain", 41, None),
        ("save", 41, None),
        ("memory", 44, 1),
    ]
    assert rows[1].text == "the machine of ranks 0, 1 is taken away: spot, 30 s left"
    assert "96 rows: T4" in rows[3].text


def test_an_ordinary_message_is_told_and_is_no_incident() -> None:
    happenings = Happenings()
    for kind in (sorted(ORDINARY_INCIDENTS)[0], "non_finite"):
        happenings.take_event(IncidentReported(generation="g", rank=0, step=5, kind=kind, message="m"), 4)
    assert [row.kind for row in happenings.rows()] == ["note", "incident"]


@pytest.mark.parametrize(
    ("part", "verdict", "num_ranks", "expected"),
    [
        ("trigger", "slow", 1.0, [("slow", 2)]),
        ("trigger", "slow", 2.0, [("slow", None)]),
        ("trigger", "input-bound", 1.0, [("slow", 2)]),
        ("trigger", "cluster-wide", 1.0, [("slow", None)]),
        ("trigger", "recovered", 1.0, [("recovered", 2)]),
        ("trigger", "held: cost", 1.0, []),
        ("trigger", "keep", 1.0, []),
        ("split", "slow", 1.0, []),
    ],
)
def test_alarms_of_the_trigger_are_events_and_other_judgements_are_not(
    part: str, verdict: str, num_ranks: float, expected: list[tuple[str, int | None]]
) -> None:
    happenings = Happenings()
    evidence = {"rank": 2.0, "num_ranks": num_ranks}
    happenings.take_finding(Finding(part=part, verdict=verdict, reason="r", evidence=evidence), 7)
    assert [(row.kind, row.rank) for row in happenings.rows()] == expected
    assert all(row.step == 7 for row in happenings.rows())
