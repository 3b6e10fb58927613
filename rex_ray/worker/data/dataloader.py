"""torch's DataLoader, and which of its options are the session's business."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from rex_ray.core.errors import ConfigError
from rex_ray.worker.tree import moves_itself, rebuilt

__all__ = ["batches_drawn_ahead", "check_loader_options", "make_data_loader", "num_processes", "to_device"]

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


def make_data_loader(reader: Any, requests: Iterable[list[Any]], options: dict[str, Any]) -> DataLoader[Any]:
    """Return a DataLoader that has ``reader`` answer each of ``requests`` with a whole batch.

    Args:
        reader: collates too, in whichever process it is read; keeps the user's data set as ``dataset``.
        requests: what the reader's ``__getitems__`` is asked, in order.
        options: the user's, without ``collate_fn``.
    """
    options = dict(options)
    if num_processes(options) > 0:
        # Starting loader processes anew for each epoch costs more than a small epoch.
        options.setdefault("persistent_workers", True)
        options["worker_init_fn"] = _InitProcess(options.get("worker_init_fn"))
    return DataLoader(reader, batch_sampler=requests, collate_fn=_as_it_is, **options)


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


class _InitProcess:
    """Shows a loader process the user's data set instead of the reader around it, then calls the user's function."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self._users = users

    def __call__(self, process: int) -> None:
        info: Any = get_worker_info()
        # The info refuses to be changed, but what a user looks for there, to divide a stream, is the user's own.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._users is not None:
            self._users(process)


def _as_it_is(batch: Any) -> Any:
    return batch
