"""D9 on a real Ray cluster: a plain loop runs out of memory, and neither its run nor the next one does so again."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.train import FailureConfig, RunConfig, ScalingConfig
from scarce_loop import BATCH, EPOCH_ROWS, ROWS_THAT_FIT, scarce_loop
from train_harness import assert_nothing_left, journal_of, steps_of

from rex_ray import RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, IncidentReported, MemoryLimited
from rex_ray.control.journal import Journal
from rex_ray.control.replay import replay
from rex_ray.train.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def trainer_of(cluster: LocalCluster, storage: Path, *, num_epochs: int, max_failures: int) -> RexTrainer:
    return RexTrainer(
        scarce_loop,
        train_loop_config={"num_epochs": num_epochs},
        rex_config=RexConfig(policy="bsp", global_batch_size=BATCH, checkpoint_interval_s=0.0, join_timeout_s=20.0),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(
            name="run", storage_path=str(storage), failure_config=FailureConfig(max_failures=max_failures)
        ),
        dataset_size=EPOCH_ROWS,
    )


def rows_of_the_scarce(journal: Journal) -> list[int]:
    """Most rows that any step gave the kind that is short of memory, group by group."""
    most: list[int] = []
    ranks: list[int] = []
    for event in journal.events:
        if isinstance(event, GroupStarted):
            ranks = [worker.rank for worker in event.problem.workers if worker.device == "T4"]
            most.append(0)
    for step in steps_of(journal):
        most[-1] = max(most[-1], *(int(step.num_rows[rank]) for rank in ranks))
    return most


def test_d9_a_plain_loop_is_restarted_within_its_memory_and_so_is_the_next_job(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    first = trainer_of(cluster, tmp_path, num_epochs=1, max_failures=1)
    assert first.fit().metrics == {"fewest": 1.0, "most": 1.0}, "every row once, those of the failed step too"
    journal = journal_of(first.journal_dir)
    limited = [event for event in journal.events if isinstance(event, MemoryLimited)]
    assert [(event.device, event.num_rows) for event in limited] == [("T4", BATCH // 2)]
    told = [event for event in journal.events if isinstance(event, IncidentReported)]
    assert [event.rank for event in told if event.kind == "out_of_memory"] == [limited[0].rank]
    assert first.control_status is not None
    assert first.control_status.row_limits == {"T4": BATCH // 4}
    assert sum(isinstance(event, GroupStarted) for event in journal.events) == 2
    assert 0 < rows_of_the_scarce(journal)[-1] <= ROWS_THAT_FIT["T4"]
    assert replay(journal).is_identical

    second = trainer_of(cluster, tmp_path, num_epochs=2, max_failures=0)
    assert second.fit().metrics == {"fewest": 2.0, "most": 2.0}
    journal = journal_of(second.journal_dir)
    assert not any(isinstance(event, MemoryLimited) for event in journal.events), "it was in the save"
    assert 0 < rows_of_the_scarce(journal)[-1] <= ROWS_THAT_FIT["T4"]
    assert_nothing_left()
