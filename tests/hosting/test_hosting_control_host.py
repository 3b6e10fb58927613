"""The control actor's inner part, without Ray: its journal, its faults, and time as an argument."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from batches import first_allocation, records, started

from rex_ray import InfeasibleError, RexConfig
from rex_ray.control.events import RunEnded, StepObserved, TelemetryGap
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.journal_files import JournalFolder, read_files
from rex_ray.hosting.wire import encode
from rex_ray.worker.link import MetricRecord

CONFIG = RexConfig(global_batch_size=32)


@pytest.fixture
def journal_dir(tmp_path: Path) -> Path:
    (tmp_path / "journal").mkdir()
    return tmp_path / "journal"


def make_host(journal_dir: Path) -> tuple[ControlHost, list[int]]:
    """A host, and the versions that it spread."""
    news: list[int] = []

    return ControlHost(CONFIG, JournalFolder(journal_dir), lambda allocation: news.append(allocation.version)), news


def metric(generation: str = "g") -> MetricRecord:
    return MetricRecord(generation=generation, epoch=0, step=0, elapsed_s=1.0, metrics={"accuracy": 0.5})


def test_a_lost_host_goes_on_from_its_journal_and_says_so(journal_dir: Path) -> None:
    first, news = make_host(journal_dir)
    first.handle(started())
    for step in range(20):
        for rank in (0, 1):
            first.take(encode(rank, records(rank, [step], first_allocation())))
    assert news == [1, 2], "the first allocation and a better one"
    second, news = make_host(journal_dir)  # the first one is never asked to end
    assert news == [2], "and the newest is published again"
    status = second.status()
    assert status.num_restarts == 1
    assert status.generation == "g"
    assert status.allocation is not None
    assert status.allocation.version == 2
    second.end("finished")
    journal = read_journal(read_files(journal_dir))
    assert journal.events[-1] == RunEnded(reason="finished")
    assert replay(journal).is_identical


def test_missing_telemetry_is_an_event_and_a_line_in_the_status(journal_dir: Path) -> None:
    host, _ = make_host(journal_dir)
    host.handle(started())
    for half_seconds in range(25):
        host.tick(half_seconds / 2)
        assert (host.status().gap is not None) == (half_seconds >= 20)
    host.end("finished")
    events = read_journal(read_files(journal_dir)).events
    assert any(isinstance(event, TelemetryGap) for event in events)


def test_the_complaint_ends_when_steps_come_again(journal_dir: Path) -> None:
    host, _ = make_host(journal_dir)
    host.handle(started())
    for second in range(12):
        host.tick(second)
    assert host.status().gap == "no complete step since step -1"
    for rank in (0, 1):
        host.take(encode(rank, records(rank, [0], first_allocation())))
    host.tick(12.0)
    assert host.status().gap is None


def test_a_failing_disk_ends_decisions_and_nothing_else(journal_dir: Path) -> None:
    host, news = make_host(journal_dir)
    host.handle(started())
    shutil.rmtree(journal_dir)
    host.take(encode(0, [metric()]))
    assert host.fault is not None
    assert "FileNotFoundError" in host.fault
    assert host.published == first_allocation(), "the last allocation stands"
    for step in range(40):
        for rank in (0, 1):
            host.take(encode(rank, records(rank, [step], first_allocation())))
    assert news == [1], "nothing that cannot be remembered is decided"
    fault = host.fault
    host.end("finished")
    assert host.fault == fault
    assert not journal_dir.exists()


def test_a_damaged_journal_is_left_as_it_is_and_nothing_is_decided(journal_dir: Path) -> None:
    host, _ = make_host(journal_dir)
    host.handle(started())
    events = journal_dir / "events.jsonl"
    events.write_bytes(events.read_bytes().replace(b"GroupStarted", b"GroupStartled"))
    damaged = events.read_bytes()
    again, news = make_host(journal_dir)
    assert again.fault is not None
    again.handle(started())
    again.end("finished")
    assert news == []
    assert events.read_bytes() == damaged


def test_bounds_that_no_allocation_meets_are_no_fault_of_the_controller(journal_dir: Path) -> None:
    host, _ = make_host(journal_dir)
    with pytest.raises(InfeasibleError):
        host.handle(started(most_rows=10))
    assert host.fault is None
    host.handle(started())
    assert host.published == first_allocation()


def test_what_is_of_another_group_or_never_arrived_is_counted(journal_dir: Path) -> None:
    host, _ = make_host(journal_dir)
    host.handle(started())
    host.take(encode(0, [metric("earlier"), *records(0, [0], first_allocation(), generation="earlier")], num_dropped=3))
    assert sum(host.status().dropped.values()) == 1 + 1 + 3
    assert host.status().dropped["not taken by the queue"] == 3


def test_the_loss_of_a_rank_ends_its_group(journal_dir: Path) -> None:
    host, _ = make_host(journal_dir)
    host.handle(started())
    host.lose("g", {1: "killed"})
    assert host.generation is None
    host.lose("g", {0: "killed too"})
    host.end("failed: killed")
    journal = read_journal(read_files(journal_dir))
    assert not [event for event in journal.events if isinstance(event, StepObserved)]
    assert replay(journal).is_identical
