"""The model on every rank: DDP around it, and buffers that are made alike now and then."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["agree_on_buffers", "unwrap", "wrapped"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def wrapped(model: nn.Module, timeout_s: float) -> DistributedDataParallel:
    """Return the model as DDP, whose reductions break after ``timeout_s``; a model that is DDP comes back as it is."""
    if isinstance(model, DistributedDataParallel):
        return model
    # Newer versions of torch split "broadcast at every forward pass" from "alike at the start", and warn of the old.
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if has_new_name else "broadcast_buffers": False}
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True, **no_broadcast)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model, without DDP around it."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


def agree_on_buffers(model: nn.Module, group: dist.ProcessGroup, own_rows: int, total_rows: int) -> None:
    """Make persistent buffers alike on all ranks: running statistics by their rows, everything else as on rank 0.

    DDP would broadcast rank 0's buffers at *every* forward pass, also when rank 0 alone evaluates, and the others
    would never answer. Between two calls of this each rank keeps the statistics of the rows that it saw.

    Args:
        model: the bare model.
        group: ranks to agree with; every one must call this.
        own_rows: rows that this rank trained on since the last call.
        total_rows: the same over all ranks.
    """
    if total_rows == 0:
        return
    averaged: set[int] = set()
    for module in model.modules():
        if isinstance(module, _BATCH_NORMS):
            for statistic in (module.running_mean, module.running_var):
                if statistic is not None:
                    statistic.mul_(own_rows / total_rows)
                    dist.all_reduce(statistic, group=group)
                    averaged.add(id(statistic))
    for buffer in _kept_buffers(model):
        if id(buffer) not in averaged:
            dist.broadcast(buffer, src=0, group=group)


def _kept_buffers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that a save holds.

    The others are derived, and may be as long as a rank's own batch: a broadcast over lengths that differ ends the
    process.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield buffer
