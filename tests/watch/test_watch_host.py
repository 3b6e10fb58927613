"""What a control host shows: also after it was lost, also after its controller failed; and how schedules reach it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import first_allocation, records, started
from hypothesis import given
from hypothesis import strategies as st

from rex_ray import RexConfig
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.journal_files import JournalFolder
from rex_ray.hosting.wire import checked, encode
from rex_ray.watch.backlog import Mark
from rex_ray.watch.fold import RunFold
from rex_ray.watch.seams import Ended, Happened, Reported
from rex_ray.worker.data.sampler import Position
from rex_ray.worker.link import IncidentRecord, MetricRecord, Record, ScheduleRecord
from rex_ray.worker.progress import Progress
from rex_ray.worker.schedule_teller import ScheduleTeller

SCHEDULE = ScheduleRecord(generation="g", epoch=0, step=0, cursor=0, num_epochs=3, learning_rate=0.1)


class FullDisk:
    """Takes the header and nothing more."""

    def __init__(self) -> None:
        self._num_taken = 0

    def read(self) -> dict[str, bytes]:
        return {}

    def append(self, chunks) -> None:
        self._num_taken += 1
        if self._num_taken > 1:
            raise OSError("disk full")


@pytest.fixture
def make_host(tmp_path: Path):
    (tmp_path / "journal").mkdir()
    return lambda: ControlHost(
        RexConfig(global_batch_size=32), JournalFolder(tmp_path / "journal"), lambda allocation: None
    )


def metric(step: int) -> MetricRecord:
    return MetricRecord(generation="g", epoch=0, step=step, elapsed_s=1.0, metrics={"accuracy": 0.1 * step})


def train(host: ControlHost, *steps: int) -> None:
    for step in steps:
        for rank in (0, 1):
            host.take(encode(rank, records(rank, [step], first_allocation())))


def test_a_lost_host_shows_what_was_reported_once_and_goes_on_counting(make_host) -> None:
    first = make_host()
    first.handle(started())
    first.take(encode(0, [SCHEDULE, metric(0)]))
    train(first, 0, 1)
    seen = first.sights(Mark())
    assert [sight.kind for sight in seen.sights if isinstance(sight, Happened)] == ["group"]
    # A group is told of before its steps are: a tracker would take it for one that goes back behind them.
    assert [type(sight).__name__ for sight in seen.in_order] == ["Happened", "Reported", "Progress"]
    assert (seen.progress.step, seen.progress.num_epochs, seen.progress.learning_rate) == (1, 3, 0.1)
    # Reported, but nobody has asked yet when the host is lost; with it go the steps that it had not written.
    first.take(encode(0, [metric(1)]))
    train(first, 2, 3)
    second = make_host()
    shown = second.sights(seen.mark)
    assert [sight.step for sight in shown.sights if isinstance(sight, Reported)] == [1]
    assert shown.mark.life == 1
    second.take(encode(0, [metric(2)]))
    train(second, *range(4, 200))
    second.end("finished")
    last = second.sights(shown.mark)
    assert [sight.step for sight in last.sights if isinstance(sight, Reported)] == [2]
    assert [type(sight).__name__ for sight in last.in_order[-2:]] == ["Progress", "Ended"]
    assert last.progress.step == 199
    assert second.sights(last.mark).sights == ()


def test_who_comes_anew_to_a_resumed_host_is_shown_what_this_life_sees_and_nothing_before(make_host) -> None:
    first = make_host()
    first.handle(started())
    first.take(encode(0, [metric(0)]))
    assert len(first.sights(Mark.of_this_life()).sights) == 2, "a first life has nothing before it"
    second = make_host()
    shown = second.sights(Mark.of_this_life())
    assert (shown.sights, shown.num_missed) == ((), 0)
    second.take(encode(0, [metric(1)]))
    assert [sight.step for sight in second.sights(shown.mark).sights if isinstance(sight, Reported)] == [1]


def test_the_end_is_shown_also_where_the_journal_could_not_be_written(tmp_path: Path) -> None:
    host = ControlHost(RexConfig(global_batch_size=32), FullDisk(), lambda allocation: None)
    host.handle(started())
    assert host.fault is not None
    host.end("finished")
    host.end("asked twice")
    assert [sight for sight in host.sights(Mark()).sights if isinstance(sight, Ended)] == [
        Ended(elapsed_s=0.0, reason="finished")
    ]


def test_a_fault_in_what_is_seen_ends_no_decision(make_host, monkeypatch, caplog) -> None:
    host = make_host()
    host.handle(started())

    def fail(_) -> None:
        raise ArithmeticError("a fold's own fault")

    monkeypatch.setattr(RunFold, "take", lambda self, entry: fail(entry))
    train(host, *range(20))
    assert host.fault is None
    assert host.published is not None
    assert host.published.version == 2, "shares follow speeds"
    assert caplog.text.count("the run is not shown any more") == 1
    host.end("finished")
    assert isinstance(host.sights(Mark()).in_order[-1], Ended)


def test_a_host_that_comes_back_still_knows_what_the_next_fit_begins_with(make_host) -> None:
    first = make_host()
    first.join(started())
    assert first.memory is not None
    assert make_host().memory == first.memory


def test_a_controller_that_failed_is_seen_to_have(make_host) -> None:
    host = make_host()
    host.handle(started())
    host.fail(OSError("disk full"))
    assert host.progress().fault == "OSError: disk full"


def test_an_incident_is_told_and_counted_unless_it_is_an_ordinary_one(make_host) -> None:
    host = make_host()
    host.handle(started())
    for kind in ("save", "storage"):
        host.take(encode(1, [IncidentRecord(generation="g", rank=1, step=3, kind=kind, message="it was full")]))
    told = [sight for sight in host.sights(Mark()).sights if isinstance(sight, Happened)]
    assert [(sight.kind, sight.text) for sight in told[1:]] == [
        ("noted", "rank 1 at step 3: it was full"),
        ("incident", "rank 1 at step 3: it was full"),
    ]
    assert host.progress().num_incidents == 1


counts = st.one_of(st.integers(-2, 10**7), st.just(2**60), st.booleans(), st.just("7"), st.none())
rates = st.one_of(st.none(), st.floats(), st.just("fast"), st.booleans())


@given(epoch=counts, step=counts, cursor=counts, num_epochs=counts, rate=rates)
def test_no_schedule_that_a_foreigner_sends_harms_the_host(
    epoch, step, cursor, num_epochs, rate, tmp_path_factory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    host = ControlHost(RexConfig(global_batch_size=32), JournalFolder(folder), lambda allocation: None)
    host.handle(started())
    odd = replace(SCHEDULE, epoch=epoch, step=step, cursor=cursor, num_epochs=num_epochs, learning_rate=rate)
    host.take(checked(encode(0, [odd])))
    assert host.fault is None
    known = host.progress()
    assert known.learning_rate is None or math.isfinite(known.learning_rate)
    assert known.left_s is None


# --- the worker's end -------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.records: list[Record] = []

    @property
    def schedules(self) -> list[ScheduleRecord]:
        return [record for record in self.records if isinstance(record, ScheduleRecord)]

    def send(self, batch) -> None:
        self.records.extend(batch)


def teller(interval_s: float) -> tuple[ScheduleTeller, Heard]:
    heard = Heard()
    return ScheduleTeller("g", heard.send, Progress(Position(epoch=1, cursor=64, step=12)), interval_s), heard


def step_records(step: int) -> list[Record]:
    return list(records(0, [step], first_allocation()))


def test_a_schedule_is_told_with_a_step_when_it_is_new_and_then_only_where_it_changed() -> None:
    tell, heard = teller(interval_s=0.0)
    parameter = torch.nn.Parameter(torch.zeros(1))
    tell.optimizer = torch.optim.SGD([parameter], lr=0.5)
    tell.announce(7)
    assert heard.records == [], "nothing leaves but with a step"
    for step in range(5):
        tell.send(step_records(step))
    assert heard.schedules == [
        ScheduleRecord(generation="g", epoch=1, step=12, cursor=64, num_epochs=7, learning_rate=0.5)
    ]
    tell.optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    tell.send(step_records(6))
    assert [schedule.learning_rate for schedule in heard.schedules] == [0.5, 0.25]
    assert len(heard.records) == 6 + 2, "no step is lost on the way"


def test_a_rate_that_moves_with_every_step_is_told_seldom_but_a_new_number_of_epochs_at_once() -> None:
    tell, heard = teller(interval_s=3600.0)
    tell.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    for step in range(100):
        tell.optimizer.param_groups[0]["lr"] = 0.5 - 0.001 * step
        tell.send(step_records(step))
    assert len(heard.schedules) == 1
    tell.announce(3)
    tell.send(step_records(100))
    assert [schedule.num_epochs for schedule in heard.schedules] == [None, 3]


def test_an_incident_inside_an_update_never_reads_the_rate_with_its_factor() -> None:
    tell, heard = teller(interval_s=0.0)
    tell.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    tell.send([IncidentRecord(generation="g", rank=0, step=1, kind="non_finite", message="skipped")])
    assert heard.schedules == []
