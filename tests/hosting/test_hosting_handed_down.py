"""What one fit leaves to the next, from its host to the next one's journal."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from batches import first_allocation, records, started

from rex_ray import RexConfig
from rex_ray.control.events import GroupStarted
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.core.types import Allocation, WorkerSpec
from rex_ray.hosting.control_host import ControlHost
from rex_ray.hosting.journal_files import JournalFolder, read_files
from rex_ray.hosting.memory_file import earlier_memory, write_memory
from rex_ray.hosting.wire import encode

CONFIG = RexConfig(global_batch_size=32)
RESUMED = replace(started(), generation="h", step=20, allocation=Allocation(version=3, local_batch_sizes=(16, 16)))


def host_in(folder: Path, memory: str | None = None, config: RexConfig = CONFIG) -> ControlHost:
    folder.mkdir()
    return ControlHost(config, JournalFolder(folder), lambda _: None, memory=memory)


def group_in(folder: Path) -> GroupStarted:
    journal = read_journal(read_files(folder))
    assert replay(journal).is_identical
    return next(event for event in journal.events if isinstance(event, GroupStarted))


@pytest.fixture
def left(tmp_path: Path) -> str:
    """What a run of some steps leaves on the disk."""
    host = host_in(tmp_path / "first")
    assert host.memory is None
    host.join(started())
    for step in range(20):
        for rank in (0, 1):
            host.take(encode(rank, records(rank, [step], first_allocation())))
    host.end("finished")
    assert host.memory is not None
    write_memory(tmp_path, host.memory)
    found = earlier_memory(tmp_path)
    assert found == host.memory
    return found


def test_a_group_that_resumes_splits_at_once_by_what_was_learnt_before(left: str, tmp_path: Path) -> None:
    knowing, blank = host_in(tmp_path / "knowing", left), host_in(tmp_path / "blank")
    third = WorkerSpec(rank=2, device="V100")
    problem = replace(RESUMED.problem, workers=(*RESUMED.problem.workers, third))
    resumed = replace(RESUMED, problem=problem)  # in a larger group than the save's
    assert sorted(blank.join(resumed).local_batch_sizes) == [10, 11, 11]
    slow, fast, other = knowing.join(resumed).local_batch_sizes
    assert 1.5 * slow < fast == pytest.approx(other, abs=1), "half as fast, by the earlier life's curves"
    knowing.end("finished")
    assert group_in(tmp_path / "knowing").memory == left


def test_a_group_that_begins_at_its_first_step_takes_nothing(left: str, tmp_path: Path) -> None:
    host = host_in(tmp_path / "anew", left)
    host.join(started())
    host.end("finished")
    assert group_in(tmp_path / "anew").memory is None


def test_what_another_policy_left_is_said_and_not_used(
    left: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = host_in(tmp_path / "other", left, RexConfig(global_batch_size=32, policy="dlb"))
    with caplog.at_level(logging.WARNING, logger="rex_ray"):
        host.join(RESUMED)
    host.end("finished")
    assert "not of policy 'dlb'" in caplog.text
    assert group_in(tmp_path / "other").memory is None


def test_a_file_that_cannot_be_read_is_said_and_nothing_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert earlier_memory(tmp_path) is None
    (tmp_path / "controller.memory").write_bytes(b"\xff\xfe")
    with caplog.at_level(logging.WARNING, logger="rex_ray"):
        assert earlier_memory(tmp_path) is None
    assert "learns anew" in caplog.text
