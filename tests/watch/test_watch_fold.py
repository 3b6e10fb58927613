"""The fold: what people see of a run is a function of its journal, alive or over, and bounded."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import record_run

from rex_ray.control.events import (
    GroupStarted,
    IncidentReported,
    MetricReported,
    RunEnded,
    ScheduleReported,
    StepObserved,
    Ticked,
    WorkerLost,
)
from rex_ray.control.journal import Entry
from rex_ray.control.notes import Applied, Decided, Measured
from rex_ray.control.reading import Earlier, read_journal
from rex_ray.core.types import Problem, StepFlag, WorkerSpec, read_only
from rex_ray.policies.base import Proposal
from rex_ray.watch.backlog import Backlog, Mark
from rex_ray.watch.fold import RunFold, sights_of
from rex_ray.watch.seams import Ended, Happened, Progress, Reported, Sight

ROWS = (32, 96)
SECOND = 1_000_000


def problem_of(num_workers: int = 2, dataset_size: int | None = 1280) -> Problem:
    workers = tuple(WorkerSpec(rank=r, device="T4" if r % 2 == 0 else "V100", node="n") for r in range(num_workers))
    return Problem(workers=workers, global_batch_size=128, max_global_batch_size=512, dataset_size=dataset_size)


def first(sizes: tuple[int, ...] = ROWS, version: int = 1) -> Decided:
    return Decided(step=-1, kind="first", reason="first", version=version, proposal=Proposal(local_batch_sizes=sizes))


def step_of(step: int, own_us: tuple[int, ...] = (100_000, 100_000), **other: object) -> StepObserved:
    def ranks(values: object) -> np.ndarray:
        return read_only(list(values), np.int64)  # type: ignore[call-overload]

    values: dict[str, object] = {
        "generation": "g",
        "epoch": 0,
        "step": step,
        "allocation_version": 1,
        "num_rows": ranks(ROWS),
        "data_us": ranks([0] * len(own_us)),
        "compute_us": ranks(own_us),
        "sync_us": ranks([0] * len(own_us)),
        "step_us": ranks([max(own_us)] * len(own_us)),
    }
    return StepObserved(**{**values, **other})  # type: ignore[arg-type]


def folded(*events: object) -> RunFold:
    fold = RunFold()
    fold.take(Entry(number=0, event=GroupStarted(generation="g", problem=problem_of()), notes=(first(),)))
    for number, event in enumerate(events, start=1):
        fold.take(Entry(number=number, event=event))  # type: ignore[arg-type]
    return fold


def same(one: Progress, other: Progress) -> bool:
    return repr(dataclasses.asdict(one)) == repr(dataclasses.asdict(other))  # NaN is NaN


# --- a whole run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    record_run(folder, policy="rex")
    return read_journal({path.name: path.read_bytes() for path in (folder / "rex_ray" / "journal").iterdir()}).entries


def test_a_journal_that_was_recorded_is_seen_as_it_was_seen_live(entries):
    live, sights = RunFold(), []
    for entry in entries:
        sights.extend(live.take(entry))
    again = list(sights_of(entries))
    assert [sight for sight in again if not isinstance(sight, Progress)] == sights
    assert same(again[-1], live.progress())
    assert isinstance(sights[-1], Ended)


def test_a_run_is_told_from_its_first_group_to_its_end(entries):
    sights = [sight for sight in sights_of(entries) if not isinstance(sight, Progress)]
    kinds = [sight.kind for sight in sights if isinstance(sight, Happened)]
    assert kinds[0] == "group"
    assert {"decided", "applied", "measured"} <= set(kinds)
    assert kinds.index("decided") < kinds.index("applied") < kinds.index("measured")
    texts = [sight.text for sight in sights if isinstance(sight, Happened)]
    assert texts[0].startswith("4 workers (2 T4, 2 V100) begin at step 0 with 16/16/16/16 of 64 rows")
    moved = next(text for text in texts if text.startswith("moves the shares from 16/16/16/16 to"))
    assert "because" in moved
    assert "expects to save" in moved
    measured = next(text for text in texts if "the time of a row" in text)
    assert "saves" in measured
    assert "expected were" in measured
    reports = [sight for sight in sights if isinstance(sight, Reported)]
    assert [report.epoch for report in reports] == [0, 1, 2, 3]


@given(data=st.data())
@settings(max_examples=30)
def test_what_a_restarted_host_shows_is_what_it_would_have_shown_and_no_report_comes_twice(entries, data):
    """The host dies after ``cut`` entries, of which its journal lost some steps and ticks at the end."""
    cut = data.draw(st.integers(0, len(entries)), label="cut")
    kept = cut
    while kept and isinstance(entries[kept - 1].event, StepObserved | Ticked) and data.draw(st.booleans()):
        kept -= 1
    asked = data.draw(st.lists(st.integers(0, cut), max_size=4).map(sorted), label="asked at")
    mark, seen = Mark(), []

    def ask(backlog: Backlog) -> None:
        nonlocal mark
        shown = backlog.since(mark, backlog.progress())
        assert shown.num_missed == 0
        mark = shown.mark
        seen.extend(shown.sights)

    before = Backlog()
    for number, entry in enumerate(entries[:cut]):
        before.take([entry])
        for _ in range(asked.count(number)):
            ask(before)
    after = Backlog()
    after.take(entries[:kept])
    after.resumed(1)
    ask(after)
    after.take(entries[kept:])
    ask(after)
    whole = Backlog()
    whole.take(entries)
    everything = whole.since(Mark(), whole.progress()).sights
    reports = [sight for sight in seen if isinstance(sight, Reported)]
    assert reports == [sight for sight in everything if isinstance(sight, Reported)]
    # Nothing is left out, and only what came of lost steps is told a second time.
    told = iter(seen)
    assert all(sight in told for sight in everything)
    assert len(seen) - len(everything) <= sum(bool(entry.notes) for entry in entries[kept:cut]) * 2
    assert same(after.progress(), whole.progress())


@given(data=st.data())
@settings(max_examples=30)
def test_steps_before_the_newest_snapshot_are_not_needed_to_show_what_was_shown(entries, data):
    """A host that comes back reads of the time before its newest snapshot only what has a line of its own."""
    first = data.draw(st.integers(0, len(entries)), label="snapshot")
    backlog = Backlog()
    backlog.take_earlier(
        Earlier(number=entry.number, event=None if is_step else entry.event, notes=entry.notes)
        for entry in entries[:first]
        if (is_step := isinstance(entry.event, StepObserved)) <= bool(entry.notes)
        and (entry.notes or not isinstance(entry.event, Ticked))
    )
    backlog.take(entries[first:])
    whole = Backlog()
    whole.take(entries)
    everything = whole.since(Mark(), whole.progress()).sights
    told = backlog.since(Mark(), backlog.progress()).sights
    assert [what_is_told(sight) for sight in told] == [what_is_told(sight) for sight in everything]


def what_is_told(sight: Sight) -> object:
    """All but the moment, which may be that of an event before."""
    return replace(sight, elapsed_s=0.0, step=0) if isinstance(sight, Happened) else replace(sight, elapsed_s=0.0)


def test_a_backlog_is_bounded_and_says_what_it_dropped():
    backlog = Backlog(most_sights=10)
    backlog.take(
        Entry(number=k, event=MetricReported(generation="g", epoch=0, step=k, elapsed_us=k, metrics={"a": float(k)}))
        for k in range(25)
    )
    shown = backlog.since(Mark(), backlog.progress())
    assert [sight.step for sight in shown.sights] == list(range(15, 25))
    assert shown.num_missed == 15
    assert backlog.since(shown.mark, backlog.progress()).sights == ()


# --- where it stands --------------------------------------------------------------------------------------------------


def test_nothing_is_claimed_before_anything_is_seen():
    progress = RunFold().progress()
    assert (progress.step, progress.workers, progress.slowest_rank, progress.left_s) == (-1, (), None, None)
    assert math.isnan(progress.rows_per_s)
    assert math.isnan(progress.imbalance)


def test_own_times_are_of_steady_steps_under_the_present_shares():
    fold = folded(*(step_of(k, own_us=(999_999, 1), flags=StepFlag.WARM_UP) for k in range(4)))
    assert math.isnan(fold.progress().workers[0].own_s)
    for k in range(4, 12):
        fold.take(Entry(number=k, event=step_of(k, own_us=(100_000, 50_000))))
    progress = fold.progress()
    assert [worker.own_s for worker in progress.workers] == [0.1, 0.05]
    assert progress.imbalance == pytest.approx(0.1 / 0.075 - 1)
    fold.take(
        Entry(
            number=12, event=step_of(12), notes=(Applied(step=12, version=2, local_batch_sizes=(28, 100), lag_steps=3),)
        )
    )
    assert [worker.local_batch_size for worker in fold.progress().workers] == [28, 100]
    assert math.isnan(fold.progress().workers[0].own_s)
    assert fold.progress().num_changes == 1


@given(factor=st.floats(1.5, 20.0), onset=st.integers(2, 6))
def test_a_worker_that_slowed_down_is_named_with_its_factor_and_onset(factor, onset):
    slow_us = round(100_000 * factor)
    fold = folded(
        *(step_of(k) for k in range(8 * onset)),
        *(step_of(k, own_us=(100_000, slow_us)) for k in range(8 * onset, 8 * onset + 16)),
    )
    progress = fold.progress()
    assert progress.slowest_rank == 1
    assert progress.slowest_why == f"slowed down {slow_us / 100_000:.2g}x since step {8 * onset}"
    for k in range(8 * onset + 16, 8 * onset + 48):
        fold.take(Entry(number=k, event=step_of(k)))
    assert fold.progress().slowest_why == "even with the others"


@pytest.mark.parametrize(
    ("own_us", "rows", "data_us", "why"),
    [
        ((100_000, 102_000), (64, 64), (0, 0), "even with the others"),
        ((200_000, 100_000), (64, 64), (0, 0), "T4 takes 2x as long a row as others"),
        ((200_000, 100_000), (96, 32), (0, 0), "larger share: 96 of 128 rows"),
        ((40_000, 100_000), (64, 64), (160_000, 0), "waits for its data 80% of the time"),
    ],
)
def test_why_somebody_is_slowest(own_us, rows, data_us, why):
    ranks = {
        "num_rows": read_only(list(rows), np.int64),
        "data_us": read_only(list(data_us), np.int64),
    }
    progress = folded(*(step_of(k, own_us=own_us, **ranks) for k in range(16))).progress()
    assert progress.slowest_why == why


@given(done=st.integers(3, 60), num_epochs=st.integers(1, 9), tenths=st.integers(1, 40))
def test_the_time_left_is_the_rows_left_at_the_pace_of_the_clock(done, num_epochs, tenths):
    """Ten steps an epoch, one every so many tenths of a second, of which the steps themselves tell nothing."""
    fold = folded(ScheduleReported(generation="g", epoch=0, step=0, cursor=0, num_epochs=num_epochs))
    done = min(done, 10 * num_epochs)
    for k in range(done):
        fold.take(Entry(number=2 * k, event=step_of(k, epoch=k // 10)))
        fold.take(Entry(number=2 * k + 1, event=Ticked(now_us=(k + 1) * tenths * SECOND // 10)))
    left_s = fold.progress().left_s
    if left_s is not None:
        assert left_s == pytest.approx((10 * num_epochs - done) * tenths / 10, rel=1e-6, abs=1e-6)
    else:
        assert (done - 1) * tenths < 10 * 6 or done < 3


@pytest.mark.parametrize("next_step", [27, 29, 30])  # steps came before it, none did, one is still under way
def test_after_a_resume_the_rows_before_it_count_as_done(next_step):
    fold = RunFold()
    fold.take(Entry(number=0, event=GroupStarted(generation="g", problem=problem_of(), step=25), notes=(first(),)))
    for k in range(25, 29):
        fold.take(Entry(number=k, event=step_of(k, epoch=2)))
        fold.take(Entry(number=k, event=Ticked(now_us=k * 2 * SECOND)))
    cursor = (next_step - 20) * 128
    told = ScheduleReported(generation="g", epoch=2, step=next_step, cursor=cursor, num_epochs=3)
    fold.take(Entry(number=40, event=told))
    assert fold.progress().left_s == pytest.approx(2.0)


def test_nobody_guesses_where_the_number_of_epochs_or_of_rows_is_unknown():
    ticks = [event for k in range(9) for event in (step_of(k), Ticked(now_us=k * SECOND))]
    assert folded(*ticks).progress().left_s is None
    fold = RunFold()
    stream = GroupStarted(generation="g", problem=problem_of(dataset_size=None))
    fold.take(Entry(number=0, event=stream, notes=(first(),)))
    fold.take(Entry(number=1, event=ScheduleReported(generation="g", epoch=0, step=0, cursor=0, num_epochs=3)))
    for event in ticks:
        fold.take(Entry(number=2, event=event))
    assert fold.progress().left_s is None
    # An epoch of streams that was seen whole says how long the next ones are.
    for k in range(9, 18):
        fold.take(Entry(number=3, event=step_of(k, epoch=1)))
        fold.take(Entry(number=3, event=Ticked(now_us=k * SECOND)))
    assert fold.progress().left_s == pytest.approx(9.0)


def test_losses_incidents_and_the_gap_are_counted_and_told():
    fold = folded(step_of(0))
    lost = fold.take(Entry(number=2, event=WorkerLost(generation="g", rank=1, reason="killed")))
    fold.take(Entry(number=3, event=WorkerLost(generation="another", rank=0, reason="late news")))
    for kind in ("preflight", "save", "storage"):
        fold.take(Entry(number=4, event=IncidentReported(generation="g", rank=0, step=0, kind=kind, message="so")))
    progress = fold.progress()
    assert (progress.num_lost, progress.num_incidents) == (1, 1)
    assert [sight.text for sight in lost] == ["rank 1 (V100 on n) was lost: killed"]
    assert fold.take(Entry(number=9, event=RunEnded(reason="finished"))) == (Ended(elapsed_s=0.0, reason="finished"),)


def test_a_change_that_made_it_worse_is_said_to_have():
    note = Measured(step=40, version=1, before_us=100_000, after_us=120_000, gain=-0.2, predicted_gain=0.1)
    fold = folded(step_of(0))
    (sight,) = fold.take(Entry(number=2, event=step_of(40), notes=(note,)))
    assert "costs 20.0% more time for a row" in sight.text
    assert "expected were 10.0%" in sight.text


def test_its_memory_does_not_grow_with_the_run():
    def size(fold: RunFold) -> int:
        def count(value: object, depth: int = 0) -> int:
            if depth > 6 or isinstance(value, int | float | str | bytes | np.ndarray | type(None)):
                return 1
            if isinstance(value, dict):
                return sum(count(item, depth + 1) for item in value.values())
            if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
                return sum(count(item, depth + 1) for item in value)
            return sum(count(item, depth + 1) for item in getattr(value, "__dict__", {}).values()) or 1

        return count(fold)

    def run_for(num_steps: int) -> RunFold:
        fold = folded()
        for k in range(num_steps):
            applied = Applied(step=k, version=k + 2, local_batch_sizes=ROWS, lag_steps=1)
            decided = Decided(
                step=k, kind="reallocate", reason="-", version=k + 3, proposal=Proposal(local_batch_sizes=ROWS)
            )
            fold.take(Entry(number=k, event=step_of(k), notes=(applied, decided)))
            fold.take(Entry(number=k, event=Ticked(now_us=k * SECOND)))
        return fold

    assert size(run_for(3000)) == size(run_for(1000))
