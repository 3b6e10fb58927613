"""A user's script that is interrupted: trains for ever on the cluster at ``argv[1]``, storing below ``argv[2]``."""

from __future__ import annotations

import logging
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from row_counter import BATCH
from train_harness import counting_loop

from rex_ray import RexConfig, RexTrainer

if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="ctrl_c", log_to_driver=True, logging_level=logging.ERROR)
    RexTrainer(
        counting_loop,
        train_loop_config={"num_epochs": 10_000},
        rex_config=RexConfig(global_batch_size=BATCH),
        scaling_config=ScalingConfig(num_workers=2, label_selector={"ray.io/accelerator-type": "in(T4,V100)"}),
        run_config=RunConfig(name="run", storage_path=sys.argv[2]),
    ).fit()
    print("fit returned")
