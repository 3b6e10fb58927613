"""The model on every rank: DDP around it, and buffers that are made alike now and then."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rex_ray.core.errors import ConfigError
from rex_ray.worker.user_warning import warn

__all__ = ["agree_on_buffers", "ddp_options", "is_sharded", "unwrap", "wrapped"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def wrapped(model: nn.Module, timeout_s: float) -> DistributedDataParallel:
    """Return the model as DDP, whose reductions break after ``timeout_s``; a model that is DDP comes back as it is.

    Raises:
        ConfigError: a compiled DDP, whose hooks would be compiled with it.
    """
    if isinstance(model, DistributedDataParallel):
        _warn_of_long_limit(model, timeout_s)
        return _copyable(model)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ConfigError(
            "the model that session.prepare was given has DistributedDataParallel inside; prepare the DDP itself, and "
            "compile what session.prepare returns, or compile the bare model and prepare that"
        )
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    return _copyable(DistributedDataParallel(model, process_group=group, **ddp_options()))


class _Copied(nn.Module):
    """A copy of a replicated model: computes the same under the same names, and is reduced by nobody.

    Args:
        module: the copy of the bare model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the copy of the bare model."""
        return self.module(*args, **kwargs)


def _copyable(ddp: DistributedDataParallel) -> DistributedDataParallel:
    """Have ``copy.deepcopy`` copy the model alone, as for an average of its weights: DDP refuses in another group."""

    def copied(memo: dict[int, Any]) -> nn.Module:
        return _Copied(copy.deepcopy(ddp.module, memo)).train(ddp.training)

    # On the object, since a user's own DDP is taken as it is; DDP's class has no method of that name.
    ddp.__dict__["__deepcopy__"] = copied
    return ddp


def ddp_options() -> dict[str, Any]:
    """Return DDP's options under which it reduces as the session expects: in place, and without buffers.

    Newer versions of torch split "broadcast at every forward pass" from "alike at the start", and warn of the old name.
    """
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    return {"gradient_as_bucket_view": True, "forward_sync_buffers" if has_new_name else "broadcast_buffers": False}


def _warn_of_long_limit(ddp: DistributedDataParallel, timeout_s: float) -> None:
    """Say so where the user's own group lets a rank wait for a dead one longer than all other waits do."""
    try:
        device = next(ddp.parameters()).device
        group: Any = ddp.process_group
        limit_s = group._get_backend(device).options._timeout.total_seconds()  # there is no public name for it
    except (AttributeError, RuntimeError, StopIteration):
        return
    if limit_s > timeout_s:
        warn(
            f"the DistributedDataParallel that session.prepare was given reduces in a process group with a limit of "
            f"{limit_s:g} s, so a dead rank is noticed that late there, not after collective_timeout_s={timeout_s:g}; "
            "prepare the bare model, or make the group with dist.new_group(timeout=...)"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model, without DDP or a compiler around it."""
    inner: Any = model
    while True:
        if isinstance(inner, (DistributedDataParallel, _Copied)):
            inner = inner.module
        elif _is_compiled(inner):
            inner = inner._orig_mod
        else:
            assert isinstance(inner, nn.Module)
            return inner


def _is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` made this module of another; it shares its parameters, under longer names."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # seconds to import, and whoever compiles has
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on the model itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # seconds to import, and whoever shards has
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


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
