"""Options of torch's DataLoader, and which of them are the session's business."""

from __future__ import annotations

from typing import Any

import torch

from rex_ray.core.errors import ConfigError
from rex_ray.worker.tree import moves_itself, rebuilt

__all__ = ["batches_drawn_ahead", "check_loader_options", "num_processes", "to_device"]

_DECIDED_HERE = {
    "batch_size": "the allocation decides how many rows a rank gets; set RexConfig.global_batch_size",
    "shuffle": "each epoch has its own order, drawn from RexConfig.seed; leave it out",
    "sampler": "the rows follow one global order that all ranks share; wrap the data set to choose rows",
    "batch_sampler": "the allocation decides the batches; leave it out",
    "drop_last": "every row is seen once per epoch; leave it out",
}


def check_loader_options(options: dict[str, Any]) -> None:
    """Refuse DataLoader options that the session decides.

    Raises:
        ConfigError: one of them was given; the message says what to do instead.
    """
    for name, remedy in _DECIDED_HERE.items():
        if name in options:
            raise ConfigError(f"session.loader does not take {name}={options[name]!r}: {remedy}")
    if options.get("in_order") is False:
        raise ConfigError("session.loader needs in_order=True: weights belong to batches in the order of their draw")


def num_processes(options: dict[str, Any]) -> int:
    """Return how many loader processes these options ask for."""
    return int(options.get("num_workers", 0))


def batches_drawn_ahead(options: dict[str, Any]) -> int:
    """Return how many batches a DataLoader with these options draws beyond the one that it hands out."""
    prefetch_factor = options.get("prefetch_factor")
    return num_processes(options) * (2 if prefetch_factor is None else int(prefetch_factor))


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to where the model computes, without waiting for the copy: tensors, and what has a method ``to``."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if not moves_itself(batch):
        return rebuilt(batch, lambda part: to_device(part, device))
    try:
        return batch.to(device, non_blocking=True)
    except TypeError:  # the user's own method, which may know of a device only
        return batch.to(device)
