"""FSDP2: a model whose parameters ``fully_shard`` divided over the ranks. It reduces by itself, and is not wrapped.

FSDP averages gradients over ranks as DDP does, so the weights at the model's output make its gradient exact, too.
What differs is when ranks wait: all of them gather the parameters of each group of layers before it computes, forward
and backward, and every such meeting makes each rank as late as the slowest. A step's wall time up to the last gradient
is alike on all ranks then, and says nothing about any. So the clock stands still in FSDP's own waits, and what is left
is the rank's own time: on a host exactly, since there collectives are waited for where they are called; on a device as
far as its computing stream waits there, while gathering that overlaps with computing counts as neither.

Torch has no public place for this, so the waits of FSDP's parameter groups are wrapped. Where a version of torch has
them no more, own times are unknown, and every step is marked as no evidence: shares stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.group.presence import Presence
from rex_ray.worker.model.replicas import is_sharded
from rex_ray.worker.model.weighting import at_end_of_backward
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.user_warning import warn

__all__ = ["ShardedReduction", "refuse_unfit_shards"]

_PROCESS_GROUPS = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")
"""Where FSDP says in which process groups a parameter group's shards meet."""

_WAITS = {"unshard": "parameters", "wait_for_unshard": "parameters", "post_backward": "gradient"}
"""Methods of a parameter group in which a rank waits for the others, and for what."""


def refuse_unfit_shards(model: nn.Module, num_ranks: int) -> None:
    """Refuse a model whose gradient would not be the mean over all ranks.

    Raises:
        ConfigError: parts of it are sharded and the whole is not, it is sharded by FSDP1, a parameter that trains is
            in no shard, or the shards are not over all ranks, each of which has its own rows.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    modules = list(model.modules())
    if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in modules):
        raise ConfigError(
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which session.prepare does not know; call "
            "torch.distributed.fsdp.fully_shard(model) (FSDP2) instead"
        )
    if not is_sharded(model):
        if any(isinstance(module, fsdp.FSDPModule) for module in modules):
            raise ConfigError(
                "parts of the model are sharded and the model itself is not, so the gradients of the rest would stay "
                "local; call fully_shard(model) after fully_shard of its parts"
            )
        return
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None and parameter.requires_grad:
            raise ConfigError(
                f"parameter {name!r} of the sharded model is in no shard, so nobody averages its gradient over ranks; "
                "leave it out of ignored_params, or freeze it"
            )
        shards = [placement for placement in getattr(parameter, "placements", ()) if not placement.is_replicate()]
        if mesh is not None and (mesh.size() != num_ranks or len(shards) > 1):
            raise ConfigError(
                f"parameter {name!r} is sharded over a mesh of shape {tuple(mesh.shape)}, and there are {num_ranks} "
                "ranks with rows of their own; shard over all of them (fully_shard's default), also replicated "
                "(HSDP), but not beside tensor or pipeline parallelism"
            )


class ShardedReduction:
    """What DDP's communication hook does for a replicated model: stamps, clean gradients of no rows, limits.

    Args:
        tracker: told of the last local gradient and of the reduction's end.
        presence: told what is waited for.
        limit_s: limit of every collective.

    Attributes:
        process_group: all ranks, for what is not sharded.
    """

    def __init__(self, tracker: StepTracker, presence: Presence, limit_s: float) -> None:
        self._tracker = tracker
        self._presence = presence
        self._limit_s = limit_s
        group = dist.new_group(timeout=timedelta(seconds=limit_s))
        assert isinstance(group, dist.ProcessGroup), "every rank is a member"
        self.process_group = group

    def install(self, model: nn.Module) -> None:
        """Stop the clock in the model's waits, and set their limits."""
        groups = _parameter_groups(model)
        for process_group in _process_groups(model, groups or []):
            _set_limit(process_group, self._limit_s)
        if groups is None:
            self._tracker.evidence.is_timed = False
            warn(
                f"this version of torch ({torch.__version__}) does not let FSDP's waits be told from a rank's own "
                "time, so shares stay as they are; set them by hand with policy='bsp' and local_batch_sizes"
            )
            return
        for group in groups:
            for method, what in _WAITS.items():
                setattr(group, method, self._timed(getattr(group, method), what))
            group._reduce_scatter_comm = _CleanReduction(group._reduce_scatter_comm, self._tracker)

    def complete(self) -> None:
        """End a backward pass: every local gradient is there, and FSDP has yet to reduce the last of them."""
        self._tracker.last_gradient()
        # FSDP queued its own end during the pass; what is queued from within the queue comes after that.
        at_end_of_backward(self._tracker.reduction_ended)

    def _timed(self, wait: Callable[..., Any], what: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._stopped_clock(what):
                return wait(*args, **kwargs)

        return timed

    @contextmanager
    def _stopped_clock(self, what: str) -> Iterator[None]:
        step = self._tracker.in_hand
        stopped = nullcontext() if step is None else step.timer.stalled()
        when = "an evaluation" if step is None else f"step {step.plan.step}"
        with self._presence.told(f"the sharded {what} of {when}", self._limit_s, any_error=False), stopped:
            yield


class _CleanReduction:
    """A reduce-scatter to which a rank without rows gives exactly nothing.

    A model may divide by its input; on the rows of zeros that stand in for none, that is no gradient but NaN.
    """

    def __init__(self, inner: Any, tracker: StepTracker) -> None:
        self._inner = inner
        self._tracker = tracker

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self._inner.allocate(*args, **kwargs)
        return buffer

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step = self._tracker.in_hand
        if step is not None and step.num_rows == 0:
            torch.nan_to_num_(input_tensor, nan=0.0, posinf=0.0, neginf=0.0)
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


def _parameter_groups(model: nn.Module) -> list[Any] | None:
    """Return FSDP's parameter groups, each once; None where they are not what they are here."""
    groups: dict[int, Any] = {}
    for module in model.modules():
        if not is_sharded(module):
            continue
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        found = getattr(state, "_fsdp_param_groups", None)
        if found is None:  # one of them at most, in older versions
            found = [group for group in [getattr(state, "_fsdp_param_group", None)] if group is not None]
        groups.update({id(group): group for group in found})
    wanted = (*_WAITS, "_reduce_scatter_comm")
    if not groups or not all(hasattr(group, name) for group in groups.values() for name in wanted):
        return None
    return list(groups.values())


def _process_groups(model: nn.Module, parameter_groups: list[Any]) -> set[Any]:
    """Return the process groups in which the model's shards meet.

    Torch takes meshes of one shape for equal, so a parameter may name an elder mesh than the one that FSDP uses.
    """
    meshes = [parameter.device_mesh for parameter in model.parameters() if hasattr(parameter, "device_mesh")]
    named = {mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)}
    infos = [getattr(group, "mesh_info", None) for group in parameter_groups]
    used = {getattr(info, name, None) for info in infos for name in _PROCESS_GROUPS}
    return (named | used) - {None}


def _set_limit(group: dist.ProcessGroup, limit_s: float) -> None:
    """Limit a group's collectives; where this version of torch has no way to, its own limit stays, and is said."""
    set_timeout = getattr(dist, "set_timeout", None) or getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is None:
        warn(
            f"this version of torch ({torch.__version__}) sets no limit of a process group that exists, so a dead rank "
            "is noticed as late as the group of fully_shard's mesh allows"
        )
        return
    set_timeout(timedelta(seconds=limit_s), group)
