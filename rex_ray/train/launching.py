"""``launch``: a script's own main function under a ``RexTrainer``, in one line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ray.train import Result, RunConfig, ScalingConfig

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError
from rex_ray.train.trainer import RexTrainer

__all__ = ["launch"]


def launch(
    function: Callable[..., Any],
    *args: Any,
    num_workers: int,
    global_batch_size: int,
    use_gpu: bool = False,
    run_config: RunConfig | None = None,
    **options: Any,
) -> Result:
    """Call ``function(*args)`` on every worker, each inside its session, and wait until training ends.

    It is ``RexTrainer(...).fit()`` with Ray's defaults; labels, elastic groups, loggers, Ray data sets and a
    ``RexConfig`` from a file need the trainer itself. Function and arguments are pickled; workers run in folders of
    their own, so paths among the arguments should be absolute.

    Args:
        function: what one process would have called; in it, ``rex_ray.session`` is the worker's session.
        args: its arguments.
        num_workers: workers to train on.
        global_batch_size: rows per optimizer step over all workers: the batch size that the script had.
        use_gpu: give each worker a GPU.
        run_config: name, storage, what to do on failure.
        options: further fields of ``RexConfig``.

    Returns:
        Ray Train's result; ``metrics`` are those reported last.

    Raises:
        ConfigError: an option that cannot work, or that ``RexConfig`` does not know; arguments that the function does
            not take.
    """
    _check_arguments(function, args)
    config = RexConfig.from_mapping({"global_batch_size": global_batch_size, **options})
    scaling = ScalingConfig(num_workers=num_workers, use_gpu=use_gpu)
    loop = partial(function, *args)
    return RexTrainer(loop, rex_config=config, scaling_config=scaling, run_config=run_config).fit()


def _check_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Refuse what would fail on every worker, or be handed an empty configuration for the argument that is missing."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        name = getattr(function, "__name__", "the function")
        raise ConfigError(
            f"launch cannot call {name} with {len(args)} arguments: {error}; give them behind it, in its order: "
            f"launch({name}, ..., num_workers=..., global_batch_size=...)"
        ) from None
