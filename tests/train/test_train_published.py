"""A published method that splits and one that grows, live: named in the configuration, and nothing else is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.train import RunConfig, ScalingConfig
from row_counter import BATCH, ROWS
from train_harness import counting_loop, journal_of, steps_of, switches_of

from rex_ray import RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted
from rex_ray.control.replay import replay
from rex_ray.train.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(180)]


def trained(storage: Path, cluster: LocalCluster, num_epochs: int, global_batch_size: int, **config: Any) -> RexTrainer:
    trainer = RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": num_epochs},
        rex_config=RexConfig(global_batch_size=global_batch_size, join_timeout_s=20.0, **config),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="run", storage_path=str(storage)),
        dataset_size=ROWS,
    )
    trainer.fit()
    return trainer


def rows_per_epoch(trainer: RexTrainer) -> dict[int, int]:
    rows: dict[int, int] = {}
    for step in steps_of(journal_of(trainer.journal_dir)):
        rows[step.epoch] = rows.get(step.epoch, 0) + int(step.num_rows.sum())
    return rows


@pytest.mark.long
def test_lb_bsp_moves_rows_from_the_slow_worker_to_the_fast_one(cluster: LocalCluster, tmp_path: Path) -> None:
    trainer = trained(tmp_path, cluster, 6, BATCH, policy="lb_bsp", policy_options={"window": 4})
    journal = journal_of(trainer.journal_dir)
    (started,) = (event for event in journal.events if isinstance(event, GroupStarted))
    slow = [worker.device for worker in started.problem.workers].index("T4")
    moved = [note.local_batch_sizes[slow] for note in switches_of(journal)]
    assert moved
    assert moved[0] < BATCH / 2
    assert {sum(note.local_batch_sizes) for note in switches_of(journal)} == {BATCH}
    assert rows_per_epoch(trainer) == dict.fromkeys(range(6), ROWS)
    assert replay(journal).is_identical


@pytest.mark.long
def test_pollux_has_norms_measured_and_grows_in_equal_shares(cluster: LocalCluster, tmp_path: Path) -> None:
    # The counting model's noise scale is its number of rows, and a sixteenth of them the largest batch.
    trainer = trained(tmp_path, cluster, 6, 8, policy="pollux", norm_interval_steps=2, max_global_batch_size=16)
    journal = journal_of(trainer.journal_dir)
    grown = [sum(note.local_batch_sizes) for note in switches_of(journal)]
    assert grown
    assert max(grown) > 8
    assert all(max(note.local_batch_sizes) - min(note.local_batch_sizes) <= 1 for note in switches_of(journal))
    assert rows_per_epoch(trainer) == dict.fromkeys(range(6), ROWS)
    assert replay(journal).is_identical
