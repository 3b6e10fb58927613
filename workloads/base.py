"""What every workload's command line has in common: cluster, policy, storage."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ray.train import FailureConfig, Result, RunConfig, ScalingConfig

from rex_ray import RexConfig, RexTrainer
from rex_ray.core.errors import ConfigError
from rex_ray.policies.registry import policy_names
from workloads.arguments import number, output_folder, whole

__all__ = ["add_common_arguments", "checked", "launch"]

WeightBy: TypeAlias = Literal["samples", "tokens"]

# Options that say what a configuration says, too; one that is given wins.
_OF_THE_CONFIG = ("global_batch_size", "max_global_batch_size", "policy", "seed", "placement_timeout_s")


def add_common_arguments(parser: argparse.ArgumentParser, *, global_batch_size: int, num_epochs: int) -> None:
    """Add the options of ``launch``, with the workload's own defaults."""
    parser.add_argument("--num-workers", type=whole(1), default=2, help="workers, the most of them (default: 2)")
    parser.add_argument("--min-workers", type=whole(1), help="go on with as few when nodes are lost (default: all)")
    parser.add_argument("--max-failures", type=whole(0), default=0, help="failed workers to bear (default: 0)")
    parser.add_argument(
        "--placement-timeout",
        type=number(above=0.0),
        dest="placement_timeout_s",
        metavar="S",
        help="wait so long for nodes (default: 60)",
    )
    parser.add_argument("--use-gpu", action="store_true", help="one CUDA device per worker")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML for RexConfig, see `rex-ray config`; above it stand REX_RAY_... variables, then these options",
    )
    parser.add_argument("--policy", help=f"one of {', '.join(policy_names())} (default: rex)")
    parser.add_argument(
        "--global-batch-size", type=whole(1), help=f"rows per optimizer step (default: {global_batch_size})"
    )
    parser.set_defaults(usual_global_batch_size=global_batch_size)
    parser.add_argument(
        "--max-global-batch-size", type=whole(1), help="growth stops there (default: 8 times the batch)"
    )
    parser.add_argument("--num-epochs", type=whole(1), default=num_epochs, help=f"(default: {num_epochs})")
    parser.add_argument("--loader-processes", type=whole(0), default=0, help="loader processes per worker (default: 0)")
    parser.add_argument("--seed", type=whole(0), help="(default: 0)")
    parser.add_argument("--label-selector", help="nodes to use, e.g. 'in(T4,V100)' (default: any)")
    parser.add_argument(
        "--storage",
        type=_storage_place,
        default="out",
        help="where runs are stored: a folder that all nodes share, or an address like s3://BUCKET/RUNS (default: out)",
    )


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a workload's command line and judge what its options can say together, before anything starts.

    Returns:
        The options, with ``rex_config``, and in those that a configuration has, too, what counts in the end.

    Raises:
        ConfigError: a value that cannot work.
    """
    options = parser.parse_args(arguments)
    fewest = options.num_workers if options.min_workers is None else options.min_workers
    if fewest > options.num_workers:
        raise ConfigError(f"--min-workers {fewest} is above --num-workers {options.num_workers}; swap them")
    chosen = {key: value for key in _OF_THE_CONFIG if (value := getattr(options, key)) is not None}
    options.rex_config = RexConfig.load(
        options.config, defaults={"global_batch_size": options.usual_global_batch_size}, **chosen
    )
    options.rex_config.check_group(options.num_workers)
    for key in _OF_THE_CONFIG:
        setattr(options, key, getattr(options.rex_config, key))
    return options


def launch(
    name: str,
    train_loop: Callable[[dict[str, Any]], None],
    loop_config: Mapping[str, Any],
    options: argparse.Namespace,
    *,
    num_rows: int | None = None,
    weight_by: WeightBy = "samples",
) -> Result:
    """Train ``train_loop`` on the Ray cluster at hand, as the command line says.

    Args:
        name: of the run's folder, before the policy's.
        train_loop: the workload's loop.
        loop_config: given to it.
        options: what ``checked`` returned.
        num_rows: of the training set, or None where only the workers will know.
        weight_by: see ``RexConfig``; the workload's own, whatever the configuration says.

    Raises:
        ConfigError: the data set is too small for the batch.
    """
    rex_config = dataclasses.replace(options.rex_config, weight_by=weight_by)
    rex_config.check_group(options.num_workers, num_rows)
    selector = {rex_config.device_label: options.label_selector} if options.label_selector else None
    trainer = RexTrainer(
        train_loop,
        train_loop_config=dict(loop_config),
        rex_config=rex_config,
        scaling_config=ScalingConfig(
            num_workers=_num_workers(options), use_gpu=options.use_gpu, label_selector=selector
        ),
        run_config=RunConfig(
            name=f"{name}-{options.policy}",
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=options.max_failures),
        ),
    )
    return trainer.fit()


def _storage_place(text: str) -> str:
    """Read a folder or an address; relative folders are the driver's, and workers stand elsewhere."""
    return text if "://" in text else str(output_folder(text).resolve())


def _num_workers(options: argparse.Namespace) -> int | tuple[int, int]:
    """Return the workers asked for; a range makes the group elastic, which costs Ray Train a watch over the nodes."""
    whole_group: int = options.num_workers
    return whole_group if options.min_workers in (None, whole_group) else (options.min_workers, whole_group)
