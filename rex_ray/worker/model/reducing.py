"""How ranks come to one gradient of a model: by DDP around it, by FSDP within it, or, of a lone worker, by nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.worker.group.side_group import SideGroup, distributed
from rex_ray.worker.model import replicas
from rex_ray.worker.model.comm_hook import CommHook, Reduction
from rex_ray.worker.model.sharding import ShardedReduction
from rex_ray.worker.model.thawed import ThawedGradients
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.preflight.precision import refuse_mixed_gradients
from rex_ray.worker.tracker import StepTracker
from rex_ray.worker.user_warning import warn

__all__ = ["ReducedModel", "UserHook", "reduced"]

UserHook: TypeAlias = tuple[Any, CommHook]
"""The state of a communication hook of DDP's, and the hook."""

_HOOK_OF_DDP = (
    "session.register_comm_hook takes a hook of DDP's, and a sharded model is reduced by FSDP; give fully_shard a "
    "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) to reduce in fewer bits"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedModel:
    """A model whose gradient, once a backward pass has ended, is that of all ranks.

    Attributes:
        model: what the user's loop calls.
        replicated: DDP's part; None where it does not reduce.
        sharded: FSDP's; None where it does not.
        complete: ends a backward pass that leaves the whole gradient; None where DDP's hook sees that end.
    """

    model: nn.Module
    replicated: Reduction | None = None
    sharded: ShardedReduction | None = None
    complete: Callable[[], None] | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """All ranks, for what is not the gradient; None for a lone worker."""
        reduction = self.replicated or self.sharded
        return None if reduction is None else reduction.process_group

    def average_by(self, hook_state: Any, hook: CommHook) -> None:
        """Average gradients by the user's communication hook from now on.

        Raises:
            ConfigError: the model is sharded, and no DDP reduces it.
        """
        if self.sharded is not None:
            raise ConfigError(_HOOK_OF_DDP)
        if self.replicated is not None:
            self.replicated.average_by(hook_state, hook)


def reduced(
    model: nn.Module, user_hook: UserHook | None, *, tracker: StepTracker, options: WorkerOptions, values: SideGroup
) -> ReducedModel:
    """Have ranks reduce the model's gradient, and the tracker told of it. Collective where there are several.

    Args:
        model: the model as the user gave it, bare or wrapped.
        user_hook: averages gradients in DDP's place.
        tracker: told of the last local gradient and of the reduction's end.
        options: the limit of a reduction, and whether norms of gradients are asked for.
        values: ranks that train the model.

    Raises:
        ConfigError: the ranks cannot reduce it, or not by the user's hook.
    """
    if replicas.is_sharded(replicas.unwrap(model)):
        if user_hook is not None:
            raise ConfigError(_HOOK_OF_DDP)
        return _sharded(model, tracker, options, values)
    if distributed():
        return _replicated(model, user_hook, tracker, options, values)
    return _alone(model, tracker)


def _sharded(model: nn.Module, tracker: StepTracker, options: WorkerOptions, values: SideGroup) -> ReducedModel:
    """Leave the reduction to FSDP, and stop the clock in it."""
    refuse_mixed_gradients(values, model.parameters())
    tracker.norms.lossless = False
    if options.norm_interval_steps:
        warn(
            "gradient norms of a sharded model are not taken, so its global batch does not grow; set "
            "max_global_batch_size to global_batch_size to say so"
        )
    limit_s = options.collective_timeout_s
    with values.presence.told("all ranks to prepare the sharded model", limit_s, any_error=False):
        shards = ShardedReduction(tracker, values.presence, limit_s)
    shards.install(replicas.unwrap(model))
    return ReducedModel(model=model, sharded=shards, complete=shards.complete)


def _replicated(
    model: nn.Module, user_hook: UserHook | None, tracker: StepTracker, options: WorkerOptions, values: SideGroup
) -> ReducedModel:
    """Put DDP around the model, and the hook into DDP."""
    refuse_mixed_gradients(values, model.parameters())
    limit_s = options.collective_timeout_s
    # A model that differs between ranks is refused in there, too, and that is not the network's fault.
    with values.presence.told("all ranks to wrap the model", limit_s, any_error=False):
        ddp = replicas.wrapped(model, limit_s)
    thawed = ThawedGradients(replicas.unwrap(model))
    reduction = Reduction(tracker, ddp.process_group, values.presence, thawed)
    if user_hook is not None:
        reduction.average_by(*user_hook)
    reduction.install(ddp)
    return ReducedModel(model=ddp, replicated=reduction)


def _alone(model: nn.Module, tracker: StepTracker) -> ReducedModel:
    """Take the local gradient for the global one, which it is."""

    def complete() -> None:
        tracker.last_gradient()
        tracker.reduction_ended()

    return ReducedModel(model=model, complete=complete)
