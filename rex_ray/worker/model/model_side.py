"""The session's model side: a model that trains on all ranks, with every hook that weights, measures and checks it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import OptimizerFamily
from rex_ray.worker.group.side_group import SideGroup, distributed
from rex_ray.worker.model import replicas
from rex_ray.worker.model.comm_hook import CommHook, Reduction
from rex_ray.worker.model.guard import ReplicaGuard
from rex_ray.worker.model.microbatch import Gradients
from rex_ray.worker.model.optimizer_hooks import OptimizerHooks
from rex_ray.worker.model.preconditioner import AdamPreconditioner, optimizer_family
from rex_ray.worker.model.weighting import OutputWeights, has_batch_norm
from rex_ray.worker.options import WorkerOptions
from rex_ray.worker.saving.state import Prepared, lr_factor_of
from rex_ray.worker.tracker import StepTracker

__all__ = ["ModelSide"]


class ModelSide:
    """The prepared model, its backward passes and its reductions.

    Args:
        tracker: told of each step's backward pass.
        options: the worker's limits, and what ranks are weighted by.
        values: ranks to agree with about token counts.
        torch_device: where the model is moved to; None: it stays where it is.
    """

    def __init__(
        self, *, tracker: StepTracker, options: WorkerOptions, values: SideGroup, torch_device: torch.device | None
    ) -> None:
        self._tracker = tracker
        self._options = options
        self._values = values
        self._torch_device = torch_device
        self._model: nn.Module | None = None
        self._optimizer_family: OptimizerFamily = "sgd"
        self._gradients: Gradients | None = None
        self._optimizer_hooks: OptimizerHooks | None = None
        self._reduction: Reduction | None = None
        self._user_hook: tuple[Any, CommHook] | None = None

    @property
    def gradients(self) -> Gradients:
        """Backward passes of the batch in hand.

        Raises:
            ConfigError: no model is prepared.
        """
        if self._gradients is None:
            raise ConfigError("call session.prepare(model, optimizer) first")
        return self._gradients

    @property
    def normalises_over_rows(self) -> bool:
        """Whether the prepared model has batch normalisation; False before there is one."""
        return self._model is not None and has_batch_norm(self._model)

    @property
    def lr_factor(self) -> float:
        """What the learning rate was multiplied by in the newest update; 1 before there is one."""
        return 1.0 if self._optimizer_hooks is None else self._optimizer_hooks.factor

    @property
    def optimizer_family(self) -> OptimizerFamily:
        """What the prepared optimizer makes of a gradient; SGD's before there is one."""
        return self._optimizer_family

    def prepare(
        self, model: nn.Module, parts: Prepared, restored: MutableMapping[str, Any] | None, *, optimizer_known: bool
    ) -> nn.Module:
        """Load what a save holds of the parts, then put DDP and the hooks around the model.

        Args:
            model: the model as the user gave it, bare or wrapped.
            parts: the bare model, and what steps it.
            restored: the save that training resumes from; what is loaded is taken out.
            optimizer_known: the controller will hear of the optimizer; norms are taken as it understands them.

        Returns:
            The model that the user's loop calls.

        Raises:
            ConfigError: see ``Session.prepare``.
        """
        if self._model is not None:
            raise ConfigError("session.prepare takes one model; put several networks into one nn.Module")
        bare = parts.model
        if self._torch_device is not None:
            bare.to(self._torch_device)
        self._tracker.device = next((p.device for p in bare.parameters()), self._tracker.device)
        self._tracker.norms.parameters = list(bare.parameters())
        self._tracker.scaler = parts.scaler
        self._optimizer_family = optimizer_family(parts.optimizer)
        if optimizer_known and self._optimizer_family == "adam":
            self._tracker.norms.preconditioner = AdamPreconditioner(parts.optimizer)
        if restored is not None:
            parts.load(restored)
        guard = ReplicaGuard(bare, frozen_matters=model is bare) if distributed() else None
        self._model = prepared = self._replicate(model)
        by_tokens = self._options.weight_by == "tokens"
        complete = None if self._reduction is not None else self._complete_gradient
        OutputWeights(self._tracker, by_tokens=by_tokens, complete=complete).install(prepared)
        self._optimizer_hooks = OptimizerHooks(self._tracker, guard, self._options.lr_slew)
        self._optimizer_hooks.factor = 1.0 if restored is None else lr_factor_of(restored)
        self._optimizer_hooks.install(parts.optimizer)
        self._gradients = Gradients(tracker=self._tracker, group=self._values, by_tokens=by_tokens, model=prepared)
        self._tracker.prepared = True
        return prepared

    def average_by(self, hook_state: Any, hook: CommHook) -> None:
        """Average gradients by the user's communication hook, from now on or from ``prepare`` on."""
        self._user_hook = (hook_state, hook)
        if self._reduction is not None:
            self._reduction.average_by(hook_state, hook)

    def agree_on_buffers(self) -> None:
        """Make buffers alike on all ranks; every one must call this."""
        if self._model is None or self._reduction is None:
            return
        tracker = self._tracker
        replicas.agree_on_buffers(
            replicas.unwrap(self._model),
            self._reduction.process_group,
            tracker.own_rows_since_sync,
            tracker.total_rows_since_sync,
        )
        tracker.own_rows_since_sync = tracker.total_rows_since_sync = 0

    def _replicate(self, model: nn.Module) -> nn.Module:
        if not distributed():
            return model
        ddp = replicas.wrapped(model, self._options.collective_timeout_s)
        self._reduction = Reduction(self._tracker, ddp.process_group)
        if self._user_hook is not None:
            self._reduction.average_by(*self._user_hook)
        self._reduction.install(ddp)
        return ddp

    def _complete_gradient(self) -> None:
        """End a backward pass that nobody reduces: the local gradient is the global one."""
        self._tracker.last_gradient()
        self._tracker.reduction_ended()
