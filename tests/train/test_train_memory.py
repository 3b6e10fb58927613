"""D9 on a real Ray cluster: a plain loop runs out of memory once, and its run goes on within it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from scarce_loop import BATCH, EPOCH_ROWS, ROWS_THAT_FIT, scarce_loop
from train_harness import assert_nothing_left, journal_of, steps_of

from rex_ray import RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, IncidentReported, MemoryLimited
from rex_ray.control.journal import Journal
from rex_ray.control.replay import replay
from rex_ray.train.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


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


def test_d9_a_plain_loop_is_restarted_within_its_memory_and_its_save_knows(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    trainer = RexTrainer(
        scarce_loop,
        train_loop_config={"num_epochs": 1},
        rex_config=RexConfig(policy="bsp", global_batch_size=BATCH, checkpoint_interval_s=0.0, join_timeout_s=20.0),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
        dataset_size=EPOCH_ROWS,
    )
    result = trainer.fit()
    assert result.metrics == {"fewest": 1.0, "most": 1.0}, "every row once, those of the failed step too"
    journal = journal_of(trainer.journal_dir)
    limited = [event for event in journal.events if isinstance(event, MemoryLimited)]
    assert [(event.device, event.num_rows) for event in limited] == [("T4", BATCH // 2)]
    told = [event for event in journal.events if isinstance(event, IncidentReported)]
    assert [event.rank for event in told if event.kind == "out_of_memory"] == [limited[0].rank]
    assert sum(isinstance(event, GroupStarted) for event in journal.events) == 2
    assert 0 < rows_of_the_scarce(journal)[-1] <= ROWS_THAT_FIT["T4"]
    assert replay(journal).is_identical
    assert trainer.control_status is not None
    assert trainer.control_status.row_limits == {"T4": BATCH // 4}
    # What a session begins with that resumes from it: tests/worker/test_worker_train_step.py.
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        saved = torch.load(Path(folder) / "state.pt", weights_only=True)
    assert saved["memory"]["share_rows"] == {"T4": BATCH // 4}
    assert_nothing_left()
