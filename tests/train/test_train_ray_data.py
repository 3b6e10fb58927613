"""Shards of Ray Data: each block goes to the worker that asks first, and every row is used once per epoch."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray.data
from ray.train import RunConfig, ScalingConfig
from ray_data_loop import ROWS, counting_shard_loop
from train_harness import assert_nothing_left, journal_of

from rex_ray import RexConfig, RexTrainer
from rex_ray.control.events import GroupStarted, MetricReported
from rex_ray.train.local_cluster import LocalCluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_shares_of_one_to_three_use_every_row_of_ray_data_once_per_epoch_and_end_together(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    blocks = ray.data.from_items([{"id": row} for row in range(ROWS)], override_num_blocks=40)
    trainer = RexTrainer(
        counting_shard_loop,
        train_loop_config={"num_epochs": 2},
        rex_config=RexConfig(
            policy="bsp",
            policy_options={"local_batch_sizes": {"T4": 8, "V100": 24}},
            global_batch_size=32,
            join_timeout_s=20.0,
            checkpoint_interval_s=0.0,
        ),
        scaling_config=ScalingConfig(num_workers=2, label_selector=cluster.label_selectors),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
        datasets={"train": blocks, "valid": blocks},
    )
    trainer.fit()
    events = journal_of(trainer.journal_dir).events
    reports = [event.metrics for event in events if isinstance(event, MetricReported)]
    assert [(report["fewest"], report["most"], report["evaluated_once"]) for report in reports] == [(1, 1, 1)] * 2
    # Equal parts would be 320; a few blocks of 16 rows may be in the wrong hands when the epoch ends.
    assert all(ROWS / 4 - 64 <= report["slow_rows"] <= ROWS / 4 + 64 for report in reports), reports
    (group,) = [event for event in events if isinstance(event, GroupStarted)]
    assert group.problem.dataset_size is None
    assert_nothing_left()
