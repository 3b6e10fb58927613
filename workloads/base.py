"""What every workload's command line has in common: cluster, policy, storage."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from ray.train import Result, RunConfig, ScalingConfig

from rex_ray import RexConfig, RexTrainer
from rex_ray.policies.registry import policy_names

__all__ = ["add_common_arguments", "launch"]


def add_common_arguments(parser: argparse.ArgumentParser, *, global_batch_size: int, num_epochs: int) -> None:
    """Add the options of ``launch``, with the workload's own defaults."""
    parser.add_argument("--num-workers", type=int, default=2, help="workers (default: 2)")
    parser.add_argument("--use-gpu", action="store_true", help="one CUDA device per worker")
    parser.add_argument("--policy", default="rex", help=f"one of {', '.join(policy_names())} (default: rex)")
    parser.add_argument("--global-batch-size", type=int, default=global_batch_size, help="rows per optimizer step")
    parser.add_argument("--max-global-batch-size", type=int, help="growth stops there (default: 8 times the batch)")
    parser.add_argument("--num-epochs", type=int, default=num_epochs, help=f"(default: {num_epochs})")
    parser.add_argument("--loader-processes", type=int, default=0, help="loader processes per worker (default: 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--label-selector", help="nodes to use, e.g. 'in(T4,V100)' (default: any)")
    parser.add_argument("--storage", type=Path, default=Path("out"), help="where runs are stored (default: out)")


def launch(
    name: str,
    train_loop: Callable[[dict[str, Any]], None],
    loop_config: Mapping[str, Any],
    options: argparse.Namespace,
    *,
    weight_by: Literal["samples", "tokens"] = "samples",
) -> Result:
    """Train ``train_loop`` on the Ray cluster at hand, as the command line says.

    Args:
        name: of the run's folder, before the policy's.
        train_loop: the workload's loop.
        loop_config: given to it.
        options: what ``add_common_arguments`` parsed.
        weight_by: see ``RexConfig``.
    """
    rex_config = RexConfig(
        global_batch_size=options.global_batch_size,
        max_global_batch_size=options.max_global_batch_size,
        policy=options.policy,
        seed=options.seed,
        weight_by=weight_by,
    )
    selector = {rex_config.device_label: options.label_selector} if options.label_selector else None
    trainer = RexTrainer(
        train_loop,
        train_loop_config=dict(loop_config),
        rex_config=rex_config,
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu, label_selector=selector),
        run_config=RunConfig(name=f"{name}-{options.policy}", storage_path=str(options.storage.resolve())),
    )
    return trainer.fit()
